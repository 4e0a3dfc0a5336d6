"""Which module may import which, checked on the syntax trees. Catches upward imports, cycles, and slow or forbidden imports."""

import ast
import subprocess
import sys
from fnmatch import fnmatchcase

import pytest
from support.package import ROOT

# From bottom to top. A module may import from lower tiers and from its own tier, without cycles. A folder may be spread over
# tiers: a step's input and the KV cache are below the layers that read them, the engine is above.
TIERS = [
    ["minirt.errors", "minirt.wording", "minirt.files", "minirt.foreign_names", "minirt.gc_freeze", "minirt.progress",
     "minirt.sizes", "minirt.settings", "minirt.threads", "minirt.user_code",
     "minirt.compile_server", "minirt.head_start", "minirt.text.limited_processes",
     "minirt.structured", "minirt.structured.contradictions", "minirt.structured.schema", "minirt.structured.params",
     "minirt.structured.limits"],
    ["minirt.device", "minirt.hooks", "minirt.hooks.capture", "minirt.sampling_params", "minirt.kernels", "minirt.kernels.*"],
    ["minirt.modeling.config", "minirt.modeling.formats", "minirt.modeling.patterns", "minirt.modeling.quantization_config"],
    ["minirt.nn", "minirt.nn.*"],
    ["minirt.patching", "minirt.patching.*"],
    ["minirt.text.*", "minirt.modeling.parameters", "minirt.modeling.rope", "minirt.loading.hub"],
    ["minirt.structured.*"],
    ["minirt.step", "minirt.step.*"],
    ["minirt.speculative", "minirt.speculative.*", "minirt.loading.options"],
    ["minirt.layers.*", "minirt.layers"],
    ["minirt.hooks.*", "minirt.adapters", "minirt.adapters.rows"],
    ["minirt.models.*", "minirt.models", "minirt.modeling.*"],
    ["minirt.engine.*", "minirt.parallel", "minirt.parallel.*"],
    ["minirt.loading.*", "minirt.adapters.*"],
    ["minirt.precompile", "minirt.precompile.*", "minirt.profiling", "minirt.profiling.*"],
    ["minirt.outputs"],
    ["minirt.processor"],
    ["minirt.call_driver"],
    ["minirt.generator", "minirt.parallel.follower"],
    ["minirt.async_generator"],
    ["minirt.server", "minirt.server.*"],
    ["minirt.bench", "minirt.bench.*"],
    ["minirt.cli", "minirt.cli.*", "minirt.__main__"],
]
# Libraries that a benchmark measures. It imports them when it runs.
MEASURED = {"minirt.bench.patch": {"transformers", "liger_kernel"}}
FORBIDDEN = {"liger_kernel", "transformers", "compressed_tensors", "gguf", "scipy", "hypothesis", "pytest", "accelerate"}


def modules():
    """(path, dotted name) of every installed module and of bench/tools."""
    for folder in ("minirt", "models", "kernels", "bench"):
        package = "minirt" if folder == "minirt" else f"minirt.{folder}"
        for path in (ROOT / folder).rglob("*.py"):
            if "recipe" in path.parts:  # scripts that are not installed
                continue
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield path, ".".join((package, *parts)).removesuffix(".__init__")


NAMES = {name for _, name in modules()}


def imports(path, module, *, everywhere=True):
    """The modules that a file imports, except under `if TYPE_CHECKING`. `everywhere`: include imports inside functions."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(n) for node in ast.walk(tree) if (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        or (not everywhere and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)) for n in ast.walk(node)
    }  # fmt: skip
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in NAMES else node.module


def tier(module):
    """The first tier that lists the module by name, else the first with a matching pattern. So a file may be below its folder."""
    exact = [i for i, patterns in enumerate(TIERS) if module in patterns]
    fitting = [i for i, patterns in enumerate(TIERS) if any(fnmatchcase(module, pattern) for pattern in patterns)]
    assert exact or fitting, f"{module} is in no tier"
    return (exact or fitting)[0]


def test_nothing_imports_upwards():
    for path, module in modules():
        if module == "minirt":
            continue
        for target in imports(path, module):
            if target.split(".")[0] == "minirt" and target != "minirt":
                assert tier(target) <= tier(module), f"{module} imports {target} from a higher tier"


def test_there_is_no_cycle():
    """Only imports at the top of a file count. Imports inside functions are late on purpose."""
    edges = {
        module: {target for target in imports(path, module, everywhere=False) if target in NAMES and target != module}
        for path, module in modules()
    }
    done, above = set(), []

    def visit(module):
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module in done:
            return
        above.append(module)
        for target in edges[module]:
            visit(target)
        above.pop()
        done.add(module)

    for module in edges:
        visit(module)


def test_what_is_installed_does_not_need_what_is_not():
    for path, module in modules():
        if not module.startswith("minirt.bench.tools"):
            assert not any(name.startswith("minirt.bench.tools") for name in imports(path, module)), module


def test_outsiders():
    for path, module in modules():
        names = {name.split(".")[0] for name in imports(path, module)}
        forbidden = names & FORBIDDEN - MEASURED.get(module, set())
        assert not forbidden, f"{path} imports {forbidden}"
        assert not names & {"tests", "support"}
        if not module.startswith(("minirt.kernels", "minirt.bench.tools.")):  # the tools are not installed; one compiles kernels
            assert "triton" not in names, f"{path} imports triton"


def test_private_names_stay_in_their_file():
    for path, module in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("minirt"):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{module} imports {private} from {node.module}"


def test_no_guard_is_an_assert():
    """python -O removes assert statements. Kernels may use tl.static_assert."""
    for path, _ in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}"


HEAVY = ("torch", "triton", "numpy", "tokenizers", "safetensors", "huggingface_hub", "jinja2", "rich", "llguidance")
HELP = "from minirt.cli.app import main; main([{}, '--help'])"


@pytest.mark.parametrize(("code", "heavy"), [
    ("import minirt", HEAVY), ("import minirt.models", HEAVY), (HELP.format("'generate'"), HEAVY),
    (HELP.format("'bench'"), (*HEAVY, "minirt.bench")), (HELP.format("'bench', 'speed'"), (*HEAVY, "minirt.bench")),
    ("import minirt; minirt.SamplingParams(structured_outputs={'regex': 'a'})", HEAVY),
    ("import minirt.server.run", ("torch", "triton", "numpy", "llguidance")),  # the front starts fast
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_light_imports(code, heavy):
    """Catches a slow start: an import of torch, Triton, tokenizers or the Hub client where nothing needs them yet."""
    script = f"import sys\ntry:\n    {code}\nfinally:\n    print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "[]"


def test_eager_needs_no_triton():
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import json, torch; from minirt import models; from minirt.modeling.model import Model\n"
        "config = models.preset('SmolLM2-135M').config\n" "print(len(Model(config, models.build(config)).layers))"
    )  # fmt: skip
    out = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert out.stdout.strip() == "63", out.stderr


def test_generating_on_a_cpu_needs_no_triton():
    """Also with an implementation of one's own."""
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "from minirt import Generator, SamplingParams; from minirt.layers import base, register\n"
        "register('mlp', 'own')(base.implementation('mlp', 'eager').factory)\n"
        "with Generator.from_pretrained(device='cpu', impl=['eager', 'layers.0.mlp=own']) as generator:\n"
        "    print(len(generator.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True)).token_ids))"
    )
    out = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert out.stdout.strip() == "3", out.stderr


def test_commands_without_triton():
    """What needs it says so; `minirt env` does as well."""
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "from minirt.cli.app import main\n"
        "for words in ('env', 'plan --device cpu', 'plan --gpu h200', 'models --gpu l4',\n"
        "              'compare --device cpu -q', 'bench kernels o --device cpu',\n"
        "              'plan --device cpu --impl triton', 'tune --show'):\n"
        "    try: main(words.split())\n"
        "    except SystemExit as end: print('code', end.code, file=sys.stderr)"
    )
    out = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    codes = [line.split()[1] for line in out.stderr.splitlines() if line.startswith("code ")]
    assert codes == ["0", "0", "0", "0", "1", "1", "2", "1"], out.stderr
    assert "Traceback" not in out.stderr
    assert out.stderr.count("Triton is not installed") == 4
    assert "triton            not installed" in out.stdout


def test_modules_that_only_unix_has_are_not_needed():
    script = (
        "import sys, psutil, torch, triton; sys.modules['resource'] = sys.modules['fcntl'] = None\n"
        "from minirt import device; import minirt.generator; import minirt.kernels.compile.tuning as tuning\n"
        "from pathlib import Path\n" "with tuning._locked(Path('.')): print(device.host_peak_memory() > 0)"
    )  # fmt: skip
    out = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert out.stdout.strip() == "True", out.stderr


def test_a_kernel_without_triton_says_what_to_install():
    """In the example and in the reader's own code, instead of "No module named 'triton'"."""
    script = (
        "import sys; sys.meta_path.insert(0, type('', (), {'find_spec': lambda self, name, *_: "
        "(_ for _ in ()).throw(ModuleNotFoundError(name, name=name)) if name == 'triton' else None})())\n"
    )
    kernel = script + "from minirt.kernels import reference\nfrom minirt.kernels import norm_linear"
    out = subprocess.run([sys.executable, "-P", "-c", kernel], capture_output=True, text=True)
    assert out.returncode == 1
    assert "minirt.kernels.norm_linear is a Triton kernel, and triton is missing: pip install triton" in out.stderr


@pytest.mark.parametrize(("name", "said"), [
    ("one_kernel", "this example runs a Triton kernel, and triton is missing: pip install triton"),
    ("patch_transformers", "this example patches a model of transformers, which is missing: pip install transformers"),
    ("ray_serve", "this example runs Ray Serve, and ray is missing: pip install 'ray[serve]'"),
    ("batch_jsonl", "usage: python examples/batch_jsonl.py FILE [MODEL]; examples/prompts.jsonl is such a FILE"),
])  # fmt: skip
def test_an_example_says_what_it_needs(name, said):
    """Catches a traceback in place of what to install or to give."""
    script = (
        "import runpy, sys; sys.modules |= dict.fromkeys(('triton', 'transformers', 'ray'))  # a module that is None is missing\n"
        f"runpy.run_path({str(ROOT / 'examples' / f'{name}.py')!r})"
    )
    out = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert (out.returncode, out.stdout, out.stderr) == (1, "", f"{said}\n")

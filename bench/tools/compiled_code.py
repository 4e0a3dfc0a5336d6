"""The machine code of every kernel variant, without a GPU, and what differs between two trees.

python bench/tools/compiled_code.py compile OUT.json [--gpu 90,80] [--model NAME[:QUANTIZATION[:KV_DTYPE]] …] [--processes 2]
python bench/tools/compiled_code.py compare OLD.json NEW.json

`compile` lists the variants that warm-up compiles for each model (dry runs of its steps, on a fake driver), and those that the
script `--calls` launches by its `every_kernel(cc, dtype)`. It stores registers, stack, shared memory and opcode counts of each.

`compare` pairs the variants of two such files. Signatures may have changed between them, so a variant's key holds no names and no
order of parameters: only the kernel, the values of its constexprs, the types of its arguments and the launch options. Variants
are paired by key and code, then by code alone, then by key, and last by the model steps that launch them. The exit code is 1 if
code differs.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CALLS = ROOT / "tests" / "kernels" / "compile" / "compile_all.py"
MODELS = (
    "Qwen2.5-7B", "Qwen2.5-7B:fp8", "Qwen2.5-7B:fp8:fp8", "Qwen2.5-7B:int4", "Qwen2.5-0.5B", "SmolLM2-135M", "Qwen3-30B-A3B",
    "Qwen3-30B-A3B:fp8",
)  # fmt: skip
SMS = {80: 108, 89: 142, 90: 132, 100: 148, 120: 170}  # A100, L40S, H100, B200, RTX 5090
SEQS, TOKENS, LENGTH = 256, 8192, 16384  # of the largest step, and of the longest sequence
SCHEMA = 1
_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
# Opcodes that bring parameters and constants into registers: they follow the layout of the parameters.
_LOADS = ("LDC", "ULDC", "LDCU", "MOV", "UMOV")


# Listing: what is compiled.


class _Lists:
    """Takes the place of Triton's compilers, and of the executor of its asynchronous mode: lists what would be compiled."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.uses: defaultdict[int, dict[str, None]] = defaultdict(dict)
        self.use = ""

    def submit(self, compile: Callable[[], Any], /) -> Future:
        from minirt.kernels.compile.processes import CompileRequest

        request = CompileRequest.of(compile)
        if request is None:
            raise RuntimeError("a kernel of a script cannot be compiled in another process; put it into a module")
        self.requests.append(request)
        future: Future = Future()
        future.set_result(len(self.requests) - 1)
        return future


def list_variants(cc: int, models: Sequence[str], calls: Path | None) -> list[tuple[Any, list[str]]]:
    """The variants that a GPU of this compute capability needs. Call it in a fresh process: it replaces Triton's launches.

    Returns:
        for each variant, what compiles it in any process (`minirt.kernels.compile.processes.CompileRequest`), and the launches
        that need it: "model, step" or "calls, dtype".
    """
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction, driver

    from minirt.engine.execute import logits_processors, step_buffers, step_graphs
    from minirt.kernels import launch
    from minirt.kernels.sampling import dispatch

    class NoDevice:
        """The part of a Triton driver that compilation needs."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", cc, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    driver.set_active(NoDevice())
    launch._INTERPRETER, launch._INTERPRETER_SMS = cc, SMS[cc]  # on a CPU, kernels are configured for this GPU
    for module in (logits_processors, dispatch, step_buffers):
        module.is_nvidia = lambda device: True  # type: ignore[attr-defined]
    step_graphs.CudaGraphs = lambda *_: object()  # type: ignore[assignment, misc]  # nothing is captured
    lists, run = _Lists(), JITFunction.run

    def list_only(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launched = run(kernel, *arguments, grid=grid, warmup=True, **options)
        number = launched if isinstance(launched, int) else launched.result()  # type: ignore[attr-defined]
        lists.uses[number][lists.use] = None

    JITFunction.run = list_only  # type: ignore[method-assign]
    with torch.inference_mode(), triton.AsyncCompileMode(lists):  # type: ignore[arg-type]
        for name in models:
            _launch_model(name, cc, lists)
        if calls is not None:
            _import_from(str(calls.parent))
            every_kernel = importlib.import_module(calls.stem).every_kernel
            for dtype in (torch.bfloat16, torch.float32) if cc == 80 else (torch.bfloat16,):  # fp32 kernels are the same on all
                lists.use = f"{calls.stem}, {str(dtype).removeprefix('torch.')}"
                every_kernel(cc, dtype)
    return [(request, list(lists.uses[number])) for number, request in enumerate(lists.requests)]


def _launch_model(name: str, cc: int, lists: _Lists) -> None:
    """Launch every kernel that serving the model can need: what `warm_up` runs, with the first layers of the model."""
    import torch

    from minirt.device import AbsentGPU
    from minirt.engine.execute.runner import Runner
    from minirt.engine.limits import EngineLimits
    from minirt.engine.warmup.warm_up import first_launches, other_launches
    from minirt.errors import UnsupportedError
    from minirt.layers.base import implementation
    from minirt.loading import load
    from minirt.loading.load import pick_dtype, pick_kv_dtype
    from minirt.loading.options import LoadOptions
    from minirt.step.kv_cache import KVCache

    preset, quantization, kv_dtype = [*name.split(":"), "", ""][:3]
    gpu, cpu = AbsentGPU(f"sm_{cc}", 1 << 40, divmod(cc, 10)), torch.device("cpu")
    options = LoadOptions(model=preset, quantization=quantization or None, kv_cache_dtype=kv_dtype or "auto", random_weights=True)
    checkpoint = load.find(preset, None, need_weights=False)
    checkpoint = checkpoint._replace(config=replace(checkpoint.config, num_layers=_fewest_layers(checkpoint.config)))
    model = load.build(options, checkpoint, None, gpu)
    model.device = gpu  # type: ignore[assignment]  # for the plan
    model.dtype = pick_dtype("bfloat16", checkpoint.config, cpu)
    model.kv_dtype = pick_kv_dtype(options.kv_cache_dtype, model.dtype)
    try:
        model.resolve("triton")
    except UnsupportedError as error:  # such as fp8 on sm_80
        print(f"sm_{cc}, {name}: left out: {error}", file=sys.stderr)
        return
    length = min(LENGTH, checkpoint.config.context_len)
    model.allocate(cpu, model.dtype, length, model.kv_dtype)
    for layer in model.unique_layers():
        layer.context.pdl = cc >= 90
        layer.bind(implementation(layer.kind, "triton"))
    cache = KVCache(model.cache_specs, SEQS + length // 64, cpu, model.kv_dtype, num_slots=SEQS)
    runner = Runner(
        model, cache, cpu, EngineLimits(length, SEQS, TOKENS), vocab_size=checkpoint.config.vocab_size, cuda_graphs=True
    )  # fmt: skip
    dry_run = model.dry_run

    def labelled(batch: Any, cache: KVCache) -> None:
        lists.use = f"{name}, {batch.num_tokens} tokens, {batch.num_seqs} sequences, {batch.logits_indices.shape[0]} logits"
        dry_run(batch, cache)
        lists.use = f"{name}, sampling"

    model.dry_run = labelled  # type: ignore[method-assign]
    lists.use = f"{name}, sampling"
    for launch in (*first_launches(runner, model), *other_launches(runner, model)):
        launch()


def _fewest_layers(config: Any) -> int:
    """How many of a model's first layers launch all that its layers launch: one, unless they differ."""
    import torch

    from minirt import models
    from minirt.layers import LayerContext

    context, seen, number = LayerContext(0, torch.device("meta")), set(), 1
    for layer in models.build(config):
        layer.context = context  # else no two layers have equal keys
        if layer.compile_key() not in seen and (match := re.match(r"layers\.(\d+)\.", layer.name)):
            number = int(match[1]) + 1
        seen.add(layer.compile_key())
    return number


def _import_from(folder: str | None) -> None:
    if folder is not None:
        sys.path.insert(0, folder)


# Compiling.


def measure(request: Any) -> dict[str, Any]:
    """Compile a variant, and read what its machine code consists of. If it cannot be compiled, "error" says why."""
    import triton

    names = list(request.signature)
    constants = {".".join([names[at], *map(str, rest)]): _value(value) for (at, *rest), value in request.constants.items()}
    known = {"gpu": request.target.arch, "kernel": request.name, "key": key(request), "constants": constants}
    try:
        kernel = triton.compile(request.source(), target=request.target, options=request.options)
    except Exception as error:
        return known | {"error": f"{type(error).__name__}: {error}"[:2000]}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        said = subprocess.run([tool, "-res-usage", "-sass", file.name], capture_output=True, text=True, check=True).stdout
    usage = {name: max(map(int, re.findall(rf"\b{name}:(\d+)", said))) for name in ("REG", "STACK", "LOCAL")}
    opcodes = Counter(_OPCODE.findall(said))
    opcodes.pop("NOP", None)  # they pad
    return known | {
        "registers": usage["REG"], "stack": usage["STACK"] + usage["LOCAL"], "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps, "opcodes": dict(sorted(opcodes.items())),
    }  # fmt: skip


def key(request: Any) -> str:
    """What a variant is compiled for, without names and order of parameters.

    Constexprs that are None or False are left out, so that a new optional parameter does not change the key.
    """
    types = Counter[str]()
    aligned = {path for path, attributes in request.attrs.items() if attributes}
    for at, kind in enumerate(request.signature.values()):
        types.update(_types(kind, (at,), aligned))
    values = Counter(_value(value) for value in _flat(request.constants.values()) if value is not None and value is not False)
    options = {name: request.options.get(name) for name in ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")}
    chosen = (f"{name}={value}" for name, value in options.items() if value not in (None, False))
    return " | ".join(" ".join(part) for part in (_counted(values), _counted(types), chosen))


def _counted(values: Counter[str]) -> Iterator[str]:
    return (f"{count}*{value}" if count > 1 else value for value, count in sorted(values.items()))


def _types(kind: Any, path: tuple[int, ...], aligned: set[Any]) -> Iterator[str]:
    if isinstance(kind, tuple | list):
        for at, part in enumerate(kind):
            yield from _types(part, (*path, at), aligned)
    elif kind != "constexpr":
        yield f"{kind}{':16' if path in aligned else ''}"


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
        if isinstance(value, tuple | list):
            yield from _flat(value)
        else:
            yield value


def _value(value: Any) -> str:
    """A constexpr's value. Functions and dtypes by name; a number and True are told apart."""
    if hasattr(value, "fn") and hasattr(value.fn, "__name__"):
        return value.fn.__name__
    return "True" if value is True else str(value)


def compile_all(gpus: Sequence[int], models: Sequence[str], calls: Path | None, processes: int) -> dict[str, Any]:
    """The record that `compile` stores. Triton's cache is TRITON_CACHE_DIR, else a folder of this call."""
    os.environ.pop("TRITON_INTERPRET", None)
    spawn = multiprocessing.get_context("spawn")
    folder = None if calls is None else str(calls.parent)
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TRITON_CACHE_DIR", cache)
        with ProcessPoolExecutor(min(processes, len(gpus)), mp_context=spawn, max_tasks_per_child=1) as pool:
            futures = [pool.submit(list_variants, cc, models, calls) for cc in gpus]
            listed = [variant for future in futures for variant in future.result()]
        variants, errors = list[dict[str, Any]](), list[dict[str, Any]]()
        with ProcessPoolExecutor(processes, mp_context=spawn, initializer=_import_from, initargs=(folder,)) as pool:
            measured = pool.map(measure, [request for request, _ in listed])
            for done, (facts, (_, uses)) in enumerate(zip(measured, listed, strict=True), 1):
                (errors if "error" in facts else variants).append(facts | {"uses": uses})
                if done % 50 == 0 or done == len(listed):
                    print(f"{done} of {len(listed)} variants", file=sys.stderr, flush=True)
    for records in (variants, errors):
        records.sort(key=lambda record: (record["gpu"], record["kernel"], record["key"], record["uses"]))
    return {"schema": SCHEMA, "versions": _versions(), "models": list(models), "variants": variants, "errors": errors}


def _versions() -> dict[str, str]:
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {"torch": version("torch"), "triton": version("triton"), "minirt": git.stdout.strip()}


# Comparing.

SAME, RENAMED, DIFFERENT, ONLY_OLD, ONLY_NEW = "same", "same, other key", "different", "only old", "only new"


class Pair(NamedTuple):
    """A variant of each file, or of one of them."""

    verdict: str
    old: dict[str, Any] | None
    new: dict[str, Any] | None


def _code(variant: dict[str, Any]) -> tuple[Any, ...]:
    facts = (variant[name] for name in ("gpu", "warps", "registers", "stack", "shared"))
    return *facts, tuple(sorted(variant["opcodes"].items()))


def _distance(old: dict[str, Any], new: dict[str, Any]) -> int:
    return sum(abs(count) for count in _changes(old, new).values()) + abs(old["registers"] - new["registers"])


def _changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, int]:
    names = old["opcodes"] | new["opcodes"]
    counts = {name: new["opcodes"].get(name, 0) - old["opcodes"].get(name, 0) for name in sorted(names)}
    return {name: count for name, count in counts.items() if count}


def compare(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[Pair]:
    """Pair the variants of two files: by key and code, by code, by key, by uses; the code of renamed kernels comes last."""
    pairs: list[Pair] = []
    rest = list(old), list(new)

    def match(verdict: str, by: Callable[[dict[str, Any]], Any]) -> None:
        """Pair what `by` maps to one value; of several with that value, those whose code differs least."""
        groups: defaultdict[Any, tuple[list, list]] = defaultdict(lambda: ([], []))
        for side in (0, 1):
            for variant in rest[side]:
                groups[by(variant)][side].append(variant)
            rest[side].clear()
        for before, after in groups.values():
            while before and after:
                places = ((_distance(a, b), i, j) for i, a in enumerate(before) for j, b in enumerate(after))
                _, i, j = min(places)
                pairs.append(Pair(verdict, before.pop(i), after.pop(j)))
            rest[0].extend(before)
            rest[1].extend(after)

    match(SAME, lambda variant: (variant["kernel"], variant["key"], _code(variant)))
    match(RENAMED, lambda variant: (variant["kernel"], _code(variant)))
    match(RENAMED, _code)
    match(DIFFERENT, lambda variant: (variant["gpu"], variant["kernel"], variant["key"]))
    match(DIFFERENT, lambda variant: (variant["gpu"], variant["kernel"], tuple(variant["uses"])))
    pairs += [Pair(ONLY_OLD, variant, None) for variant in rest[0]] + [Pair(ONLY_NEW, None, variant) for variant in rest[1]]
    return pairs


def report(pairs: Sequence[Pair]) -> str:
    """A table with a row for each kernel, and below it each variant that is not the same."""
    verdicts = (SAME, RENAMED, DIFFERENT, ONLY_OLD, ONLY_NEW)
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for pair in pairs:
        variant = pair.old or pair.new or {}
        counts[f"sm_{variant['gpu']} {variant['kernel']}"][pair.verdict] += 1
    rows = [[name, *(str(row[verdict]) for verdict in verdicts)] for name, row in sorted(counts.items())]
    rows.append(["all", *(str(sum(row[verdict] for row in counts.values())) for verdict in verdicts)])
    lines = [_aligned(["kernel", *verdicts], rows)]
    for pair in pairs:
        if pair.verdict == DIFFERENT and pair.old and pair.new:
            lines.append(f"{_title(pair.new)}\n    {_difference(pair.old, pair.new)}")
        elif pair.verdict in (ONLY_OLD, ONLY_NEW):
            lines.append(f"{_title(pair.old or pair.new or {})}\n    {pair.verdict}")
    return "\n".join(lines)


def _aligned(heads: Sequence[str], rows: list[list[str]]) -> str:
    """A table as text. What is equal in all rows stands above it."""
    from minirt.bench.report import as_text, markdown_table

    return as_text("\n".join(markdown_table(heads, rows, left=1)))


def _title(variant: dict[str, Any]) -> str:
    others = f" and {len(variant['uses']) - 1} more" if len(variant["uses"]) > 1 else ""
    return f"sm_{variant['gpu']} {variant['kernel']} ({variant['uses'][0]}{others}): {variant['key']}"


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    parts = [f"{name} {old[name]} → {new[name]}" for name in ("registers", "stack", "shared", "warps") if old[name] != new[name]]
    changes = _changes(old, new)
    opcodes = ", ".join(f"{name} {count:+d}" for name, count in sorted(changes.items(), key=lambda item: -abs(item[1])))
    if changes:
        loads = all(name.split(".")[0] in _LOADS for name in changes)
        total = sum(old["opcodes"].values()), sum(new["opcodes"].values())
        parts.append(f"instructions {total[0]} → {total[1]}{', only loads of parameters' if loads else ''}: {opcodes}")
    return "; ".join(parts)


def summary(variants: Sequence[dict[str, Any]]) -> str:
    """A table with a row for each kernel: variants, and the most registers, stack, shared memory and instructions of one."""
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for variant in variants:
        groups[f"sm_{variant['gpu']} {variant['kernel']}"].append(variant)
    rows = []
    for name, group in sorted(groups.items()):
        most = [max(variant[what] for variant in group) for what in ("registers", "stack", "shared")]
        most.append(max(sum(variant["opcodes"].values()) for variant in group))
        spilling = sum(any(op.startswith(("STL", "LDL")) for op in variant["opcodes"]) for variant in group)
        rows.append([name, *map(str, (len(group), *most, spilling))])
    return _aligned(["kernel", "variants", "registers", "stack", "shared", "instructions", "with local memory"], rows)


def _read(file: str) -> list[dict[str, Any]]:
    record = json.loads(Path(file).read_text())
    if record.get("schema") != SCHEMA:
        sys.exit(f"{file}: not a file of `compile`; expected schema {SCHEMA}, found {record.get('schema')}")
    return record["variants"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("compile")
    one.add_argument("out")
    one.add_argument("--gpu", default="90", help=f"compute capabilities, of {', '.join(map(str, SMS))}; default: %(default)s")
    one.add_argument("--model", nargs="*", default=MODELS, help="presets, such as Qwen2.5-7B:fp8; none after it: no model")
    one.add_argument("--calls", type=Path, default=CALLS, help="default: %(default)s")
    one.add_argument("--processes", type=int, default=os.cpu_count())
    two = commands.add_parser("compare")
    two.add_argument("old")
    two.add_argument("new")
    options = parser.parse_args()
    if options.command == "compile":
        gpus = [int(cc) for cc in options.gpu.split(",")]
        record = compile_all(gpus, options.model, options.calls.resolve(), options.processes)
        Path(options.out).write_text(json.dumps(record, indent=0) + "\n")
        print(summary(record["variants"]))
        for failed in record["errors"]:
            print(f"{_title(failed)}\n    {failed['error']}", file=sys.stderr)
        return int(bool(record["errors"]))
    pairs = compare(_read(options.old), _read(options.new))
    print(report(pairs))
    return int(any(pair.verdict not in (SAME, RENAMED) for pair in pairs))


if __name__ == "__main__":
    sys.exit(main())

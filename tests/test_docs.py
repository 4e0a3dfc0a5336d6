"""README.md, CONTRIBUTING.md, docs/ and examples/: links resolve, and what is shown runs and prints what is shown.

`tests/support/pages.py` says which blocks run. Pages run on a CPU, also where there is a GPU, since outputs are those of a CPU.
Catches a page or heading that moved, an option that a command lacks, a snippet without its imports, and output that has changed.
"""

import builtins
import json
import os
import re
import runpy
import subprocess
import symtable
import sys
import types
from unittest import mock
from urllib.parse import unquote

import pytest
from support import pages
from support.package import ROOT

from minirt.bench.tools import settings_tables
from minirt.errors import MinirtError

TOP = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
RUN = [*TOP, *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/benchmarks/*.md"))]
LINKED = [*TOP, ROOT / "CHANGELOG.md", ROOT / "models" / "embedded" / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
SCRIPTS = sorted(ROOT.glob("examples/*.py"))


def name(path):
    return path.relative_to(ROOT).as_posix()


# --- links ---


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    slugs, seen = [], {}
    for heading in re.findall(r"^#+ +(.*?) *#*$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE):
        plain = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = seen[slug] = seen.get(slug, -1) + 1
        slugs.append(f"{slug}-{count}" if count else slug)
    return slugs


def broken_links(page, text):
    """The relative links of a page that lead nowhere."""
    broken = []
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / unquote(file)).resolve() if file else page
        good = linked.exists() and linked.is_relative_to(ROOT)
        if good and anchor:
            good = linked.suffix == ".md" and anchor in anchors(linked.read_text("utf-8") if file else text)
        if not good:
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", LINKED, ids=name)
def test_links_resolve(page):
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_every_page_is_in_the_index():
    """docs/README.md, one line for each."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = {(ROOT / "docs" / target).resolve() for target in re.findall(r"\]\(([^)#]+\.md)", index)}
    folders = ("*.md", "*/README.md", "design/*.md", "benchmarks/*.md")
    expected = {page for pattern in folders for page in ROOT.glob(f"docs/{pattern}")}
    assert expected - {ROOT / "docs" / "README.md"} <= listed


# --- examples ---


@pytest.fixture(scope="module")
def results(smollm2, tmp_path_factory):
    """Page → its faults, in a folder that looks like the repository. The Hub's cache holds the tests' SmolLM2-135M-Instruct."""
    folder = tmp_path_factory.mktemp("repository")
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    cache = tmp_path_factory.mktemp("hub")
    repository = cache / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / ("0" * 40)).symlink_to(smollm2)
    environment = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "MINIRT_MODEL")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, str(ROOT / "tests" / "support" / "pages.py"), str(folder), *map(name, RUN)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=name)
def test_examples_run_and_print_what_is_shown(page, results):
    assert results[name(page)] == [], "\n\n".join(results[name(page)])


@pytest.mark.parametrize("page", RUN, ids=name)
def test_examples_that_do_not_run_here_have_options_that_exist(page):
    left_out = [e for e in pages.examples(page.read_text(encoding="utf-8")) if e.why]
    assert {e.source: fault for e in left_out if (fault := pages.skipped_fault(e))} == {}


def free_names(source):
    """The names that a Python block reads and neither defines, imports nor finds among the built-in ones."""
    def tables(table):
        yield table
        for child in table.get_children():
            yield from tables(child)

    top = symtable.symtable(source, "block", "exec")
    defined = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    defined |= {child.get_name() for child in top.get_children()}
    read = {symbol.get_name() for table in tables(top) for symbol in table.get_symbols() if symbol.is_global()}
    read |= {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    return read - defined - set(dir(builtins))


@pytest.mark.parametrize("page", RUN, ids=name)
def test_blocks_that_need_earlier_blocks_are_announced(page):
    """The blocks of a page share their variables. Catches a page that does not say so: a block pasted alone is a NameError."""
    text = page.read_text(encoding="utf-8")
    blocks = [e.source for e in pages.examples(text) if e.kind == "python"]
    needing = {source.strip().partition("\n")[0]: names for source in blocks if (names := free_names(source))}
    assert needing == {} or "build on each other" in text


def test_most_of_the_readme_runs():
    examples = pages.examples((ROOT / "README.md").read_text(encoding="utf-8"))
    assert sum(e.kind == "python" and e.why is None for e in examples) >= 2
    assert sum(e.kind == "console" and e.why is None and bool(e.expected) for e in examples) >= 2


def test_sizes_of_files_in_the_readme():
    """"[the MLP, 87 lines](FILE)": nearly as many lines as the file has. Catches a claim that has grown old."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    claims = re.findall(r"\[[^]]*?, (\d+) lines\]\(([^)]*)\)", text)
    assert len(claims) >= 2
    for claimed, file in claims:
        lines = len((ROOT / file).read_text(encoding="utf-8").splitlines())
        assert abs(int(claimed) - lines) <= 0.1 * lines, file


def test_the_size_of_the_core():
    """The overview and the README state it, to a twentieth. `python tests/tools/lines.py` counts."""
    lines = runpy.run_path(str(ROOT / "tests" / "tools" / "lines.py"))
    counted = lines["rooms"](lines["working_tree"]())
    core = sum(counted[room].code for room in lines["CORE"])
    claims = {"docs/design/overview.md": "<!-- core -->([0-9,]+)<!-- end", "README.md": r"\[the core, ([0-9,]+) lines\]"}
    for page, claim in claims.items():
        (claimed,) = re.findall(claim, (ROOT / page).read_text(encoding="utf-8"))
        assert abs(int(claimed.replace(",", "")) - core) <= 0.05 * core, page


def test_each_module_says_in_one_line_what_it_owns():
    """The first lines of the docstrings are the list of files. Catches a line that is missing or does not stand alone."""
    tool = runpy.run_path(str(ROOT / "tests" / "tools" / "modules.py"))
    modules = tool["modules"]()
    assert len(modules) > 100
    assert [name(path) for path in modules if not tool["summary"](path).endswith(".")] == []


@pytest.mark.parametrize(("folder", "most"), [(".", 75_000), ("docs/decisions", 20_000)])
def test_the_pages_stay_short(folder, most):
    """Words of all Markdown pages, as `wc -w` counts them. Catches a fact that is told again in place of a link."""
    patterns = ("*.md", "docs/**/*.md", "*/*.md", "models/**/*.md")
    listed = {page for pattern in patterns for page in (ROOT / folder).glob(pattern) if not name(page).startswith(".")}
    counts = {name(page): len(page.read_text(encoding="utf-8").split()) for page in listed}
    assert sum(counts.values()) <= most, sorted(counts.items(), key=lambda item: -item[1])[:10]


def test_every_example_is_run():
    """examples/README.md shows what each script prints. One that needs a server's packages only compiles."""
    shown = pages.examples((ROOT / "examples" / "README.md").read_text(encoding="utf-8"))
    run = {word for e in shown if e.why is None and e.expected for word in e.source.split() if word.endswith(".py")}
    left_out = {word for e in shown if e.why for word in e.source.split() if word.endswith(".py")}
    assert run | left_out == set(map(name, SCRIPTS))
    assert left_out == {"examples/ray_serve.py"}
    assert len(run) >= 5
    for script in left_out:
        compile((ROOT / script).read_text(encoding="utf-8"), script, "exec")


def test_the_ray_example_uses_what_exists():
    """Ray is not installed for the tests: a stand-in for it is enough to build the deployment."""
    recorded = {}

    def record(**options):
        recorded.update(options)
        return lambda deployed: types.SimpleNamespace(bind=lambda: deployed)

    stub = types.ModuleType("ray")
    stub.serve = types.SimpleNamespace(
        deployment=record, ingress=lambda app: lambda deployed: recorded.update(app=app) or deployed, Application=object
    )
    with mock.patch.dict(sys.modules, {"ray": stub}):
        built = runpy.run_path(str(ROOT / "examples" / "ray_serve.py"))["deployment"]("embedded", 2, gpus=0, device="cpu")
    assert recorded["num_replicas"] == 2
    built.app = recorded["app"]
    with pytest.raises(MinirtError, match="not been started"):
        built.check_health(built)


# --- what finds faults finds them ---

PAGE = """
```python
x = 3
print(x)
```

```text
3
```
```console
$ minirt generate -q --temperature 0 --max-tokens 3 hi    # a comment
one
$ cat a.txt
…
```
```console error
$ minirt generate --top-p 2 hi
minirt: …
```
```python gpu
import triton
```
"""


@pytest.mark.slow
def test_a_wrong_example_is_found(tmp_path):
    """One fault for each of the five examples that are wrong, none for the others."""
    text = PAGE.replace("$ cat a.txt", "$ cat b.txt").replace("\n3\n", "\n4\n")
    text += "```python\nprint(x + 1)\n```\n\n```text\n4\n```\n```python\nprint(y)\n```\n"
    (tmp_path / "page.md").write_text(text.replace("--top-p 2", "-q --max-tokens 1"))
    command = [sys.executable, str(ROOT / "tests" / "support" / "pages.py"), str(tmp_path), "page.md"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=True)
    faults = json.loads(done.stdout)["page.md"]
    assert [fault.partition(": ")[0] for fault in faults] == [f"page.md:{line}" for line in (2, 11, 13, 17, 30)]
    for fault, word in zip(faults, ("expected:\n4", "expected:\none", "No such file", "exit code 0", "NameError"), strict=True):
        assert word in fault


# --- pages are complete ---


def test_every_command_is_on_the_quickstart():
    """Catches a command that was added, renamed or removed without its line in the list of commands."""
    from minirt.cli.app import cli

    commands = set(cli.commands) - {"bench", "eval"}
    commands |= {f"{group} {command}" for group in ("bench", "eval") for command in cli.commands[group].commands}
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z0-9 ]+)` \|", page.partition("\n## Command line\n")[2], re.MULTILINE)) == commands


def test_the_tables_of_settings_are_up_to_date():
    """`python bench/tools/settings_tables.py` writes them. Catches a setting that was changed without the page."""
    text = settings_tables.PAGE.read_text(encoding="utf-8")
    assert settings_tables.render(text) == text


def test_the_python_api_is_documented():
    import inspect
    from dataclasses import fields

    from minirt import AsyncGenerator, Completion, Generator, SamplingParams, errors

    text = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    names = set(inspect.signature(Generator.from_pretrained).parameters)
    names |= {field.name for kind in (SamplingParams, Completion) for field in fields(kind)}
    names |= {name for kind in (Generator, AsyncGenerator, Completion) for name in vars(kind) if not name.startswith("_")}
    names |= {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert {name for name in names if not re.search(rf"`[^`\n]*\b{name}\b", text)} == set()


def test_each_argument_of_decoder_config_is_described():
    """The page of models points to its docstring. Catches an argument that it lacks, and one that is gone."""
    import inspect

    from minirt.models.decoder import decoder_config

    described = re.findall(r"^    (\w+): .+\.$", inspect.getdoc(decoder_config).partition("Args:\n")[2], re.MULTILINE)
    assert described == list(inspect.signature(decoder_config).parameters)[1:]

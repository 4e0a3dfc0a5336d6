"""Finds the examples of Markdown pages, and runs them in a separate process.

Fences by their info string:
    python          runs; the blocks of a page share one namespace. A `text` block right below is what the block prints. A warning
                    that points into minirt is a fault. A block that begins with `# NAME.py` is saved as this file, for later
                    commands, in place of being run.
    console         commands, each with its expected stdout: `$ minirt …`, `$ python examples/…` or `$ cat FILE`, optionally after
                    `$ echo TEXT |`; and `$ echo TEXT > FILE` or `>> FILE`. The exit code must be 0.
    console error   the same, with the expected stderr. The exit code must be 1 or 2.
    sh WHY          commands to paste, one a line, without output; lines that begin with # are comments. Never run.
    python WHY, console WHY    not run; WHY is a key of `REASONS`. Python must compile, and options of `minirt` must exist.
    text and others            shown, not run.
In expected output, `…` stands for any text.

As a script, `python tests/support/pages.py FOLDER PAGE…` runs the pages in FOLDER and prints {page: [fault, …]} as JSON. Each
page has a separate process, forked from one that has imported PyTorch.
"""

import json
import os
import re
import runpy
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

REASONS = {
    "gpu": "needs a CUDA GPU", "download": "needs weights from the Hugging Face Hub",
    "install": "installs packages, or runs all tests", "server": "runs until it is stopped, or needs a server that runs",
}  # fmt: skip
SHOWN = ("", "text", "json", "markdown")
COMMANDS = ("minirt", "python", "cat", "echo")
_NOTE = "no --model: this is the embedded model, which tells stories for small children\n"


class Fence(NamedTuple):
    line: int
    info: str
    text: str


class Example(NamedTuple):
    """`source`: Python code or a command line. `expected`: its output; None if the page shows none. `why`: a key of `REASONS`, if
    the example is not run."""

    line: int
    kind: str  # python, console or error
    source: str
    expected: str | None
    why: str | None = None


def fences(text: str) -> list[Fence]:
    blocks = re.finditer(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```[ ]*$", text, flags=re.DOTALL | re.MULTILINE)
    return [Fence(text.count("\n", 0, block.start()) + 1, block["info"].strip(), block["text"]) for block in blocks]


def examples(text: str) -> list[Example]:
    """The examples of a page, in order. Raises ValueError for an unknown info string or command."""
    listed: list[Example] = []
    previous: Fence | None = None
    for fence in fences(text):
        kind, _, why = fence.info.partition(" ")
        if kind == "python":
            listed.append(Example(fence.line, kind, fence.text, None, _reason(fence, why)))
        elif kind == "console":
            failing = why == "error"
            reason = None if failing else _reason(fence, why)
            listed += _commands(fence, "error" if failing else "console", reason)
        elif kind == "sh" and why:
            reason, lines = _reason(fence, why), enumerate(fence.text.splitlines(), fence.line + 1)
            commands = ((number, line) for number, line in lines if line.strip() and not line.startswith("#"))
            listed += [Example(number, "console", line, None, reason) for number, line in commands]
        elif kind == "dockerfile":  # its commands of minirt, whose options are checked
            words = [line.partition(" ")[::2] for line in fence.text.splitlines()]
            lines = [" ".join(json.loads(rest)) if word == "ENTRYPOINT" else rest for word, rest in words]
            listed += [Example(fence.line, "console", line, None, "gpu") for line in lines if line.startswith("minirt ")]
        elif fence.info not in SHOWN:
            raise ValueError(f"line {fence.line}: unknown info string {fence.info!r}")
        elif fence.info == "text" and previous is not None and previous.info == "python" and _follows(text, previous, fence):
            listed[-1] = listed[-1]._replace(expected=fence.text)
        previous = fence
    return listed


def _reason(fence: Fence, why: str) -> str | None:
    if why and why not in REASONS:
        raise ValueError(f"line {fence.line}: {why!r} is none of {', '.join(REASONS)}")
    return why or None


def _follows(text: str, first: Fence, second: Fence) -> bool:
    """Whether there are only empty lines between the two fences."""
    lines = text.splitlines()[first.line + first.text.count("\n") + 1 : second.line - 1]
    return not any(line.strip() for line in lines)


def _commands(fence: Fence, kind: str, why: str | None) -> Iterator[Example]:
    lines = fence.text.splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if line.startswith("$ ")]
    if not starts or starts[0] != 0:
        raise ValueError(f"line {fence.line}: a console block begins with `$ `")
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        source = lines[start][2:].strip()
        if why is None and source.split()[0] not in COMMANDS:
            raise ValueError(f"line {fence.line + start + 1}: cannot run {source.split()[0]!r}")
        yield Example(fence.line + start + 1, kind, source, "".join(lines[start + 1 : end]), why)


def matches(expected: str, printed: str) -> bool:
    """Whether `printed` matches `expected`, in which `…` stands for any text. Ignores spaces at the ends of lines."""
    expected, printed = ("\n".join(line.rstrip() for line in text.strip("\n").split("\n")) for text in (expected, printed))
    pattern = ".*".join(re.escape(part) for part in expected.split("…"))
    return re.fullmatch(pattern, printed, flags=re.DOTALL) is not None


def parses(command: str) -> str | None:
    """The reason why click refuses the options of a `minirt` command line, or None. Does not run the command."""
    import click

    from minirt.cli.app import cli

    words = shlex.split(command, comments=True)
    if words[0] != "minirt":
        return None
    parsed: click.Command = cli
    while isinstance(parsed, click.Group) and words[1:] and not words[1].startswith("-"):
        subcommand = parsed.commands.get(words[1])
        if subcommand is None:
            return f"no such command {words[1]!r}"
        parsed, words = subcommand, words[1:]
    try:
        parsed.make_context(words[0], words[1:])
    except click.exceptions.Exit:  # --help, --version
        return None
    except click.ClickException as error:
        return error.format_message()
    return None


def skipped_fault(example: Example) -> str | None:
    """What is wrong with an example that is not run: Python that does not compile, or options that do not exist."""
    if example.kind == "python":
        try:
            compile(example.source, "example", "exec")
        except SyntaxError as error:
            return str(error)
        return None
    return parses(example.source)


# --- the process that runs pages ---


@contextmanager
def _redirected() -> Iterator[Callable[[], tuple[str, str]]]:
    """Captures what the process writes. Yields a function that returns stdout and stderr so far."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        kept = os.dup(1), os.dup(2)

        def written() -> tuple[str, str]:
            sys.stdout.flush()
            sys.stderr.flush()
            return tuple(os.pread(file.fileno(), 1 << 24, 0).decode() for file in (out, err))  # type: ignore[return-value]

        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            yield written
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)


def _run_command(source: str) -> int:
    """Run a command line in this process and return its exit code."""
    words = shlex.split(source, comments=True)
    if words[0] == "echo" and words[-2] in (">", ">>"):
        with open(words[-1], "w" if words[-2] == ">" else "a", encoding="utf-8") as file:
            file.write(" ".join(words[1:-2]) + "\n")
        return 0
    if words[0] == "echo":
        bar = words.index("|")
        with tempfile.TemporaryFile("w+") as given:
            given.write(" ".join(words[1:bar]) + "\n")
            given.seek(0)
            os.dup2(given.fileno(), 0)
        words = words[bar + 1 :]
    if words[0] == "cat":
        for name in words[1:]:
            sys.stdout.write(Path(name).read_text(encoding="utf-8"))
        return 0
    try:
        if words[0] == "minirt":
            from minirt.cli.app import main

            main(words[1:])
        sys.argv = words[1:]
        runpy.run_path(words[1], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def _fault(example: Example, namespace: dict) -> str | None:
    with _redirected() as written, tempfile.TemporaryDirectory() as scratch:
        code, trace = 0, ""
        try:
            if example.kind == "python" and (name := re.match(r"# (\w+\.py)\n", example.source)):
                Path(name[1]).write_text(example.source, encoding="utf-8")
            elif example.kind == "python":
                file = Path(scratch) / f"line{example.line}.py"  # Triton reads the source of its kernels
                file.write_text(example.source, encoding="utf-8")
                exec(compile(example.source, str(file), "exec"), namespace)
            else:
                code = _run_command(example.source)
        except BaseException:
            trace = traceback.format_exc()
        out, err = written()
    if trace:
        return trace
    if code not in ((1, 2) if example.kind == "error" else (0,)):
        return f"exit code {code}: {err[-2000:]}"
    if example.kind == "python" and re.search(r"/minirt/\S+:[0-9]+: \w*Warning: ", err):
        return err
    printed = err.removeprefix(_NOTE) if example.kind == "error" else out
    if example.expected is None or matches(example.expected, printed):
        return None
    return f"expected:\n{example.expected}\nfound:\n{printed}"


def _run_page(page: Path) -> list[str]:
    faults = []
    namespace = {"__name__": "page"}
    for example in examples(page.read_text(encoding="utf-8")):
        if example.why is None and (fault := _fault(example, namespace)):
            faults.append(f"{page.name}:{example.line}: {fault}")
    return faults


def main(folder: str, pages: list[str]) -> None:
    import torch

    import minirt.generator  # noqa: F401 (once, for all pages)

    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, page in enumerate(pages):
            target = Path(scratch) / str(number)
            child = os.fork()
            if child == 0:
                try:
                    os.chdir(folder)
                    faults = _run_page(Path(page))
                except BaseException:
                    faults = [traceback.format_exc()]
                target.write_text(json.dumps(faults))
                os._exit(0)
            _, status = os.waitpid(child, 0)
            results[page] = json.loads(target.read_text()) if target.exists() else [f"ended with status {status}"]
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

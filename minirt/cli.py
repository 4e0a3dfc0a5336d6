"""The command line: `minirt generate | chat | plan | env`.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failure, 2 usage, 130 Ctrl-C. Heavy imports wait until
a command needs them.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from minirt.errors import InputError, MinirtError, UnsupportedError

DEMO_HINT = "give --model: a folder, a Hub id such as Qwen/Qwen2.5-0.5B, or a preset such as Qwen2.5-7B"


def _options(*groups: Callable) -> Callable:
    def decorate(command: Callable) -> Callable:
        for group in reversed(groups):
            command = group(command)
        return command

    return decorate


_GRAPH_OPTIONS = _options(
    click.option("--model", "-m", envvar="MINIRT_MODEL", help="Folder, Hub id or preset name. Also from MINIRT_MODEL."),
    click.option("--revision", help="Branch, tag or commit of a Hub model."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
    click.option("--dtype", default="auto", show_default=True, help="auto, bfloat16, float16 or float32."),
    click.option("--impl", multiple=True, help="Implementation: NAME for all layers, or GLOB=NAME (repeatable)."),
)
_LOAD_OPTIONS = _options(
    _GRAPH_OPTIONS,
    click.option("--max-model-len", type=int, help="Positions to serve; default: the model's own."),
    click.option("--random-weights", is_flag=True, help="Random weights: no download for a preset."),
    click.option("--check-weights", is_flag=True, help="Refuse NaN and Inf in the checkpoint."),
    click.option("--kv-cache-memory", callback=lambda c, p, v: parse_size(v), help="Memory for KV pages, e.g. 4GiB."),
)
_SAMPLING_OPTIONS = _options(
    click.option("--max-tokens", type=int, help="New tokens at most."),
    click.option("--temperature", type=float, help="0 is greedy."),
    click.option("--top-k", type=int, help="Keep the k most probable tokens."),
    click.option("--top-p", type=float, help="Keep the most probable tokens up to this mass."),
    click.option("--min-p", type=float, help="Keep tokens at least this probable, relative to the best."),
    click.option("--seed", type=int, help="Seed of the draws (and of random weights)."),
    click.option("--stop", multiple=True, help="End the text before this string (repeatable)."),
    click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token."),
)
_DEBUG = click.option("--debug", is_flag=True, help="Show the traceback of an error.")
_QUIET = click.option("--quiet", "-q", is_flag=True, help="No progress and no summary.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="minirt")
def cli() -> None:
    """Run decoder models layer by layer: generate text, chat, or print how a model runs."""


@cli.command()
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@_LOAD_OPTIONS
@click.option("--prompt-file", "files", multiple=True, help="Read a prompt from a file, verbatim; - is stdin (repeatable).")
@click.option("--chat", is_flag=True, help="Each prompt is a user's message: apply the chat template.")
@_SAMPLING_OPTIONS
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt.")
@_QUIET
@_DEBUG
def generate(prompts: tuple[str, ...], files: tuple[str, ...], chat: bool, as_json: bool, quiet: bool, **options: Any) -> None:
    """Complete each PROMPT and print the text as it comes."""
    texts = [*prompts, *(read_prompt(name) for name in files)]
    if not texts:
        raise click.UsageError("no prompt: give PROMPT or --prompt-file")
    params = _sampling(options)
    with _load(options, quiet) as generator:
        inputs = [generator.encode_chat([{"role": "user", "content": t}]) if chat else generator.encode(t) for t in texts]
        shown = None
        for text, tokens in zip(texts, inputs, strict=True):
            streamed = generator.stream_completion(tokens, params)
            for piece, completion in streamed:
                shown = completion
                if not as_json:
                    _write(piece.text)
            if shown is None:
                continue
            _write(json.dumps(_record(text, shown), ensure_ascii=False) + "\n" if as_json else "\n")
            if not quiet:
                _summary(generator, shown)


@cli.command()
@_LOAD_OPTIONS
@click.option("--system", help="A system message to begin with.")
@_SAMPLING_OPTIONS
@_QUIET
@_DEBUG
def chat(system: str | None, quiet: bool, **options: Any) -> None:
    """Talk with the model. /clear starts anew; /exit, Ctrl-D or Ctrl-C at the prompt ends; Ctrl-C stops an answer."""
    params = _sampling(options)
    opening = [{"role": "system", "content": system}] if system else []
    with _load(options, quiet) as generator:
        messages = list(opening)
        while (line := _ask()) is not None:
            if line == "/clear":
                messages = list(opening)
                continue
            messages.append({"role": "user", "content": line})
            answer, completion = "", None
            try:
                for piece, completion in generator.stream_completion(generator.encode_chat(messages), params):
                    answer += piece.text
                    _write(piece.text)
            except KeyboardInterrupt:
                _note("(stopped)")
            _write("\n")
            messages.append({"role": "assistant", "content": answer})
            if completion is not None and not quiet:
                _summary(generator, completion)


@cli.command()
@_GRAPH_OPTIONS
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_DEBUG
def plan(as_json: bool, **options: Any) -> None:
    """Print the graph: each layer, its implementation and why, its weights. Reads no weights."""
    from minirt.generator import plan_model

    config, model = plan_model(
        _model_name(options), device=options["device"], dtype=options["dtype"], impl=list(options["impl"]) or "auto",
        revision=options["revision"],
    )
    if as_json:
        rows = [vars(row) for row in model.plan.rows]
        _write(json.dumps({"device": model.plan.device, "weight_bytes": model.plan.weight_bytes, "layers": rows}) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{options['model']} · {config.model_type} · {model.num_parameters / 1e6:,.1f} M parameters · {model.plan.device}")
    for column in ("layer", "implementation", "why", "dtype"):
        table.add_column(column)
    table.add_column("weights", justify="right")
    for row in model.plan.rows:
        table.add_row(row.layer, row.implementation, row.reason, row.dtype, _bytes(row.bytes))
    table.add_row("total", "", "", "", _bytes(model.plan.weight_bytes))
    Console(width=None if sys.stdout.isatty() else 110).print(table)


@cli.command()
def env() -> None:
    """Print what a bug report needs: versions, devices, memory."""
    from minirt.usage import environment

    for name, value in environment().items():
        _write(f"{name:<16} {value}\n")


def parse_size(text: str | None) -> int | None:
    """"512MiB", "4GB", "1000000" → bytes."""
    if text is None:
        return None
    units = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    stripped = text.strip().lower().removesuffix("ib") if text.strip().lower().endswith("ib") else text.strip().lower().removesuffix("b")
    number, unit = (stripped[:-1], stripped[-1:]) if stripped[-1:] in units and stripped[-1:] else (stripped, "")
    try:
        value = int(float(number) * units[unit])
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise click.BadParameter(f"{text!r} is no size; write for example 4GiB")
    return value


def read_prompt(name: str) -> str:
    """A prompt file's text, nothing stripped; "-" is stdin."""
    try:
        if name == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(name, "rb") as file:
                data = file.read()
        return data.decode("utf-8")
    except OSError as error:
        raise InputError(f"cannot read the prompt file: {error.strerror}", where=name) from error
    except UnicodeDecodeError as error:
        raise InputError("not valid UTF-8", where=name, found=f"byte 0x{data[error.start]:02x} at offset {error.start}") from error


def _sampling(options: dict[str, Any]) -> Any:
    from minirt.sampling import SamplingParams

    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")
    return SamplingParams(stop=options["stop"], **{name: options[name] for name in names})


def _model_name(options: dict[str, Any]) -> str:
    if not options["model"]:
        raise click.UsageError(f"no model: {DEMO_HINT}")
    return options["model"]


@contextmanager
def _load(options: dict[str, Any], quiet: bool) -> Any:
    name = _model_name(options)
    from minirt.generator import Generator

    with _progress(quiet) as progress:
        generator = Generator.from_pretrained(
            name, device=options["device"], dtype=options["dtype"], impl=list(options["impl"]) or "auto",
            max_model_len=options["max_model_len"], revision=options["revision"], random_weights=options["random_weights"],
            seed=(options["seed"] or 0) if options["random_weights"] else 0, check_weights=options["check_weights"],
            kv_cache_memory=options["kv_cache_memory"], progress=progress,
        )
    with generator:
        yield generator


@contextmanager
def _progress(quiet: bool) -> Any:
    """A bar of bytes on stderr, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("weights", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _record(prompt: str, completion: Any) -> dict[str, Any]:
    names = ("prompt_token_ids", "token_ids", "text", "finish_reason", "time_to_first_token_s", "decode_tokens_per_s", "peak_memory_bytes")
    record = {"prompt": prompt, **{name: getattr(completion, name) for name in names}}
    effective = completion.sampling
    record["sampling"] = {name: getattr(effective, name) for name in effective.sources}
    record["sampling_sources"] = effective.sources
    return record


def _summary(generator: Any, completion: Any) -> None:
    """What the run took, on stderr. The bandwidth counts weight bytes only."""
    first, rate = completion.time_to_first_token_s, completion.decode_tokens_per_s
    loaded = f"load {generator.load_time_s:.2f} s"
    if generator.bytes_read:
        loaded += f" ({_bytes(generator.bytes_read)} at {generator.bytes_read / generator.load_time_s / 1e9:.2f} GB/s)"
    lines = [
        f"{loaded} · first token {first:.3f} s · prompt {len(completion.prompt_token_ids)} tokens, "
        f"{len(completion.prompt_token_ids) / first:.1f} tokens/s",
        f"decode {len(completion.token_ids)} tokens, {rate:.1f} tokens/s, {rate * generator.decode_read_bytes / 1e9:.1f} GB/s of "
        f"weights · peak memory {_bytes(completion.peak_memory_bytes)} · finished: {completion.finish_reason}",
        completion.sampling.describe(),
    ]
    if completion.sampling.not_applied:
        lines.append(f"generation_config.json asks for, and minirt does not do: {', '.join(completion.sampling.not_applied)}")
    _note("\n".join(lines))


def _ask() -> str | None:
    """The user's next non-empty line, or None at the end of the input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return None
        if line.strip() == "/exit":
            return None
        if line.strip():
            return line.strip() if line.strip() == "/clear" else line


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(text: str) -> None:
    click.secho(text, err=True, dim=sys.stderr.isatty())


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return ""


def _fail(error: BaseException, code: int) -> NoReturn:
    click.echo(f"minirt: {error}", err=True)
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point: runs a command and turns errors into one line on stderr and an exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    try:
        cli.main(arguments, standalone_mode=False)
        sys.exit(0)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2 if isinstance(error, click.UsageError) else 1)
    except (KeyboardInterrupt, click.Abort):
        click.echo("", err=True)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains once more at exit
        sys.exit(1)
    except MinirtError as error:
        if "--debug" in arguments:
            raise
        _fail(error, 1)
    except Exception as error:  # the root cause in one line; the traceback on request
        if "--debug" in arguments:
            raise
        if type(error).__name__ == "OutOfMemoryError":
            _fail(UnsupportedError(f"out of device memory: {error}", hint="lower --kv-cache-memory or take a smaller model"), 1)
        _fail(MinirtError(f"unexpected {type(error).__name__}: {error}", hint="run with --debug for the traceback"), 1)


if __name__ == "__main__":
    main()

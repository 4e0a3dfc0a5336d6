"""The command line: `minirt generate | chat | plan | env`.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failure, 2 usage, 130 Ctrl-C. Heavy imports wait
until a command needs them.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from minirt.errors import InputError, MinirtError, OutOfMemoryError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"  # the demo: small enough for any machine
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def _options(*groups: Callable) -> Callable:
    def decorate(command: Callable) -> Callable:
        for group in reversed(groups):
            command = group(command)
        return command

    return decorate


_GRAPH_OPTIONS = _options(
    click.option(
        "--model", "-m", envvar="MINIRT_MODEL",
        help=f"Folder, Hub id or preset. Also from MINIRT_MODEL. Default: a demo model, {DEFAULT_MODEL}.",
    ),
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
    click.option(
        "--kv-cache-memory", metavar="SIZE", callback=lambda c, p, v: parse_size(v),
        help="Memory for KV pages, e.g. 4GiB.",
    ),
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
@click.option("--prompt-file", "files", multiple=True, help="Take a file verbatim as prompt; - is stdin (repeatable).")
@click.option("--chat", is_flag=True, help="Each prompt is a user's message: apply the chat template.")
@_SAMPLING_OPTIONS
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt, each on its line.")
@_QUIET
@_DEBUG
def generate(
    prompts: tuple[str, ...], files: tuple[str, ...], chat: bool, as_json: bool, quiet: bool, **options: Any
) -> None:
    """Complete each PROMPT, then each prompt file, one after the other, and print the new text as it comes.

    Every text ends with a newline of its own; the prompt is not repeated. A model without a tokenizer takes token ids
    ("1 2 3") and prints token ids.
    """
    texts = [*prompts, *(read_prompt(name) for name in files)]
    if not texts:
        raise click.UsageError("no prompt: give PROMPT or --prompt-file")
    params = _sampling(options)
    with _load(options, quiet) as generator:
        inputs = [_encode(generator, text, chat) for text in texts]
        for tokens in inputs:
            generator.check(tokens, params)  # all of them, before the first text is out
        for text, tokens in zip(texts, inputs, strict=True):
            completion = None
            for piece, completion in generator.stream_completion(tokens, params):  # noqa: B007 (the last one counts)
                if not as_json:
                    _write(piece.text if generator.tokenizer else f"{piece.token_ids[0]} ")
            _write(json.dumps(_record(text, completion), ensure_ascii=False) + "\n" if as_json else "\n")
            if not quiet:
                _summary(generator, completion)


@cli.command()
@_LOAD_OPTIONS
@click.option("--system", help="A system message to begin with; an empty one replaces the template's own.")
@_SAMPLING_OPTIONS
@_QUIET
@_DEBUG
def chat(system: str | None, quiet: bool, **options: Any) -> None:
    """Talk with the model, a line a message. /clear starts anew; /exit or Ctrl-D ends; Ctrl-C stops an answer."""
    params = _sampling(options)
    opening = [] if system is None else [{"role": "system", "content": system}]
    with _load(options, quiet) as generator:
        generator.encode_chat([*opening, {"role": "user", "content": "?"}])  # no template: say so before anybody types
        messages = list(opening)
        while (line := _ask()) is not None:
            if line == "/clear":
                messages = list(opening)
                continue
            asked = {"role": "user", "content": line}
            answer, completion = "", None
            try:
                tokens = generator.encode_chat([*messages, asked])
                for piece, completion in generator.stream_completion(tokens, params):  # noqa: B007 (the last one counts)
                    answer += piece.text
                    _write(piece.text)
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                _note("(stopped)")
            except InputError as error:
                if not sys.stdin.isatty():
                    raise
                _note(f"minirt: {error}; /clear starts anew")
                continue
            _write("\n")
            messages += [asked, {"role": "assistant", "content": answer}]
            if completion is not None and not quiet:
                _summary(generator, completion)


@cli.command()
@_GRAPH_OPTIONS
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_DEBUG
def plan(as_json: bool, **options: Any) -> None:
    """Print the graph: each layer, its implementation and why, its weights. Reads no weights."""
    from minirt.choose import plan_model

    name = _model_name(options)
    config, model = plan_model(
        name, device=options["device"], dtype=options["dtype"], impl=list(options["impl"]) or "auto",
        revision=options["revision"],
    )
    if as_json:
        rows = [vars(row) for row in model.plan.rows]
        record = {"device": model.plan.device, "weight_bytes": model.plan.weight_bytes, "layers": rows}
        _write(json.dumps(record) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    size = f"{model.num_parameters / 1e6:,.1f} M parameters"
    table = Table(title=f"{name} · {config.model_type} · {size} · {model.plan.device}")
    for column in ("layer", "implementation", "why", "dtype"):
        table.add_column(column)
    table.add_column("weights", justify="right")
    for row in model.plan.rows:
        table.add_row(row.layer, row.implementation, row.reason, row.dtype, _bytes(row.bytes))
    table.add_row("total", "", "", "", _bytes(model.plan.weight_bytes))
    console = Console(width=None if sys.stdout.isatty() else 110, markup=False, emoji=False, highlight=False)
    with console.capture() as printed:
        console.print(table)
    _write(printed.get())


@cli.command()
def env() -> None:
    """Print what a bug report needs: versions, devices, memory."""
    from minirt.usage import environment

    for name, value in environment().items():
        _write(f"{name:<16} {value}\n")


def parse_size(text: str | None) -> int | None:
    """"512MiB", "4GB", "1000000" → bytes; KiB, MiB, GiB are powers of 1024, kB, MB, GB (and k, M, G) of 1000."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([kmgt]?)(i?)b?", text.strip().lower())
    value = int(float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2]]) if match else 0
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
        byte = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise InputError("not valid UTF-8", where=name, found=byte) from error


def _encode(generator: Any, text: str, chat: bool) -> list[int]:
    """Token ids of a prompt as the command line takes it."""
    if chat:
        return generator.encode_chat([{"role": "user", "content": text}])
    if generator.tokenizer is not None:
        return generator.encode(text)
    words = text.replace(",", " ").split()
    if not all(re.fullmatch("[0-9]{1,18}", word) for word in words):
        raise InputError(
            "the model has no tokenizer, so that a prompt must be token ids", where=generator.name,
            expected="integers, as in '1 2 3'", found=ascii(text[:80]),
        )
    return [int(word) for word in words]


def _sampling(options: dict[str, Any]) -> Any:
    from minirt.sampling import SamplingParams

    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")
    try:
        return SamplingParams(stop=options["stop"] or None, **{name: options[name] for name in names})
    except InputError as error:  # name the flag, not the field
        flag = "--" + str(error.where).removeprefix("SamplingParams.").replace("_", "-")
        raise InputError(error.what, where=flag, expected=error.expected, found=error.found) from error


def _model_name(options: dict[str, Any], quiet: bool = False) -> str:
    if options["model"] is not None:
        return options["model"]
    if not quiet:
        _note(f"no --model: this is the demo model, {DEFAULT_MODEL} from the Hub")
    return DEFAULT_MODEL


@contextmanager
def _load(options: dict[str, Any], quiet: bool) -> Any:
    if options["random_weights"] and options["check_weights"]:
        raise click.UsageError("--check-weights checks a checkpoint, and --random-weights reads none")
    name = _model_name(options, quiet)
    from minirt.generator import Generator

    with _progress(quiet) as progress:
        generator = Generator.from_pretrained(
            name, device=options["device"], dtype=options["dtype"], impl=list(options["impl"]) or "auto",
            max_model_len=options["max_model_len"], revision=options["revision"], seed=options["seed"] or 0,
            random_weights=options["random_weights"], check_weights=options["check_weights"],
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

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("weights", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _record(prompt: str, completion: Any) -> dict[str, Any]:
    names = ["prompt_token_ids", "token_ids", "text", "finish_reason"]
    names += ["time_to_first_token_s", "decode_tokens_per_s", "peak_memory_bytes"]
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
        f"decode {len(completion.token_ids)} tokens, {rate:.1f} tokens/s, "
        f"{rate * generator.decode_read_bytes / 1e9:.1f} GB/s of weights · "
        f"peak memory {_bytes(completion.peak_memory_bytes)} · finished: {completion.finish_reason}",
        f"{completion.sampling.describe()} · at most {completion.sampling.max_tokens} new tokens "
        f"({completion.sampling.sources.get('max_tokens', 'default')})",
    ]
    if completion.sampling.not_applied:
        ignored = ", ".join(completion.sampling.not_applied)
        lines.append(f"generation_config.json asks for, and minirt does not do: {ignored}")
    _note("\n".join(lines))


def _ask() -> str | None:
    """The user's next non-empty line, or None at the end of the input."""
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            byte = f"byte 0x{error.object[error.start]:02x}"
            raise InputError("not valid UTF-8", where="stdin", found=byte) from error
        if line.strip() == "/exit":
            return None
        if line.strip():
            return line.strip() if line.strip() == "/clear" else line


def _write(text: str) -> None:
    """Send results on at once; a reader that has gone away (`| head`) ends the program without a word."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or what is left fails once more at exit
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        raise MinirtError(f"cannot write the output: {error.strerror}", where="stdout") from error


def _note(text: str) -> None:
    click.secho(text, err=True, dim=sys.stderr.isatty())


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return ""


def _named(error: Exception) -> MinirtError:
    """An error that minirt did not raise itself, in one line: its kind, its message, what to do."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) or "can't allocate memory" in text:
        hint = "lower --kv-cache-memory or --max-model-len, or take a smaller model"
        return OutOfMemoryError(f"out of memory: {text}", hint=hint)
    return MinirtError(f"unexpected {type(error).__name__}: {text}", hint="run with --debug for the traceback")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point: runs a command and turns errors into one line on stderr and an exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # A stream that the shell closed (`>&-`) is None.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout, sys.stderr = (s or open(os.devnull, "w") for s in (sys.stdout, sys.stderr))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    try:
        cli.main(arguments, standalone_mode=False)
        sys.exit(0)
    except click.ClickException as error:
        error.show()
        sys.exit(2 if isinstance(error, click.UsageError) else 1)
    except click.Abort:  # Ctrl-C; click has ended the line
        sys.exit(130)
    except Exception as error:
        if "--debug" in arguments:
            raise
        click.echo(f"minirt: {error if isinstance(error, MinirtError) else _named(error)}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

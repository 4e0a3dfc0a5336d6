"""The command line: `minirt generate | chat | plan | bench | compare | eval | tune | env`.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failure, 2 usage, 130 Ctrl-C. Heavy imports wait
until a command needs them. Options shared by commands are in cli_options.py, printing is in cli_output.py, the many prompts of
`generate --prompts` in cli_many.py and cli_prompts.py, `bench` in cli_bench.py, `compare` in cli_compare.py,
`eval` in cli_eval.py, `tune` in cli_tune.py.
"""

import io
import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from minirt.cli_bench import bench
from minirt.cli_compare import compare
from minirt.cli_eval import evaluate
from minirt.cli_many import generate_many
from minirt.cli_options import (
    debug_option,
    encode_prompt,
    graph_options,
    load_options,
    model_name,
    open_generator,
    plan_graph,
    quiet_option,
    read_prompt,
    sampling_options,
    sampling_params,
)
from minirt.cli_output import completion_record, completion_summary, format_bytes, json_line, note, write
from minirt.cli_tune import tune
from minirt.errors import DeviceFailedError, InputError, MinirtError, OutOfMemoryError, inside


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="minirt")
def cli() -> None:
    """Run decoder models layer by layer: generate text, chat, measure, or print how a model runs."""


cli.add_command(bench)
cli.add_command(compare)
cli.add_command(evaluate)
cli.add_command(tune)


@cli.command()
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@load_options
@click.option("--prompt-file", "files", multiple=True, help="Take a file verbatim as prompt; - is stdin (repeatable).")
@click.option("--prompts", "many", metavar="FILE", help="Run all requests of a JSON-lines file at once; - is stdin.")
@click.option("--chat", is_flag=True, help="Each prompt is a user's message: apply the chat template.")
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt, each on its line.")
@quiet_option
@debug_option
def generate(
    prompts: tuple[str, ...], files: tuple[str, ...], many: str | None, chat: bool, as_json: bool, quiet: bool,
    **options: Any,
) -> None:
    """Complete each PROMPT, then each prompt file, one after the other, and print the new text as it comes.

    Every text ends with a newline of its own; the prompt is not repeated. A model without a tokenizer takes token ids
    ("1 2 3") and prints token ids.

    --prompts runs many requests through the engine at once, for throughput. Each line of its FILE is a JSON text, or an
    object with "prompt", "messages" (a conversation) or "prompt_token_ids", its own max_tokens, temperature, top_k,
    top_p, min_p, seed, stop and ignore_eos where they differ from the command line's, and an "id" to be copied to the
    result. Results come in the order of the lines, each text followed by one newline; a text may hold newlines itself,
    so programs should read --json, whose objects also name their "line". After Ctrl-C all that is finished is printed,
    and what is unfinished with the finish_reason "abort"; a request that has no token yet is left out. A request that fails
    has the finish_reason "error"; the others go on, and the exit code is 1.
    """
    if many is not None:
        if prompts or files:
            raise click.UsageError("--prompts goes without PROMPT and --prompt-file")
        generate_many(many, options, chat=chat, as_json=as_json, quiet=quiet)
        return
    texts = [*prompts, *(read_prompt(name) for name in files)]
    places = [f"PROMPT {i}" if len(texts) > 1 else None for i in range(1, len(prompts) + 1)] + list(files)
    if not texts:
        raise click.UsageError("no prompt: give PROMPT, --prompt-file or --prompts")
    params = sampling_params(options)
    with open_generator(options, quiet) as generator:
        inputs = []
        for place, text in zip(places, texts, strict=True):
            with inside(place):
                inputs.append(encode_prompt(generator, text, chat))
                generator.check(inputs[-1], params)  # all of them, before the first text is out
        for place, text, tokens in zip(places, texts, inputs, strict=True):
            with inside(place):
                for piece, completion in generator.stream_completion(tokens, params):  # noqa: B007 (the last one counts)
                    if not as_json:
                        write(piece.text if generator.tokenizer else f"{piece.token_ids[0]} ")
            write(json_line({"prompt": text, **completion_record(completion)}) if as_json else "\n")
            if not quiet:
                note(completion_summary(generator, completion))


@cli.command()
@load_options
@click.option("--system", help="A system message to begin with; an empty one replaces the template's own.")
@sampling_options
@quiet_option
@debug_option
def chat(system: str | None, quiet: bool, **options: Any) -> None:
    """Talk with the model, a line a message. /clear starts anew; /exit or Ctrl-D ends; Ctrl-C stops an answer."""
    params = sampling_params(options)
    opening = [] if system is None else [{"role": "system", "content": system}]
    with open_generator(options, quiet) as generator:
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
                    write(piece.text)
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                note("(stopped)")
            except InputError as error:
                if not sys.stdin.isatty():
                    raise
                note(f"minirt: {error}; /clear starts anew")
                continue
            write("\n")
            messages += [asked, {"role": "assistant", "content": answer}]
            if completion is not None and not quiet:
                note(completion_summary(generator, completion))


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


@cli.command()
@graph_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@debug_option
def plan(as_json: bool, **options: Any) -> None:
    """Print the graph: each layer, its implementation and why, its weights. Reads no weights."""
    name = model_name(options)
    config, model = plan_graph(options, name)
    if as_json:
        rows = [vars(row) for row in model.plan.rows]
        record = {"device": model.plan.device, "weight_bytes": model.plan.weight_bytes, "layers": rows}
        write(json.dumps(record) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    size = f"{model.num_parameters / 1e6:,.1f} M parameters"
    table = Table(title=f"{name} · {config.model_type} · {size} · {model.plan.device}")
    for column in ("layer", "implementation", "why", "dtype"):
        table.add_column(column)
    table.add_column("weights", justify="right")
    for row in model.plan.rows:
        table.add_row(row.layer, row.implementation, row.reason, row.dtype, format_bytes(row.bytes))
    table.add_row("total", "", "", "", format_bytes(model.plan.weight_bytes))
    printed, terminal = io.StringIO(), sys.stdout.isatty()
    width = None if terminal else 110
    console = Console(file=printed, width=width, force_terminal=terminal, markup=False, emoji=False, highlight=False)
    console.print(table)
    write(printed.getvalue())


@cli.command()
def env() -> None:
    """Print what a bug report needs: versions, devices, memory."""
    from minirt.usage import environment

    for name, value in environment().items():
        write(f"{name:<16} {value}\n")


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
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # whatever the locale: `chat` says what is not
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's word on what nothing here needs
    try:
        cli.main(arguments, standalone_mode=False, obj=arguments)  # a benchmark records its command line
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
        if isinstance(error, DeviceFailedError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # freeing what lies on the GPU would fail as well, and abort the process with another code
        sys.exit(1)


if __name__ == "__main__":
    main()

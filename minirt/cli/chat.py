"""`minirt chat`: a conversation on the terminal, one message per line."""

import sys
from typing import Any

import click

from minirt.cli.options import (
    debug_option,
    load_options,
    open_model,
    prefix_cache_option,
    quiet_option,
    sampling_options,
    sampling_params,
)
from minirt.cli.output import completion_summary, note, write
from minirt.errors import InputError


@click.command()
@load_options
@prefix_cache_option
@click.option("--system", help="The system message; an empty one replaces the template's default.")
@sampling_options
@quiet_option
@debug_option
def chat(system: str | None, quiet: bool, **options: Any) -> None:
    """Chat with the model, one message per line. /clear starts over; /exit or Ctrl-D ends; Ctrl-C stops an answer."""
    params = sampling_params(options)
    opening = [] if system is None else [{"role": "system", "content": system}]
    with open_model(options, quiet) as generator:
        generator.encode_chat([*opening, {"role": "user", "content": "?"}])  # without a template, fail before the user types
        messages = list(opening)
        while (line := _ask()) is not None:
            if line == "/clear":
                messages = list(opening)
                continue
            asked = {"role": "user", "content": line}
            answer, completion = "", None
            try:
                tokens = generator.encode_chat([*messages, asked], generator.max_len - 1)
                for piece, completion in generator.stream_completion(tokens, params):  # noqa: B007 (used after the loop)
                    answer += piece.text
                    write(piece.text)
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                note("(stopped)")
            except InputError as error:
                if not sys.stdin.isatty():
                    raise
                note(f"minirt: {error}; /clear starts over")
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

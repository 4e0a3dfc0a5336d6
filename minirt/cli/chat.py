"""`minirt chat`: a conversation on the terminal, a line a message."""

import sys
from typing import Any

import click

from minirt.cli.options import (
    debug_option,
    load_options,
    open_generator,
    quiet_option,
    sampling_options,
    sampling_params,
)
from minirt.cli.output import completion_summary, note, write
from minirt.errors import InputError


@click.command()
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

"""`minirt generate`: complete prompts one after the other; with --prompts, many at once (`generate_many`)."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from minirt.cli import options as shared
from minirt.cli import output
from minirt.cli.files import read_text, shown_name
from minirt.cli.generate_many import generate_many
from minirt.cli.help import command, option_group, option_in
from minirt.errors import inside, quoted


@command(short_help="Complete prompts; with --prompts, many at once.")
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@shared.serving_options
@shared.warm_prompt_option
@shared.chat_options
@option_group(
    "Prompts",
    click.option(
        "--prompt-file", "files", multiple=True, metavar="FILE",
        help="Use a file's text verbatim as prompt; - is stdin (repeatable).",
    ),
    click.option("--prompts", "many", metavar="FILE", help="Run all requests of a JSON-lines file at once; - is stdin."),
)
@shared.template_option
@shared.text_format_option
@shared.output_file_option
@option_in(
    "Output", "--verbose", "-v", is_flag=True, help="With --json: all sampling values of each result, and where each comes from."
)
@shared.sampling_options
@shared.detail_options
@shared.general_options
def generate(
    prompts: tuple[str, ...], files: tuple[str, ...], many: str | None, chat: bool, system: str | None,
    variables: dict[str, Any] | None, output_format: str, verbose: bool, quiet: bool, **options: Any,
) -> None:
    """Complete each PROMPT, then each prompt file, one after the other, and print the new text as it is generated.

    A PROMPT of "-" is stdin, and so is a pipe if there is no prompt at all; one newline at its end is removed. --prompt-file
    takes everything verbatim.

    Each text is followed by a newline; the prompt is not repeated. With --json, each prompt is a line with a JSON object. A model
    without a tokenizer takes token ids ("1 2 3") and prints token ids. The samples of --n are printed when all are complete.

    --prompts runs many requests through the engine at once, for throughput. Each line of FILE is a JSON string or a JSON
    object. An object has one of "prompt", "messages" (a conversation) and "prompt_token_ids". It may override the command
    line's sampling options, by their names with underscores (max_tokens). It may have an "id", which is copied to the result.
    Results are printed in the order of the lines, each text followed by a newline. A text may contain newlines itself, so
    programs should use --json, whose objects also give their "line". After Ctrl-C, SIGTERM or SIGHUP, all finished results are
    printed, and unfinished ones with the finish_reason "abort"; requests without a token are left out. A failed request has the
    finish_reason "error"; the others continue, and the exit code is 1.
    """
    as_json = output_format == "json"
    shared.require_chat(chat, system, variables if many is None else None)
    if verbose and not as_json:
        raise click.UsageError("--verbose needs --json, which prints the values")
    printing = output.Printing(as_json, verbose, quiet)
    if many is not None:
        if prompts or files:
            raise click.UsageError("--prompts cannot be combined with PROMPT or --prompt-file")
        generate_many(many, options, printing, chat=chat, system=system, variables=variables)
        return
    if not (prompts or files) and not sys.stdin.isatty():
        prompts = tuple(filter(None, [_piped()]))
    prompts = tuple(_piped() if prompt == "-" else prompt for prompt in prompts)
    texts = [*prompts, *(read_text(name, "--prompt-file") for name in files)]
    places = [f"PROMPT {i}" if len(texts) > 1 else None for i in range(1, len(prompts) + 1)] + list(map(shown_name, files))
    if not texts:
        raise click.UsageError("no prompt: give PROMPT, --prompt-file or --prompts, or pipe a text to stdin")
    if not quiet:
        _note_names(prompts)
    params = shared.sampling_params(options)
    if not as_json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise click.UsageError("--logprobs and --prompt-logprobs need --json, which prints them")
    with shared.open_model(options, quiet, texts, chat) as generator:
        inputs, done, shows_text = [], [], generator.tokenizer is not None and params.detokenize
        for place, text in zip(places, texts, strict=True):
            with shared.named_by_option(place):
                inputs.append(shared.encode_prompt(generator, text, chat, params, system, variables))
                generator.check(inputs[-1], params)  # check all prompts before any text is printed
        with output.results_in(options["output_file"], quiet):
            for place, text, tokens in zip(places, texts, inputs, strict=True):
                with inside(place):
                    if params.n > 1:
                        samples = generator.generate(tokens, params).outputs
                    else:
                        for piece, completion in generator.stream_completion(tokens, params):  # noqa: B007 (used after the loop)
                            if not as_json:
                                output.write(piece.text if shows_text else f"{piece.token_ids[0]} ")
                        samples = completion.outputs
                done += samples
                for completion in samples:
                    streamed = not as_json and params.n == 1
                    output.write("\n" if streamed else printing.line(generator, {"prompt": text}, completion, params.n > 1))
                if not quiet:
                    output.note(output.completion_summary(generator, samples))
        output.warn_incomplete(done)
        if not chat:
            output.note_template(generator, done, quiet)


def _note_names(prompts: tuple[str, ...]) -> None:
    """Say that a prompt which is the name of a model or a file is a prompt all the same. Other programs take it as a name."""
    from minirt.models import preset

    for text in prompts:
        with suppress(OSError, ValueError):  # too long for a name, or with a null character
            if preset(text) is not None or (Path(text) / "config.json").is_file():
                output.note(f"the prompt {quoted(text, 80)} is the name of a model: --model names the model to use")
            elif Path(text).is_file():
                output.note(f"the prompt {quoted(text, 80)} is the name of a file: --prompt-file reads a prompt from a file")


def _piped() -> str:
    """The text of stdin without the newline at its end, which `echo` and the like add."""
    return read_text("-").removesuffix("\n").removesuffix("\r")

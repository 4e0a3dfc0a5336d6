"""`minirt eval`: how good a model is, as it runs here."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from minirt.cli_options import debug_option, load_options, open_generator, quiet_option, read_prompt
from minirt.cli_output import write
from minirt.progress import LoadProgress, load_bars

if TYPE_CHECKING:
    from minirt.evaluation import Perplexity, Progress
    from minirt.generator import Generator


@click.group("eval")
def evaluate() -> None:
    """Measure how good a model is, with the layers, dtype and device that it would run with."""


@evaluate.command("perplexity")
@load_options
@click.option("--text", "file", required=True, metavar="FILE", help="UTF-8 text to be predicted; - is stdin.")
@click.option("--max-length", type=int, help="Tokens in a window. Default: 2048, or what the model holds if that is less.")
@click.option("--stride", type=int, help="Tokens from one window to the next. Default: half a window.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@quiet_option
@debug_option
def perplexity_command(
    file: str, max_length: int | None, stride: int | None, as_json: bool, quiet: bool, **options: Any
) -> None:
    """How well the model predicts a text: perplexity per token, and bits per byte.

    The text is tokenized once and cut into windows that overlap; every token but the first is scored once, in the first window
    that holds it, from at least --max-length minus --stride tokens before it. Sums are in fp64.
    """
    text = read_prompt(file)
    with open_generator(options, quiet) as generator:
        from minirt.evaluation import perplexity

        with _bar(quiet) as progress:
            result = perplexity(generator, text, window=max_length, stride=stride, progress=progress)
        write(_as_json(generator, result) if as_json else _as_text(result))


@contextmanager
def _bar(quiet: bool) -> Iterator["Progress | None"]:
    bars: LoadProgress | None
    with load_bars(not quiet) as bars:
        yield (lambda done, total: bars("tokens", done, total)) if bars else None


def _as_text(result: "Perplexity") -> str:
    lines = [f"perplexity     {result.perplexity:.6g}", f"nats a token   {result.nll / result.tokens:.6g}"]
    if result.bits_per_byte is not None:
        lines.append(f"bits a byte    {result.bits_per_byte:.6g}")
    lines.append(f"tokens scored  {result.tokens} in {result.windows} windows of {result.window}, stride {result.stride}")
    return "\n".join(lines) + "\n"


def _as_json(generator: "Generator", result: "Perplexity") -> str:
    record = {"model": generator.name, "perplexity": result.perplexity, "bits_per_byte": result.bits_per_byte, **vars(result)}
    return json.dumps(record) + "\n"

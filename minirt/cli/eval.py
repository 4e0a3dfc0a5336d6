"""`minirt eval`: measures the quality of a model."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import click

from minirt.cli import options as shared
from minirt.cli.files import read_text
from minirt.cli.help import option_group
from minirt.cli.output import json_line, write
from minirt.cli.settings import option_of
from minirt.cli.suggestions import Commands
from minirt.errors import InputError, printable
from minirt.loading.options import LoadOptions
from minirt.progress import load_bars
from minirt.sizes import format_size

_PAGES = 64 << 20  # bytes for KV pages; hardly used, because the measurement allocates its own


@click.group("eval", cls=Commands, short_help="Measure perplexity, or the error of FP8 rounding.")
def evaluate() -> None:
    """Measure a model's quality with the layers, dtype and device that it runs with."""


@evaluate.command("perplexity", short_help="Measure how well the model predicts a text.")
@shared.load_options
@option_group(
    "Measurement", click.option("--text", "file", required=True, metavar="FILE", help="UTF-8 text to score; - is stdin."),
    click.option("--max-length", type=int, help="Tokens in a window. Default: 2048, or the model's context, if shorter."),
    click.option("--stride", type=int, help="Tokens from one window to the next. Default: half a window."),
)  # fmt: skip
@shared.text_format_option
@shared.general_options
def perplexity_command(
    file: str, max_length: int | None, stride: int | None, output_format: str, quiet: bool, **options: Any
) -> None:
    """Measure how well the model predicts a text: perplexity per token, and bits per byte.

    The text is tokenized once and cut into overlapping windows. Every token except the first is scored once, in the first window
    that contains it. From the second window on, at least --max-length minus --stride tokens precede it. Sums are in fp64.
    """
    text = read_text(file, "--text")
    with shared.open_model(options, quiet) as generator:
        from minirt.bench.perplexity import perplexity

        shared.require_tokenizer(generator, "--text")
        try:
            with load_bars(not quiet) as bars:
                result = perplexity(generator, text, window=max_length, stride=stride, progress=bars and partial(bars, "tokens"))
        except InputError as error:  # name the options, not the arguments
            raise error.at({"window": "--max-length", "stride": "--stride"}.get(str(error.where), error.where or file)) from error
        dtype, plan = str(generator.model.dtype).removeprefix("torch."), generator.plan
        if output_format == "json":
            record = {"model": generator.name, "device": str(generator.device), "weight_bytes": plan.weight_bytes, "dtype": dtype}
            measured = {"perplexity": result.perplexity, "bits_per_byte": result.bits_per_byte} | vars(result)
            write(json_line(record | {"formats": plan.formats} | measured))
            return
        facts = printable(generator.name), dtype, *plan.formats, f"{format_size(plan.weight_bytes)} of weights", generator.device
        write(f"model          {' · '.join(map(str, facts))}\n")
        write(f"perplexity     {result.perplexity:.6g}\nnats a token   {result.nll / result.tokens:.6g}\n")
        if result.bits_per_byte is not None:
            write(f"bits a byte    {result.bits_per_byte:.6g}\n")
        write(f"tokens scored  {result.tokens} in {result.windows} windows of {result.window}, stride {result.stride}\n")


@evaluate.command("fp8", short_help="Print the error of FP8 rounding in each linear layer.")
@option_group("Model", shared.model_option, *(option_of(LoadOptions, name, "Model") for name in ("revision", "device", "dtype")))
@option_group(
    "Measurement",
    click.option("--text", "file", required=True, metavar="FILE", help="UTF-8 text to take activations from; - is stdin."),
    click.option(
        "--num-tokens", "-n", type=click.IntRange(2), show_default="512, or the model's context, if shorter",
        help="Number of tokens to use, from the start of the text.",
    ),
)
@shared.text_format_option
@shared.general_options
def fp8_command(file: str, num_tokens: int | None, output_format: str, quiet: bool, **options: Any) -> None:
    """Print the relative errors that FP8 rounding causes in each linear layer: of its weights and, on real activations, of its
    outputs.

    The model is loaded twice with eager layers: as it is, and with every linear layer quantized, including the LM head. "1
    token": only weights are rounded, as in a step of one token. "more tokens": activations too. --json prints one object per
    linear layer. `minirt compare --fp8` shows the additional error of the kernels.
    """
    text = read_text(file, "--text")
    name = shared.model_name(options, quiet)
    from minirt.bench.fp8_error import format_errors, table
    from minirt.bench.report import as_text

    load = shared.to_load_options(options, name, impl="eager", max_num_seqs=1, kv_cache_memory=_PAGES, warm_up="none")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "on a CPU, quantized weights")  # the command is about errors, not speed
        with shared.open_generator(load, quiet) as plain:
            shared.require_tokenizer(plain, "--text")
            if plain.plan.formats:
                raise InputError("the checkpoint is quantized already", where="--model", found=plain.plan.checkpoint)
            most = plain.model.max_model_len
            if num_tokens is not None and num_tokens > most:
                raise InputError("more than the model has positions for", where="--num-tokens", expected=most, found=num_tokens)
            with shared.open_generator(replace(load, quantization="fp8", quantize_head=True), quiet) as quantized:
                errors = format_errors(plain.model, quantized.model, plain.encode(text)[: num_tokens or min(512, most)])
    write("".join(json_line(error._asdict()) for error in errors) if output_format == "json" else as_text(table(errors)))

"""`minirt bench patch`: options and output. minirt.bench.patch measures."""

from pathlib import Path
from typing import Any

import click

from minirt.cli.files import check_picture
from minirt.cli.help import command
from minirt.cli.options import NUMBERS, random_weights_option
from minirt.cli.report import kernel_dtype, kernel_options, print_report, progress_of, report_options, words_of
from minirt.cli.settings import COUNT, Parsed, options_of
from minirt.settings import setting

_VARIANTS = ("minirt", "minirt fp8", "liger")
_PARTS = ("norms", "attention", "rope", "mlp")


def _some_of(names: tuple[str, ...]) -> Parsed:
    """Some of several names, with commas between them."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = dict.fromkeys(text.split(","))
        if unknown := [name for name in chosen if name not in names]:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(names)}")
        return tuple(chosen)

    return Parsed(",".join(names), parse)


class _Options:
    model: str = setting("Preset, or the folder of a model.", "Qwen2.5-7B", option="--model -m", group="Model")
    input_len: Any = setting("Tokens of a prompt.", "128,512,2048,8192", option="--input-len -p", kind=NUMBERS)
    batch_size: Any = setting("Sequences of a decode step.", "1,8", option="--batch-size -b", kind=NUMBERS)
    context_len: int = setting("Tokens before a decode step.", 128, option="--context-len -c", kind=COUNT)
    output_len: int = setting("Decode steps of a run.", 32, option="--output-len -n", kind=COUNT)
    variants: Any = setting(
        "What to compare with the model without changes. Liger's kernels need liger-kernel.", ",".join(_VARIANTS),
        kind=_some_of(_VARIANTS),
    )  # fmt: skip
    parts: Any = setting("What minirt replaces.", ",".join(_PARTS), kind=_some_of(_PARTS))
    compiled: bool | None = setting("Also compiled transformers. Default: on a GPU.", option="--compile/--no-compile")
    repeats: int = setting("Measured runs of a test.", 5, kind=COUNT)
    seed: int = setting("Seed of prompts and random weights.", 0)
    picture: str | None = setting(
        "Draw the speed of each variant: .png or .svg. Needs matplotlib.", metavar="FILE", group="Output")


@command(short_help="Time a transformers model with minirt's kernels.")
@options_of(_Options, "", title="Measurement")
@kernel_options
@random_weights_option
@report_options
@click.pass_context
def patch(ctx: click.Context, **options: Any) -> None:
    """Time a model of transformers with and without minirt's kernels (`minirt.patch`): prompts, and decode steps.

    Each variant is a new model with the same weights. Its logits are compared with those of the model without changes before it
    is timed. Times are from the call to the next token on the device: in transformers' eager mode with a cache that grows and,
    with --compile, compiled with a static cache. "speed" is the time of the model without changes, divided by the variant's.
    """
    check_picture(options["picture"])
    from minirt.bench import patch as benchmark
    from minirt.bench.report import Report, machine
    from minirt.device import pick_device

    device = pick_device(options["device"])
    cuda, name = device.type == "cuda", options["model"]
    dtype = kernel_dtype(options["dtype"], cuda)
    benchmark.require_transformers()
    if options["random_weights"]:
        benchmark.hf_config(name)  # refuses an unknown name before anything else
    compiled = cuda if options["compiled"] is None else options["compiled"]
    sizes = benchmark.Sizes(
        options["input_len"], options["batch_size"], options["context_len"], options["output_len"], options["repeats"]
    )
    rows, facts = benchmark.run(
        lambda: benchmark.build(name, options["random_weights"], dtype, device, options["seed"]), sizes, options["variants"],
        benchmark.MODES if compiled else benchmark.MODES[:1], device, parts=options["parts"], seed=options["seed"],
        progress=progress_of(options),
    )  # fmt: skip
    shared = machine("patch", device, words_of(ctx), None) | facts
    shared |= {"model": name, "random_weights": options["random_weights"]}
    shared |= {"dtype": str(dtype).removeprefix("torch."), "parts": list(options["parts"])}
    shared["versions"] |= benchmark.versions()
    print_report(Report(shared, rows, benchmark.markdown), options)
    if options["picture"] is not None:
        benchmark.draw(shared, rows, Path(options["picture"]))

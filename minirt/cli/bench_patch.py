"""`minirt bench patch`: options and output. minirt.bench.patch measures."""

from pathlib import Path
from typing import Any

import click

from minirt.cli.files import check_picture
from minirt.cli.help import command, option_group
from minirt.cli.options import (
    NUMBERS,
    random_weights_option,
)
from minirt.cli.report import kernel_dtype, print_report, progress_of, report_options, words_of

_VARIANTS = ("minirt", "minirt fp8", "liger")
_PARTS = ("norms", "attention", "rope", "mlp")


class _Names(click.ParamType):
    """Some of several names, with commas between them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names, self.name = names, ",".join(names)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        names = value if isinstance(value, tuple) else tuple(value.split(","))
        if unknown := [name for name in names if name not in self.names]:
            self.fail(f"{unknown[0]!r} is none of {', '.join(self.names)}", param, ctx)
        return tuple(dict.fromkeys(names))


@command(short_help="Time a transformers model with minirt's kernels.")
@option_group(
    "Model",
    click.option("--model", "-m", default="Qwen2.5-7B", show_default=True, help="Preset, or the folder of a model."),
    click.option("--dtype", help="bfloat16, float16 or float32. Default: bfloat16; on a CPU float32."),
    click.option("--device", default="auto", show_default=True, help="cuda, cuda:N or cpu."),
    random_weights_option,
)
@option_group(
    "Measurement",
    click.option("--input-len", "-p", type=NUMBERS, default="128,512,2048,8192", show_default=True, help="Tokens of a prompt."),
    click.option("--batch-size", "-b", type=NUMBERS, default="1,8", show_default=True, help="Sequences of a decode step."),
    click.option(
        "--context-len", "-c", type=click.IntRange(1), default=128, show_default=True, help="Tokens before a decode step."
    ),
    click.option("--output-len", "-n", type=click.IntRange(1), default=32, show_default=True, help="Decode steps of a run."),
    click.option(
        "--variants", type=_Names(_VARIANTS), default=",".join(_VARIANTS), show_default=True,
        help="What to compare with the model without changes. Liger's kernels need liger-kernel.",
    ),
    click.option(
        "--parts", type=_Names(_PARTS), default=",".join(_PARTS), show_default=True, help="What minirt replaces.",
    ),
    click.option("--compile/--no-compile", "compiled", default=None, help="Also compiled transformers. Default: on a GPU."),
    click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Measured runs of a test."),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of prompts and random weights."),
)
@option_group(
    "Output",
    click.option("--picture", metavar="FILE", help="Draw the speed of each variant: .png or .svg. Needs matplotlib."),
)
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
    from minirt.bench.report import machine
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
    print_report(benchmark.PatchReport(shared, rows), options)
    if options["picture"] is not None:
        benchmark.draw(shared, rows, Path(options["picture"]))

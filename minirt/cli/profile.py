"""`minirt profile`: options and output. minirt.bench.profile measures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from minirt.cli import options as shared
from minirt.cli.files import check_picture, check_target
from minirt.cli.help import command
from minirt.cli.output import note
from minirt.cli.report import print_report, progress_of, report_options, words_of
from minirt.cli.settings import COUNT, options_of
from minirt.settings import setting


class _Options:
    batch_size: Any = setting("Sequences of a step; several: 1,64.", "1", option="--batch-size -b", kind=shared.NUMBERS)
    context_len: Any = setting(
        "Tokens of each in decode steps, the new one included; 0: no decode steps.", "128", option="--context-len -c",
        kind=shared.NUMBERS_OR_0)
    input_len: Any = setting(
        "Tokens of each in steps of prompts; 0: none.", "128", option="--input-len -p", kind=shared.NUMBERS_OR_0)
    compare: str | None = setting("Profile the same steps with this --impl, too, such as eager.", metavar="NAME")
    picture: str | None = setting("Draw the time of each layer: .png or .svg.", metavar="FILE", group="Output")
    repeats: int = setting("Steps of each kind.", 10, kind=COUNT)


@command(short_help="Divide the time of a step among its layers and kernels.")
@options_of(_Options, "", title="Measurement")
@shared.load_options
@report_options
@click.pass_context
def profile(ctx: click.Context, batch_size: tuple[int, ...], **options: Any) -> None:
    """Divide the time of decode steps and of prompts among layers and kernels: time, share, bytes of weights, launches, gaps.

    On a GPU the timeline of a trace is divided: kernels overlap, and each moment counts once. On a CPU each layer is timed.
    """
    check_target(options["output_file"], "--output-file")
    check_picture(options["picture"])
    name = shared.model_name(options, options["quiet"])
    from minirt.bench.ceiling import read_ceiling
    from minirt.bench.profile import draw, markdown, rows_of
    from minirt.bench.report import Report, machine
    from minirt.device import pick_device

    steps = [(size, length, kind) for kind in ("context_len", "input_len") for length in options[kind] for size in batch_size]
    load, progress, rows = shared.for_measuring(shared.to_load_options(options, name)), progress_of(options), []
    about: dict[str, Any] = {}
    ceiling = read_ceiling(pick_device(options["device"]))  # before a model takes the memory
    for other in (None,) if options["compare"] is None else (None, options["compare"]):
        with shared.open_generator(load if other is None else replace(load, impl=other), options["quiet"]) as generator:
            for size, length, kind in steps:
                prompt = kind == "input_len"
                if prompt and size * length > generator.max_num_batched_tokens:
                    note(f"{size} prompts of {length} tokens are more than a step has: {generator.max_num_batched_tokens}")
                    continue
                result = generator.profile(batch_size=size, context_len=length, prompt=prompt, repeats=options["repeats"])
                progress(f"{result.step}: {result.step_s * 1e3:.3f} ms")
                rows += rows_of(result, ceiling.bytes_per_s, other)
            about = about or machine("profile", generator.device, words_of(ctx), ceiling) | {"model": name}
    print_report(Report(about, rows, markdown), options)
    if options["picture"] is not None:
        draw(about, rows, Path(options["picture"]))

"""`minirt bench start`: options and output. minirt.bench.start measures."""

from typing import Any

import click

from minirt.cli import options as shared
from minirt.cli.files import check_target
from minirt.cli.help import command
from minirt.cli.report import print_report, progress_of, report_options, words_of
from minirt.cli.settings import COUNT, options_of
from minirt.settings import setting


class _Options:
    repeats: int = setting("Starts with a warm kernel cache.", 3, kind=COUNT)


@command(short_help="Time a start, by phase, up to the first token.")
@options_of(_Options, "", title="Measurement")
@shared.serving_options
@report_options
@click.pass_context
def start(ctx: click.Context, repeats: int, **options: Any) -> None:
    """Time new processes from their start to the first token, by phase: first with an empty kernel cache, then with a warm one.

    The user's own kernel cache is not touched. With --kernel-cache, the first start takes its kernels from that folder.
    """
    check_target(options["output_file"], "--output-file")
    name = shared.model_name(options, options["quiet"])
    from minirt.bench.report import Report, machine
    from minirt.bench.start import markdown, run
    from minirt.device import pick_device

    shared.for_measuring(shared.to_load_options(options, name))  # checks them, before any start
    device, arguments = pick_device(options["device"]), shared.load_arguments(options, name)
    rows = run(arguments, options["imports"], repeats, progress_of(options))
    about = machine("start", device, words_of(ctx), None) | {"model": name, "quantization": arguments["quantization"]}
    print_report(Report(about, rows, markdown), options)

"""`minirt compile`: compile a model's kernels for a GPU that need not be in this machine, for images and fleets."""

from pathlib import Path
from typing import Any

import click

from minirt.cli import options as shared
from minirt.cli.gpus import gpu_option, planned_gpu
from minirt.cli.help import command, option_in
from minirt.cli.output import counted, note, write
from minirt.errors import MinirtError
from minirt.progress import load_bars
from minirt.threads import usable_cpus


@command(short_help="Compile a model's kernels for another machine.")
@shared.model_options
@gpu_option
@shared.memory_options
@shared.general_options
@option_in("Output", "--output", required=True, type=click.Path(file_okay=False), metavar="FOLDER", help="Where they go.")
@option_in("General", "--jobs", type=click.IntRange(1, 1024), help="Kernels compiled at once. Default: one for each CPU.")
def compile(output: str, jobs: int | None, **options: Any) -> None:
    """Compile the kernels that a start with these options needs, on a machine that may have no GPU. Reads no weights.

    Give the folder to `minirt serve --kernel-cache` (or another command) on a machine with this GPU. It is used only there, with
    the same versions of minirt and Triton. Kernels for drafts, and for tuned configurations, are compiled at the start as before.
    """
    gpu = planned_gpu(options)
    if gpu is None:
        raise click.UsageError("--gpu: name the GPU, such as --gpu H100")
    if not gpu.sms:
        raise click.UsageError(f"--gpu {gpu.name}: kernels depend on the number of SMs, so it needs a name, such as H100")
    name = shared.model_name(options, options["quiet"])
    from minirt.precompile.plan import compile_kernels

    load = shared.to_load_options(options, name)
    with load_bars(not options["quiet"]) as progress:
        def compiled(done: int, total: int) -> None:
            if progress is not None:
                progress("kernels", done, total)

        try:
            count = compile_kernels(load, gpu, Path(output), jobs or usable_cpus(), compiled)
        except OSError as error:
            raise MinirtError("cannot be written to", where=f"--output {output}", found=error.strerror) from error
    if not options["quiet"]:
        note(f"{counted(count, 'kernel')} for {gpu}")
    write(f"{output}\n")

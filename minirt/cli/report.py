"""What the commands share that print a report of measurements."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from minirt.cli.help import option_group
from minirt.cli.options import general_options, output_file_option, report_format_option
from minirt.cli.output import emit, note
from minirt.cli.settings import option_of, options_of
from minirt.loading.options import LoadOptions
from minirt.settings import setting

if TYPE_CHECKING:
    import torch

    from minirt.bench.report import Report



class _Dtype:
    dtype: str | None = setting(
        "bfloat16, float16 or float32. Default: bfloat16; on a CPU float32.", metavar="TEXT",
        kind=("bfloat16", "float16", "float32"))


kernel_options = option_group(None, options_of(_Dtype, "", title="Model"), option_of(LoadOptions, "device", "Model"))
report_options = option_group(None, report_format_option, output_file_option, general_options)


def print_report(report: "Report", options: dict[str, Any]) -> None:
    emit(report.render(options["output_format"]), options["output_file"], options["quiet"])


def progress_of(options: dict[str, Any]) -> Callable[[str], None]:
    """Where a measurement writes how far it is: standard error, or with --quiet nowhere."""
    return (lambda text: None) if options["quiet"] else note


def words_of(ctx: click.Context) -> list[str]:
    """The command line of a command, for its report."""
    return ["minirt", *(ctx.find_root().obj or [])]


def kernel_dtype(name: str | None, cuda: bool) -> "torch.dtype":
    """The dtype that --dtype names; without it bfloat16 on a GPU, float32 on a CPU."""
    import torch

    return getattr(torch, name or ("bfloat16" if cuda else "float32"))

"""`minirt env`: versions, devices and memory, for a bug report."""

from minirt.cli.help import command
from minirt.cli.options import text_format_option
from minirt.cli.output import json_line, write
from minirt.errors import printable


@command()
@text_format_option
def env(output_format: str) -> None:
    """Print versions, devices and memory, for a bug report."""
    from minirt.bench.environment import environment

    if output_format == "json":
        write(json_line(environment()))
        return
    for name, value in environment().items():
        write(printable(f"{name:<17} {value}") + "\n")

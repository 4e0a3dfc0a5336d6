"""`minirt env`: versions, devices and memory, for a bug report."""

import click

from minirt.cli.output import write
from minirt.errors import printable


@click.command()
def env() -> None:
    """Print versions, devices and memory, for a bug report."""
    from minirt.device import environment

    for name, value in environment().items():
        write(printable(f"{name:<16} {value}") + "\n")

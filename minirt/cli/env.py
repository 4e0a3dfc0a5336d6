"""`minirt env`: what a bug report needs."""

import click

from minirt.cli.output import write


@click.command()
def env() -> None:
    """Print what a bug report needs: versions, devices, memory."""
    from minirt.device import environment

    for name, value in environment().items():
        write(f"{name:<16} {value}\n")

"""The command group and `main`, the entry point, which runs a command and turns errors into one line and an exit code.

Results go to stdout, everything else to stderr. Exit codes: 0 success, 1 failure, 2 usage, 130 Ctrl-C. Slow imports happen only
in the commands that need them. Each command has its own file in this folder; `options` and `output` hold what they share.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

import click

from minirt.cli.bench import bench
from minirt.cli.chat import chat
from minirt.cli.compare import compare
from minirt.cli.env import env
from minirt.cli.eval import evaluate
from minirt.cli.generate import generate
from minirt.cli.plan import plan
from minirt.cli.tune import tune
from minirt.errors import DeviceFailedError, MinirtError, OutOfMemoryError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="minirt")
def cli() -> None:
    """Run decoder models layer by layer: generate text, chat, measure, or print how a model runs."""


for command in (bench, chat, compare, env, evaluate, generate, plan, tune):
    cli.add_command(command)


def _named(error: Exception) -> MinirtError:
    """Turn another library's exception into a one-line `MinirtError`: its type, its message and a hint."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) or "can't allocate memory" in text:
        hint = "lower --kv-cache-memory or --max-model-len, or use a smaller model"
        return OutOfMemoryError(f"out of memory: {text}", hint=hint)
    return MinirtError(f"unexpected {type(error).__name__}: {text}", hint="run with --debug for the traceback")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point: run a command, and turn errors into one line on stderr and an exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # A stream that the shell closed (`>&-`) is None.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout, sys.stderr = (s or open(os.devnull, "w") for s in (sys.stdout, sys.stderr))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character gets "?" instead of an error
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # in any locale; `chat` reports invalid UTF-8
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # a torch warning; nothing here needs NumPy
    try:
        cli.main(arguments, standalone_mode=False, obj=arguments)  # a benchmark records its command line
        sys.exit(0)
    except click.ClickException as error:
        error.show()
        sys.exit(2 if isinstance(error, click.UsageError) else 1)
    except click.Abort:  # Ctrl-C; click has printed a newline
        sys.exit(130)
    except Exception as error:
        if "--debug" in arguments:
            raise
        click.echo(f"minirt: {error if isinstance(error, MinirtError) else _named(error)}", err=True)
        if isinstance(error, DeviceFailedError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # freeing GPU memory would fail too, and abort the process with another exit code
        sys.exit(1)


if __name__ == "__main__":
    main()

"""The command group and `main`, the entry point, which runs a command and turns errors into one line and an exit code.

Results go to stdout, everything else to stderr. Exit codes: 0 success, 2 a wrong option or value, 1 any other failure, 130
Ctrl-C, 143 SIGTERM, 129 SIGHUP. Slow imports happen only in the commands that need them. Each command has its own file in this
folder. `options`, `files`, `output` and `process` hold what they share.
"""

import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

import minirt
from minirt.cli.bench import bench
from minirt.cli.chat import chat
from minirt.cli.compare import compare
from minirt.cli.compile import compile as compile_kernels
from minirt.cli.completion import attach
from minirt.cli.env import env
from minirt.cli.eval import evaluate
from minirt.cli.generate import generate
from minirt.cli.models import models
from minirt.cli.output import one_line
from minirt.cli.plan import plan
from minirt.cli.process import Terminated, standard_streams, termination_signals, warning_lines
from minirt.cli.profile import profile
from minirt.cli.score import score
from minirt.cli.serve import serve
from minirt.cli.suggestions import Commands, for_option, takes_only_options
from minirt.cli.tune import tune
from minirt.errors import DeviceFailedError, MinirtError, OutOfMemoryError
from minirt.threads import limit_spinning
from minirt.wording import command_line


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(minirt.__version__, prog_name="minirt")
def cli() -> None:
    """Run decoder models layer by layer: generate text, chat, measure, or print how a model runs."""


for command in (bench, chat, compare, compile_kernels, env, evaluate, generate, models, plan, profile, score, serve, tune):
    cli.add_command(command)
attach(cli)


def _named(error: Exception) -> MinirtError:
    """Turn another library's exception into a one-line `MinirtError`: its type, its message and a hint."""
    text, out_of_memory = str(error), isinstance(error, MemoryError)
    if "torch" in sys.modules and not out_of_memory:
        from minirt.device import is_out_of_memory

        out_of_memory = is_out_of_memory(error)
    if out_of_memory:
        hint = "lower --kv-cache-memory or --max-model-len, or use a smaller model"
        return OutOfMemoryError(f"out of memory: {text}", hint=hint)
    return MinirtError(f"unexpected {type(error).__name__}: {text}", hint="run with --debug for the traceback")


def _usage(error: click.ClickException, arguments: Sequence[str]) -> str:
    """click's message in the form of a `MinirtError`: the option, what is wrong with it, and which command explains it."""
    if type(error) is click.BadParameter and (error.param_hint or error.param):  # not a parameter that is missing
        name = error.param_hint
        if name is None and error.param is not None:
            name = max(error.param.opts, key=len) if isinstance(error.param, click.Option) else error.param.human_readable_name
        text = f"{name}: {error.message}"
    elif isinstance(error, click.NoSuchOption):
        text = for_option(error, arguments)
    else:
        text = error.format_message()
        text = text[:1].lower() + text[1:]
        if text.startswith("got unexpected extra argument") and takes_only_options(error):
            text = f"{text.rstrip('.')}: the model is an option, --model MODEL"
    text = re.sub(r"is not a valid (integer|float) range$", r"is not a valid \1", text.rstrip("."))
    context = getattr(error, "ctx", None)
    return f"{text} (see {context.command_path if context else 'minirt'} --help)"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point: run a command, and turn errors into one line on stderr and an exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    limit_spinning()  # before a command imports PyTorch
    with standard_streams(), warning_lines(), command_line():
        code = _exit_code(arguments)
    sys.exit(code)


def _exit_code(arguments: list[str]) -> int:
    try:
        with termination_signals():
            # A benchmark records its command line.
            cli.main(arguments, "minirt", "_MINIRT_COMPLETE", standalone_mode=False, obj=arguments)
            sys.stdout.flush()
        return 0
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command; click 8.1 has no such error
            sys.stderr.write(error.format_message() + "\n")
        else:
            sys.stderr.write(f"minirt: {one_line(_usage(error, arguments))}\n")
        return 2 if isinstance(error, click.UsageError) else 1
    except (click.Abort, KeyboardInterrupt) as error:  # click has printed a newline, and made an Abort of the other
        interrupt = error.__cause__ if isinstance(error, click.Abort) else error
        return interrupt.exit_code if isinstance(interrupt, Terminated) else 130
    except Exception as error:
        if "--debug" in arguments:
            raise
        click.echo(f"minirt: {one_line(str(error if isinstance(error, MinirtError) else _named(error)))}", file=sys.stderr)
        if isinstance(error, DeviceFailedError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # freeing GPU memory would fail too, and abort the process with another exit code
        return 2 if isinstance(error, MinirtError) and error.is_usage else 1


if __name__ == "__main__":
    main()

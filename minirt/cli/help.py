"""How --help lists the options of a command: in groups, which have the same title and order in all commands."""

from collections.abc import Callable
from functools import partial
from typing import Any

import click

# In this order. Within a group, the most used options come first.
TITLES = ("Prompts", "Measurement", "Model", "Server", "Requests", "Sampling", "Structured output", "Output", "Memory and speed",
          "General")  # fmt: skip

MODEL_ARGUMENT = "named"  # the argument that is the same as --model


def option_group(title: str | None, *options: Callable) -> Callable:
    """One decorator for several options. --help lists them in this order.

    Args:
        title: of `TITLES`, for the options that have none. None: they all have one.
    """

    def decorate(command: Callable) -> Callable:
        before = len(getattr(command, "__click_params__", ()))
        for option in reversed(options):
            command = option(command)
        for parameter in command.__click_params__[before:]:  # type: ignore[attr-defined]
            if title is not None and not hasattr(parameter, "group"):
                parameter.group = title
        return command

    return decorate


def option_in(title: str, *spellings: str, **facts: Any) -> Callable:
    """`click.option` in the group `title`."""
    return option_group(title, click.option(*spellings, **facts))


class Command(click.Command):
    """A command whose --help has a list for each group of options, and that takes one model."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            given, _, order = self.make_parser(ctx).parse_args(list(args))
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # that of an option without its value has none
            raise
        if [parameter.name for parameter in order].count("model") + isinstance(given.get(MODEL_ARGUMENT), str) > 1:
            raise click.UsageError("two models, and a command has one (docs/fleets.md: several servers behind one address)", ctx)
        rest = super().parse_args(ctx, args)
        if model := ctx.params.pop(MODEL_ARGUMENT, None):
            ctx.params["model"] = model
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        lists: dict[str, list[tuple[str, str]]] = {title: [] for title in TITLES}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                lists[getattr(parameter, "group", TITLES[-1])].append(record)
        for title, records in lists.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


command = partial(click.command, cls=Command)  # in place of click.command

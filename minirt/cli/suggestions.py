"""What to write in place of a command or an option that does not exist: `Commands`, the class of groups, and `for_option`."""

import re
from collections.abc import Collection, Iterator, Sequence

import click

from minirt.cli.help import Command
from minirt.foreign_names import command_line_hint, similar, table

# Commands → an option of others → why they do not have it, and what does.
_NOT_HERE = {
    "minirt bench serve": {"--speculate": "an option of the server: minirt serve --speculate"},
    "minirt bench": {
        "--speculate": "prompts of minirt bench are random tokens, where drafts are seldom right; "
        "minirt bench speculate measures them with prompts of yours"
    },
}
_SHOWN = 3  # commands that a hint names


class Commands(click.Group):
    """A group whose error for an unknown command names the one that was meant: by another program's name for it, by the name of
    a command of a group below, or by spelling."""

    command_class = Command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name, known = args[0], self.list_commands(ctx)
        if name in known or name.startswith("-"):
            return super().resolve_command(ctx, args)
        below = [path for path, _ in _commands(self, ctx.command_path) if path.endswith(f" {name}")]
        hint = f"here {below[0]}" if below else table("commands").get(name if ctx.parent is None else f"{ctx.info_name} {name}")
        near = [word for word in known if name and word.startswith(name)] or similar(name, known)
        guess = f" ({hint})" if hint else f". Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise click.UsageError(f"No such command '{name}'{guess}", ctx)


def for_option(error: click.NoSuchOption, arguments: Sequence[str]) -> str:
    """The message for an unknown option: what another program's option is called here, which commands have it, or which option of
    this command is spelled like it."""
    context, name = error.ctx, error.option_name
    if context is None:
        return f"no such option '{name}'"
    if re.fullmatch("-[^-]", name):  # click names one letter: the first of "-tp", the second of "-hf", as -h is an option
        given = [word.partition("=")[0] for word in arguments if re.match(rf"-\w*{re.escape(name[1])}", word)]
        name = given[0] if given and given[0].isascii() else name
    options = _options(context.command)
    hint = option_hint(name, options, context.command_path)
    if hint is None and isinstance(context.command, click.Group):
        commands = context.command.commands
        given = [word for word in arguments if word in commands][-1:] or list(commands)
        having = [word for word in given if name in _options(commands[word])]
        hint = f"options follow the command, as in {context.command_path} {having[0]} {name}" if having else None
    near = similar(name, [option for option in options if option.startswith("--")]) if name.startswith("--") else []
    hint = hint or _elsewhere(name, context) or (f"did you mean {' or '.join(near)}?" if near else None)
    return f"no such option '{name}'" + (f" ({hint})" if hint else "")


def option_hint(name: str, options: Collection[str], command: str = "minirt") -> str | None:
    """What another program's option is called here, for "--name" or "-n" and a command with these options and arguments."""
    text = table("llama-bench").get(name) if f"{command} ".startswith("minirt bench ") else None
    text = text or command_line_hint(table("short").get(name, name.lstrip("-").replace("-", "_")))
    return text if all(option in options for option in re.findall(r"--[a-z-]+|\bPROMPT\b", text or "")) else None


def takes_only_options(error: click.ClickException) -> bool:
    """Whether the command takes its model as an option and nothing else as an argument."""
    context: click.Context | None = getattr(error, "ctx", None)
    if context is None:
        return False
    return "--model" in _options(context.command) and not any(isinstance(one, click.Argument) for one in context.command.params)


def _elsewhere(name: str, context: click.Context) -> str | None:
    """That other commands have this long option, those of the same group first; or why this one does not."""
    here = f"{context.command_path} "
    for path, why in _NOT_HERE.items():
        if here.startswith(f"{path} ") and name in why:
            return why[name]
    root = context.find_root()
    paths = [path for path, command in _commands(root.command, root.command_path) if name in _options(command)]
    group = here.strip().rpartition(" ")[0]
    paths.sort(key=lambda path: path.rpartition(" ")[0] != group)
    if not paths or not name.startswith("--"):
        return None
    shown = [*paths[:_SHOWN], *["others"] * (len(paths) > _SHOWN)]
    return f"an option of {' and '.join([', '.join(shown[:-1])] * (len(shown) > 1) + shown[-1:])}"


def _commands(group: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """All commands of a group and of the groups below, with what a user types for them."""
    for name, command in getattr(group, "commands", {}).items():
        yield f"{path} {name}", command
        yield from _commands(command, f"{path} {name}")


def _options(command: click.Command) -> list[str]:
    """The options of a command, and what its arguments are called: PROMPT."""
    names: list[str] = []
    for one in command.params:
        argument = isinstance(one, click.Argument)
        names += re.findall("[A-Z]+", one.human_readable_name) if argument else one.opts + one.secondary_opts
    return names

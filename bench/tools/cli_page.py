"""The generated block of docs/cli.md, from the commands and options of `minirt.cli`.

python bench/tools/cli_page.py     writes the page; needs no PyTorch, no Triton and no GPU

The block is the text between `<!-- commands -->` and `<!-- end of commands -->`. A test compares the page with the commands.
"""

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from minirt.cli.app import cli
from minirt.cli.help import TITLES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
_START, _END = "<!-- commands -->\n", "<!-- end of commands -->"


class Option(NamedTuple):
    """An option as `--help` shows it. `name`: its longest spelling. `group`: one of `TITLES`."""

    name: str
    group: str
    usage: str
    text: str


def commands(group: click.Group = cli, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """(words, command) of the commands that are no groups, in the order of `--help`."""
    for word in group.list_commands(click.Context(group)):
        command = group.commands[word]
        yield from commands(command, (*words, word)) if isinstance(command, click.Group) else [((*words, word), command)]


def options(command: click.Command) -> list[Option]:
    """The options of a command in the order of `--help`, without `--help` itself, which all commands have."""
    context = click.Context(command, info_name="")
    listed = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and isinstance(parameter, click.Option) and "--help" not in parameter.opts:
            group = getattr(parameter, "group", TITLES[-1])
            listed.append(Option(max(parameter.opts, key=len), group, *map(_one_line, record)))
    return sorted(listed, key=lambda option: TITLES.index(option.group))


def shared() -> list[Option]:
    """Options that at least two commands state alike. If commands state an option in several ways, the most frequent way."""
    counts = Counter(option for _, command in commands() for option in options(command))
    common: dict[str, Option] = {}
    for option, count in counts.most_common():
        if count > 1:
            common.setdefault(option.name, option)
    return [option for option in counts if common.get(option.name) == option]  # in the order of the commands


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _prose(text: str) -> str:
    """Help as Markdown: options as code, and characters that Markdown would read escaped. What is code already stays."""
    parts = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"(?<![\w-])--?[a-z](?:[\w-]*\w)?", r"`\g<0>`", re.sub(r"[*<|]", r"\\\g<0>", parts[i]))
    return "".join(parts)


def _table(*rows: tuple[str, ...]) -> str:
    """A Markdown table, whose first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


def _option(option: Option) -> tuple[str, str]:
    """The cells of an option."""
    return f"`{option.usage}`".replace("|", "\\|"), _prose(option.text)


def _anchor(title: str) -> str:
    return f"#{title.lower().replace(' ', '-')}-options"


def _section(words: tuple[str, ...], command: click.Command, common: list[Option]) -> Iterator[str]:
    """What a command does, its usage, and a table of its options; those of `common` have one row in each group."""
    context = click.Context(command, info_name=" ".join(("minirt", *words)))
    yield f"### {' '.join(words)}"
    yield f"`{context.command_path} {' '.join(command.collect_usage_pieces(context))}`"
    yield from (_prose(_one_line(paragraph)) for paragraph in inspect.cleandoc(command.help or "").split("\n\n"))
    rows: list[tuple[str, str, str]] = []
    for title in TITLES:
        listed = [option for option in options(command) if option.group == title]
        cells = [_option(option) for option in listed if option not in common]
        if names := [f"`{option.name}`" for option in listed if option in common]:
            cells.append((", ".join(names), f"[shared options]({_anchor(title)})"))
        rows += [(title if number == 0 else "", *pair) for number, pair in enumerate(cells)]
    yield _table(("group", "option", "meaning"), *rows)


def block() -> str:
    """The commands with their options, then the options that commands share."""
    common = shared()
    rows: list[tuple[str, str]] = []
    parts = ["## Commands", ""]
    for words, command in commands():
        rows.append((f"[`{' '.join(words)}`](#{'-'.join(words)})", _prose(command.get_short_help_str(200))))
        parts += _section(words, command, common)
    parts[1] = _table(("command", "does"), *rows)
    parts.append("## Shared options")
    for title in TITLES:
        if cells := [_option(option) for option in common if option.group == title]:
            parts += [f"### {title} options", _table(("option", "meaning"), *cells)]
    return "\n\n".join(parts) + "\n"


def render(text: str) -> str:
    """The text of the page with its block made again."""
    before, _, rest = text.partition(_START)
    return f"{before}{_START}{block()}{_END}{rest.partition(_END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""What vLLM, llama.cpp and transformers call an option, argument or class, and what it is here.

The command line, `Generator` and its methods, `SamplingParams`, the lines of `--prompts` and `import` take their hints from it.
The record of a setting has its other names (`Setting.elsewhere`); foreign_names.toml has the rest, and those of commands.
docs/coming-from.md explains more.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, TypeVar

from minirt.errors import InputError, MinirtError, quoted

_T = TypeVar("_T")

# (Whose name it is, its name on the command line, its name in Python), or why minirt has no such thing.
_Entry = tuple[str, str | None, str | None] | str


def names() -> dict[str, _Entry]:
    """The names of options, arguments and classes in the file, and those that the records of settings have."""
    import minirt
    from minirt.settings import Settings, settings_of

    _ = minirt.LoadOptions, minirt.SamplingParams  # so that their classes are known
    known: dict[str, _Entry] = dict(table("nothing"))
    for program in ("vLLM", "llama.cpp", "transformers"):
        known |= {name: (_whose(program), option or None, python or None) for name, (option, python) in table(program).items()}
    for kind in Settings.__subclasses__():
        for name, record in settings_of(kind).items():
            in_file = {"transformers": record.file} if record.file not in (None, name) else {}
            for program, spellings in (*in_file.items(), *record.elsewhere.items()):
                entry = _whose(program), record.option_name, kind._python and kind._python.format(name)
                known.update(dict.fromkeys(spellings.split(), entry))
    return known


@cache
def table(title: str) -> dict[str, Any]:
    """A table of the file, with an entry for each of its names."""
    import tomllib

    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: value for spellings, value in tables[title].items() for name in spellings.split(", ")}


def _whose(program: str) -> str:
    return f"{program}'{'s' * (program[-1] != 's')} name"


def python_hint(name: object) -> str | None:
    """What to write in Python for another library's name; None: no library's name that is known here."""
    return _hint(names().get(str(name)), 2)


def command_line_hint(name: str) -> str | None:
    """What to write on the command line for another program's option, with underscores; None: see `python_hint`."""
    return _hint(names().get(name), 1)


def similar(name: str, known: Iterable[str], most: int = 2) -> list[str]:
    """The `known` names that begin like a name, or else are spelled nearly like it. Dashes in front do not count."""
    spellings = {spelling.lstrip("-").lower(): spelling for spelling in known}
    bare = name.lstrip("-").lower()
    begun = [word for word in spellings if min(len(word), len(bare)) >= 3 and (word.startswith(bare) or bare.startswith(word))]
    return [spellings[word] for word in begun[:most] or get_close_matches(bare, spellings, n=most, cutoff=0.7)]


def check_names(
    given: Iterable[str], known: Sequence[str], place: str, error: type[MinirtError] = InputError,
    elsewhere: Mapping[str, str] | None = None, unnamed: Sequence[object] = (),
) -> None:
    """Refuse argument names that are not `known`, with what to write instead. `elsewhere`: what to write for names of others.
    `unnamed`: arguments without a name, all of which are refused."""
    if unnamed:
        what, expected = "an argument without its name", f"{place}({known[0]}=…), or another name"
        raise error(what, where=place, expected=expected, found=quoted(unnamed[0], 80))
    for name in given:
        if name not in known:
            hint = (elsewhere or {}).get(name) or python_hint(name)
            one_of = None if hint else f"one of {', '.join(known)}"
            if not hint and (near := similar(name, known)):
                hint = f"did you mean {' or '.join(near)}?"
            raise error("no such argument", where=place, expected=one_of, found=name, hint=hint)


def checks_names(elsewhere: Mapping[str, str], options: Sequence[str] = ()) -> Callable[[type[_T]], type[_T]]:
    """Decorator of classes: an argument name that `__init__` or a public method lacks is an `InputError` of `check_names`,
    not a TypeError.

    `options`: the names that `__init__` takes as `**options`.
    """

    def decorate(kind: type[_T]) -> type[_T]:
        for name, method in list(vars(kind).items()):
            if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
                known = [*inspect.signature(method).parameters][1:]  # without self
                known = [*known[:-1], *options] if known[-1:] == ["options"] else known
                place = method.__qualname__.removesuffix(".__init__")
                setattr(kind, name, _checked(method, partial(check_names, known=known, place=place, elsewhere=elsewhere)))
        return kind

    return decorate


def _checked(method: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    @wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        check(named)
        return method(*arguments, **named)

    @wraps(method)
    async def call_async(*arguments: Any, **named: Any) -> Any:
        check(named)
        return await method(*arguments, **named)

    return call_async if inspect.iscoroutinefunction(method) else call


def _hint(entry: _Entry | None, side: int) -> str | None:
    if entry is None or isinstance(entry, str):
        return entry
    return f"{entry[0]}; here {entry[side]}" if entry[side] else None

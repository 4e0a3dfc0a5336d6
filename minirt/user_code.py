"""`import_file`: runs a Python file of the user, for the layers and implementations that it registers; `named`: what is in it."""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from minirt.errors import InputError, inside

imported: list[str] = []  # the files that have run, in order: other ranks run them, too


def import_file(path: str) -> None:
    """Import a Python file under its name without the suffix, once. Modules beside it can be imported, after all others.

    Raises:
        InputError: it is no Python file, another module has its name, or running it fails.
    """
    file, place = Path(path).absolute(), f"--import {path}"
    spec = spec_from_file_location(file.stem, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise InputError("not a Python file", where=place, expected="a file such as mine.py")
    if (loaded := sys.modules.get(spec.name)) is not None:
        if getattr(loaded, "__file__", None) == spec.origin:
            return
        raise InputError(f"another module is named {spec.name}", where=place, hint="rename the file")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(file.parent))
    try:
        with inside(place):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[spec.name]
        if not isinstance(error, Exception) or str(getattr(error, "where", "")).startswith(place):
            raise
        what = f"running it fails: {type(error).__name__}: {error}"
        raise InputError(what, where=place, hint="--debug shows the traceback") from error
    imported.append(str(file))


def named(value: Any, where: str) -> Any:
    """What "module:name" stands for, so that another process can find it, too; the value itself if it is no text.

    Raises:
        InputError: there is no such module, or no such name in it.
    """
    if not isinstance(value, str):
        return value
    module, _, name = value.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        expected, hint = "module:name", "--import FILE makes a file a module of its name"
        raise InputError(f"cannot be imported: {error}", where=where, expected=expected, found=value, hint=hint) from error

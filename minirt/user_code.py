"""`import_file`: runs a Python file of the user, for the layers and implementations that it registers."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from minirt.errors import InputError, inside


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

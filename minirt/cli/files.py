"""The files that a command reads and writes: prompts, texts, requests and results. "-" is stdin."""

import os
import stat
import sys
from pathlib import Path
from typing import BinaryIO

import click

from minirt.errors import InputError

MAX_BYTES = 1 << 30  # of one input file
_BLOCK = 1 << 20


def shown_name(name: str) -> str:
    """A file's name in messages."""
    return "stdin" if name == "-" else name


def read_file(name: str, option: str | None = None) -> bytes:
    """The bytes of a regular file or a pipe (such as `<(command)`) of at most 1 GiB; "-" is stdin.

    `option`: the option that names the file, for the message if there is no such file: the user may have given a text.

    Raises:
        InputError: it cannot be read, is a folder or a device, or is larger.
    """
    shown = shown_name(name)
    try:
        if name == "-":
            data = _read(sys.stdin.buffer)
        else:
            mode = os.stat(name).st_mode  # before opening, because opening a device can have side effects
            if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
                kind = "a folder" if stat.S_ISDIR(mode) else "a device or a socket"
                raise InputError("cannot be read as text", where=shown, expected="a file or a pipe", found=kind)
            with open(name, "rb") as file:
                data = _read(file)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        if isinstance(error, InputError):
            raise
        hint = f"{option} takes the name of a file" if option else None
        raise InputError(f"cannot be read: {getattr(error, 'strerror', None) or error}", where=shown, hint=hint) from error
    if len(data) > MAX_BYTES:
        raise InputError("is too large", where=shown, expected="at most 1GiB")
    return data


def _read(file: BinaryIO) -> bytes:
    """The whole content, or a little more than MAX_BYTES. Reads in blocks, because `read(n)` allocates n bytes at once."""
    data = bytearray()
    while len(data) <= MAX_BYTES:
        block = file.read(_BLOCK)
        data += block
        if len(block) < _BLOCK:  # the end; on a terminal, another read would wait for a second Ctrl-D
            break
    return bytes(data)


def read_text(name: str, option: str | None = None) -> str:
    """The UTF-8 text of a file, unchanged; "-" is stdin. `option`: see `read_file`."""
    data = read_file(name, option)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise InputError("not valid UTF-8", where=shown_name(name), found=byte) from error


def check_target(target: str | None, flag: str) -> str | None:
    """`target`. Fails before any work if the folder of an output file does not exist."""
    if target is not None and not Path(target).absolute().parent.is_dir():
        raise click.BadParameter(f"the folder of {target!r} does not exist", param_hint=flag)
    return target


def check_picture(target: str | None) -> None:
    """Fail before any work if `--picture` names no picture, or matplotlib is missing."""
    if target is None:
        return
    from minirt.bench.picture import SUFFIXES, require_matplotlib

    if Path(target).suffix not in SUFFIXES:
        raise click.BadParameter(f"{target!r} ends with none of {', '.join(SUFFIXES)}", param_hint="--picture")
    check_target(target, "--picture")
    require_matplotlib()

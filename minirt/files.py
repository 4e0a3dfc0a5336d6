"""Reads the small files of a model folder: regular files only, each with a bound on its size. Writes files of the cache folder.

Every failure to read raises the error class that the caller passes, with the file as `where`. Does not import torch.
"""

import json
import os
import secrets
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from minirt.errors import MinirtError, quoted

_HINT = "get the file again"
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
# O_NONBLOCK: opening a named pipe must not wait for a writer. Some systems lack some of these flags.
_FLAGS = os.O_RDONLY
for _name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"):
    _FLAGS |= getattr(os, _name, 0)


def present(path: Path) -> bool:
    """Whether something has this name, even a broken link or a file that cannot be read. Use it for optional files.

    False means "the model has no such file". Everything that is not plainly absent counts as present; reading it then raises an
    error that says what is wrong.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def read_bytes(path: Path, *, limit: int, error: type[MinirtError]) -> bytes:
    """The content of a regular file of at most `limit` bytes. Never waits, and never reads more than the limit.

    Args:
        error: the class to raise.
    Raises:
        error: there is no such file, it is not a regular file, it is too large, or it cannot be read.
    """
    try:
        file = os.open(path, _FLAGS)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
                raise error("is not a regular file", where=path, found=kind, hint=_HINT)
            content, size = bytearray(), status.st_size
            # Some regular files, such as those in /proc, state a size of 0, so the bytes are counted.
            while size <= limit and (block := os.read(file, 1 << 20)):
                content += block
                size = max(size, len(content))
        finally:
            os.close(file)
    except MinirtError:
        raise
    except (OSError, ValueError) as cause:  # ValueError: a null character in the name
        broken = isinstance(cause, FileNotFoundError) and os.path.islink(path)
        reason = "the link leads nowhere" if broken else getattr(cause, "strerror", None) or cause
        raise error(f"cannot be read: {reason}", where=path, hint=_HINT) from cause
    if size > limit:
        raise error("is too large", where=path, expected=f"at most {limit:,} bytes", found=f"{size:,}", hint=_HINT)
    return bytes(content)


def read_text(path: Path, *, limit: int, error: type[MinirtError]) -> str:
    """The UTF-8 text of a file, as `read_bytes` reads it. Line ends stay as they are."""
    content = read_bytes(path, limit=limit, error=error)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error(f"is not UTF-8 text: {cause.reason} at byte {cause.start}", where=path, hint=_HINT) from cause


def read_json(path: Path, *, limit: int, error: type[MinirtError]) -> dict[str, Any]:
    """The JSON object in a file, as `read_bytes` reads it. A key that an object repeats is an error at any depth."""
    return parse_json(read_text(path, limit=limit, error=error), path, error=error)


def parse_json(text: str, path: Path | str, *, error: type[MinirtError], hint: str = _HINT) -> dict[str, Any]:
    """The JSON object in `text`, the content of the file `path`. A key that an object repeats is an error at any depth."""
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as cause:
        what = "nested too deeply" if isinstance(cause, RecursionError) else cause
        raise error(f"is not readable JSON: {what}", where=path, hint=hint) from cause
    if not isinstance(value, dict):
        raise error("is not a JSON object", where=path, found=type(value).__name__, hint=hint)
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` of `json.loads` that refuses a repeated key with a ValueError."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"a key is repeated, and its values may differ: {quoted(twice, 80)}")
    return value


def cache_folder() -> Path:
    """Where minirt keeps what took time to find: $MINIRT_CACHE, or minirt in the user's cache folder."""
    if "MINIRT_CACHE" in os.environ:
        return Path(os.environ["MINIRT_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minirt"


def replace_file(file: Path, content: bytes) -> None:
    """Write a file, atomically. Nothing is written through a link: others may be able to write to the folder. Raises OSError."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as target:  # a new file, or an error
            target.write(content)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)

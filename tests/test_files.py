"""`minirt.files`: what is not a regular file of a bounded size is refused at once, and JSON objects name each key once."""

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from minirt.errors import CheckpointError, ConfigError, InputError, MinirtError, TokenizerError
from minirt.files import present, read_bytes, read_json, read_text

LIMIT = 1000


def refused(path: Path, match: str, read=read_json, limit: int = LIMIT) -> MinirtError:
    with pytest.raises(TokenizerError, match=match) as caught:
        read(path, limit=limit, error=TokenizerError)
    assert caught.value.where == path
    return caught.value


@pytest.mark.parametrize("size", [0, 1, LIMIT - 1, LIMIT])
def test_a_file_within_its_bound_is_read_whole(size: int, tmp_path: Path) -> None:
    content = bytes(i % 251 for i in range(size))
    (tmp_path / "f").write_bytes(content)
    assert read_bytes(tmp_path / "f", limit=LIMIT, error=ConfigError) == content


def test_a_file_of_several_blocks_and_its_line_ends(tmp_path: Path) -> None:
    text = "é\r\n\r" * (1 << 19)
    (tmp_path / "f").write_bytes(text.encode())
    assert read_text(tmp_path / "f", limit=1 << 30, error=ConfigError) == text


def test_one_byte_too_many(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * (LIMIT + 1))
    assert refused(tmp_path / "f", "is too large").found == "1,001"


def test_a_sparse_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "f", "wb") as file:
        file.truncate(3 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(tmp_path / "f", "is too large")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


def test_a_file_that_states_no_size_is_bounded_too() -> None:
    """Files in /proc state a size of 0."""
    path = Path("/proc/self/smaps")
    if not path.exists():
        pytest.skip("no /proc")
    assert path.stat().st_size == 0
    refused(path, "is too large", limit=100)
    assert len(read_bytes(Path("/proc/self/status"), limit=100_000, error=ConfigError)) > 100


def special_files(folder: Path) -> dict[str, Path]:
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "link to fifo").symlink_to("fifo")
    (folder / "link to device").symlink_to("/dev/zero")
    names = ["fifo", "folder", "link to fifo", "link to device"]
    return {name: folder / name for name in names} | {name: Path("/dev", name) for name in ("zero", "null", "tty")}


def test_special_files_neither_block_nor_are_read(tmp_path: Path) -> None:
    """In a process of its own: the fault is a read that never ends."""
    paths = special_files(tmp_path)
    script = (
        "import sys; from pathlib import Path; from minirt.errors import ConfigError; from minirt.files import read_text\n"
        "for path in map(Path, sys.argv[1:]):\n" "    try: read_text(path, limit=1000, error=ConfigError)\n"
        "    except ConfigError as error: print(error.what)\n"
    )  # fmt: skip
    command = [sys.executable, "-P", "-c", script, *map(str, paths.values())]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    assert len(out) == len(paths)
    for name, what in zip(paths, out, strict=True):
        assert what == "is not a regular file" or (name == "tty" and what.startswith("cannot be read")), name


def test_a_socket_and_an_unreadable_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        refused(Path("s"), "cannot be read")
    refused(Path("x" * 300), "cannot be read: File name too long")
    refused(Path("a\0b"), "cannot be read")
    refused(Path("no such file"), "cannot be read: No such file")


def test_only_what_is_plainly_absent_is_not_present(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    assert all(present(tmp_path / name) for name in ("dangling", "loop", "file", "fifo", ".", "x" * 300, "a\0b"))
    assert not any(present(tmp_path / name) for name in ("absent", "absent/deeper", "file/deeper"))
    refused(tmp_path / "dangling", "the link leads nowhere")
    refused(tmp_path / "loop", "cannot be read: .*symbolic links")


@pytest.mark.parametrize("error", [ConfigError, CheckpointError, TokenizerError, InputError])
def test_the_caller_chooses_the_class(error: type[MinirtError], tmp_path: Path) -> None:
    for content in (b"\xff", b"{", b"[]", b'{"a": 1, "a": 1}', b" " * (LIMIT + 1)):
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(error) as caught:
            read_json(tmp_path / "f", limit=LIMIT, error=error)
        assert type(caught.value) is error
        assert caught.value.where == tmp_path / "f"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        *((text, "is not readable JSON") for text in ("", "{", "{'a': 1}", '{"a": 1,}', '{"a": ' + "9" * 5000 + "}", "\ufeff{}")),
        *((text, "is not a JSON object") for text in ("[]", '"text"', "null", "1", '[{"a": 1}]')),
        *((text, "nested too deeply") for text in ('{"a":' * 100_000, "[" * 100_000)),
        ('{"a": 1, "b": 2, "a": 1}', "key is repeated.*'a'"),
        ('{"b": [{"c": {"x\\ny": 1, "\\u0078\\ny": 2}}]}', r"key is repeated.*'x\\ny'"),
    ],
    ids=range(15),
)
def test_what_is_not_one_json_object(content: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content.encode())
    refused(tmp_path / "f", match, limit=1 << 20)


def test_a_json_object_is_read_as_json_reads_it(tmp_path: Path) -> None:
    value = {"a": {"a": [1, {"a": None}], "": 1.5}, "é\ud83d": "x", "A": True}
    (tmp_path / "f").write_text(json.dumps(value))
    assert read_json(tmp_path / "f", limit=LIMIT, error=ConfigError) == value


def test_a_repeated_key_among_many_is_found_in_linear_time(tmp_path: Path) -> None:
    keys = [*range(300_000), 299_999]
    (tmp_path / "f").write_text("{" + ",".join(f'"{key}":0' for key in keys) + "}")
    refused(tmp_path / "f", "'299999'", limit=1 << 24)

"""What rank 0 tells the others before each step: `pack` and `unpack` of plain values, and `Ring`, the memory that all share."""

import marshal
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from minirt.step import plan, rules

_BYTES = 16 << 20  # of the ring; longer messages are read while they are written
_PAGE = mmap.PAGESIZE
_PLACES = 64  # 8-byte counters before it: bytes written, then those that each rank has read
_COUNTER, _LENGTH = struct.Struct("<Q"), struct.Struct("<I")
_KINDS: list[type] = [  # of which a plan consists, beside Python's own
    plan.StepPlan, plan.PlannedSequences, plan.Edit, plan.Copies, plan.Snapshot, plan.SlotRules, plan.Scored, plan.Sampling,
    plan.HookPlan, rules.Rules,
]  # fmt: skip
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_ARRAY = -1


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind is np.ndarray:
        return _ARRAY, value.dtype.str, value.shape, value.tobytes()
    if kind is tuple:
        return None, *map(_plain, value)
    if isinstance(value, Mapping):
        return {key: _plain(member) for key, member in value.items()}
    if (number := _NUMBERS.get(kind)) is None:
        return value.item() if isinstance(value, np.generic) else value
    if kind is plan.PlannedSequences:  # the other arrays are its rows
        return number, _plain(value.values), value.total_tokens, value.total_logits, value.total_draws
    return number, *map(_plain, value if isinstance(value, tuple) else [getattr(value, field.name) for field in fields(value)])


def _value(plain: Any) -> Any:
    if type(plain) is dict:
        return {key: _value(member) for key, member in plain.items()}
    if type(plain) is not tuple:
        return plain
    number, *members = plain
    if number is None:
        return tuple(map(_value, members))
    if number == _ARRAY:
        dtype, shape, data = members
        return np.frombuffer(data, dtype).reshape(shape)
    if _KINDS[number] is plan.PlannedSequences:
        values, *totals = map(_value, members)
        return plan.PlannedSequences(values, *values, *totals)  # type: ignore[call-arg]  # mypy does not count the rows
    return _KINDS[number](*map(_value, members))


def pack(value: Any) -> bytes:
    """A plan, or a tuple of plans and plain values, as bytes."""
    return marshal.dumps(_plain(value))


def unpack(data: bytes) -> Any:
    return _value(marshal.loads(data))


class Ring:
    """Bytes from one process to several others through memory that they share.

    The writer tells readers over another channel that there is something, which also orders the writes.

    Attributes:
        page: of the same memory, for what is no message; 0 at first.

    Args:
        descriptor: of the memory, in a reader; None: new memory.
    """

    def __init__(self, readers: int, descriptor: int | None = None) -> None:
        self._readers = readers
        if descriptor is None:
            if hasattr(os, "memfd_create"):
                descriptor = os.memfd_create("minirt")
            else:
                descriptor, path = tempfile.mkstemp()
                os.unlink(path)
            os.ftruncate(descriptor, _PAGE + 8 * _PLACES + _BYTES)
        self.descriptor = descriptor
        self.page = mmap.mmap(descriptor, _PAGE)
        self._memory = memoryview(mmap.mmap(descriptor, _PAGE + 8 * _PLACES + _BYTES))[_PAGE:]

    def _count(self, place: int) -> int:
        return _COUNTER.unpack_from(self._memory, 8 * place)[0]

    def _copy(self, position: int, data: memoryview | int) -> bytes:
        """Write bytes at a position of the stream, or read so many."""
        count, read = data if isinstance(data, int) else len(data), b""
        while count:
            first = position % _BYTES
            size = min(count, _BYTES - first)
            at = 8 * _PLACES + first
            if isinstance(data, int):
                read += self._memory[at : at + size]
            else:
                self._memory[at : at + size] = data[:size]
                data = data[size:]
            count, position = count - size, position + size
        return read

    def write(self, data: bytes, announce: Callable[[], None]) -> None:
        """Append a message. `announce`: tells the readers, and raises an exception if one of them has ended."""
        view, written = memoryview(_LENGTH.pack(len(data)) + data), self._count(0)
        while view:
            room = _BYTES - (written - min(self._count(1 + reader) for reader in range(self._readers)))
            if not room:
                announce()
                time.sleep(0.0001)
                continue
            self._copy(written, view[:room])
            written += min(room, len(view))
            view = view[room:]
            _COUNTER.pack_into(self._memory, 0, written)
        announce()

    def read(self, reader: int, wait: Callable[[], None]) -> bytes:
        """The next message. `wait`: returns after an announcement."""
        length = _LENGTH.unpack(self._take(reader, _LENGTH.size, wait))[0]
        return self._take(reader, length, wait)

    def _take(self, reader: int, count: int, wait: Callable[[], None]) -> bytes:
        place, data = 1 + reader, b""
        position = self._count(place)
        while len(data) < count:
            if not (there := min(self._count(0) - position, count - len(data))):
                wait()
                continue
            data += self._copy(position, there)
            position += there
            _COUNTER.pack_into(self._memory, 8 * place, position)
        return data

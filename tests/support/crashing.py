"""A function for `LimitedProcesses` that ends its process on request. It stands here because that process imports it."""

import ctypes
import os


def target(first):
    """The function of the process; it runs there."""

    def answer(value, size):
        if value == "crash":
            ctypes.string_at(0)
        if value == "memory":
            bytearray(2 << 40)
        return [first, value, size, os.getpid()]

    return answer

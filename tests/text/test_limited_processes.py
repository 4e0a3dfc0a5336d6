"""A function in a separate process: what ends that process ends one call, and the next one has a new process.

ProcessLimits of time and memory: tests/text/test_rendering.py.
"""

import os

import pytest

from minirt.text.limited_processes import LimitedProcesses, ProcessLimits, Stopped


def test_a_crash_ends_one_call():
    """Catches a crash that reaches this process, an answer that is taken for another call's, and a process that is used again."""
    processes = LimitedProcesses("support.crashing:target", "é", ProcessLimits(10, 60, 8 << 30))
    first, value, size, process = processes.ask({"a": [1]})
    assert (first, value, size) == ("é", {"a": [1]}, len(b'{"a": [1]}\n'))
    assert process != os.getpid()
    assert processes.ask(None)[3] == process
    with pytest.raises(Stopped, match="ended with code -11"):
        processes.ask("crash")
    assert processes.ask(2)[1] == 2
    with pytest.raises(Stopped, match="more than 8GiB of memory"):
        processes.ask("memory")
    assert processes.ask(3)[1] == 3

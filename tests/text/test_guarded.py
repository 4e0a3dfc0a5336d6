"""A function in a separate process: what ends that process ends one call, and the next one has a new process.

Limits of time and memory: tests/text/test_rendering.py.
"""

import os

import pytest

from minirt.text.guarded import Guarded, Limits, Stopped


def test_a_crash_ends_one_call():
    """Catches a crash that reaches this process, an answer that is taken for another call's, and a process that is used again."""
    guarded = Guarded("support.crashing:target", "é", Limits(10, 60, 8 << 30))
    first, value, size, process = guarded.ask({"a": [1]})
    assert (first, value, size) == ("é", {"a": [1]}, len(b'{"a": [1]}\n'))
    assert process != os.getpid()
    assert guarded.ask(None)[3] == process
    with pytest.raises(Stopped, match="ended with code -11"):
        guarded.ask("crash")
    assert guarded.ask(2)[1] == 2
    with pytest.raises(Stopped, match="more than 8GiB of memory"):
        guarded.ask("memory")
    assert guarded.ask(3)[1] == 3

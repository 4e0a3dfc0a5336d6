"""A decode step enters few files, and docs/design/step.md shows which. Catches a detour that a change adds, and an old page."""

import pytest

from minirt.bench.tools import step_trace


@pytest.mark.slow
def test_a_step_takes_few_calls_and_the_page_shows_them():
    trace = step_trace.trace()
    assert len(trace.calls) <= 60
    assert trace.files <= 12
    assert trace.changes <= 30
    assert trace.table() in step_trace.PAGE.read_text(encoding="utf-8"), "run bench/tools/step_trace.py"


def test_counts():
    trace = step_trace.Trace([("a", "f"), ("a", "g"), ("b", "h"), ("a", "f")])
    assert (trace.files, trace.changes) == (2, 2)
    assert trace.table().splitlines()[-3:] == ["| `a` | `f` · `g` |", "| `b` | `h` |", "| `a` | `f` |"]

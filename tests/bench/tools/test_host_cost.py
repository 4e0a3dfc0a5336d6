"""The cost of a step on the host, counted in calls of functions.

Catches work in a step for requests that wait, and for callers that wait for the end.
"""

import gc

import pytest

from minirt.bench.tools import host_cost

STEPS, SEQUENCES = 24, 4


@pytest.fixture(scope="module")
def generator():
    with host_cost.load(SEQUENCES, STEPS) as made:
        yield made


def calls(generator, kind, waiting):
    """No finalizer of an older test may run in between."""
    gc.collect()
    gc.disable()
    try:
        return host_cost.Cost(generator, SEQUENCES, waiting, STEPS).calls(kind)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [host_cost.generate, host_cost.streams])
def test_a_step_costs_the_same_whatever_waits(generator, kind):
    """Also the prefix cache, the callers' queues and the queue of those that wait: 5 and 5,000 requests.

    How many calls a stream takes varies a little with its threads; one call for each waiting request would be thousands.
    """
    few, many = (calls(generator, kind, waiting) for waiting in (5, 5000))
    assert 50 < few < 1000
    assert abs(many - few) < 50, "a step looks at requests that wait"
    assert not generator._engine.call(lambda engine: engine.has_work)


def test_a_call_that_waits_for_the_end_costs_less_than_streams(generator):
    """`generate` needs no output a step. The counts are of steps without events of callers."""
    assert calls(generator, host_cost.generate, 0) + 3 * SEQUENCES < calls(generator, host_cost.streams, 0)

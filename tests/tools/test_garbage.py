"""What tests do with Python's garbage collector (`support/garbage.py`). Catches models that stay in memory when closed."""

import gc
import weakref

from minirt.engine.gc_freeze import freeze_gc


class Node:
    other: "Node"


def test_a_cycle_goes_with_its_owner_and_the_tests_stay_frozen():
    count = gc.get_freeze_count()
    assert count > 100_000
    owner, one, two = Node(), Node(), Node()
    one.other, two.other = two, one
    gone = weakref.ref(one)
    release = freeze_gc(owner)
    del one, two
    release()
    assert gone() is None
    assert gc.get_freeze_count() == count

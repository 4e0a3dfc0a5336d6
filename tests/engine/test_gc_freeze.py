"""Objects are frozen while a model is loaded, and released after it. Otherwise a cycle of layers would keep GPU memory."""

import gc
import weakref

import pytest

from minirt.engine import gc_freeze
from minirt.engine.gc_freeze import freeze_gc


class Node:
    """An object that can be part of a reference cycle."""

    other: "Node"


def _cycle() -> weakref.ref[Node]:
    one, two = Node(), Node()
    one.other, two.other = two, one
    return weakref.ref(one)


def frozen() -> int:
    """Number of frozen objects, without the immortal objects that Python 3.12 itself freezes at every collection."""
    return gc.get_freeze_count() - _always_frozen


_always_frozen = 0


@pytest.fixture(autouse=True)
def _nothing_else_held():
    global _always_frozen
    assert gc_freeze._held == 0, "an earlier test left objects frozen"
    gc.unfreeze()
    gc.collect()
    _always_frozen = gc.get_freeze_count()
    yield
    assert frozen() == 0


def test_what_there_is_is_frozen_until_the_owner_lets_go():
    owner = Node()
    release = freeze_gc(owner)
    assert frozen() > 1000
    release()
    assert frozen() == 0
    release()  # a second call does nothing


def test_an_owner_that_is_forgotten_lets_go():
    owner = Node()
    freeze_gc(owner)
    assert frozen() > 1000
    del owner
    assert frozen() == 0


def test_a_frozen_cycle_goes_when_its_owner_does_though_another_holds():
    first, second = Node(), Node()
    first.part = Node()
    first.part.other = first.part
    part = weakref.ref(first.part)
    releases = [freeze_gc(first), freeze_gc(second)]
    first.part = None
    gc.collect()
    assert part() is not None, "the cycle was not frozen"
    releases[0]()
    assert part() is None
    assert frozen() > 1000, "the other owner still holds"
    releases[1]()


def test_what_came_later_is_collected():
    owner = Node()
    release = freeze_gc(owner)
    later = _cycle()
    gc.collect()
    assert later() is None
    release()


def test_an_owner_in_a_cycle_is_collected_while_another_takes_hold():
    owner = Node()
    owner.other = owner
    freeze_gc(owner)
    gc.unfreeze()  # so that the collection in the next freeze_gc finds the owner
    del owner
    other = Node()
    release = freeze_gc(other)
    assert frozen() > 1000
    release()

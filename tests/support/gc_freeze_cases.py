"""Tests of `minirt.gc_freeze`, which test_gc_freeze.py runs in a process of their own.

Objects are frozen while a model is loaded, and released after it. Otherwise a cycle of layers would keep GPU memory.
"""

import gc
import weakref

import pytest

from minirt import gc_freeze
from minirt.gc_freeze import freeze_gc


class Node:
    """An object that can be part of a reference cycle."""

    other: "Node"


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


@pytest.fixture
def threshold():
    before = gc.get_threshold()
    yield lambda *values: gc.set_threshold(*values, *before[len(values) :])
    gc.set_threshold(*before)


def test_collections_are_rarer_until_the_last_owner_lets_go(threshold):
    threshold(701, 11)
    first, second = Node(), Node()
    releases = [freeze_gc(first), freeze_gc(second)]
    assert gc.get_threshold()[:2] == (gc_freeze._OBJECTS, 11)
    releases[0]()
    assert gc.get_threshold()[0] == gc_freeze._OBJECTS
    releases[1]()
    assert gc.get_threshold()[:2] == (701, 11)


@pytest.mark.parametrize("own", [0, 1_000_000])
def test_what_the_program_has_set_is_kept(own, threshold):
    threshold(own)
    owner = Node()
    release = freeze_gc(owner)
    assert gc.get_threshold()[0] == own
    release()
    assert gc.get_threshold()[0] == own


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

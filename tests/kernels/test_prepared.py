"""Prepared launches. Catches: a launch of another compiled kernel, or with other arguments, than Triton's own; a kernel that is
not prepared; a launch that goes through Triton, or encodes its TMA descriptors, each time; one that Triton must do itself (a
hook, scratch memory) and does not, or that runs while kernels are only compiled; an unexpected Triton that is not noticed."""

import pytest


@pytest.fixture(scope="module")
def seen(probe):
    return probe("prepared_probe.py")


@pytest.mark.exhaustive
def test_every_kernel_is_launched_as_by_triton(probe):
    """With the arguments of its calls, and with each of them changed."""
    every = probe("prepared_probe.py", "every kernel")
    assert every["differences"] == []
    assert every["seen"] == every["all"]


def test_every_kernel_is_prepared(seen):
    """Catches a kernel whose decorator was forgotten."""
    assert len(seen["prepared"]) > 30
    assert seen["prepared"] == seen["all"]


def test_triton_launches_once_for_a_specialization_and_a_device(seen):
    # Pairs: launches that reached the C function, and those of them that went through Triton.
    assert seen["again"] == [[1, 1], [1, 0], [1, 0]]
    assert seen["keywords"] == [[1, 0]]
    assert seen["device"] == [[1, 1], [1, 0], [1, 0]]


def test_what_takes_part_in_a_launch(seen):
    """A record as the last argument is no tuple of arguments; a known TMA descriptor is not encoded again; a hook gets its
    launches; grids have one to three sizes."""
    assert seen["constants last"] == seen["hook"] == [[1, 1], [1, 0]]
    assert seen["encoded"][2:] == [0, 0, 0]
    assert seen["grids"] == [[5, 1, 1, 700], [5, 6, 1, 700], [5, 6, 7, 700], [8, 9, 1, 700]]


def test_what_is_not_covered_goes_through_triton_or_does_not_run(seen):
    """Large numbers, subclasses and scratch memory; contexts in which launches only compile, or do nothing."""
    assert {tuple(count) for case in ("large", "subclass", "scratch") for count in seen[case]} == {(1, 1)}
    assert [(inside[0], after) for inside, after in (seen["ahead"], seen["skipped"])] == [(0, [1, 0])] * 2


def test_another_interface_of_triton_means_its_own_path_and_one_warning(seen):
    assert seen["other"] == [[1, 1]] * 5 + [[1, 0]]
    (said,) = seen["said"]
    assert "launched by Triton" in said

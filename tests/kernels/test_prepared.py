"""Prepared launches. Catches: a launch of another compiled kernel, or with other arguments, than Triton's own; a kernel that is
not prepared; a launch that goes through Triton, or encodes its TMA descriptors, each time; one that Triton must do itself (a
hook, scratch memory) and does not, or that runs while kernels are only compiled; an unexpected Triton that is not noticed."""

import pytest


@pytest.fixture(scope="module")
def seen(probe):
    return probe("prepared_probe.py")


def test_every_kernel_is_launched_as_by_triton(seen):
    assert seen["differences"] == []
    assert seen["seen"] == seen["all"]


def test_every_kernel_is_prepared(seen):
    assert len(seen["prepared"]) > 30
    assert seen["prepared"] == seen["all"]


def test_triton_launches_once_for_a_specialization_and_a_device(seen):
    # Pairs: launches that reached the C function, and those of them that went through Triton.
    assert seen["again"] == [[1, 1], [1, 0], [1, 0]]
    assert seen["keywords"] == [[1, 0]]
    assert seen["device"] == [[1, 1], [1, 0], [1, 0]]


def test_a_record_as_the_last_argument_is_no_tuple_of_arguments(seen):
    assert seen["constants last"] == [[1, 1], [1, 0]]


def test_a_known_tma_descriptor_is_not_encoded_again(seen):
    assert seen["encoded"][2:] == [0, 0, 0]


@pytest.mark.parametrize("case", ["large", "subclass", "scratch"])
def test_what_is_not_covered_goes_through_triton(seen, case):
    assert set(map(tuple, seen[case])) == {(1, 1)}


def test_a_launch_hook_gets_its_launches(seen):
    assert seen["hook"] == [[1, 1], [1, 0]]


@pytest.mark.parametrize("context", ["ahead", "skipped"])
def test_nothing_runs_where_launches_only_compile_or_do_nothing(seen, context):
    inside, after = seen[context]
    assert (inside[0], after) == (0, [1, 0])


def test_grids_of_one_to_three_sizes(seen):
    assert seen["grids"] == [[5, 1, 1, 700], [5, 6, 1, 700], [5, 6, 7, 700], [8, 9, 1, 700]]


def test_another_interface_of_triton_means_its_own_path_and_one_warning(seen):
    assert seen["other"] == [[1, 1]] * 5 + [[1, 0]]
    (said,) = seen["said"]
    assert "launched by Triton" in said

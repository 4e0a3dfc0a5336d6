"""Compiling ahead of the first launch. Catches: a kernel that runs anyway, is compiled once for each launch, or is loaded only by
its launch, on another device or not at all; an error that is lost, or is raised in spite of `ignore_errors`; launches of other
threads that do not run; launchers of one name that get each other's contents; patches of Triton that stay."""

import pytest
import torch
from triton.runtime import JITFunction

from minirt.kernels.compile.ahead_of_time import compile_ahead


@pytest.fixture(scope="module")
def seen(probe):
    return probe("ahead_of_time_probe.py")


def test_each_kernel_is_compiled_and_loaded_once_and_runs_when_launched_again(seen):
    first, then = seen["first"], seen["then"]
    assert first["compiled"] == ["small"] * 2
    assert first["loaded"] == [["small", "cuda:1"]] * 2
    assert first["launched"] == []
    assert first["progress"] == [[1, 2, False], [2, 2, False]]
    assert (then["compiled"], then["loaded"]) == (first["compiled"], first["loaded"])
    assert then["launched"] == ["small"] * 2


def test_what_cannot_be_loaded_raises_or_is_left_to_its_launch(seen):
    assert (seen["raised"], seen["left"]) == ("OutOfResources", "OutOfResources")


def test_after_an_interruption_kernels_can_be_launched(seen):
    assert (seen["ended"], seen["after"]) == ("KeyboardInterrupt", 2)


def test_other_threads_launch_as_ever(seen):
    assert seen["both"] == [1, 1, 1, 1]


def test_launchers_of_one_name_keep_their_own_contents(seen):
    assert seen["modules"] == ["a", "b"]


def test_triton_is_as_it_was(seen):
    assert seen["restored"]


def test_without_a_gpu_nothing_changes():
    run = JITFunction.run
    with compile_ahead(torch.device("cpu"), lambda *_: pytest.fail("nothing is compiled")):
        assert JITFunction.run is run

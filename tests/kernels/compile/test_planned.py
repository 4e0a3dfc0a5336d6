"""Kernels that a start will compile, listed on a machine without a GPU, and a folder of them that travels."""

import pytest

# What a start compiles on an H100. A number falls freely, and rises only with a reason on its line.
MOST = {"Qwen2.5-7B": 98, "Qwen2.5-7B fp8": 103, "Qwen2.5-0.5B": 96}  # two more: now with those of the draw from row maxima


@pytest.fixture(scope="module")
def seen(probe):
    return probe("planned_probe.py")


def test_a_start_compiles_no_more_kernels_than_before(seen):
    """A constant in place of an argument multiplies them, and each takes a second of a processor."""
    assert seen["counts"] == MOST


def test_a_plan_does_not_take_tensors_for_the_same(seen):
    """All tensors on the meta device have the address 0, so that products seemed to add to their residual in place."""
    assert seen["in place"] == 0


def test_the_sampler_has_one_form_for_all_filters(seen):
    counts = seen["sampler"]
    assert {name: counts[name] for name in ("_check_kernel", "_race_kernel", "_sum_kernel", "_collect_kernel")} == {
        "_check_kernel": 1, "_race_kernel": 3, "_sum_kernel": 4, "_collect_kernel": 2,
    }  # fmt: skip


def test_a_plan_is_for_its_gpu_and_repeatable(seen):
    """Catches what one plan leaves behind: kernels that the next one takes for known."""
    assert all(seen["again"])
    assert seen["targets"] == ["GPUTarget(backend='cuda', arch=90, warp_size=32)"]
    assert seen["other"] == [89]


def test_a_folder_travels(seen):
    """From a folder that cannot be written to. Triton's lists of files have absolute paths: they must lead to the copies."""
    assert seen["progress"] == [[1, 2], [2, 2]]
    assert seen["before"] == [False, False]
    assert seen["after"] == [True, True]
    assert seen["places"] == ["True"]
    assert seen["names"]
    assert seen["kept"]


def test_a_folder_for_another_gpu_is_refused_by_name(seen):
    assert "compute_capability 8.6, sms 72; found compute_capability 9.0, sms 132" in seen["refused"]
    assert "minirt compile" in seen["refused"]
    assert "missing" in seen["no folder"]


def test_a_start_with_adapters_compiles_their_kernels(seen):
    """Catches kernels of adapters that the first request with one would wait for."""
    assert seen["adapters"] == ["_adapters_kernel", "_few_rows_kernel", "_shrink_kernel", "_steps_kernel"]

"""Kernels compiled in other processes. Catches: requests that name another kernel than is looked for afterwards (it would be
compiled twice), a kernel that is lost with its process, processes that are missing without a word, or that are started for
kernels which are there already."""

import pytest


@pytest.fixture(scope="module")
def found(probe):
    return probe("processes_probe.py")


def test_what_a_process_has_compiled_is_only_loaded(found):
    assert found["elsewhere"] == {"made": [], "loaded": ["_rms_norm_kernel"] * 2, "said": []}


def test_kernels_of_a_script_are_compiled_where_they_are(found):
    assert found["own"] == {"made": ["own"], "loaded": ["_rms_norm_kernel", "own"], "said": []}


def test_without_its_process_a_kernel_is_compiled_all_the_same(found):
    """And a warning says so, once."""
    for case, word in (("ended", "(exit code -9)"), ("none", "/no/python")):
        assert found[case]["made"] == found[case]["loaded"] == ["_rms_norm_kernel"] * 2
        assert len(found[case]["said"]) == 1
        assert word in found[case]["said"][0]


def test_what_is_cached_needs_no_process(found):
    assert found["servers"] == 0
    assert found["cached"]["made"] == []

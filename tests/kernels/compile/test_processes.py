"""Kernels compiled in other processes. Catches: a request whose kernel is not the one looked up afterwards (it would be compiled
twice), a kernel that is lost with its process, missing processes without a warning, processes that are started for kernels in
the cache."""

import pytest


@pytest.fixture(scope="module")
def seen(probe):
    return probe("processes_probe.py")


def test_what_a_process_has_compiled_is_only_loaded(seen):
    elsewhere = dict(seen["elsewhere"])
    steps = elsewhere.pop("steps")
    assert elsewhere == {"made": [], "loaded": ["_rms_norm_kernel"] * 2, "said": []}
    assert steps[-2:] == [[1, 2, True], [2, 2, True]], "a kernel that is compiled counts as one that is not cached"


def test_a_digest_does_not_depend_on_the_order_of_kernels(seen):
    """With Triton 3.6, it would: 50 of the 182 kernels that a start compiled were compiled again for it."""
    assert seen["digests"] == []


def test_kernels_of_a_script_are_compiled_where_they_are(seen):
    script = {name: value for name, value in seen["own"].items() if name != "steps"}
    assert script == {"made": ["script_kernel"], "loaded": ["_rms_norm_kernel", "script_kernel"], "said": []}


def test_without_its_process_a_kernel_is_compiled_all_the_same(seen):
    """One warning says so."""
    for case, word in (("ended", "(exit code -9)"), ("none", "/no/python")):
        assert seen[case]["made"] == seen[case]["loaded"] == ["_rms_norm_kernel"] * 2
        assert len(seen[case]["said"]) == 1
        assert word in seen[case]["said"][0]


def test_what_is_cached_needs_no_process(seen):
    assert seen["servers"] == 0
    assert seen["cached"]["made"] == []
    assert not any(compiles for _, _, compiles in seen["cached"]["steps"]), "a user would be told that kernels are compiled"


def test_another_triton_compiles_in_this_process(seen):
    """Private parts of Triton that are missing, or take other arguments: one warning, and the kernels are there."""
    for case, word in (("missing", "ImportError"), ("changed", "TypeError")):
        assert len(seen[case]["said"]) == 1
        assert "in this process only" in seen[case]["said"][0]
        assert word in seen[case]["said"][0]
    assert seen["missing"]["made"] == seen["missing"]["loaded"] == ["_rms_norm_kernel"] * 2
    assert seen["changed"]["made"] == seen["changed"]["loaded"] == ["_rms_norm_kernel"]


def test_another_triton_compiles_at_the_launch(seen):
    """Without its asynchronous mode, launches run and compile as they come."""
    for case in ("no mode", "another mode"):
        assert len(seen[case]["said"]) == 1
        assert "one after the other" in seen[case]["said"][0]
    assert seen["launched"] == ["_rms_norm_kernel"] * 2


def test_what_is_compiled_at_the_end_is_given_up(seen):
    """A command ends although kernels are being compiled that nothing has needed yet. If they are needed later, their launch
    compiles them."""
    assert seen["given up"] == {"before": [], "made": ["_rms_norm_kernel"], "launched": 1}

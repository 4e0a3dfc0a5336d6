"""The tables of regimes, and what is stated about them elsewhere."""

from dataclasses import replace
from importlib import import_module

from minirt.kernels.regimes import TABLES, up_to
from minirt.kernels.special_limits import SPECIAL


def test_limits_of_special_kernels_are_those_of_the_tables():
    """Every kernel that is for one capability takes its limits from there. Some regimes are for part of a kernel's head sizes."""
    regimes = [regime for module, name in TABLES for regime in getattr(import_module(module), name)]
    head_dims = {}
    for regime in (regime for regime in regimes if regime.capability is not None and regime.limits is not None):
        stated = {name: limits for table in SPECIAL[regime.capability] for name, limits in table.items()}
        limits, of_regime = stated[regime.kernel], head_dims.setdefault(regime.kernel, set())
        if regime.kernel in SPECIAL[regime.capability].attention:
            of_regime |= {*regime.limits.head_dims}
            limits = replace(limits, head_dims=regime.limits.head_dims)
        assert regime.limits == limits
    tables = [table for tables in SPECIAL.values() for table in tables]
    assert head_dims == {name: {*getattr(one, "head_dims", ())} for table in tables for name, one in table.items()}


UNDECLARED = {"EARLY", "PREFILL_SEQUENCES", "CHUNK_PROMPTS"}  # tables of sizes, not of kernels


def test_each_kernel_declares_its_limits_and_its_order():
    """`quantize` adds nothing."""
    kernels = [regime for module, name in TABLES if name not in UNDECLARED for regime in getattr(import_module(module), name)]
    assert [regime.kernel for regime in kernels if regime.limits is None] == []
    assert [regime.kernel for regime in kernels if regime.sums is None] == ["quantize"]


def test_the_end_of_a_variant():
    """Sizes on an end belong to it, and the last interval has none."""
    assert [up_to(2, 5)(size) for size in (1, 2, 3, 5, 6)] == [2, 2, 5, 5, None]

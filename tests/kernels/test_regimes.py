"""The tables of regimes, and what is stated about them elsewhere."""

from importlib import import_module

from minirt.kernels.regimes import SPECIAL_KERNELS, TABLES, up_to


def test_special_kernels_are_those_of_the_tables():
    regimes = [regime for module, name in TABLES for regime in getattr(import_module(module), name)]
    declared = {}
    for regime in regimes:
        if regime.capability is not None and regime.limits is not None:
            limits, kernels = regime.limits, declared.setdefault(regime.capability, {})
            formats, head_dims = kernels.get(regime.kernel, (set(), set()))
            kernels[regime.kernel] = formats | {*limits.formats}, head_dims | {*getattr(limits, "head_dims", ())}
    stated = {
        capability: {name: ({*formats}, {*head_dims}) for name, (_, formats, head_dims) in kernels.items()}
        for capability, kernels in SPECIAL_KERNELS.items()
    }
    assert stated == declared


UNDECLARED = {"EARLY", "PREFILL_SEQUENCES", "CHUNK_PROMPTS"}  # tables of sizes, not of kernels


def test_each_kernel_declares_its_limits_and_its_order():
    """`quantize` adds nothing."""
    kernels = [regime for module, name in TABLES if name not in UNDECLARED for regime in getattr(import_module(module), name)]
    assert [regime.kernel for regime in kernels if regime.limits is None] == []
    assert [regime.kernel for regime in kernels if regime.sums is None] == ["quantize"]


def test_the_end_of_a_variant():
    """Sizes on an end belong to it, and the last interval has none."""
    assert [up_to(2, 5)(size) for size in (1, 2, 3, 5, 6)] == [2, 2, 5, 5, None]

"""The tables of regimes, and what is stated about them elsewhere."""

from importlib import import_module

from minirt.kernels.regimes import SPECIAL_KERNELS, TABLES


def test_special_kernels_are_those_of_the_tables():
    regimes = [regime for module, name in TABLES for regime in getattr(import_module(module), name)]
    found = {}
    for regime in regimes:
        if regime.capability is not None:
            found.setdefault(regime.capability, set()).add(regime.kernel)
    assert {capability: set(kernels) for capability, kernels in SPECIAL_KERNELS.items()} == found

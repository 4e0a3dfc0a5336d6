"""`bench/tools/draft_distribution.py`. Catches a test that finds no difference, or one where there is none."""

import random
from collections import Counter

import pytest
from scipy import stats

from minirt.bench.tools import draft_distribution


def draws(weights, count, seed):
    return Counter(random.Random(seed).choices(range(len(weights)), weights, k=count))


def test_chi_square_is_scipys():
    first, second = draws([5, 3, 2, 1], 3000, 1), draws([5, 3, 2, 1], 2000, 2)
    found = draft_distribution.chi_square(first, second)
    expected = stats.chi2_contingency([[own[i] for i in range(4)] for own in (first, second)], correction=False)
    assert found["chi_square"] == pytest.approx(expected.statistic)
    assert found["p"] == pytest.approx(expected.pvalue)
    assert found["degrees_of_freedom"] == 3


def test_rare_texts_are_one_cell_and_a_difference_is_found():
    rare = draws([1] * 5000, 900, 3)  # few come twice: all of them together are one cell
    assert draft_distribution.chi_square(rare, draws([1] * 5000, 900, 4))["degrees_of_freedom"] == 0
    assert draft_distribution.chi_square(draws([5, 5], 4000, 5), draws([5, 7], 4000, 6))["p"] < 1e-3


def test_measure():
    """On a CPU in fp32, drafts change no text at all, and those that repeat a token are wrong."""
    _, rows = draft_distribution.measure(None, "cpu", None, 40)
    verified = [row["verified_and_accepted"] for row in rows if "verified_and_accepted" in row]
    assert len(verified) == 2
    assert all(own["mtp"][1] > own["mtp"][0] / 2 > 0 for own in verified)
    assert all(own["repeat"][0] > 0 == own["repeat"][1] for own in verified)
    assert [row["different"] for row in rows if "different" in row] == [{"mtp": 0, "repeat": 0}] * 2

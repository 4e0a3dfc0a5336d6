"""Patterns from model files: the same answers as `re.match`, and none takes long."""

import random
import re

import pytest

from minirt.errors import UnsupportedError
from minirt.modeling.patterns import matches

ATOMS = ["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", "1", "[0-9]", r"\w", r"[^\d.]"]
REPEATS = ["*", "+", "?", "{2}", "{1,3}", "{0,2}", "*?", "{2,}"]


def pattern(source, depth=0):
    chance = source.random()
    if depth > 2 or chance < 0.35:
        return source.choice(ATOMS)
    inner = pattern(source, depth + 1)
    if chance < 0.6:
        return inner + pattern(source, depth + 1)
    if chance < 0.75:
        return f"({inner}|{pattern(source, depth + 1)})"
    if chance < 0.9:
        return f"(?:{inner}){source.choice(REPEATS)}"
    return f"(?{source.choice('=!')}{inner})" if chance < 0.95 else source.choice(["^", "$"]) + inner


def test_answers_of_re():
    source, count = random.Random(1), 0
    for _ in range(5000):
        rule, text = pattern(source), "".join(source.choice("ab.1\n") for _ in range(source.randrange(8)))
        assert matches(rule, text) == bool(re.match(rule, text)), (rule, text)
        count += matches(rule, text)
    assert 1000 < count < 4500


@pytest.mark.parametrize(("rule", "name", "expected"), [
    (".*lm_head", "lm_head", True), (".*mlp.gate$", "model.layers.0.mlp.gate_proj", False),
    (r".*self_attn\.(q|k|v)_proj$", "model.layers.11.self_attn.k_proj", True), (r"visual.*", "model.visual", False),
    (r"^model\.layers\.[0-9]+\.mlp\..*$", "model.layers.31.mlp.down_proj", True), ("model", "model.norm", True),
    (r"^(?!.*experts).*$", "model.layers.1.self_attn.q_proj", True), (r"^(?!.*experts).*$", "model.experts.1.up", False),
    (r"((?!mlp\.experts).)*$", "model.mlp.experts.1.up", False), (r"model\.(?=.*_proj).*", "model.mlp.up_proj", True),
])  # fmt: skip
def test_rules_in_the_wild(rule, name, expected):
    assert matches(rule, name) is expected


SLOW = [
    "(a|a)*$", "(a+)+$", "(.*)*x", ".*" * 80 + "x", "(a?){1000}b", "(((a{60}){60}){60})", "(|)*" * 20, "((?!.*x).)*y",
    "(?=(?=(?=.*b).*c).*d)" * 9,
]  # fmt: skip
UNKNOWN = [
    r"(a)\1", "(?<=a)", "(?<!a)", "(?i)a", "(?P<x>a)(?P=x)", r"\ba", "((((((((a*)*)*)*)*)*)*)*)*", "(", "a" * 513, "(?i:a)",
]  # fmt: skip


@pytest.mark.parametrize("rule", SLOW)
def test_no_pattern_takes_long(rule):
    """Each takes ages, or much memory, with a matcher that backtracks."""
    matches(rule, "a" * 100 + "!")


@pytest.mark.parametrize("rule", UNKNOWN)
def test_other_patterns_are_refused(rule):
    with pytest.raises(UnsupportedError, match=r"regular expression|too long"):
        matches(rule, "aaaa")

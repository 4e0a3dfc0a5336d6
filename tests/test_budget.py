"""Each room of the code has a budget of lines, so growth is a decision that is made in sight.

`python tests/tools/lines.py` prints the counts: code without blank lines, comments and docstrings. Anyone may lower a number;
raising one needs the reason on its line.
"""

import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("lines", Path(__file__).with_name("tools") / "lines.py")
lines = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lines)

# What one reads to know how a token is made: the rooms of `lines.CORE` together.
CORE = 11_194  # windows and nine families; seams of hooks; MXFP4; batch invariance
BUDGET = {
    "minirt": 2_060,  # `Generator.profile`, functions by name
    "minirt/engine": 3_378,  # captures without garbage collection; cache groups: pages of layers with windows, freed behind them
    "minirt/step": 447,  # page tables by cache group
    "minirt/layers": 921,  # windows, factors, norms of Q, K, V; sinks, biases of experts; experts beside an MLP
    "minirt/modeling": 1_642,  # windows by layer, and eight families' settings; MXFP4
    "minirt/loading": 1_618,  # the memory of windows; experts in MXFP4; tensors of sound
    "minirt/speculative": 296,
    "models": 832,  # Granite, Phi, Seed-OSS, Hunyuan, OLMo 3, EXAONE 4, Muse-Glimmer, gpt-oss, Gemma 4
    "models/recipe": 731,
    "kernels": 13_032,  # windows in every attention kernel; sinks, MXFP4, biases and factors of experts; heads of 512
    "minirt/hooks": 375,  # hidden states and logits, edits, logits processors
    "minirt/profiling": 249,  # of `bench`: `Generator.profile`; bytes of windows
    "minirt/precompile": 39,  # `minirt compile`
    "minirt/server": 2_815,  # `/ready`; `reasoning_strength`
    "minirt/text": 2_736,  # addressed messages and calls of Muse-Glimmer; harmony; channels of Gemma 4
    "minirt/structured": 1_200,  # grammars after the header of a message
    "minirt/cli": 2_816,  # `minirt profile`; presets with one release
    "minirt/nn": 367,
    "minirt/patching": 629,
    "bench": 6_157,
    "examples": 241,  # logit lens, linear probe, steering vector, a profile, a bad layer
    "tests": 40_810,  # MXFP4, gpt-oss and Gemma 4; windows against transformers, seven families; addressed messages
}


@pytest.fixture(scope="module")
def counted():
    return lines.rooms(lines.working_tree())


@pytest.mark.parametrize("room", BUDGET)
def test_a_room_keeps_to_its_budget(counted, room):
    """Catches growth that nobody decided on."""
    code = counted[room].code
    assert code <= BUDGET[room], f"{room} has {code:,} lines of code: take something away, or raise its budget and say why"


def test_every_room_has_a_budget_and_the_core_has_its_own(counted):
    """Catches code in a place that nobody counts, and rooms of the core that grow together."""
    assert {room for room, number in counted.items() if number.code} - {"the top level"} == set(BUDGET)
    core = sum(counted[room].code for room in lines.CORE)
    assert core <= CORE, f"the core has {core:,} lines of code"


def test_lines_of_code():
    """Catches docstrings, comments and blank lines that count, and strings over several lines that count once."""
    source = '"""A\n\nB"""\n\nimport a  # why\n\n\ndef f():\n    """C\n    D"""\n    # E\n    return """x\n\ny"""\n'
    assert lines.count(source) == (5, 14)

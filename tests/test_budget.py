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
CORE = 11_806  # 16-bit scales; shares of GPUs, row maxima too; batch invariance; windows and nine families; hooks; adapters
BUDGET = {
    "minirt": 2_114,  # `Generator.profile`, functions by name; adapters per request; ranks, which import files of users
    "minirt/engine": 3_457,  # captures without garbage collection; cache groups by window; adapters: places, steps; ranks
    "minirt/step": 449,  # page tables by cache group
    "minirt/layers": 1_110,  # windows, norms and factors of families; adapters of linears; shares, row maxima too
    "minirt/modeling": 1_791,  # 16-bit scales; windows by layer, settings of families; MXFP4; rows and columns of shares
    "minirt/loading": 1_753,  # 16-bit scales; memory of windows; adapters; experts in MXFP4; tensors of sound; parts of tensors
    "minirt/speculative": 296,
    "models": 836,  # Granite, Phi, Seed-OSS, Hunyuan, OLMo 3, EXAONE 4, Muse-Glimmer, gpt-oss, Gemma 4
    "models/recipe": 816,  # an adapter's training
    "kernels": 14_331,  # 16-bit scales; one order of sums, Hopper's prompts too; windows; launchers; adapters; heads of 512
    "minirt/hooks": 375,  # hidden states and logits, edits, logits processors
    "minirt/profiling": 251,  # of `bench`: `Generator.profile`; bytes of windows; ranks refused
    "minirt/precompile": 41,  # `minirt compile`
    "minirt/server": 2_934,  # `/ready`; calls before a grammar; `reasoning_strength`; efforts of harmony; adapters
    "minirt/text": 2_756,  # addressed messages and calls of Muse-Glimmer; harmony, its efforts; channels of Gemma 4
    "minirt/structured": 1_231,  # grammars after the header of a message, and calls before it
    "minirt/cli": 2_824,  # `minirt profile`; presets with one release
    "minirt/nn": 367,
    "minirt/patching": 629,
    "bench": 6_163,  # ranks compare together
    "examples": 249,  # logit lens, linear probe, steering vector, a profile, a bad layer
    "tests": 43_336,  # sums that fit; eight families; messages; adapters; MXFP4, gpt-oss, Gemma 4; ranks; forms of wgmma
    "minirt/adapters": 456,  # LoRA: files, merging, places on the device, rows
    "minirt/parallel": 680,  # several GPUs: processes, messages, sums, maxima; implementations that must sum; memory; their end
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

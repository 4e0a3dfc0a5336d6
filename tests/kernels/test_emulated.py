"""Kernels for Hopper without a GPU, see `tests/emulate`. Catches errors of these kernels alone: missing barriers and fences,
accesses outside of tensors, deadlocks. Also catches an emulation that would not notice them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DECODE = ("attention/test_decode_fp8.py", "attention/test_decode.py")
FP16 = "float16 and not bfloat16"
FUSED = f"{FP16} and fused and True"
# FP8 pages: narrow work items; wide ones that reach past the last head.
NARROW = f"{FP16} and fused and fp8_pages and 130 and not 1300 and not 512"
# FP8 pages: more blocks than slots for their scales; wide work items whose slots are overwritten.
LONG = f"{FP16} and fused and fp8_pages and (1300 or (513 and 255 and not 21))"
SIXTEEN = f"{FUSED} and write and (1100 or 129)"  # 16-bit pages: one tile of channels, and two
# Partial rotary embedding, gates, sinks, scales, norms without weights; on pages of both formats; single tokens among prompts;
# 256 and 512 channels, also of prompts.
SETTINGS = (
    f"(decode and test_a_step and {FP16} and (D256-R64 or D128-R64)) or (on_fp8 and D64-R64)"
    f" or (mixed and test_a_step and {FP16} and D128-R64) or (test_prompts and {FP16} and True) or (mixed and makes_v and D256)"
    f" or (sinks and test_a_step and {FP16} and D64-R64)"
)
# Windows: splits of 16-bit and of FP8 pages, also among prompts; prompts whose blocks are masked at both ends.
WINDOW = f"{FP16} and ((test_decode and 612 and not 132) or among or parts_of or (test_prompts and (299 or 127 or 512)))"
# 64 rows of the weight; FP8 whose sums are set aside; widths that no tile divides; a tile with more rows of x, and one without.
EXPERTS = "(False and 64 and 136) or (True and (256 or 80 and 32))"
# Scales of blocks: two groups of warps and strips past the last row; blocks of 128 rows.
BLOCKS = "test_products_in_blocks and (304 or 400)"

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]


def emulated(files: Sequence[str], selection: str, without: str = "") -> str:
    """pytest's output for the selected tests under emulation, which needs no GPU and must find none."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"MINIRT_EMULATE": "1", "MINIRT_EMULATE_WITHOUT": without, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / file) for file in files)]
    done = subprocess.run([*command, "-k", selection], capture_output=True, text=True, env=environment, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("files", "selection", "count"),
    [
        (DECODE, NARROW, 3),
        (DECODE, LONG, 3),
        (DECODE, SIXTEEN, 2),
        (["attention/test_settings.py"], SETTINGS, 13),
        (["attention/test_window_sm90.py"], WINDOW, 8),
        (["attention/test_invariant_sm90.py"], "bfloat16 and (False and 251 or 77 and True)", 2),
        (["attention/test_prefill.py"], f"{FP16} and test_hopper and ((129 and 50) or (37 and 70 and not 400))", 2),
        (["moe/test_experts_sm90.py"], f"test_products and ({EXPERTS})", 4),
        (["moe/test_experts_sm90.py"], BLOCKS, 2),
        (["linear/test_fp8_blocks.py"], "test_hopper_small", 4),
        (["gated_delta/test_gated_delta.py"], "against_reference and bfloat16 and 70 and 64 and not 129", 1),
        (["moe/test_products_int4.py"], f"{FP16} and test_one_product and (70 or 96 or mx)", 6),
        (["moe/test_experts_int4_sm90.py"], f"test_one_product and {FP16}", 8),
        (["moe/test_experts_int4_sm90.py"], "test_one_product and bfloat16 and mx and (70 or 104)", 2),
        (["moe/test_few_tokens_int4.py"], "bfloat16 and any_configuration and (300 or 1400 or 320)", 4),
        (["linear/test_int4_hopper.py"], f"{FP16} and (gelu_tanh or (7 and 33) or (40 and 140) or mx)", 9),
        (["linear/test_int4_hopper.py", "moe/test_experts_int4_sm90.py"], "torch", 18),
    ],
    ids=[
        "decode", "decode of long sequences", "decode in 16 bits", "settings", "windows", "invariant prompts", "prompts",
        "experts", "experts in blocks", "linear", "gated delta", "experts of 4 bits", "Hopper's experts of 4 bits",
        "Hopper's MXFP4 experts", "few tokens' experts of 4 bits", "int4", "int4 with scales of 16 bits",
    ],
)
def test_kernels(files, selection, count):
    said = emulated(files, selection)
    assert f"{count} passed" in said, said[-6000:]
    assert "failed" not in said, said[-6000:]


@pytest.mark.parametrize(("without", "finding"), [
    ("fence.proxy", "write after read: TMA overwrites what a thread"), ("bar.sync", "a thread reads what a thread"),
    ("cp.async.mbarrier.arrive", "waits at an mbarrier for ever"), ("mbarrier.arrive.shared", "waits at an mbarrier for ever"),
])  # fmt: skip
def test_what_is_missing_is_found(without, finding):
    said = emulated(DECODE, f"{FUSED} and fp8_pages and 130 and 200 and not 66", without)
    assert finding in said, said[-6000:]
    assert "EmulationError" in said
    assert "passed" not in said


@pytest.mark.parametrize("without", ["cp.async.wait_group", "bar.warp"])
def test_what_is_missing_around_copies_is_found(without):
    said = emulated(["linear/test_int4_hopper.py"], f"{FP16} and test_one_token and 2440", without)
    assert "a thread reads what cp.async" in said, said[-6000:]
    assert "passed" not in said

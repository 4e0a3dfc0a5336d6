"""Every kernel compiles for every target, with the intended tensor-core instructions and within its shared memory.

Catches, without a GPU: errors that only the compiler reports (types of loop variables, instructions that a target lacks), a tile
too large for a smaller GPU, fp32 products silently computed in TF32, loads moved across the wait of a PDL launch, sums that
differ between lanes.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Families of compile_all.py that one test compiles, with the number of their kernels. A test is to take at most 45 s of one core.
FIRST = {
    ("linear", "attention", "step"): 23, ("int4", "experts"): 13, ("experts-int4",): 7,
    ("gated-delta", "attention-few", "adapters", "collectives"): 21, ("sampling",): 13, ("gpt-oss",): 20,
}  # fmt: skip
FP8 = {("linear-fp8", "linear-blocks"): 6, ("experts-fp8", "experts-blocks"): 12}
HOPPER = {
    ("linear",): 7, ("linear-fp8",): 6, ("linear-blocks", "linear-three-groups"): 6, ("int4",): 7, ("attention", "step"): 21,
    ("experts",): 11, ("attention-sizes",): 9, ("attention-wide",): 8,
    ("attention-windows",): 9, ("experts-fp8",): 10, ("experts-blocks",): 12, ("experts-other-tiles",): 3,
    ("gated-delta", "attention-few", "adapters", "collectives"): 21, ("experts-int4",): 9, ("sampling",): 13,
    ("gpt-oss",): 21,
}  # fmt: skip
OTHERS = {
    ("linear", "attention"): 12, ("int4", "experts", "gated-delta", "attention-few", "adapters", "collectives"): 31,
    ("experts-int4",): 7,
}  # fmt: skip
# float16 has the same kernels as bfloat16: test_emulated.py compiles some for Hopper, and on a GPU they run in both dtypes.
# float32 has the same kernels on all targets. `IN_FULL` of compile_all.py says which targets compile every launch.
TARGETS = {
    (90, "bfloat16"): HOPPER, (80, "bfloat16"): FIRST, (89, "bfloat16"): FP8 | {("attention-wide",): 7},
    (100, "bfloat16"): OTHERS | FP8 | {("sampling",): 13},
    (120, "bfloat16"): OTHERS | {("linear-fp8",): 5, ("sampling",): 13}, (80, "float32"): OTHERS,
}  # fmt: skip
# sm_89 shares the instructions of its 16-bit kernels with sm_80, and their tiles, for small shared memory, with sm_120. Experts
# in FP8, which use no TMA, and scales of blocks are the same on sm_89 and sm_120. The kernels of the table of slots and of
# sampling have neither products nor a dtype.
NO_DTYPE = {"step", "sampling"}
LEFT_OUT = {
    89: ["linear", "int4", "attention", "experts", "experts-int4", "gated-delta", "attention-few",
         "adapters", "collectives"],
    120: ["linear-blocks", "experts-fp8", "experts-blocks"],
}  # fmt: skip
CASES = [(cc, dtype, families) for (cc, dtype), groups in TARGETS.items() for families in groups]
MMA = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
DENSE = (
    "_gemm_small_kernel", "_gemm_kernel", "_gemm_int4_kernel", "_gemm_int4_sm90_kernel", "_gemm_sm90_kernel", "_prefill_kernel",
    "_chunk_kernel", "_prefill_sm90_kernel", "_decode_sm90_kernel", "_experts_sm90_kernel", "_router_kernel",
    "_delta_prepare_kernel", "_delta_state_kernel", "_experts_int4_kernel", "_experts_int4_sm90_kernel",
)  # fmt: skip
# Kernels in which every lane that holds a sum over lanes stores it: all copies of a sum must be equal.
COPIES = (
    "_gemv_kernel", "_gemv_int4_kernel", "_few_gate_up_kernel", "_few_down_kernel",
    "_few_gate_up_int4_kernel", "_few_down_int4_kernel", "_decode_kernel", "_prefill_kernel",
    "_chunk_kernel", "_decode_few_kernel", "_delta_decode_kernel", "_delta_drafts_kernel", "_delta_conv_kernel",
    "_delta_norm_kernel", "_delta_tokens_kernel",
)  # fmt: skip
PDL = (
    "_gemv_int4_kernel", "_gemv_int4_sm90_kernel", "_gemm_int4_kernel",
    "_gemm_int4_small_sm90_kernel", "_gemm_int4_sm90_kernel", "_unpack_kernel",
    "_gemv_kernel", "_rms_norm_kernel", "_quantize_kernel", "_quantize_groups_kernel", "_gemm_small_kernel", "_kv_write_kernel",
    "_decode_kernel", "_decode_few_kernel", "_combine_kernel", "_gemm_sm90_kernel", "_decode_sm90_kernel",
    "_decode_fp8_sm90_kernel", "_router_kernel", "_choose_kernel", "_place_kernel", "_gather_kernel", "_quantize_rows_kernel",
    "_sum_experts_kernel", "_few_gate_up_kernel",
    "_few_down_kernel", "_few_gate_up_int4_kernel", "_few_down_int4_kernel", "_experts_sm90_kernel", "_delta_decode_kernel",
    "_delta_drafts_kernel", "_delta_tokens_kernel", "_delta_inputs_kernel", "_few_rows_kernel", "_shrink_kernel",
    "_expand_kernel", "_all_reduce_kernel",
    "_experts_int4_sm90_kernel",
)  # fmt: skip
READ_AHEAD = (  # read before the PDL wait: weights, lengths, older tokens, logits of the router, addresses, bases of adapters
    "_gemv_int4_kernel", "_gemv_int4_sm90_kernel", "_gemm_int4_small_sm90_kernel", "_gemm_int4_sm90_kernel", "_unpack_kernel",
    "_gemv_kernel", "_rms_norm_kernel", "_decode_kernel", "_decode_few_kernel", "_combine_kernel", "_decode_sm90_kernel",
    "_decode_fp8_sm90_kernel", "_few_down_kernel", "_few_down_int4_kernel", "_router_kernel", "_delta_decode_kernel",
    "_delta_drafts_kernel", "_delta_tokens_kernel", "_few_rows_kernel", "_shrink_kernel", "_expand_kernel",
    "_all_reduce_kernel",
)  # fmt: skip


def compile_all(cc: int, dtype: str, *families: str) -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compile_all.py")), str(cc), dtype, *families]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("cc", "dtype", "families"), CASES, ids=[f"sm{cc}-{dtype}-{'+'.join(families)}" for cc, dtype, families in CASES]
)
def test_compiles_as_meant(cc, dtype, families):
    """Each family of the target is compiled by one of the cases, except those of `LEFT_OUT`."""
    compiled = compile_all(cc, dtype, *families)
    results, groups = compiled["results"], TARGETS[cc, dtype]
    covered = [*LEFT_OUT.get(cc, ()), *itertools.chain(*groups)]
    assert {*compiled["families"]} == {*covered} | NO_DTYPE
    assert len({r["kernel"] for r in results}) == groups[families]
    for r in results:
        name = r["kernel"]
        assert r["shared"] <= (16 * 1024 if families == ("sampling",) else r["limit"]), r
        assert not (name in COPIES and r["adds_unrounded"]), r
        if name == "_experts_int4_kernel" and cc == 100 and (r["options"]["GROUP"], r["options"]["BLOCK_T"]) == (1, 64):
            pass  # the sums of eight groups of 32 columns are more than tensor memory holds, so Triton may use no tensor cores
        elif name == "_router_kernel" and r["options"]["BLOCK_E"] < 64:
            assert r["mma"] == ["mma.sync"], r  # fewer experts than rows of the wider instructions
        elif name == "_prefill_sm90_kernel" and r["options"]["INVARIANT"]:
            assert r["mma"] == ["mma.sync", MMA[cc]], r  # totals by the narrow instruction
        elif name in DENSE and (r["fp8"] or dtype != "float32"):
            assert r["mma"] == [MMA[cc]], r
            assert r["fp8_mma"] == (r["fp8"] and cc != 100), r  # sm_100 encodes the types in a descriptor
        elif name == "_experts_kernel" and dtype != "float32":
            assert r["mma"] == [MMA[cc] if r["options"]["BLOCK_T"] >= 64 else "mma.sync"], r
            assert r["pipelined"], r
        elif dtype == "float32":
            assert not r["mma"], r
        elif name == "_decode_kernel":
            assert r["mma"] == ["mma.sync"], r  # 16 rows are too few for the wider instructions
            assert r["pipelined"], r  # also around the wait of a PDL launch
        elif name == "_decode_few_kernel":
            assert r["mma"] == [MMA[cc] if r["options"]["BLOCK_M"] >= 64 else "mma.sync"], r
            assert r["pipelined"], r
        elif name == "_decode_fp8_sm90_kernel":
            assert r["mma"] == ["mma.sync"], r  # no ptxas overwrites its register operands
            assert r["transposed_loads"], r  # of V, by ldmatrix
        elif name == "_gemm_int4_small_sm90_kernel":
            assert r["mma"] == ["mma.sync"], r  # whose operands are in registers
        elif name == "_gemv_int4_sm90_kernel":
            assert r["mma"] == ["mma.sync"], r
            assert r["pipelined"], r
            assert r["tiles_before_wait"] or not r["pdl"], r
        if name in ("_few_gate_up_int4_kernel", "_few_down_int4_kernel"):
            assert not r["flushes_denormals"], r
            # Some of x, with Triton 3.9; and what four times as many scale words take.
            assert r["stack"] <= (128 if r["options"]["GROUP"] == 4 else 384), r
        if name == "_gemv_int4_kernel":
            assert not r["flushes_denormals"], r  # its weights are denormal numbers
            # On later GPUs than Hopper, the kernel of one token with 4-bit weights keeps a few values in local memory.
            assert r["stack"] <= (256 if name == "_gemv_int4_kernel" and cc >= 100 else 64), r
        if name == "_decode_few_kernel" and cc == 90:
            # No spills, except in Triton 3.9 with a gate on heads of 256 channels, which takes registers for its addresses.
            # Of 512 channels, the sums of 64 rows take half of the registers.
            assert r["stack"] <= {256: 64, 512: 384}.get(r["options"]["D"], 0), r
        if "_sm90" in name:
            assert r["tma"] == (name not in ("_gemv_int4_sm90_kernel", "_gemm_int4_small_sm90_kernel")), r
            most = {"_prefill_sm90_kernel": 256, "_decode_sm90_kernel": 32, "_decode_fp8_sm90_kernel": 32}
            most["_gemm_sm90_kernel"] = 8 if r["options"].get("SCALE_ROWS") else 0  # of the fetching warp, before its loop
            # Gated products with groups of 32: what four scale words a row take, and more where the norm is fused.
            most["_gemm_int4_small_sm90_kernel"] = 1024 if r["options"].get("GROUP") == 1 else 64
            most["_gemm_int4_sm90_kernel"] = 384  # addresses of outputs, which the residual has too, kept over the loop
            if r["options"].get("D") == 512:  # addresses of the pieces' operands, kept over the loops
                most["_prefill_sm90_kernel"] = 448
            most["_experts_int4_sm90_kernel"] = 32  # of the fetching warp
            blocks = r["options"].get("SCALE_ROWS")
            most["_experts_sm90_kernel"] = 256 if r["fp8"] and not blocks else 0  # in the epilogue of the highest tiles
            if name == "_decode_sm90_kernel" and (r["options"]["D"] == 256 or r["options"]["GROUP"] == 16):
                most[name] = 128  # before an item's products, and in Triton 3.9 only
            assert r["stack"] <= most.get(name, 0), r  # no spills, or none in the loops of products
        if name in ("_decode_sm90_kernel", "_decode_fp8_sm90_kernel"):
            programs = 65536 // (256 * r["options"]["maxnreg"])  # that the registers let run at once
            assert programs * (r["shared"] + 1024) <= 228 * 1024, r
        if name == "_gemm_int4_sm90_kernel" and r["pdl"]:
            assert r["roles_read_ahead"][-1], r  # words, by the loading warp
        if name == "_gemm_sm90_kernel" and r["pdl"]:
            groups = r["options"]["GROUPS"]
            assert r["roles_read_ahead"] == [False] * groups + [True], r  # weights, by the loading warp
        if name in ("_experts_sm90_kernel", "_experts_int4_sm90_kernel") and r["pdl"]:
            multiply, *rest = r["roles_read_ahead"]  # the second group, and the loading warp, whose wait may be there twice
            assert not multiply, r
            assert any(rest), r  # lists and weights
            if "maxnreg" in r["options"]:
                assert 2 * (r["shared"] + 1024) <= 228 * 1024, r  # two programs share an SM
        if name in ("_gemm_kernel", "_gemm_small_kernel"):
            assert r["tma"] == (cc >= 90 and r["options"]["K"] % 8 == 0 and (r["fp8"] or dtype != "float32")), r
        if name in PDL and r["options"].get("launch_pdl"):
            assert r["pdl"], r
            # Before the wait, a kernel may read only data that the preceding kernel does not write. If it has such data, it must.
            ahead = name in READ_AHEAD or (name == "_gemm_small_kernel" and r["rows_before_loop"])
            after_low_rank = bool(r["options"].get("LOW_RANK_BLOCK"))  # which triggers when x is complete
            ahead = ahead or after_low_rank
            ahead = ahead or (name == "_gemm_int4_kernel" and r["bias"]) or (name == "_gather_kernel" and r["norm"])
            assert r["loads_before_wait"] == ahead, r
            assert name != "_gemm_small_kernel" or not r["tiles_before_wait"] or after_low_rank, r
        else:
            assert not r["pdl"], r

"""Compile every kernel for a GPU that need not be present, through its own host wrapper, and print the results as JSON.

test_targets.py runs this in a separate process, without TRITON_INTERPRET: `compile_all.py CAPABILITY DTYPE [FAMILY …]`. A fake
Triton driver names the target, and launches become compilations. So configurations, specializations and argument types are those
with which the wrapper would launch on that GPU.
"""

import itertools
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from minirt.engine.execute.logits_processors import LogitsProcessors
from minirt.kernels import embedding, launch, norm, rope
from minirt.kernels.adapters import expand
from minirt.kernels.adapters import rows as rows_of_adapters
from minirt.kernels.adapters.operands import AdapterRows, AdapterWeights, most_steps
from minirt.kernels.adapters.shrink import low_rank
from minirt.kernels.attention import dispatch as attention
from minirt.kernels.attention import rope_write as kv_write
from minirt.kernels.attention.operands import AttentionInput, KVPages, Rope, Scores, Sequences
from minirt.kernels.collectives.all_reduce import all_reduce
from minirt.kernels.collectives.gather_maxima import gather_maxima
from minirt.kernels.collectives.peers import peers_of
from minirt.kernels.gated_delta import dispatch as gated_delta
from minirt.kernels.gated_delta.operands import GatedDeltaSequences, GatedDeltaState, GatedDeltaWeights
from minirt.kernels.linear import dispatch as linear
from minirt.kernels.linear import gemm, gemm_sm90
from minirt.kernels.linear.product import Epilogue, Product
from minirt.kernels.moe import dispatch as moe
from minirt.kernels.moe import experts_sm90, route
from minirt.kernels.moe.mixture import SharedOutput
from minirt.kernels.reference import SharedExpert, computes_shared
from minirt.kernels.sampling import sample
from minirt.kernels.sampling.batch import DTYPES, SamplingBatch
from minirt.kernels.sampling.dispatch import token_logprobs
from minirt.kernels.sampling.filters import SamplingWorkspace
from minirt.kernels.speculative import draft_model, ngram
from minirt.kernels.speculative.draft_input import draft_input
from minirt.kernels.speculative.reference import DraftTokens
from minirt.kernels.step import copies
from minirt.kernels.step import kernels as step
from minirt.kernels.step.rows import RowTable
from minirt.kernels.step.table import MAX_SNAPSHOTS, Columns, Rows, StepTensors
from minirt.step.rules import Rules

HIDDEN, INTER, PAGE = 3584, 18944, 64  # Qwen2.5-7B
LARGE = ((200, 3000), (500, INTER), (8192, INTER))  # tokens and width: every tile of the tables of `gemm`
# Targets for which every launch is compiled: all 16-bit kernels, and all FP8 kernels. The others have the same code for other
# matrix instructions, another size of shared memory, PDL or another dtype: launches with equal tiles are compiled once there,
# except those of kernels that only Hopper has.
IN_FULL = {(80, "bfloat16"), (89, "bfloat16")}
FRAMES = re.compile(rb"\x04\x11\x08\x00.\0\0\0(..\0\0)", re.DOTALL)  # stack bytes of a thread: the cubin's EIATTR_FRAME_SIZE


def many_tokens(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, pdl: bool = False, **epilogue) -> None:
    """A product by the kernel for many tokens: `gemm_sm90` where it accepts it, else `gemm`."""
    if out is None:
        rows = len(weight) // (2 if "activation" in epilogue else 1)
        out = torch.empty(len(x), rows, dtype=torch.bfloat16 if "scale" in epilogue else x.dtype, device=x.device)
    product = Product(x, weight, out, epilogue=Epilogue(**epilogue), pdl=pdl)
    hopper = linear.capability(x.device) == 90 and gemm_sm90.accepts(product)
    (gemm_sm90.gemm_sm90 if hopper else gemm.gemm)(product)


def adds_unrounded(ptx: str) -> bool:
    """Whether a lane adds its own unrounded product to a neighbour's rounded one, so that the two lanes have different sums."""
    brought = re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+),", ptx)
    return not set(brought).isdisjoint(re.findall(r"fma\.rn\.f32\s+%\w+, %\w+, %\w+, (%\w+);", ptx))


class CompileOnly:
    """The part of a Triton driver that compilation needs."""

    def __init__(self, cc: int) -> None:
        self.target = GPUTarget("cuda", cc, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def tile(args: tuple, given: dict) -> tuple:
    """What of a launch decides about its kernel's matrix instructions, shared memory and loads before the wait of PDL."""
    sizes = ("BLOCK", "STAGES", "SPLIT", "GROUP", "SCALE", "num_")
    facts = {name: value for name, value in given.items() if isinstance(value, int) and (name == "D" or name.startswith(sizes))}
    dtypes = [str(getattr(getattr(arg, "base", arg), "dtype", "")) for arg in args[:2]]
    return *dtypes, "residual" in given, "ep.bias" in given, *sorted(facts.items())


def compile_instead_of_launching(cc: int, results: list[dict], each: str = "launch") -> None:
    """Make launches compile for a target. each: "launch", or "tile": of a generic kernel's launches with equal tiles, one."""
    driver.set_active(CompileOnly(cc))
    run, seen = jit.JITFunction.run, set()

    def warm_up(self, *args, grid, warmup, **kwargs):
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs  # prepared kernels get constexprs by position
        records = {name: record._asdict() for name, record in given.items() if hasattr(record, "_fields")}
        for name, fields in records.items():
            given |= {field if name == "C" else f"{name}.{field}": value for field, value in fields.items()}
        given = {name: plain for name, arg in given.items() if (plain := getattr(arg, "value", arg)) is not None}
        key = self.fn.__name__, tile(args, given)
        if each == "tile" and key in seen and not re.search(r"_sm\d+", self.fn.__name__):
            return
        seen.add(key)
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if hasattr(kernel, "result"):
            kernel = kernel.result()
        ptx = kernel.asm["ptx"]
        before_wait = ptx.partition("griddepcontrol.wait")[0]
        roles = [part.rpartition("setmaxnreg")[2] for part in ptx.split("griddepcontrol.wait")[:-1]]  # up to their waits
        results.append(
            {
                "kernel": self.fn.__name__,
                "shared": kernel.metadata.shared,
                "limit": launch.shared_limit(cc),
                "mma": sorted(set(re.findall(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", ptx))),
                "fp8": any(getattr(getattr(a, "base", a), "dtype", None) == torch.float8_e4m3fn for a in args[:2]),
                "fp8_mma": "e4m3.e4m3" in ptx,
                "stack": max(int.from_bytes(size, "little") for size in FRAMES.findall(kernel.asm["cubin"])),
                "tma": "cp.async.bulk.tensor" in ptx,
                "pipelined": "cp.async.wait_group" in ptx,
                "transposed_loads": bool(re.search(r"ldmatrix[.\w]*\.trans", ptx)),
                "adds_unrounded": adds_unrounded(ptx),
                "pdl": "griddepcontrol.wait" in ptx,
                "loads_before_wait": "ld.global" in before_wait or "cp.async" in before_wait,
                "tiles_before_wait": "cp.async" in before_wait,
                "roles_read_ahead": ["ld.global" in role or "cp.async" in role for role in roles],
                "rows_before_loop": ("ep.scale" in given and "SCALE_ROWS" not in given) or "ep.bias" in given,
                "bias": "ep.bias" in given,
                "norm": "norm" in given or "norm_ptr" in given,
                "flushes_denormals": bool(re.search(r"\b(fma|mul|add)(\.rn)?\.ftz", ptx)),
                "options": {k: v for k, v in given.items() if isinstance(v, int | str)},
            }
        )

    jit.JITFunction.run = warm_up
    launch._INTERPRETER, launch._INTERPRETER_SMS = cc, 132  # on a CPU, kernels are configured for this GPU, with an H200's SMs
    launch.capability.cache_clear()


@dataclass(frozen=True)
class Calls:
    """What the calls of a family need. Tensors are uninitialized, because nothing runs."""

    cc: int
    dtype: torch.dtype
    workspace: launch.Workspace

    @property
    def pdl(self) -> bool:
        return self.cc >= 90

    def empty(self, *shape: int, like: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(*shape, dtype=like or self.dtype)

    def ints(self, *shape: int, like: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=like)


def linear_16(calls: Calls) -> None:
    """Weights of the activations' dtype (16 or 32 bits), and the embedding, the norm and rotary embedding."""
    empty, ints, workspace, pdl = calls.empty, calls.ints, calls.workspace, calls.pdl
    norm_weight, bias = empty(HIDDEN), empty(4608)
    qkv, gate_up, down = empty(4608, HIDDEN), empty(2 * INTER, HIDDEN), empty(HIDDEN, INTER)
    embedding.embedding(ints(3, like=torch.int64), empty(1000, HIDDEN))
    norm.rms_norm(empty(300, HIDDEN), norm_weight, 1e-6)
    for T in (1, 100, 2000):
        packed, norms = empty(1, T, 36, 128), (empty(128), empty(128))
        q, k = packed[:, :, :28].transpose(1, 2), packed[:, :, 28:32].transpose(1, 2)
        for table in (empty(1, T, 128), empty(1, T, 128, like=torch.float32)):
            rope.qk_norm_rope(q, k, table, table)
            rope.qk_norm_rope(q, k, table, table, *norms)
    rope.norm_rope(empty(2, 3, 5, 6), empty(2, 5, 6), empty(2, 5, 6))  # heads whose halves are no power of two
    linear.norm_linear(empty(1, 577), empty(577), 1e-6, empty(13, 577))  # unaligned rows: a thread loads single values
    for T in (1, 5, 100, 300):  # one output, as in the gate of shared experts: Triton makes its number a constant
        linear.norm_linear(empty(T, 577), None, 1e-6, empty(1, 577))
    for T in (1, 5, 100):
        x = empty(T, HIDDEN)
        linear.norm_linear(x, norm_weight, 1e-6, qkv, bias, workspace=workspace, pdl=pdl)
        linear.norm_gate_up(x, norm_weight, 1e-6, gate_up, "silu", pdl=pdl)
        linear.linear_residual(empty(T, INTER), down, x, workspace=workspace, pdl=pdl)
    linear.norm_linear(empty(1, HIDDEN), norm_weight, 1e-6, empty(50000, HIDDEN), out_dtype=torch.float32)
    for T, inter in LARGE:
        x = empty(T, HIDDEN)
        many_tokens(x, qkv, empty(T, 4608), bias=bias)
        many_tokens(x, qkv[:4601])  # rows of outputs that TMA cannot move
        many_tokens(x, qkv, out=empty(T, 4608, like=torch.float32), pdl=pdl)
        many_tokens(x, gate_up[: 2 * inter], activation="silu", pdl=pdl)
        linear.linear_residual(empty(T, INTER), down, x, workspace=workspace, pdl=pdl)


def linear_fp8(calls: Calls) -> None:
    """FP8 weights with a scale for each row."""
    empty, workspace, pdl, eight = calls.empty, calls.workspace, calls.pdl, torch.float8_e4m3fn
    norm_weight, bias = empty(HIDDEN), empty(4608)
    qkv, gate_up, down = (empty(*shape, like=eight) for shape in ((4608, HIDDEN), (2 * INTER, HIDDEN), (HIDDEN, INTER)))
    scales = [empty(len(weight), like=torch.float32) for weight in (qkv, gate_up, down)]
    for T in (1, 5, 24, 64, 100):
        x = empty(T, HIDDEN)
        linear.norm_linear(x, norm_weight, 1e-6, qkv, bias, scale=scales[0], workspace=workspace, pdl=pdl)
        linear.norm_gate_up(x, norm_weight, 1e-6, gate_up, "silu", scale=scales[1], pdl=pdl)
        linear.linear_residual(empty(T, INTER), down, x, scale=scales[2], workspace=workspace, pdl=pdl)
    for T, inter in LARGE:
        x, x_scale = empty(T, HIDDEN, like=eight), empty(T, like=torch.float32)
        many_tokens(x, qkv, residual=empty(T, 4608), scale=scales[0], x_scale=x_scale, out=empty(T, 4608))
        many_tokens(x, qkv[:4601], scale=scales[0][:4601], x_scale=x_scale)
        many_tokens(x, qkv, scale=scales[0], x_scale=x_scale, out=empty(T, 4608, like=torch.float32), pdl=pdl)
        many_tokens(x, gate_up[: 2 * inter], activation="silu", scale=scales[1][: 2 * inter], x_scale=x_scale, pdl=pdl)
        linear.linear_residual(empty(T, INTER), down, empty(T, HIDDEN), scale=scales[2], workspace=workspace, pdl=pdl)


def linear_blocks(calls: Calls) -> None:
    """FP8 weights with a scale for each block: the regimes of the linear layers, and blocks of fewer rows than a tile has."""
    empty, workspace, pdl = calls.empty, calls.workspace, calls.pdl
    eight, bias = torch.float8_e4m3fn, empty(4608)

    def weight(rows: int, K: int, g: int = 128) -> dict[str, torch.Tensor]:
        scale = empty(-(-rows // g), -(-K // 128), like=torch.float32)
        return {"weight": empty(rows, K, like=eight), "scale": scale}

    for T in (1, 5, 64, 100, 500):
        x = empty(T, HIDDEN)
        linear.norm_linear(x, empty(HIDDEN), 1e-6, bias=bias, workspace=workspace, pdl=pdl, **weight(4608, HIDDEN))
        linear.norm_gate_up(x, empty(HIDDEN), 1e-6, activation="silu", pdl=pdl, **weight(2 * INTER, HIDDEN))
        linear.linear_residual(empty(T, INTER), residual=x, workspace=workspace, pdl=pdl, **weight(HIDDEN, INTER))
        linear.linear_residual(empty(T, 576), residual=empty(T, 568), workspace=workspace, pdl=pdl, **weight(568, 576, 8))
    if calls.cc == 90 and calls.dtype.itemsize == 2:
        for groups, widths in ((2, (64, 32)), (2, (64, 0)), (3, (128, 0)), (3, (64, 32))):
            config = gemm_sm90.derive_config(*widths, HIDDEN, 1, False, 132, groups=groups, blocks=True)
            x, x_scale = empty(300, HIDDEN, like=eight), empty(300, HIDDEN // 128, like=torch.float32)
            qkv = weight(4608, HIDDEN)
            epilogue = Epilogue(qkv["scale"], x_scale)
            gemm_sm90.gemm_sm90(Product(x, qkv["weight"], empty(300, 4608), epilogue=epilogue, pdl=True), config)


def linear_int4(calls: Calls) -> None:
    """4-bit weights, in groups of each size."""
    empty, ints, workspace, pdl = calls.empty, calls.ints, calls.workspace, calls.pdl
    for T, group in ((1, 128), (24, 64), (64, 128), (100, 32), (100, 128), (300, 128)):
        for N, K, gated in ((4608, HIDDEN, False), (2 * INTER, HIDDEN, True), (HIDDEN, INTER, False)):
            x, words, scale = empty(T, K), ints(N, K // 4, like=torch.int16), ints(K // group, N)
            if gated:
                linear.norm_gate_up(x, empty(K), 1e-6, words, "silu", scale=scale, pdl=pdl)
            else:
                residual = empty(T, N)
                linear.linear_residual(x, words, residual, empty(N), scale=scale, workspace=workspace, pdl=pdl)
    of_scales = torch.bfloat16 if calls.dtype.itemsize == 4 else calls.dtype
    for T, group in ((1, 32), (8, 32), (24, 64), (100, 32), (100, 64), (300, 32)):  # symmetric, with scales of 16 bits
        words, scale = ints(4608, HIDDEN // 4, like=torch.int16), empty(HIDDEN // group, 4608, like=of_scales)
        linear.norm_gate_up(empty(T, HIDDEN), empty(HIDDEN), 1e-6, words, "silu", scale=scale, pdl=pdl)
        linear.linear_residual(empty(T, HIDDEN), words, empty(T, 4608), scale=scale, workspace=workspace, pdl=pdl)
    words, scale = ints(131, 160, like=torch.int16), ints(5, 131)
    for T in (1, 3, 40, 300):  # columns that no chunk fills, and that TMA cannot move
        linear.norm_linear(empty(T, 577), empty(577), 1e-6, words, scale=scale, pdl=pdl)


def linear_three_groups(calls: Calls) -> None:
    """Tiles of 192 rows for Hopper: the widest, which take the most registers, and the narrowest."""
    empty = calls.empty
    x, up, down, qkv = empty(300, HIDDEN), empty(2 * INTER, HIDDEN), empty(HIDDEN, INTER), empty(4608, HIDDEN)
    for widths in ((128, 128), (128, 64), (128, 16)):
        config = gemm_sm90.derive_config(*widths, HIDDEN, 2, False, 132, groups=3)
        gemm_sm90.gemm_sm90(Product(x, up, empty(300, INTER), epilogue=Epilogue(activation="silu"), pdl=True), config)
    for widths in ((128, 64), (128, 16), (64, 0)):
        config = gemm_sm90.derive_config(*widths, INTER, 2, True, 132, groups=3)
        gemm_sm90.gemm_sm90(Product(empty(300, INTER), down, empty(300, HIDDEN), epilogue=Epilogue(residual=x), pdl=True), config)
    for widths in ((128, 64), (64, 0)):
        config = gemm_sm90.derive_config(*widths, HIDDEN, 2, False, 132, groups=3)
        gemm_sm90.gemm_sm90(Product(x, qkv, empty(300, 4608), epilogue=Epilogue(bias=empty(4608)), pdl=True), config)


def all_attention(calls: Calls) -> None:
    """Prefill and decode attention on pages of the activations' dtype and of FP8; on Hopper also with heads of 64 channels."""
    empty, ints, workspace, pdl, cc = calls.empty, calls.ints, calls.workspace, calls.pdl, calls.cc
    for Nq, Nkv, D in ((28, 4, 128), (32, 8, 64))[: 2 if cc == 90 else 1]:
        tables, lens, cos_sin = ints(2, 40), ints(2), empty(4096, D, like=torch.float32)
        for fp8 in (False, True)[: 2 if cc >= 89 else 1]:
            pages = empty(8, PAGE, Nkv, D, like=torch.float8_e4m3fn if fp8 else None)
            scale = empty(8, PAGE, Nkv, like=torch.float32) if fp8 else None
            scales = {"k_scales": scale, "v_scales": scale}
            for T in (2, 100):
                heads, slots = empty(T, (Nq + 2 * Nkv) * D), ints(T, like=torch.int64)
                rest = (cos_sin, slots, slots, pages, pages, Nq, Nkv, empty(D), empty(D))
                kv_write.qk_norm_rope_kv_write(heads, *rest, pdl=pdl, **scales)
            parts = {"workspace": workspace, "max_splits": 2} | scales
            for T, shortest, rest in ((100, 2, parts), (8192, 1, parts), (8192, 1, scales)):
                q = empty(T, Nq, D)
                attention.paged_attention_prefill(q, pages, pages, tables, ints(3), lens, D**-0.5, shortest=shortest, **rest)
            for B in (1, 2):
                rest = (pages, pages, tables[:B], lens[:B], ints(B + 1), 100, D**-0.5, workspace)
                heads = empty(B, (Nq + 2 * Nkv) * D)
                attention.rope_paged_attention_decode(heads, cos_sin, *rest, Nq, pdl=pdl, **scales)
            q = empty(100, Nq, D)
            attention.paged_attention_decode(q, *rest, query_starts=ints(3), pdl=pdl, **scales)
            heads, slots = empty(100, (Nq + 2 * Nkv) * D), ints(100, like=torch.int64)  # prompts beside sequences of one token
            sequences = Sequences(tables, lens, ints(3), ints(3))
            attention.attention(AttentionInput(
                heads, KVPages(pages, pages, scale, scale), sequences, Scores(D**-0.5), q, Rope(cos_sin), slots, slots,
                workspace, 2, max_query_len=90, pdl=pdl,
            ))  # fmt: skip
    if cc == 90:  # prompts of an invariant step
        one_order = launch.Workspace("cpu", 16, invariant=True)
        for Nq, Nkv, D in ((28, 4, 128), (32, 8, 64)):
            q, pages = empty(8192, Nq, D), empty(8, PAGE, Nkv, D)
            rest = (pages, pages, ints(2, 40), ints(3), ints(2), D**-0.5)
            attention.paged_attention_prefill(q, *rest, workspace=one_order, max_splits=64)
    if cc == 90:  # FP8 pages, with more heads of 64 channels than a work item has and with fewer heads of 128
        for Nkv, D in ((32, 64), (3, 128)):
            heads, cos_sin = empty(8, 3 * Nkv * D), empty(4096, D, like=torch.float32)
            pages, scale = empty(8, PAGE, Nkv, D, like=torch.float8_e4m3fn), empty(8, PAGE, Nkv, like=torch.float32)
            rest = (pages, pages, ints(8, 40), ints(8), ints(9), 100, D**-0.5, workspace, Nkv)
            attention.rope_paged_attention_decode(heads, cos_sin, *rest, k_scales=scale, v_scales=scale, pdl=True)


def attention_few(calls: Calls) -> None:
    """Few new tokens of each sequence: tiles of 64 rows and of 32, on pages of the activations' dtype and of FP8."""
    empty, ints = calls.empty, calls.ints
    for Nq, Nkv, D in ((28, 4, 128), (14, 2, 64), (32, 8, 64))[: 3 if calls.cc == 90 else 1]:
        for fp8 in (False, True)[: 2 if calls.cc >= 89 else 1]:
            pages = empty(8, PAGE, Nkv, D, like=torch.float8_e4m3fn if fp8 else None)
            scale = empty(8, PAGE, Nkv, like=torch.float32) if fp8 else None
            attention.paged_attention_decode_few(
                empty(10, Nq, D), pages, pages, ints(2, 40), ints(3), ints(2), ints(3), 100, 5, D**-0.5, calls.workspace,
                k_scales=scale, v_scales=scale, pdl=calls.pdl,
            )  # fmt: skip


def attention_sizes(calls: Calls) -> None:
    """Heads of 80 channels, which are padded, and of 256, both partly rotated and gated, in one step each of every kind."""
    empty, ints = calls.empty, calls.ints
    for D, steps in ((80, ((8, 9, None),)), (256, ((2, None, None), (600, 9, None), (16, 9, 2)))):
        Nq, Nkv, pages = 8, 1, empty(8, PAGE, 1, D)
        for T, starts, most in steps:
            rows, slots = empty(T, (2 * Nq + 2 * Nkv) * D), ints(T, like=torch.int64)
            heads, gate = rows[:, : (Nq + 2 * Nkv) * D], rows[:, (Nq + 2 * Nkv) * D :].view(T, Nq, D)
            B = T if starts is None else starts - 1
            sequences = Sequences(ints(B, 40), ints(B), ints(B + 1), None if starts is None else ints(starts))
            rope_and_norm = Rope(empty(4096, 64, like=torch.float32), empty(D), empty(D), normalize=True)
            attention.attention(AttentionInput(
                heads, KVPages(pages, pages), sequences, Scores(D**-0.5), empty(T, Nq, D), rope_and_norm, slots, slots,
                calls.workspace, 2 * B, max_query_len=most, pdl=calls.pdl, gate=gate,
            ))  # fmt: skip


def attention_windows(calls: Calls) -> None:
    """Windows: steps of single tokens, among prompts, of few tokens and of a prompt, on 16-bit and FP8 pages."""
    empty, ints, (Nq, Nkv, D) = calls.empty, calls.ints, (32, 2, 128)
    for fp8 in (False, True):
        pages = empty(8, PAGE, Nkv, D, like=torch.float8_e4m3fn if fp8 else None)
        scale = empty(8, PAGE, Nkv, like=torch.float32) if fp8 else None
        for T, starts, most in ((1, None, None), (2, None, None), (600, 9, None), (16, 9, 2)):
            B, slots = T if starts is None else starts - 1, ints(T, like=torch.int64)
            sequences = Sequences(ints(B, 40), ints(B), ints(B + 1), None if starts is None else ints(starts))
            attention.attention(AttentionInput(
                empty(T, (Nq + 2 * Nkv) * D), KVPages(pages, pages, scale, scale), sequences, Scores(D**-0.5, 2048),
                empty(T, Nq, D), Rope(empty(4096, D, like=torch.float32)), slots, slots, calls.workspace, 2 * B,
                max_query_len=most, pdl=calls.pdl,
            ))  # fmt: skip


def attention_wide(calls: Calls) -> None:
    """Heads of 512 channels whose V is their K, as in Gemma 4, in steps of every kind, on 16-bit and FP8 pages."""
    empty, ints, (Nq, Nkv, D) = calls.empty, calls.ints, (32, 4, 512)
    for fp8 in (False, True):
        pages = empty(8, PAGE, Nkv, D, like=torch.float8_e4m3fn if fp8 else None)
        scale = empty(8, PAGE, Nkv, like=torch.float32) if fp8 else None
        for T, starts, most in ((2, None, None), (600, 9, None), (16, 9, 2)):
            B, slots = T if starts is None else starts - 1, ints(T, like=torch.int64)
            sequences = Sequences(ints(B, 40), ints(B), ints(B + 1), None if starts is None else ints(starts))
            rope_and_norm = Rope(empty(4096, D, like=torch.float32), empty(D), empty(D), normalize_v=True, v_is_k=True)
            attention.attention(AttentionInput(
                empty(T, (Nq + Nkv) * D), KVPages(pages, pages, scale, scale), sequences, Scores(1.0), empty(T, Nq, D),
                rope_and_norm, slots, slots, calls.workspace, 2 * B, max_query_len=most, pdl=calls.pdl,
            ))  # fmt: skip


# Experts, hidden size, width of an expert, steps: Qwen3-30B-A3B with each height of tiles, and a width that no tile divides.
MIXTURES = ((128, 2048, 768, (1, 3, 9, 40, 200, 400, 800, 1100)), (60, 2052, 700, (1, 1000)))


def experts_16(calls: Calls) -> None:
    """Mixtures of experts with weights of the activations' dtype and the router; one has factors, no residual."""
    empty, pdl = calls.empty, calls.pdl
    for many, hidden, inter, steps in MIXTURES:
        gate_up, down, norm_weight = empty(many, 2 * inter, hidden), empty(many, hidden, inter), empty(hidden)
        factors = empty(many) if many == 60 else None
        for T in steps:
            h = empty(T, hidden)
            parts = moe.router_logits(h, norm_weight, 1e-6, empty(many, hidden), 8, pdl=pdl)
            moe.mixture_residual(
                h, parts, gate_up, down, h if factors is None else None, 8, True, "silu", norm_weight=norm_weight,
                factors=factors, pdl=pdl,
            )  # fmt: skip


def experts_fp8(calls: Calls) -> None:
    """FP8 experts with a scale for each row, and a shared expert."""
    for many, hidden, inter, steps in MIXTURES:
        up, down = (calls.empty(many, *shape, like=torch.float8_e4m3fn) for shape in ((2 * inter, hidden), (hidden, inter)))
        scales = {"gate_up_scale": calls.empty(many, 2 * inter, like=torch.float32)}
        scales["down_scale"] = calls.empty(many, hidden, like=torch.float32)
        for T in steps:
            h, logits = calls.empty(T, hidden), calls.empty(T, many)
            first, last = (calls.empty(*shape, like=torch.float8_e4m3fn) for shape in ((2 * inter, hidden), (hidden, inter)))
            expert = SharedExpert(first, last, calls.empty(1, hidden), scales["gate_up_scale"][0], scales["down_scale"][0])
            computed = computes_shared(T, 8, up, down, scales["gate_up_scale"], scales["down_scale"], expert)
            shared = expert if computed else SharedOutput(h, calls.empty(T, 1))
            moe.mixture_residual(h, logits, up, down, h, 8, False, "gelu", pdl=calls.pdl, shared=shared, **scales)


def experts_blocks(calls: Calls) -> None:
    """FP8 experts with a scale for each block."""
    empty, pdl = calls.empty, calls.pdl
    for many, hidden, inter, steps in MIXTURES:
        up, down = (empty(many, *shape, like=torch.float8_e4m3fn) for shape in ((2 * inter, hidden), (hidden, inter)))
        scales, norm_weight = {}, empty(hidden)
        for name, weight, part in (("gate_up_scale", up, inter), ("down_scale", down, hidden)):
            blocks = weight.shape[1] // math.gcd(128, part), -(-weight.shape[2] // 128)
            scales[name] = empty(many, *blocks, like=torch.float32)
        for T in steps:
            h = empty(T, hidden)
            parts = moe.router_logits(h, norm_weight, 1e-6, empty(many, hidden), 8, pdl=pdl)
            moe.mixture_residual(h, parts, up, down, h, 8, True, "silu", norm_weight=norm_weight, pdl=pdl, **scales)


def experts_int4(calls: Calls) -> None:
    """Experts of 4 bits, with groups of 128 and of 32 columns."""
    empty, words = calls.empty, lambda K: -(-K // 128) * 32
    for many, hidden, inter, steps in MIXTURES:
        up, down = (empty(many, rows, words(K), like=torch.int16) for rows, K in ((2 * inter, hidden), (hidden, inter)))
        for group, T in itertools.product((128, 32), steps):
            shapes = {"gate_up_scale": (-(-hidden // group), 2 * inter), "down_scale": (-(-inter // group), hidden)}
            scales = {name: calls.ints(shape[0], many, shape[1]).movedim(1, 0) for name, shape in shapes.items()}
            h, logits = empty(T, hidden), empty(T, many)
            if group == 32 and T in (1, 9):
                like = torch.bfloat16 if calls.dtype.itemsize == 4 else calls.dtype
                symmetric = {name: empty(n, many, rows, like=like).movedim(1, 0) for name, (n, rows) in shapes.items()}
                moe.mixture_residual(h, logits, up, down, h, 8, True, "silu", pdl=calls.pdl, **symmetric)
            if T == 1:
                scales |= {"norm_weight": empty(hidden), "shared": SharedOutput(h, empty(T, 1))}
            moe.mixture_residual(h, logits, up, down, h, 8, True, "silu", pdl=calls.pdl, **scales)


def of_gpt_oss(calls: Calls) -> None:
    """MXFP4 in linears and in experts with biases and a clamped SwiGLU; sinks beside windows; rows of no whole chunks of 128."""
    empty, ints, (Nq, Nkv, D), H, E = calls.empty, calls.ints, (64, 8, 64), 2880, 32
    for T, K in ((1, H), (8, H), (24, HIDDEN), (100, HIDDEN), (300, HIDDEN)):
        words, scale = ints(4608, -(-K // 128) * 32, like=torch.int16), ints(-(-K // 128), 4608).view(torch.uint32)
        residual, bias = empty(T, 4608), empty(4608)
        linear.linear_residual(empty(T, K), words, residual, bias, scale=scale, workspace=calls.workspace, pdl=calls.pdl)
    up, down = ints(E, 2 * H, 736, like=torch.int16), ints(E, H, 736, like=torch.int16)
    scales = {
        name: ints(23, E, rows).view(torch.uint32).movedim(1, 0)
        for name, rows in (("gate_up_scale", 2 * H), ("down_scale", H))
    }
    for T in (1, 3, 8, 40, 400):
        h, router = empty(T, H), empty(E, H)
        logits = moe.router_logits(h, empty(H), 1e-5, router, 4, bias=empty(E), four_bits=True, pdl=calls.pdl)
        moe.mixture_residual(
            h, logits, up, down, h, 4, True, "silu", norm_weight=empty(H), eps=1e-5, gate_up_bias=empty(E, 2 * H),
            down_bias=empty(E, H), limit=7.0, alpha=1.702, pdl=calls.pdl, **scales,
        )  # fmt: skip
    for fp8 in (False, True)[: 2 if calls.cc >= 89 else 1]:
        pages = empty(8, PAGE, Nkv, D, like=torch.float8_e4m3fn if fp8 else None)
        scale = empty(8, PAGE, Nkv, like=torch.float32) if fp8 else None
        for T, starts, most in ((2, None, None), (1100, 9, None), (16, 9, 2)):
            B, slots = T if starts is None else starts - 1, ints(T, like=torch.int64)
            sequences = Sequences(ints(B, 40), ints(B), ints(B + 1), None if starts is None else ints(starts))
            attention.attention(AttentionInput(
                empty(T, (Nq + 2 * Nkv) * D), KVPages(pages, pages, scale, scale), sequences, Scores(D**-0.5, 128),
                empty(T, Nq, D), Rope(empty(4096, D, like=torch.float32)), slots, slots, calls.workspace, 2 * B,
                max_query_len=most, pdl=calls.pdl, sinks=empty(Nq),
            ))  # fmt: skip


def experts_other_tiles(calls: Calls) -> None:
    """Tiles of `experts_sm90` that no rule chooses; FP8 also with sums that are set aside, and with scales of blocks.

    Up and gate are launched without PDL, down with it.
    """
    empty = calls.empty
    sixteen, eight, aside = ((8, 128), (128, 64), (128, 128, 1, 32)), ((8, 128),), ((64, 128),)
    blocks = ((8, 128), (64, 64, 2), (64, 128))
    for stored, hidden, tiles in (("", 2048, sixteen), ("rows", 2048, eight), ("rows", 4096, aside), ("blocks", 2048, blocks)):
        like, scales, x_scale = torch.float8_e4m3fn if stored else torch.bfloat16, None, None
        routing = route.route(empty(8, 16), 8, True, 8)
        for config in itertools.starmap(experts_sm90.derive_config, tiles):
            for K, N, activation in ((hidden, 768, "silu"), (768, hidden, None)):
                rows = N if activation is None else 2 * N
                weight = empty(16, rows, K, like=like)
                if stored == "rows":
                    scales, x_scale = empty(16, rows, like=torch.float32), empty(64, like=torch.float32)
                elif stored == "blocks":
                    scales, x_scale = (empty(*shape, K // 128, like=torch.float32) for shape in ((16, rows // 128), (64,)))
                epilogue, pdl = Epilogue(scales, x_scale, activation=activation), activation is None
                product = Product(empty(64, K, like=like), weight, empty(64, N), epilogue=epilogue, pdl=pdl)
                experts_sm90.launch(product, routing, config)


def all_gated_delta(calls: Calls) -> None:
    """Gated DeltaNet of Qwen3.5-27B, with and without undone tokens: one token, and prompts."""
    empty, ints, floats = calls.empty, calls.ints, torch.float32
    Hk, Hv, D = 16, 48, 128
    channels = (2 * Hk + Hv) * D
    for drafts in (0, 4):
        ring = 3 + 2 * drafts if drafts else 4
        state = GatedDeltaState(empty(9, ring, channels), empty(9, Hv, D, D, like=floats))
        if drafts:
            state = state._replace(gates=empty(9, ring, 2, Hv, like=floats), folded=ints(9, Hv))
        weights = GatedDeltaWeights(empty(channels, 4), empty(Hv, like=floats), empty(Hv, like=floats), empty(D), 1e-6)
        for T in (2, 300):
            both = empty(T, channels + Hv * D + 2 * Hv)
            sequences = GatedDeltaSequences(ints(3), ints(2), ints(2), ints(2, MAX_SNAPSHOTS, 2))
            rest = (both[:, : -2 * Hv], both[:, -2 * Hv :], weights, state, sequences)
            for longest in (1,) if T == 2 else (200, 20):  # one prompt, and many
                gated_delta.gated_delta_net(*rest, longest, pdl=calls.pdl)
            gated_delta.gated_delta_net(*rest, T, invariant=True, pdl=calls.pdl)


def step_table(calls: Calls) -> None:
    """The table of slots: with and without drafts, several groups of pages, and a history, from which drafts come. Copies of rows
    of words, and of bytes."""
    ints = calls.ints
    for word in (4, 1):
        sizes = ints(3, like=torch.int64)
        copies.copy_rows(RowTable(sizes, sizes, 786432, word, (sizes,) * 3), 2, 65)
    for columns, B, T, one_token in (
        (Columns(0, (), 513, 0), 5, 5, True), (Columns(0, (), 513, 0), 6, 300, False),
        (Columns(4, (2048,), 513, 4096), 7, 300, False),
    ):  # fmt: skip
        table, R, long = ints(9, columns.words), B * (1 + columns.drafts), torch.int64
        message, rows = ints(80), Rows(*(ints(B) for _ in range(5)), ints(T))
        out = StepTensors(
            ints(T, like=long), ints(T, like=long), ints(columns.groups, T, like=long), ints(B + 1), ints(B),
            ints(columns.groups, B + 1), ints(B),
            ints(B, MAX_SNAPSHOTS, 2), ints(columns.groups, B, columns.pages), ints(R, like=long), ints(R, like=long),
            *(ints(R) for _ in range(3)),
        )  # fmt: skip
        settings = SamplingBatch(*(ints(R, like=dtype) for dtype in DTYPES))
        step.edit_table(table, message.view(20, 4), message, message[:1])
        step.derive(table, columns, rows, out, settings, PAGE, 256, one_token=one_token)
        step.commit(table, columns, rows, out.seq_lens, ints(R, like=long), ints(B, 2 + columns.drafts))
        maxima = ints(R, 1188, like=long)
        step.commit_greedy(table, columns, rows, out.seq_lens, maxima, message[2:3], ints(B, 2 + columns.drafts))
        step.report(table, columns, rows, ints(B, 2 + columns.drafts), 151936)
        if columns.history:
            ngram.propose(table, columns, rows, most=4, shortest=2, longest=4)
            ngram.propose(table, columns, rows, most=1, shortest=1, longest=16)
        if columns.drafts:
            draft_model.first_pass(table, rows, out.tokens, out.positions, out.query_starts)
            for ids, count in ((ints(32768, like=long), 32768), (None, 248320)):
                logits = calls.empty(B, count, like=torch.float32)
                tokens = DraftTokens(ints(B, like=long), ints(B, like=long), ints(B, like=long), ints(B), ints(B + 1))
                rest = {"number": 2, "most": 4, "page_size": PAGE, "kv_split": 256}
                draft_model.draw(logits, ids, table, columns, rows, tokens, **rest)
    norm_weights = [calls.empty(HIDDEN) for _ in range(2)]
    draft_input(ints(5, like=torch.int64), calls.empty(97, HIDDEN), calls.empty(5, HIDDEN), *norm_weights, 1e-6)


def all_adapters(calls: Calls) -> None:
    """Adapters of gate and up, with a norm, and of down: y for few rows and many, within products and after them."""
    empty, ints, places, R = calls.empty, calls.ints, 8, 64
    for T in (1, 5, 33, 2000):
        for K, N, P in ((HIDDEN, 2 * INTER, 2), (INTER, HIDDEN, 1)):
            weights = AdapterWeights(empty(places, P, R, K), empty(N, places * P * R), empty(places, P, like=torch.float32))
            rows = AdapterRows(ints(T), {P: ints(1 + most_steps(P, R, places))})
            norm, activation = (empty(K), "silu") if P == 2 else (None, None)
            x, given = empty(T, K), {"workspace": calls.workspace, "pdl": calls.pdl}
            expand.add_adapters(x, weights, rows, empty(T, N), norm, 1e-6, activation, check=False, **given)
            added = partial(low_rank, weights=weights, rows=rows, **given)
            if activation is None:
                linear.linear_residual(x, empty(N, K), empty(T, N), adapters=added, **given)
            else:
                linear.norm_gate_up(x, norm, 1e-6, empty(N, K), activation, adapters=added, **given)
        steps = ints(2, 2, 1 + most_steps(2, R, places))
        rows_of_adapters.used_steps(ints(T), ints(5, like=torch.int64), ints(5), R, places, steps)
    rows_of_adapters.adapters_of(ints(9, 64), 4, ints(5), ints(6), ints(300))


def all_collectives(calls: Calls) -> None:
    """Sums over two and eight ranks, with and without the residual, and row maxima."""
    for ranks in (2, 8):
        memory = calls.ints(2, ranks, 64, HIDDEN, like=torch.int16 if calls.dtype.itemsize == 2 else torch.int32)
        peers = peers_of(1, [memory] * ranks, calls.dtype)
        x = calls.empty(64, HIDDEN)
        all_reduce(x, peers, pdl=calls.pdl)
        all_reduce(x, peers, x, pdl=calls.pdl)
        memory = calls.ints(2, ranks, 64, 16, like=torch.int64)
        peers = peers_of(1, [memory] * ranks, torch.int64)
        gather_maxima(calls.ints(64, 1188, like=torch.int64), peers, 76032)


def all_sampling(calls: Calls) -> None:
    """Draws with every filter, rules of requests with counts of 16 and of 32 bits, and log-probabilities."""
    ints, longs = (torch.zeros(2, dtype=dtype) for dtype in (torch.int32, torch.int64))
    every = SamplingBatch(*(torch.zeros(2, dtype=dtype) for dtype in DTYPES))
    greedy = every.needed((), all_greedy=True)
    rules = Rules(0.1, 0.2, 1.3, {0: 1.0}, (1, 2), ((1, 2),), 3, (2,))
    for V, longest in ((152064, 100), (1031, 1 << 16)):
        logits = calls.empty(2, V, like=torch.float32)
        for settings in (every.needed(()), greedy, every, every.needed(("top_p",))):
            sample.sample(logits, settings)
        sample.sample(logits, greedy, row_maxima=calls.ints(2, 500, like=torch.int64))
        sample.row_maxima(logits, ints[:1], SamplingWorkspace(2, V, "cpu"))
        processors = LogitsProcessors(2, V, longest, torch.device("cpu"), "triton")
        processors.fill(0, rules, [1], [2])
        for mask in (None, calls.ints(2, -(-V // 32))):
            processors.process(logits, ints, longs, mask, any_bias=True, any_ban=True)
        processors.record(longs, ints, longs)
        token_logprobs(logits, longs, ints, 5, impl="triton")


def families(cc: int, dtype: torch.dtype) -> dict[str, Callable[[Calls], None]]:
    """The families of kernels that a target has, each with calls for its kernels and regimes, mostly in Qwen2.5-7B's shapes."""
    known = {"linear": linear_16, "int4": linear_int4, "attention": all_attention, "experts": experts_16}
    known |= {"experts-int4": experts_int4, "step": step_table, "gated-delta": all_gated_delta, "attention-few": attention_few}
    known |= {"sampling": all_sampling, "adapters": all_adapters, "collectives": all_collectives}
    if cc >= 89:
        known |= {"linear-fp8": linear_fp8, "linear-blocks": linear_blocks}
        known |= {"experts-fp8": experts_fp8, "experts-blocks": experts_blocks}
    if cc in (89, 90) and dtype.itemsize == 2:
        known["attention-wide"] = attention_wide
    if cc in (80, 90) and dtype.itemsize == 2:
        known["gpt-oss"] = of_gpt_oss
    if cc == 90 and dtype.itemsize == 2:
        known |= {"attention-sizes": attention_sizes, "attention-windows": attention_windows}
        known |= {"linear-three-groups": linear_three_groups, "experts-other-tiles": experts_other_tiles}
    return known


def every_kernel(cc: int, dtype: torch.dtype, *names: str) -> None:
    """The calls of these families, or of all families of the target."""
    known, calls = families(cc, dtype), Calls(cc, dtype, launch.Workspace("cpu"))
    for name in names or known:
        known[name](calls)


def main(cc: int, dtype: str, *names: str) -> None:
    results: list[dict] = []
    compile_instead_of_launching(cc, results, "launch" if (cc, dtype) in IN_FULL else "tile")
    every_kernel(cc, getattr(torch, dtype), *names)
    known = list(families(cc, getattr(torch, dtype)))
    print(json.dumps({"triton": triton.__version__, "families": known, "results": results}))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])

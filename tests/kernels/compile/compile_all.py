"""Compile every kernel for a GPU that need not be present, through its own host wrapper, and print the results as JSON.

test_targets.py runs this in its own process, without TRITON_INTERPRET: `compile_all.py CAPABILITY DTYPE`. A fake Triton driver
names the target, and launches become compilations. So configurations, specializations and argument types are those with which
the wrapper would launch on that GPU.
"""

import itertools
import json
import math
import re
import sys
from collections.abc import Callable

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from minirt.kernels import embedding, launch, norm
from minirt.kernels.attention import decode, prefill
from minirt.kernels.attention import dispatch as attention
from minirt.kernels.attention import rope_write as kv_write
from minirt.kernels.linear import dispatch as linear
from minirt.kernels.linear import gemm, gemm_sm90, gemm_small, int4
from minirt.kernels.linear.product import Epilogue, Product
from minirt.kernels.moe import dispatch as moe
from minirt.kernels.moe import experts_sm90, products, route

HIDDEN, INTER, PAGE = 3584, 18944, 64  # Qwen2.5-7B
FRAMES = re.compile(rb"\x04\x11\x08\x00.\0\0\0(..\0\0)", re.DOTALL)  # stack bytes of a thread: the cubin's EIATTR_FRAME_SIZE


def many_tokens(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, pdl: bool = False, **epilogue) -> None:
    """A product by the kernel for many tokens: `gemm_sm90` where it accepts it, else `gemm`."""
    if out is None:
        rows = len(weight) // (2 if "activation" in epilogue else 1)
        out = torch.empty(len(x), rows, dtype=torch.bfloat16 if "scale" in epilogue else x.dtype, device=x.device)
    product = Product(x, weight, out, epilogue=Epilogue(**epilogue), pdl=pdl)
    hopper = launch.capability(x.device) == 90 and gemm_sm90.accepts(product)
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


def compile_instead_of_launching(cc: int, results: list[dict]) -> None:
    driver.set_active(CompileOnly(cc))
    run = jit.JITFunction.run

    def warm_up(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if hasattr(kernel, "result"):
            kernel = kernel.result()
        ptx = kernel.asm["ptx"]
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs  # prepared kernels get constexprs by position
        for name, arg in list(given.items()):
            if hasattr(arg, "_asdict"):  # of records, the fields: of a norm "norm.eps", of others "bias"
                prefix = "norm." if name == "norm" else ""
                given |= {prefix + field: getattr(value, "value", value) for field, value in arg._asdict().items()}
        given = {name: arg for name, arg in given.items() if arg is not None}
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
                "rows_before_loop": ("scale" in given and "SCALE_ROWS" not in given) or "bias" in given,
                "bias": "bias" in given,
                "norm": "norm" in given,
                "flushes_denormals": bool(re.search(r"\b(fma|mul|add)(\.rn)?\.ftz", ptx)),
                "options": {k: v for k, v in given.items() if isinstance(v, int | str)},
            }
        )

    jit.JITFunction.run = warm_up
    launch._INTERPRETER_SMS = 132  # an H200's
    for module in (gemm_small, gemm, int4, linear, attention, prefill, decode, products, moe):
        module.capability = lambda device: cc


def every_kernel(cc: int, dtype: torch.dtype) -> None:
    """One call for each kernel and regime, with shapes of Qwen2.5-7B. Tensors are uninitialized, because nothing runs."""

    def empty(*shape: int, like: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=like)

    def ints(*shape: int, like: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=like)

    pdl = cc >= 90
    workspace = launch.Workspace("cpu")
    norm_weight, bias = empty(HIDDEN), empty(4608)
    qkv, gate_up, down = empty(4608, HIDDEN), empty(2 * INTER, HIDDEN), empty(HIDDEN, INTER)
    embedding.embedding(ints(3, like=torch.int64), empty(1000, HIDDEN))
    norm.rms_norm(empty(300, HIDDEN), norm_weight, 1e-6)
    linear.norm_linear(empty(1, 577), empty(577), 1e-6, empty(13, 577))  # unaligned rows: a thread loads single values
    for T in (1, 5, 100, 300):  # one output, as in the gate of shared experts: Triton makes its number a constant
        linear.norm_linear(empty(T, 577), None, 1e-6, empty(1, 577))
    for T in (1, 5, 100):
        x = empty(T, HIDDEN)
        linear.norm_linear(x, norm_weight, 1e-6, qkv, bias, workspace=workspace, pdl=pdl)
        linear.norm_gate_up(x, norm_weight, 1e-6, gate_up, "silu", pdl=pdl)
        linear.linear_residual(empty(T, INTER), down, x, workspace=workspace, pdl=pdl)
    if cc >= 89:
        eight = torch.float8_e4m3fn
        qkv8, gate_up8, down8 = (torch.empty_like(w, dtype=eight) for w in (qkv, gate_up, down))
        scales = [empty(len(w), like=torch.float32) for w in (qkv8, gate_up8, down8)]
        for T in (1, 5, 24, 64, 100):
            x = empty(T, HIDDEN)
            linear.norm_linear(x, norm_weight, 1e-6, qkv8, bias, scale=scales[0], workspace=workspace, pdl=pdl)
            linear.norm_gate_up(x, norm_weight, 1e-6, gate_up8, "silu", scale=scales[1], pdl=pdl)
            linear.linear_residual(empty(T, INTER), down8, x, scale=scales[2], workspace=workspace, pdl=pdl)
        in_blocks(empty, workspace, pdl, cc)
    four_bits(empty, ints, workspace, pdl)
    linear.norm_linear(empty(1, HIDDEN), norm_weight, 1e-6, empty(50000, HIDDEN), out_dtype=torch.float32)
    if cc == 90 and dtype.itemsize == 2:
        three_groups(empty)
    for T, inter in ((200, 3000), (500, INTER), (8192, INTER)):  # covers every tile of the tables
        x = empty(T, HIDDEN)
        many_tokens(x, qkv, empty(T, 4608), bias=bias)
        many_tokens(x, qkv[:4601])  # rows of outputs that TMA cannot move
        many_tokens(x, qkv, out=empty(T, 4608, like=torch.float32), pdl=pdl)
        many_tokens(x, gate_up[: 2 * inter], activation="silu", pdl=pdl)
        linear.linear_residual(empty(T, INTER), down, x, workspace=workspace, pdl=pdl)
        if cc >= 89:
            x, x_scale = torch.empty_like(x, dtype=eight), empty(T, like=torch.float32)
            many_tokens(x, qkv8, residual=empty(T, 4608), scale=scales[0], x_scale=x_scale, out=empty(T, 4608))
            many_tokens(x, qkv8[:4601], scale=scales[0][:4601], x_scale=x_scale)
            many_tokens(x, qkv8, scale=scales[0], x_scale=x_scale, out=empty(T, 4608, like=torch.float32), pdl=pdl)
            many_tokens(x, gate_up8[: 2 * inter], activation="silu", scale=scales[1][: 2 * inter], x_scale=x_scale, pdl=pdl)
            linear.linear_residual(empty(T, INTER), down8, empty(T, HIDDEN), scale=scales[2], workspace=workspace, pdl=pdl)
    for Nq, Nkv, D in ((28, 4, 128), (32, 8, 64))[: 2 if cc == 90 else 1]:
        tables, lens, cos_sin = ints(2, 40), ints(2), empty(4096, D, like=torch.float32)
        for fp8 in (False, True)[: 2 if cc >= 89 else 1]:
            pages = empty(8, PAGE, Nkv, D, like=torch.float8_e4m3fn if fp8 else dtype)
            scale = empty(8, PAGE, Nkv, like=torch.float32) if fp8 else None
            scales = {"k_scales": scale, "v_scales": scale}
            for T in (2, 100):
                heads, where = empty(T, (Nq + 2 * Nkv) * D), ints(T, like=torch.int64)
                rest = (cos_sin, where, where, pages, pages, Nq, Nkv, empty(D), empty(D))
                kv_write.qk_norm_rope_kv_write(heads, *rest, pdl=pdl, **scales)
            parts = {"workspace": workspace, "max_splits": 2} | scales
            for T, shortest, rest in ((100, 2, parts), (8192, 1, parts), (8192, 1, scales)):
                q = empty(T, Nq, D)
                attention.paged_attention_prefill(
                    q, pages, pages, tables, ints(3), lens, D**-0.5, shortest=shortest, **rest
                )
            for B in (1, 2):
                rest = (pages, pages, tables[:B], lens[:B], ints(B + 1), 100, D**-0.5, workspace)
                heads = empty(B, (Nq + 2 * Nkv) * D)
                attention.rope_paged_attention_decode(heads, cos_sin, *rest, Nq, pdl=pdl, **scales)
            q = empty(100, Nq, D)
            attention.paged_attention_decode(q, *rest, query_starts=ints(3), pdl=pdl, **scales)
    if cc == 90:
        wide_items(empty, ints, workspace)
    experts(empty, cc)


def in_blocks(empty: Callable[..., torch.Tensor], workspace: launch.Workspace, pdl: bool, cc: int) -> None:
    """Weights with a scale for each block: the regimes of the linear layers, and blocks of fewer rows than a tile has."""
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
    if cc == 90 and empty(1).itemsize == 2:
        for groups, widths in ((2, (64, 32)), (2, (64, 0)), (3, (128, 0)), (3, (64, 32))):
            config = gemm_sm90.derive_config(*widths, HIDDEN, 1, False, 132, groups=groups, blocks=True)
            x, x_scale = empty(300, HIDDEN, like=eight), empty(300, HIDDEN // 128, like=torch.float32)
            own = weight(4608, HIDDEN)
            epilogue = Epilogue(own["scale"], x_scale)
            gemm_sm90.gemm_sm90(Product(x, own["weight"], empty(300, 4608), epilogue=epilogue, pdl=True), config)


def four_bits(
    empty: Callable[..., torch.Tensor], ints: Callable[..., torch.Tensor], workspace: launch.Workspace, pdl: bool
) -> None:
    """4-bit weights, in groups of each size."""
    for T, group in ((1, 128), (24, 64), (64, 128), (100, 32), (100, 128), (300, 128)):
        for N, K, gated in ((4608, HIDDEN, False), (2 * INTER, HIDDEN, True), (HIDDEN, INTER, False)):
            x, words, scale = empty(T, K), ints(N, K // 4, like=torch.int16), ints(K // group, N)
            if gated:
                linear.norm_gate_up(x, empty(K), 1e-6, words, "silu", scale=scale, pdl=pdl)
            else:
                residual = empty(T, N)
                linear.linear_residual(x, words, residual, empty(N), scale=scale, workspace=workspace, pdl=pdl)
    words, scale = ints(131, 160, like=torch.int16), ints(5, 131)
    for T in (1, 3, 40, 300):  # columns that no chunk fills, and that TMA cannot move
        linear.norm_linear(empty(T, 577), empty(577), 1e-6, words, scale=scale, pdl=pdl)


def experts(empty: Callable[..., torch.Tensor], cc: int) -> None:
    """Mixtures of experts with the shapes of Qwen3-30B-A3B, for each height of tiles; some with a width that no tile divides."""
    pdl = cc >= 90
    for many, hidden, inter, steps in ((128, 2048, 768, (1, 9, 40, 200, 400, 800, 1100)), (60, 2052, 700, (1, 1000))):
        gate_up, down, norm_weight = empty(many, 2 * inter, hidden), empty(many, hidden, inter), empty(hidden)
        for T in steps:
            h, logits = empty(T, hidden), empty(T, many)
            parts = moe.router_logits(h, norm_weight, 1e-6, empty(many, hidden), pdl=pdl)
            moe.mixture_residual(h, parts, gate_up, down, h, 8, True, "silu", norm_weight=norm_weight, pdl=pdl)
            if cc >= 89:
                up8, down8 = (torch.empty_like(w, dtype=torch.float8_e4m3fn) for w in (gate_up, down))
                scales = {"gate_up_scale": empty(many, 2 * inter, like=torch.float32)}
                scales |= {"down_scale": empty(many, hidden, like=torch.float32)}
                shared = {"shared": h, "shared_gate": empty(T, 1)}
                moe.mixture_residual(h, logits, up8, down8, h, 8, False, "gelu", pdl=pdl, **scales, **shared)
                for name, weight, part in (("gate_up_scale", up8, inter), ("down_scale", down8, hidden)):  # of blocks
                    blocks = weight.shape[1] // math.gcd(128, part), -(-weight.shape[2] // 128)
                    scales[name] = empty(many, *blocks, like=torch.float32)
                moe.mixture_residual(h, parts, up8, down8, h, 8, True, "silu", norm_weight=norm_weight, pdl=pdl, **scales)
    if cc == 90 and gate_up.dtype.itemsize == 2:
        other_tiles(empty)


def other_tiles(empty: Callable[..., torch.Tensor]) -> None:
    """Tiles of `experts_sm90` that no rule chooses; FP8 also with sums that are set aside, and with scales of blocks."""
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
                for pdl in (True, False):
                    epilogue = Epilogue(scales, x_scale, activation=activation)
                    product = Product(empty(64, K, like=like), weight, empty(64, N), epilogue=epilogue, pdl=pdl)
                    experts_sm90.launch(product, routing, config)


def wide_items(empty: Callable[..., torch.Tensor], ints: Callable[..., torch.Tensor], workspace: launch.Workspace) -> None:
    """Decode attention on FP8 pages, with more heads of 64 channels than a work item has and with fewer heads of 128."""
    for Nkv, D in ((32, 64), (3, 128)):
        heads, cos_sin = empty(8, 3 * Nkv * D), empty(4096, D, like=torch.float32)
        pages, scale = empty(8, PAGE, Nkv, D, like=torch.float8_e4m3fn), empty(8, PAGE, Nkv, like=torch.float32)
        rest = (pages, pages, ints(8, 40), ints(8), ints(9), 100, D**-0.5, workspace, Nkv)
        attention.rope_paged_attention_decode(heads, cos_sin, *rest, k_scales=scale, v_scales=scale, pdl=True)


def three_groups(empty: Callable[..., torch.Tensor]) -> None:
    """Tiles of 192 rows for Hopper: the widest, which take the most registers, and the narrowest."""
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


def main(cc: int, dtype: str) -> None:
    results: list[dict] = []
    compile_instead_of_launching(cc, results)
    every_kernel(cc, getattr(torch, dtype))
    print(json.dumps({"triton": triton.__version__, "results": results}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

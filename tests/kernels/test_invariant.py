"""The same bits for a row, however many rows are computed with it, if the workspace is invariant. On a GPU: its units decide.

Catches: tiles, steps or splits of K chosen by the number of tokens; another instruction for few tokens; FP8 sums that are set
aside after other elements; attention of prompts that adds KV splits in another order than decoding, or rescales by factors that
round; sums over a row whose order is that of a tile's layout; QK-norms by the number of tokens; other kernels, other parts of
the router's logits, or another sum over experts, for some steps of a mixture; unpacked weights that are read too early.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from minirt.kernels import reference
from minirt.kernels.attention import decode, decode_few
from minirt.kernels.attention.dispatch import attention
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.kernels.attention.operands import AttentionInput, KVPages, Rope, Scores, Sequences
from minirt.kernels.launch import Workspace
from minirt.kernels.linear.dispatch import linear
from minirt.kernels.linear.product import Epilogue, Norm, Product
from minirt.kernels.moe.dispatch import mixture_residual, router_logits
from minirt.kernels.moe.mixture import SharedOutput

pytestmark = pytest.mark.gpu
TOKENS = (1, 2, 7, 16, 17, 33, 64, 65, 128, 129, 192, 300, 700)


@triton.jit
def _add(x, w, acc, EXCHANGED: tl.constexpr):
    return tl.dot(w, x.T, acc) if EXCHANGED else tl.dot(x, w.T, acc)


@triton.jit
def _tile_kernel(
    x_ptr, w_ptr, out_ptr, K, PART, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr, EXCHANGED: tl.constexpr,
    PAIR: tl.constexpr,
):  # fmt: skip
    """The first M rows of x times the first N of w, into rows of 256. Sums are set aside after each PART of K.
    EXCHANGED: w is on the M side. PAIR: the next N rows of w have a second accumulator."""
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[:, None], tl.arange(0, STEP)[None, :]
    sums = tl.zeros((N, M) if EXCHANGED else (M, N), tl.float32)
    second_sums = sums
    for first in range(0, K, PART):
        last = tl.minimum(first + PART, K)
        acc = tl.zeros((N, M) if EXCHANGED else (M, N), tl.float32)
        second = acc
        for start in range(first, last, STEP):
            inside = start + k < last
            x = tl.load(x_ptr + m * K + start + k, mask=inside, other=0.0)
            w_ptrs = w_ptr + n * K + start + k
            acc = _add(x, tl.load(w_ptrs, mask=inside, other=0.0), acc, EXCHANGED)
            if PAIR:
                second = _add(x, tl.load(w_ptrs + N * K, mask=inside, other=0.0), second, EXCHANGED)
        sums += acc
        second_sums += second
    out = out_ptr + m * 256 + n.T
    tl.store(out, sums.T if EXCHANGED else sums)
    if PAIR:
        tl.store(out + N, second_sums.T if EXCHANGED else second_sums)


@gluon.jit
def _wgmma_kernel(x_ptr, w_ptr, out_ptr, K, PART, N: gl.constexpr, STEP: gl.constexpr):
    """`_tile_kernel` with PAIR and 16 rows of x a warp, as two `warpgroup_mma` that are in flight together."""
    M: gl.constexpr = 16 * gl.num_warps()
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    MOVED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // STEP, STEP // 8], [gl.num_warps(), 1], [1, 0])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 256 // DTYPE.primitive_bitwidth])
    x_tile = gl.allocate_shared_memory(DTYPE, [M, STEP], gl.NVMMASharedLayout.get_default_for([M, STEP], DTYPE))
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, STEP], DTYPE)
    w_tile = gl.allocate_shared_memory(DTYPE, [N, STEP], w_layout)
    second_tile = gl.allocate_shared_memory(DTYPE, [N, STEP], w_layout)
    k = gl.arange(0, STEP, gl.SliceLayout(0, MOVED))[None, :]
    x_ptrs = x_ptr + gl.arange(0, M, gl.SliceLayout(1, MOVED))[:, None] * K + k
    w_ptrs = w_ptr + gl.arange(0, N, gl.SliceLayout(1, MOVED))[:, None] * K + k
    sums = gl.zeros([M, N], gl.float32, SUMS)
    second_sums = sums
    for first in range(0, K, PART):
        last = gl.minimum(first + PART, K)
        acc = gl.zeros([M, N], gl.float32, SUMS)
        second = acc
        for start in range(first, last, STEP):
            inside = start + k < last
            x_tile.store(gl.load(x_ptrs + start, mask=inside, other=0.0))
            w_tile.store(gl.load(w_ptrs + start, mask=inside, other=0.0))
            second_tile.store(gl.load(w_ptrs + N * K + start, mask=inside, other=0.0))
            fence_async_shared()
            acc = warpgroup_mma(x_tile, w_tile.permute((1, 0)), acc, is_async=True)
            second = warpgroup_mma(x_tile, second_tile.permute((1, 0)), second, is_async=True)
            acc, second = warpgroup_mma_wait(0, deps=[acc, second])
        sums += acc
        second_sums += second
    m = gl.arange(0, M, gl.SliceLayout(1, SUMS))[:, None]
    out = out_ptr + m * 256 + gl.arange(0, N, gl.SliceLayout(0, SUMS))[None, :]
    gl.store(out, sums)
    gl.store(out + N, second_sums)


class Form(NamedTuple):
    """A kernel that multiplies `rows` of x by `columns` of w, its constants, and its number of warps."""

    kernel: Any
    rows: int
    columns: int
    constants: dict[str, Any]
    warps: int


def forms(eight_bits: bool, hopper: bool) -> Iterator[Form]:
    """The largest tile first. No tile has more than 64 sums a thread, or steps too long for shared memory."""
    for M, N, (step, warps), (exchanged, pair) in itertools.product(
        (128, 64, 32, 16), (128, 16), ((128, 8), (64, 8), (128, 4), (32, 4)), ((False, False), (True, False), (False, True))
    ):
        columns = 2 * N if pair else N
        fits = M * columns <= 2048 * warps and (M + columns) * step <= 1 << 15
        if fits and not (eight_bits and (N if exchanged else M) < 64):
            constants = {"M": M, "N": N, "STEP": step, "EXCHANGED": exchanged, "PAIR": pair}
            yield Form(_tile_kernel, M, columns, constants, warps)
    if hopper:
        for N, step, warps in itertools.product((64, 16), (128, 64, 32), (8, 4)):
            yield Form(_wgmma_kernel, 16 * warps, 2 * N, {"N": N, "STEP": step}, warps)


def far_apart(rows: int, K: int, dtype: torch.dtype, gen: torch.Generator) -> torch.Tensor:
    """Random values over many powers of two, so that another order or rounding of sums is seen."""
    x = torch.randn(rows, K, generator=gen, device=gen.device)
    return (x * torch.randint(-4, 5, (rows, K), generator=gen, device=gen.device).exp2()).to(dtype)


@pytest.mark.parametrize("K", [576, 1104, 3584, 18944])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_tiles_of_tensor_cores_agree(dtype, K, device):
    """What `product.part_of` stands on, of any version of Triton: in 16 bits every tile, instruction and step gives one result,
    and two accumulators the same. In FP8, tiles of 64 rows or more do; smaller ones are `mma.sync`, in another order."""
    gen = torch.Generator(device).manual_seed(K)
    x, w = far_apart(128, K, dtype, gen), far_apart(256, K, dtype, gen)
    exact = x.double() @ w.double().T
    for part in (K, 512):
        truth = torch.full((128, 256), torch.nan, device=device)
        for form in forms(dtype.itemsize == 1, torch.cuda.get_device_capability(device) == (9, 0)):
            out = torch.full((128, 256), torch.nan, device=device)
            form.kernel[(1,)](x, w, out, K, part, **form.constants, num_warps=form.warps)
            tile = slice(0, form.rows), slice(0, form.columns)
            assert (out - exact)[tile].abs().max() < 0.05 * exact.abs().max(), (part, form)
            truth = torch.where(truth.isnan(), out, truth)
            assert torch.equal(out[tile], truth[tile]), (part, form)


def test_powers_of_two_are_exact(device):
    """Catches rescaling of attention's sums by factors that round."""

    @triton.jit
    def kernel(x_ptr, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(x_ptr + i, tl.exp2(-i.to(tl.float32)))

    out = torch.full((128,), torch.nan, device=device)
    kernel[(1,)](out, 128)
    assert out[:126].tolist() == [2.0**-i for i in range(126)]


def of_product(N, K, form, kind, device, seed=0):
    """compute(first token, tokens): rows of a product in an invariant step."""
    dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(kind, torch.bfloat16)
    gen = torch.Generator(device).manual_seed(N + K + seed)

    def make(*shape, scale=1.0):
        return (torch.randn(*shape, generator=gen, device=device) * scale).to(dtype)

    rows = 2 * N if form == "gated" else N
    weight, scale = make(rows, K, scale=K**-0.5), None
    if kind == "fp8":
        weight, scale = reference.quantize_fp8(weight)
        scale = scale.flatten()
    elif kind == "fp8_blocks":
        weight, scale = weight.to(torch.float8_e4m3fn), torch.rand(rows // 128, K // 128, generator=gen, device=device) + 0.5
    elif kind in ("int4", "mxfp4"):
        weight, scale = reference.quantize_weight(weight, kind)
    x, residual, bias, norm = make(max(TOKENS), K), make(max(TOKENS), N), make(rows), Norm(make(K), 1e-6)
    workspace = Workspace(device, 1 << 24, invariant=True)

    def compute(first, count):
        part = slice(first, first + count)
        ep = Epilogue(
            scale, None, bias if form == "bias" else None, "silu" if form == "gated" else None,
            residual[part].contiguous() if form == "residual" else None,
        )  # fmt: skip
        out = torch.full((count, N), torch.nan, dtype=torch.float32 if form == "logits" else dtype, device=device)
        return linear(Product(x[part].contiguous(), weight, out, norm if form != "residual" else None, ep, workspace, True))

    return compute


@pytest.mark.parametrize(("N", "K", "form"), [
    (96, 576, "plain"), (512, 3584, "residual"), (4608, 3584, "bias"), (1184, 896, "gated"), (3584, 18944, "residual"),
    (18944, 3584, "gated"), (520, 1096, "bias"), (152, 4864, "residual"), (32000, 2048, "logits"),
    (1, 2048, "plain"),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8", "fp8_blocks", "fp32", "int4", "mxfp4"])
def test_products(N, K, form, kind, device):
    if kind == "fp8_blocks" and (N % 128 or K % 128):
        pytest.skip("blocks of 128")
    if kind == "fp32" and N * K > 1 << 24:
        pytest.skip("slow")
    compute = of_product(N, K, form, kind, device)
    truth = torch.cat([compute(i, 1) for i in range(40)])
    assert truth.isfinite().all()
    for count in TOKENS:
        out = compute(0, count)[:40]
        assert torch.equal(out, truth[: len(out)]), f"{count} tokens, {(out != truth[: len(out)]).sum().item()} values differ"
    for first, count in ((3, 20), (7, 1), (11, 290)):
        out = compute(first, count)[: 40 - first]
        assert torch.equal(out, truth[first : first + len(out)]), (first, count)


@pytest.mark.parametrize(("N", "K", "form"), [
    (960, 576, "plain"), (576, 576, "residual"), (1536, 576, "gated"), (576, 1536, "residual"),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["bf16", "fp8", "int4"])
def test_products_in_a_cuda_graph(N, K, form, kind, device):
    """Of SmolLM2-135M, with two weights in turn. Catches a kernel that reads a weight while the kernel before still unpacks it.
    Kernels that are launched one by one are too far apart for that, and memory of a single weight has its values already."""
    computes = [of_product(N, K, form, kind, device, seed) for seed in (0, 1)]
    truth = [torch.cat([compute(i, 1) for i in range(40)]) for compute in computes]
    calls = [(i, count) for count in (1, 2, 16, 17, 64, 65, 300, 700) for i in (0, 1)]
    for i, count in calls:  # compiles
        computes[i](0, count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [computes[i](0, count)[:40] for i, count in calls]
    for _ in range(5):
        graph.replay()
        for (i, count), out in zip(calls, outs, strict=True):
            differ = (out != truth[i][: len(out)]).sum().item()
            assert not differ, f"weight {i}, {count} tokens: {differ} values differ"


@pytest.mark.parametrize(("E", "k", "H", "inter"), [(128, 8, 2048, 768), (32, 4, 2880, 2880), (8, 2, 1024, 2112)])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8", "fp8_blocks", "int4", "mxfp4"])
def test_mixtures(E, k, H, inter, kind, device, on_hopper):
    if kind == "fp8_blocks" and (H % 128 or inter % 64):
        pytest.skip("blocks of 128")
    dtype = torch.float16 if kind == "fp16" else torch.bfloat16
    gen = torch.Generator(device).manual_seed(E + H)

    def make(*shape, scale=1.0):
        return (torch.randn(*shape, generator=gen, device=device) * scale).to(dtype)

    def experts(rows, K, part):
        weight = make(E, rows, K, scale=K**-0.5)
        if kind in ("bf16", "fp16"):
            return weight, None
        stored = [reference.quantize_weight(one, kind, part) for one in weight]
        return tuple(torch.stack(tensors) for tensors in zip(*stored, strict=True))

    (up, up_scale), (down, down_scale) = experts(2 * inter, H, inter), experts(H, inter, H)
    T = 1100
    x, norm, router, y, gate = make(T, H), make(H), make(E, H, scale=H**-0.5), make(T, H), make(T, 1)
    biased = kind == "mxfp4"
    bias = make(E) if biased else None
    biases = {"gate_up_bias": make(E, 2 * inter), "down_bias": make(E, H), "limit": 7.0, "alpha": 1.702} if biased else {}

    def compute(first, count):
        part = slice(first, first + count)
        h = x[part].contiguous()
        logits = router_logits(
            h, norm, 1e-6, router, k, bias=bias, four_bits=up.dtype == torch.int16,
            invariant=True, pdl=True,
        )  # fmt: skip
        return mixture_residual(
            h, logits, up, down, h, k, True, "silu", norm_weight=norm, eps=1e-6, gate_up_scale=up_scale, down_scale=down_scale,
            shared=None if biased else SharedOutput(y[part].contiguous(), gate[part].contiguous()), invariant=True, pdl=True,
            **biases,
        )  # fmt: skip

    truth = torch.cat([compute(i, 1) for i in range(40)])
    assert truth.isfinite().all()
    for count in (*TOKENS, 1100):
        out = compute(0, count)[:40]
        assert torch.equal(out, truth[: len(out)]), f"{count} tokens, {(out != truth[: len(out)]).sum().item()} values differ"
    for first, count in ((3, 20), (7, 1), (11, 290)):
        out = compute(first, count)[: 40 - first]
        assert torch.equal(out, truth[first : first + len(out)]), (first, count)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("pages", ["bf16", "fp16", "fp8", "fp32"])
@pytest.mark.parametrize(("Nq", "Nkv", "D", "norm", "sinks"), [
    (14, 2, 64, False, False), (7, 1, 128, True, False), (8, 8, 128, False, False), (4, 2, 256, True, False),
    (16, 2, 64, False, True),
])  # fmt: skip
def test_attention(Nq, Nkv, D, norm, sinks, pages, window, device):
    """The results of all tokens of a prompt, and its pages, for any division into steps and beside any other sequences. The first
    prompt is long enough for Hopper's kernel."""
    dtype, PAGE = {"fp32": torch.float32, "fp16": torch.float16}.get(pages, torch.bfloat16), 16
    gen = torch.Generator(device).manual_seed(D + Nq)

    def make(*shape):
        return torch.randn(*shape, generator=gen, device=device).to(dtype)

    lens, width = [1100, 300, 40, 611], (Nq + 2 * Nkv) * D
    order, per, heads = torch.randperm(280, generator=gen, device=device).int(), 70, [make(n, width) for n in lens]
    tables = order.view(4, per)
    cos_sin, weights = make(1100, D).float(), (make(D), make(D)) if norm else (None, None)
    shape, sink = (280, PAGE, Nkv, D), make(Nq) if sinks else None
    workspace = Workspace(device, 1 << 24, invariant=True)

    def cache():
        if pages == "fp8":
            empty = [torch.zeros(shape, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
            return KVPages(*empty, *(torch.full(shape[:3], torch.nan, device=device) for _ in range(2)))
        return KVPages(*(torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2)))

    def step(kv, parts):
        """Outputs of parts (sequence, first token, end)."""
        new, seq_lens = [end - first for _, first, end in parts], [end for *_, end in parts]
        raw = torch.cat([heads[b][first:end] for b, first, end in parts])
        positions = torch.cat([torch.arange(first, end, device=device) for _, first, end in parts])
        places = torch.cat([tables[b].long()[torch.arange(first, end, device=device) // PAGE] for b, first, end in parts])
        slots = places * PAGE + positions % PAGE
        i32 = {"dtype": torch.int32, "device": device}
        starts = decode.splits_before(seq_lens, KV_SPLIT, window, new)
        bound = sum(-(-n // KV_SPLIT) for n in seq_lens)
        workspace.reserve(decode_few.workspace_floats(bound, Nq, D))
        query_starts = None if max(new) == 1 else torch.tensor([sum(new[:i]) for i in range(len(new) + 1)], **i32)
        a = AttentionInput(
            raw, kv, Sequences(torch.stack([tables[b] for b, *_ in parts]), torch.tensor(seq_lens, **i32),
            torch.tensor(starts, **i32), query_starts), Scores(D**-0.5, window),
            torch.full((len(raw), Nq, D), torch.nan, dtype=dtype, device=device), Rope(cos_sin, *weights, 1e-6), positions, slots,
            workspace, bound, max(seq_lens), max(new), pdl=True, sinks=sink,
        )  # fmt: skip
        return attention(a).split(new)

    whole = cache()
    truth = [step(whole, [(b, 0, n)])[0] for b, n in enumerate(lens)]
    assert all(x.isfinite().all() for x in truth)

    def same(kv, b, first, end, out):
        differ = (out != truth[b][first:end]).flatten(1).any(1).nonzero().flatten().tolist()
        assert not differ, f"{len(differ)} tokens of sequence {b}, first {first + differ[0]}, in steps of {end - first}"

    for size in (1, 3, 17, 64, 300):
        kv = cache()
        for first in range(0, lens[0], size):
            end = min(first + size, lens[0])
            same(kv, 0, first, end, step(kv, [(0, first, end)])[0])
            if size == 1 and first == 600:  # beside others, with one new token each, then with few
                for b in (1, 2, 3):
                    step(kv, [(b, 0, lens[b])])
                last = [(b, n - 1, n) for b, n in enumerate(lens) if b] + [(0, first, end)]
                for part, out in zip(last, step(kv, last), strict=True):
                    same(kv, *part, out)
                few = [(1, lens[1] - 5, lens[1]), (0, first - 2, end), (2, 39, 40)]
                for part, out in zip(few, step(kv, few), strict=True):
                    same(kv, *part, out)
                mixed = [(3, 100, 611), (0, first, end), (1, 290, 300), (2, 0, 40)]
                for part, out in zip(mixed, step(kv, mixed), strict=True):
                    same(kv, *part, out)
        slots = torch.arange(lens[0], device=device)
        at = tables[0].long()[slots // PAGE] * PAGE + slots % PAGE
        for mine, theirs in zip(kv, whole, strict=True):
            if mine is not None:
                assert torch.equal(mine.flatten(0, 1)[at].float(), theirs.flatten(0, 1)[at].float())

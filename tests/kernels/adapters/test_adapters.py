"""Adapters by row: the kernels against fp64 math that knows one row and one adapter at a time."""

from functools import partial

import pytest
import torch

from minirt.bench import bounds
from minirt.errors import InputError
from minirt.kernels.adapters import reference
from minirt.kernels.adapters.operands import AdapterRows, AdapterWeights, most_steps
from minirt.kernels.launch import Workspace
from minirt.kernels.reference import ACTIVATE

triton_kernels = pytest.importorskip("minirt.kernels.adapters.expand")
from minirt.kernels.adapters.shrink import low_rank  # noqa: E402
from minirt.kernels.linear.dispatch import linear_residual, norm_gate_up, norm_linear  # noqa: E402

RANKS = (4, 16, 32, 1, 0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float32,)


def weights_of(parts, K, dtype, R=32):
    """Adapters of five places. Of a module without one (rank 0), the weights are those of another adapter."""
    P, N, S = 1 + max(part[2] for part in parts), parts[-1][1], len(RANKS)
    random = torch.Generator().manual_seed(7)
    a, b = torch.randn(S, P, R, K, generator=random) / K**0.5, torch.zeros(N, S, P, R)
    ranks = torch.tensor([[-(-RANKS[(place + 2 * module) % S] * R // 32) for module in range(P)] for place in range(S)])
    for place in range(S):
        for start, end, module in parts:
            rank = int(ranks[place, module]) or 3
            a[place, module, rank:] = 0
            b[start:end, place, module, :rank] = torch.randn(end - start, rank, generator=random)
    scales = torch.zeros(S, P + 3)[:, :P]  # as in an engine, rows of these are apart
    scales.copy_((torch.rand(S, P, generator=random) + 0.5) * (ranks > 0))
    stored = torch.zeros(S, P + 3, device=DEVICE)
    stored[:, :P] = scales
    return AdapterWeights(a.to(DEVICE, dtype), b.flatten(1).to(DEVICE, dtype), stored[:, :P])


def truth(x, w, adapters, base, norm, eps, activation, parts):
    x, out, (S, P, R, _) = x.double(), base.double().clone(), w.a.shape
    b = w.b.double().view(len(w.b), S, P, R)
    for t, adapter in enumerate(adapters.tolist()):
        if adapter < 0:
            continue
        h = x[t] if norm is None else x[t] / (x[t].square().mean() + eps).sqrt() * norm.double()
        for start, end, module in parts:
            if w.scales[adapter, module]:
                y = w.a[adapter, module].double() @ h
                out[t, start:end] += w.scales[adapter, module].double() * (b[start:end, adapter, module] @ y)
    return out if activation is None else ACTIVATE[activation](out.chunk(2, 1)[0]) * out.chunk(2, 1)[1]


def rows_of(adapters, w):
    S, P, R, _ = w.a.shape
    return AdapterRows(adapters, {P: reference.used_steps(adapters, P, R, S)})


def drawn(T, K, N, dtype, normed, seed):
    random = torch.Generator().manual_seed(seed)
    x, base = torch.randn(T, K, generator=random).to(DEVICE, dtype), torch.randn(T, N, generator=random).to(DEVICE, dtype)
    norm = (torch.rand(K, generator=random) + 0.5).to(DEVICE, dtype) if normed else None
    return x, base, norm, torch.randint(-1, len(RANKS), (T,), generator=random, dtype=torch.int32).to(DEVICE)


QKV, GATED = [(0, 70, 0), (70, 101, 1), (101, 131, 2)], [(0, 97, 0), (97, 194, 1)]
CASES = [
    (1, 576, QKV, None), (4, 97, QKV, None), (37, 1100, [(0, 40, 0)], None), (5, 300, GATED, "silu"), (300, 130, GATED, "gelu"),
    (3, 80, [(0, 48, 0), (48, 96, 0)], "silu"),
]  # fmt: skip


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("T", "K", "parts", "activation"), CASES)
def test_against_one_row_at_a_time(T, K, parts, activation, normed):
    """Catches rows of another adapter, modules without an adapter (rank 0), modules swapped, a part of K left out, a sum that
    enters after the activation, and rows without an adapter that change."""
    for dtype in DTYPES:
        w, workspace = weights_of(parts, K, dtype), Workspace(DEVICE)
        x, base, norm, adapters = drawn(T, K, parts[-1][1], dtype, normed, T)
        rows = rows_of(adapters, w)
        wanted = truth(x, w, adapters, base, norm, 1e-5, activation, parts)
        theirs = reference.add_adapters(x, w, rows, base.clone(), norm, 1e-5, activation)
        ours = triton_kernels.add_adapters(x, w, rows, base.clone(), norm, 1e-5, activation, workspace=workspace)
        errors = bounds.errors(theirs, wanted)
        assert errors.relative < (1e-5 if dtype == torch.float32 else 2e-2), "the reference"
        assert bounds.errors(ours, wanted).relative < (1e-5 if dtype == torch.float32 else 2e-2)
        if activation is None:
            assert torch.equal(ours[adapters < 0], base[adapters < 0])
        again = triton_kernels.add_adapters(x, w, rows, base.clone(), norm, 1e-5, activation, workspace=workspace)
        assert torch.equal(ours, again)


# For each kernel of linears; columns that cut its tiles between modules; enough of them for a split of K, and for strips. Last,
# ranks other than 32, with which blocks of columns are of one place, or of several, or of two modules.
PRODUCTS = [
    (1, 576, QKV, None), (1, 1100, GATED, "silu"), (1, 97, [(0, 40, 0)], None), (3, 576, QKV, None), (40, 1088, GATED, "silu"),
    (64, 1152, [(0, 256, 0)], None), (150, 320, [(0, 200, 0), (200, 264, 1), (264, 328, 2)], None),
    (200, 328, [(0, 96, 0), (96, 192, 1)], "gelu"), (130, 2304, [(0, 136, 0)], None),
    (1, 64, QKV, None, 16), (1, 72, QKV, None, 48), (1, 64, GATED, "silu", 80), (1, 64, [(0, 48, 0), (48, 96, 0)], "silu", 48),
    (3, 64, GATED, "silu", 48), (20, 64, [(0, 48, 0), (48, 96, 0)], "silu", 16), (130, 64, GATED, "silu", 80),
]  # fmt: skip
LARGE = [
    (2048, 2304, [(0, 3584, 0), (3584, 4096, 1), (4096, 4608, 2)], None), (500, 1024, [(0, 4000, 0), (4000, 8000, 1)], "silu"),
]  # fmt: skip


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("case", PRODUCTS + LARGE * (DEVICE == "cuda"))
def test_in_the_product(case, alone):
    """Catches columns of another module or place, steps that only some programs of a tile take, a sum that the root mean square
    divides twice or not at all, one that enters after the activation or is added by each part of K, and rows without an adapter
    that get one. `alone`: one adapter for all rows."""
    T, K, parts, activation, *rank = case
    for dtype in DTYPES:
        w, N, workspace = weights_of(parts, K, dtype, *rank), parts[-1][1], Workspace(DEVICE)
        x, residual, norm, adapters = drawn(T, K, N, dtype, activation is not None or T % 2 == 1, K + T)
        if alone:
            adapters.fill_(2 if T > 1 else -1)
        weight = (torch.randn(N, K, generator=torch.Generator().manual_seed(K)) / K**0.5).to(DEVICE, dtype)
        added = partial(low_rank, weights=w, rows=rows_of(adapters, w), workspace=workspace)
        h = x.double() if norm is None else x.double() / (x.double().square().mean(1, True) + 1e-5).sqrt() * norm.double()
        base = h @ weight.double().T
        base += residual.double() if norm is None else 0.0
        ours = product(x, norm, weight, residual, activation, workspace, added)
        wanted = truth(x, w, adapters, base, norm, 1e-5, activation, parts)
        assert bounds.errors(ours, wanted).relative < (1e-5 if dtype == torch.float32 else 2e-2)
        assert torch.equal(ours, product(x, norm, weight, residual, activation, workspace, added))


def product(x, norm, weight, residual, activation, workspace, added):
    if activation is not None:
        return norm_gate_up(x, norm, 1e-5, weight, activation, workspace=workspace, adapters=added)
    if norm is None:
        return linear_residual(x, weight, residual, workspace=workspace, adapters=added)
    return norm_linear(x, norm, 1e-5, weight, workspace=workspace, adapters=added)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 5, 16, 64, 128, 300])
def test_overlapping_kernels(T):
    """Catches a product that reads an x which is not complete, or that a cache has as it was, or y before its time:
    each product changes x in place, in a CUDA graph that runs repeatedly."""
    K, width, dtype = 1152, 2304, torch.bfloat16
    random = torch.Generator().manual_seed(T)
    shapes = (2 * width, K), (K, width)
    gate, down = ((torch.randn(n, k, generator=random) / k**0.5).to(DEVICE, dtype) for n, k in shapes)
    parts = [(0, width, 0), (width, 2 * width, 1)], [(0, K, 0)]
    x, _, norm, adapters = drawn(T, K, K, dtype, True, T)
    outputs = []
    for pdl in (False, True):
        workspace, y, graph = Workspace(DEVICE), x.clone(), torch.cuda.CUDAGraph()
        added = []
        for part, k in zip(parts, (K, width), strict=True):
            w = weights_of(part, k, dtype)
            added.append(partial(low_rank, weights=w, rows=rows_of(adapters, w), workspace=workspace, pdl=pdl))

        def layers(y=y, workspace=workspace, added=added, pdl=pdl):
            for _ in range(24):
                h = norm_gate_up(y, norm, 1e-5, gate, "silu", workspace=workspace, adapters=added[0], pdl=pdl)
                linear_residual(h, down, y, out=y, workspace=workspace, adapters=added[1], pdl=pdl)

        layers()
        y.copy_(x)
        with torch.cuda.graph(graph):
            layers()
        y.copy_(x)
        for _ in range(5):
            graph.replay()
        outputs.append(y.clone())
    assert torch.isfinite(outputs[0]).all()
    assert torch.equal(*outputs)


def test_a_product_without_a_kernel_for_adapters_is_refused():
    """Catches a weight in 4 bits, or FP8, whose product leaves the adapters out without a word."""
    words, scale = torch.zeros(32, 32, dtype=torch.int16, device=DEVICE), torch.ones(1, 32, dtype=torch.int32, device=DEVICE)
    with pytest.raises(InputError, match="no kernel adds adapters to this product"):
        norm_linear(torch.ones(3, 128, device=DEVICE), None, 0.0, words, scale=scale, adapters=lambda x, norm: None)


def test_no_row_gets_what_another_adapter_has():
    """Catches a row whose values change with the adapters of its neighbours, which have large weights."""
    w, workspace = weights_of(QKV, 96, torch.float32), Workspace(DEVICE)
    x, base, _, _ = drawn(20, 96, 131, torch.float32, False, 5)
    w.a[1], w.b.view(131, len(RANKS), -1)[:, 1] = 1e18, 1e18
    adapters = torch.tensor([1, 2] * 10, dtype=torch.int32, device=DEVICE)
    together = triton_kernels.add_adapters(x, w, rows_of(adapters, w), base.clone(), workspace=workspace)
    adapters[::2] = -1
    alone = triton_kernels.add_adapters(x, w, rows_of(adapters, w), base.clone(), workspace=workspace)
    assert torch.equal(alone[1::2], together[1::2])


@pytest.mark.parametrize(("T", "places", "P", "R"), [(1, 1, 1, 16), (16, 3, 3, 16), (300, 8, 4, 48), (700, 2, 2, 128)])
def test_the_used_steps(T, places, P, R):
    """Catches a block whose adapter a row has and that is left out, old ones that stay, rows in another order, and blocks that
    other tokens than `rows` use among those of `rows`, whose y may have no columns for them."""
    from minirt.kernels.adapters import rows as kernels

    random, most = torch.Generator().manual_seed(T), most_steps(P, R, places)
    adapters = torch.randint(-1, places, (T,), generator=random, dtype=torch.int32)
    adapters[adapters == places // 2] = -1  # one that nobody has
    rows = torch.randperm(T, generator=random)[: -(-T // 3) % 100]
    steps = torch.full((2, P, 1 + most), -7, dtype=torch.int32, device=DEVICE)
    of_rows = torch.full((len(rows),), -9, dtype=torch.int32, device=DEVICE)
    kernels.used_steps(adapters.to(DEVICE), rows.to(DEVICE), of_rows, R, places, steps)
    assert of_rows.tolist() == adapters[rows].tolist()
    for chosen, made in zip((adapters, adapters[rows]), steps.tolist(), strict=True):
        for modules, of in enumerate(made, 1):
            wanted = reference.used_steps(chosen, modules, R, places).tolist()
            assert wanted[0] <= most_steps(modules, R, places, len(chosen))
            assert of[: 1 + wanted[0]] == wanted[: 1 + wanted[0]]


def test_the_adapter_of_each_token():
    """Catches a token that gets the adapter of another sequence, and padding that has one."""
    from minirt.kernels.adapters import rows as kernels

    table = torch.full((6, 8), 99, dtype=torch.int32)
    table[:, 4] = torch.tensor([3, -1, 0, 2, 5, 1])
    slots, starts = torch.tensor([4, 1, 0, -1], dtype=torch.int32), torch.tensor([0, 300, 301, 305, 305], dtype=torch.int32)
    wanted = [5] * 300 + [-1] + [3] * 4 + [-1] * 7
    assert reference.adapters_of(table, 4, slots, starts, 312).tolist() == wanted
    out = torch.full((312,), -9, dtype=torch.int32, device=DEVICE)
    kernels.adapters_of(table.to(DEVICE), 4, slots.to(DEVICE), starts.to(DEVICE), out)
    assert out.tolist() == wanted

"""Adapters by row: the kernels against fp64 math that knows one row and one adapter at a time."""

import pytest
import torch

from minirt.bench import bounds
from minirt.kernels.adapters import reference
from minirt.kernels.adapters.operands import AdapterWeights, Groups, most_tiles, tile_rows, tiles_of
from minirt.kernels.linear.product import TokenAdapter
from minirt.kernels.reference import ACTIVATE

triton_kernels = pytest.importorskip("minirt.kernels.adapters.add")
RANKS = (4, 16, 64, 1, 0)


def weights_of(parts, K, dtype, device, R=64):
    """Adapters of five places. Of a module without one (rank 0), the weights are those of another adapter."""
    P, N, S = 1 + max(part[2] for part in parts), parts[-1][1], len(RANKS)
    random = torch.Generator().manual_seed(7)
    a, b = torch.randn(S, P, R, K, generator=random) / K**0.5, torch.randn(S, N, R, generator=random)
    ranks = torch.tensor([[RANKS[(place + 2 * module) % S] for module in range(P)] for place in range(S)], dtype=torch.int32)
    for place in range(S):
        for start, end, module in parts:
            if rank := int(ranks[place, module]):
                a[place, module, rank:] = 0
                b[place, start:end, rank:] = 0
    scales, stored = torch.zeros(S, P + 3, device=device), torch.zeros(S, P + 3, dtype=torch.int32, device=device)
    scales, stored = scales[:, :P], stored[:, :P]  # as in an engine, rows of these are apart
    scales.copy_((torch.rand(S, P, generator=random) + 0.5) * (ranks > 0))
    stored.copy_(ranks)
    tiles = torch.tensor(tiles_of(parts), dtype=torch.int32).to(device)
    modules = torch.tensor([module for start, end, module in parts for _ in range(start, end)], dtype=torch.int32).to(device)
    return AdapterWeights(a.to(device, dtype), b.to(device, dtype), scales, stored, modules, tiles)


def truth(x, w, adapters, base, norm, eps, activation, parts):
    x, out = x.double(), base.double().clone()
    for t, adapter in enumerate(adapters.tolist()):
        if adapter < 0:
            continue
        h = x[t] if norm is None else x[t] / (x[t].square().mean() + eps).sqrt() * norm.double()
        for start, end, module in parts:
            rank = int(w.ranks[adapter, module])
            y = w.a[adapter, module, :rank].double() @ h
            out[t, start:end] += w.scales[adapter, module].double() * (w.b[adapter, start:end, :rank].double() @ y)
    return out if activation is None else ACTIVATE[activation](out.chunk(2, 1)[0]) * out.chunk(2, 1)[1]


def unmarked(count, device):
    return torch.full((count,), -1, dtype=torch.int32, device=device)


def grouped(adapters, places):
    g = reference.group_rows(adapters.cpu(), places, tile_rows(len(adapters)))
    return Groups(g.order.to(adapters.device), g.tiles.to(adapters.device), g.block)


QKV, GATED = [(0, 70, 0), (70, 101, 1), (101, 131, 2)], [(0, 97, 0), (97, 194, 1)]
CASES = [
    (1, 576, QKV, None), (7, 97, QKV, None), (37, 1100, [(0, 40, 0)], None), (5, 300, GATED, "silu"), (300, 130, GATED, "gelu"),
    (3, 80, [(0, 48, 0), (48, 96, 0)], "silu"),
]  # fmt: skip


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("T", "K", "parts", "activation"), CASES)
def test_against_one_row_at_a_time(T, K, parts, activation, normed):
    """Catches rows of another adapter, modules without an adapter (rank 0), modules swapped, a part of K left out, a sum that
    enters after the activation, and rows without an adapter that change."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
        random = torch.Generator().manual_seed(T)
        w, N = weights_of(parts, K, dtype, device), parts[-1][1]
        x, base = torch.randn(T, K, generator=random).to(device, dtype), torch.randn(T, N, generator=random).to(device, dtype)
        norm = (torch.rand(K, generator=random) + 0.5).to(device, dtype) if normed else None
        adapters = torch.randint(-1, len(RANKS), (T,), generator=random, dtype=torch.int32).to(device)
        groups = grouped(adapters, len(RANKS))
        wanted = truth(x, w, adapters, base, norm, 1e-5, activation, parts)
        tiles = len(groups.tiles)
        theirs = reference.add_adapters(x, w, groups, base.clone(), norm, 1e-5, activation)
        ours = triton_kernels.add_adapters(x, w, groups, base.clone(), norm, 1e-5, activation, marks=unmarked(tiles, device))
        errors = bounds.errors(theirs, wanted)
        assert errors.relative < (1e-5 if dtype == torch.float32 else 2e-2), "the reference"
        assert bounds.fault(bounds.errors(ours, wanted), errors, bounds.floor(dtype)) is None
        if activation is None:
            assert torch.equal(ours[adapters < 0], base[adapters < 0])
        again = triton_kernels.add_adapters(x, w, groups, base.clone(), norm, 1e-5, activation, marks=unmarked(tiles, device))
        assert torch.equal(ours, again)


@pytest.mark.parametrize(("T", "places"), [(1, 1), (16, 3), (17, 8), (300, 5), (700, 2)])
def test_rows_by_adapter(T, places):
    """Catches tiles with rows of two adapters, rows that no tile has or that two have, and unused tiles with old values."""
    from minirt.kernels.adapters import groups as kernels

    device, random = "cuda" if torch.cuda.is_available() else "cpu", torch.Generator().manual_seed(T)
    adapters = torch.randint(-1, places, (T,), generator=random, dtype=torch.int32).to(device)
    rows = torch.randperm(T, generator=random)[: max(1, T // 3)].sort().values.to(device)
    for chosen in (None, rows):
        of = adapters if chosen is None else adapters[chosen]
        count = len(of)
        out = Groups(
            torch.full((count,), -7, dtype=torch.int32, device=device),
            torch.full((most_tiles(count, places), 3), -7, dtype=torch.int32, device=device), tile_rows(count),
        )  # fmt: skip
        kernels.group_rows(adapters, places, out, chosen)
        seen = []
        for adapter, first, number in out.tiles.tolist():
            seen += out.order[first : first + number].tolist()
            assert number <= out.block
            assert (of[out.order[first : first + number].long()] == adapter).all()
        assert sorted(seen) == list(range(count))
        wanted = grouped(of, places)
        assert torch.equal(out.order, wanted.order)
        assert torch.equal(out.tiles, wanted.tiles)


def test_the_adapter_of_each_token():
    """Catches a token that gets the adapter of another sequence, and padding that has one."""
    from minirt.kernels.adapters import groups as kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = torch.full((6, 8), 99, dtype=torch.int32)
    table[:, 4] = torch.tensor([3, -1, 0, 2, 5, 1])
    slots, starts = torch.tensor([4, 1, 0, -1], dtype=torch.int32), torch.tensor([0, 300, 301, 305, 305], dtype=torch.int32)
    wanted = [5] * 300 + [-1] + [3] * 4 + [-1] * 7
    assert reference.adapters_of(table, 4, slots, starts, 312).tolist() == wanted
    out = torch.full((312,), -9, dtype=torch.int32, device=device)
    kernels.adapters_of(table.to(device), 4, slots.to(device), starts.to(device), out)
    assert out.tolist() == wanted


@pytest.mark.parametrize("adapter", [2, 1, -1])
@pytest.mark.parametrize(("K", "parts", "activation"), [(576, QKV, None), (1100, GATED, "silu"), (97, [(0, 40, 0)], None)])
def test_one_token_in_its_product(K, parts, activation, adapter):
    """Catches rows of B of another module, a sum that the root mean square divides twice or not at all, one that enters after the
    activation, and a token without an adapter that gets one."""
    from minirt.kernels.linear.dispatch import linear_residual, norm_gate_up, norm_linear

    device, random = "cuda" if torch.cuda.is_available() else "cpu", torch.Generator().manual_seed(K)
    w, N = weights_of(parts, K, torch.float32, device), parts[-1][1]
    x, weight = torch.randn(1, K, generator=random).to(device), (torch.randn(N, K, generator=random) / K**0.5).to(device)
    norm = (torch.rand(K, generator=random) + 0.5).to(device) if K != 97 else None
    groups = grouped(torch.tensor([adapter], dtype=torch.int32, device=device), len(RANKS))
    y = unmarked(w.a.shape[1] * w.a.shape[2], device)
    adapter_of_token = TokenAdapter(w.a, w.b, w.scales, w.modules, groups.tiles, y, w.scales.stride(0))
    h = x.double() if norm is None else x.double() / (x.double().square().mean() + 1e-5).sqrt() * norm.double()
    base, adapters = h @ weight.double().T, torch.tensor([adapter])
    if norm is None:
        residual = torch.randn(1, N, generator=random).to(device)
        ours, base = linear_residual(x, weight, residual, adapter=adapter_of_token), base + residual.double()
    elif activation is None:
        ours = norm_linear(x, norm, 1e-5, weight, adapter=adapter_of_token)
    else:
        ours = norm_gate_up(x, norm, 1e-5, weight, activation, adapter=adapter_of_token)
    wanted = truth(x, w, adapters, base, norm, 1e-5, activation, parts)
    assert bounds.errors(ours, wanted).relative < 1e-5

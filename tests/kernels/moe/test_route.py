"""The router's choice and the lists that the products by expert work through, against the reference and its invariants."""

import pytest
import torch

from minirt.kernels import reference
from minirt.kernels.linear.product import Norm
from minirt.kernels.moe import route as module
from minirt.kernels.moe.route import CASES, gather, most_tiles, route
from minirt.kernels.norm import rms_norm_quantize
from minirt.kernels.quantize import quantize


def check_lists(routing, E, block_t):
    order, tiles = reference.expert_tiles(routing.experts, E, block_t)
    assert torch.equal(routing.order, order)
    used = tiles.shape[1]
    assert routing.used.tolist() == [used]
    assert torch.equal(routing.tiles[:, :used], tiles)
    assert (routing.tiles[:, used:] == -1).all()
    assert used <= routing.tiles.shape[1]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_choice_and_lists(case, normalize, dtype, make):
    T, E, k = case["T"], case["E"], case["k"]
    logits = make(T, E, dtype=dtype, scale=2.0)
    routing = route(logits, k, normalize, 16)
    weights, experts = reference.route(logits, k, normalize)
    assert torch.equal(routing.experts.long(), experts)
    assert routing.weights.dtype == dtype
    torch.testing.assert_close(routing.weights, weights, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
    check_lists(routing, E, 16)


def test_ties_go_to_the_lower_expert(device):
    logits = torch.zeros(4, 70, device=device)
    logits[1, [69, 8, 31]] = 2.0
    logits[2, 40:] = -torch.inf
    logits[3] = -torch.inf
    logits[3, [66, 3]] = 1.0
    routing = route(logits, 4, True, 16)
    assert routing.experts.tolist() == [[0, 1, 2, 3], [8, 31, 69, 0], [0, 1, 2, 3], [3, 66, 0, 1]]
    torch.testing.assert_close(routing.weights, reference.route(logits, 4, True)[0], rtol=3e-7, atol=0)
    assert (routing.weights[1, :3] == routing.weights[1, 0]).all()


def test_a_row_with_nan_has_the_lowest_experts(make, device):
    logits = make(3, 9, dtype=torch.float32)
    logits[1, 4] = torch.nan
    routing = route(logits, 3, True, 16)
    assert routing.experts[1].tolist() == [0, 1, 2]
    assert routing.weights[1].isnan().all()
    assert routing.weights[[0, 2]].isfinite().all()
    check_lists(routing, 9, 16)


@pytest.mark.parametrize(("T", "block_t"), [(40, 2), (33, 128), (3, 16)])
def test_all_tokens_on_one_expert(T, block_t, device, monkeypatch):
    """More pairs of one expert, and more tiles, than a program handles at a time; the others have none."""
    monkeypatch.setattr(module, "_BLOCK", 16)
    monkeypatch.setattr(module, "FEW", 4)
    logits = torch.zeros(T, 7, device=device)
    logits[:, 5], logits[:, 2] = 9, 5
    routing = route(logits, 2, False, block_t)
    assert routing.order.tolist() == [*range(1, 2 * T, 2), *range(0, 2 * T, 2)]
    check_lists(routing, 7, block_t)


def test_every_share_of_tokens_fits_in_the_list():
    generator = torch.Generator().manual_seed(2)
    for _ in range(300):
        E, k = int(torch.randint(1, 9, (), generator=generator)), 1
        T, block_t = int(torch.randint(1, 40, (), generator=generator)), 1 << int(torch.randint(0, 5, (), generator=generator))
        experts = torch.randint(0, E, (T, k), generator=generator)
        assert reference.expert_tiles(experts, E, block_t)[1].shape[1] <= most_tiles(T * k, E, block_t)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("T", "H", "k"), [(1, 72, 3), (9, 272, 2), (5, 640, 1)])
def test_gather_quantizes_as_the_other_kernels_do(T, H, k, blocks, dtype, make):
    """The same bits, at every place of a token. A scale of 128 channels does not know the outlier of others, nor NaN."""
    x, norm = make(T, H, dtype=dtype), 1 + make(H, dtype=dtype, scale=0.3)
    x[0, 3], x[-1, H - 1] = 300, torch.nan
    routing = route(make(T, 5, dtype=dtype), k, True, 16)
    token = routing.order.long() // k
    for weight in (None, norm):
        out, scale = gather(x, routing, True, weight if weight is None else Norm(weight, 1e-6), blocks=blocks)
        alone = quantize(x, blocks=blocks) if weight is None else rms_norm_quantize(x, weight, 1e-6, blocks=blocks)
        assert torch.equal(out.view(torch.uint8), alone[0].view(torch.uint8)[token])
        assert torch.equal(scale, alone[1][token])
        assert scale.shape == ((T * k, -(-H // 128)) if blocks else (T * k,))

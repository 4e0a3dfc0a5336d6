"""The experts of a mixture by the kernels: against the reference in fp64, on tokens spread in every way."""

import pytest
import torch

from minirt.bench import bounds
from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels.linear.product import Epilogue, Product
from minirt.kernels.moe import products
from minirt.kernels.moe.dispatch import mixture, mixture_residual
from minirt.kernels.moe.mixture import Mixture, SharedOutput
from minirt.kernels.moe.products import CASES
from minirt.kernels.moe.route import route


def weights(make, E, H, inter, dtype):
    return make(E, 2 * inter, H, dtype=dtype, scale=H**-0.5), make(E, H, inter, dtype=dtype, scale=inter**-0.5)


def expected(h, logits, gate_up, down, residual, k, normalize, activation="silu", scales=(None, None), shared=None, gate=None):
    chosen, experts = reference.route(logits, k, normalize)
    y = reference.mixture(h, chosen, experts, gate_up, down, activation, *scales)
    if shared is not None:
        y = y + gate.sigmoid() * shared
    return residual + y


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mixture(case, dtype, make, agrees):
    T, E, k, H, inter = case.values()
    activation = "silu" if T > 1 else "gelu_tanh"
    h, residual, logits = (make(T, n, dtype=dtype) for n in (H, H, E))
    experts = weights(make, E, H, inter, dtype)
    shared, gate = (make(T, H, dtype=dtype), make(T, 1, dtype=dtype)) if E % 2 else (None, None)
    operands = (h, logits, *experts, residual)
    out = mixture_residual(*operands, k, True, activation, shared=None if shared is None else SharedOutput(shared, gate))
    same = expected(*operands, k, True, activation, shared=shared, gate=gate)
    wide = [None if t is None else t.double() for t in (*operands, shared, gate)]
    truth = expected(*wide[:5], k, True, activation, shared=wide[5], gate=wide[6])
    agrees(out, same, truth)


@pytest.mark.parametrize("T", [1, 9])
def test_fp8_experts(T, make):
    E, k, H, inter = 5, 2, 80, 48
    h, residual, logits = (make(T, n, dtype=torch.float32) for n in (H, H, E))
    (gate_up, up_scale), (down, down_scale) = map(reference.quantize_fp8, weights(make, E, H, inter, torch.float32))
    operands = (h, logits, gate_up, down, residual)
    out = mixture_residual(*operands, k, True, "silu", gate_up_scale=up_scale, down_scale=down_scale)
    same = expected(*operands, k, True, scales=(up_scale, down_scale))
    wide = (h.double(), logits.double(), gate_up, down, residual.double())
    truth = expected(*wide, k, True, scales=(up_scale, down_scale))
    least = bounds.floor(torch.float32, quantized_activations=not reference.few_tokens(T, k, E))
    assert bounds.fault(bounds.errors(out, truth), bounds.errors(same, truth), least) is None


@pytest.mark.parametrize("T", [1, 19])
def test_unused_experts_are_not_read_and_every_row_is_written(T, make, nan):
    """All tokens on two experts; the others hold NaN, as do the buffers before."""
    E, H, inter = 6, 40, 24
    gate_up, down = weights(make, E, H, inter, torch.float32)
    for tensor in (gate_up, down):
        tensor[[0, 1, 3, 5]] = torch.nan
    logits = torch.zeros(T, E, device=gate_up.device)
    logits[:, 4], logits[:, 2] = 3, 2
    h = make(T, H, dtype=torch.float32)
    routing = route(logits, 2, True, products.block_t(T))
    inner = nan(2 * T, inter, dtype=torch.float32)
    products.launch(Product(h, gate_up, inner, epilogue=Epilogue(activation="silu")), routing)
    rows = products.launch(Product(inner, down, nan(2 * T, H, dtype=torch.float32)), routing)
    out = products.combine(h, rows, routing.weights, nan(T, H, dtype=torch.float32))
    torch.testing.assert_close(out, expected(h, logits, gate_up, down, h, 2, True), rtol=1e-5, atol=1e-5)
    # Rows of `inner` stand in the order of experts: those of expert 2, each token's second, come first.
    gate, up = (h @ gate_up[2].T).chunk(2, -1)
    torch.testing.assert_close(inner[:T], torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [1, 19])
def test_the_output_may_be_the_residual(T, make):
    """Catches a residual that is read after it was overwritten."""
    gate_up, down = weights(make, 6, 40, 24, torch.float32)
    h, residual, logits = (make(T, n, dtype=torch.float32) for n in (40, 40, 6))
    other = mixture_residual(h, logits, gate_up, down, residual, 2, True, "silu")
    assert mixture(Mixture(h, logits, gate_up, down, residual, residual, 2, True, "silu")) is residual
    assert torch.equal(residual, other)


def test_nan_of_an_expert_stays_with_its_tokens(make):
    E, T, H, inter = 6, 30, 40, 24
    gate_up, down = weights(make, E, H, inter, torch.float32)
    down[3] = torch.nan
    h, logits = make(T, H, dtype=torch.float32), make(T, E, dtype=torch.float32)
    out = mixture_residual(h, logits, gate_up, down, h, 2, True, "silu")
    users = (reference.route(logits, 2, True)[1] == 3).any(1)
    assert 0 < users.sum() < T
    assert torch.equal(out.isnan().any(1), users)


def test_no_tokens_and_wrong_arguments(make):
    gate_up, down = weights(make, 4, 16, 8, torch.float32)
    h, logits = make(2, 16, dtype=torch.float32), make(2, 4, dtype=torch.float32)
    assert mixture_residual(h[:0], logits[:0], gate_up, down, h[:0], 2, True, "silu").shape == (0, 16)
    for words, arguments in (
        ("gate_up", (h, logits, gate_up[:, :-2].contiguous(), down, h, 2, True, "silu")),
        ("down", (h, logits, gate_up, down[:3], h, 2, True, "silu")), ("top_k", (h, logits, gate_up, down, h, 5, True, "silu")),
        ("activation", (h, logits, gate_up, down, h, 2, True, "relu")),
        ("logits", (h, logits[:1], gate_up, down, h, 2, True, "silu")),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"^{words}"):
            mixture_residual(*arguments)
    for shared, words in (
        (SharedOutput(h, h), "shared.gate"), (SharedOutput(h[:, 1:], h[:, :1]), "shared.output"),
        (reference.SharedExpert(gate_up[0, 2:], down[0], h[:1]), "shared: these experts do not compute it"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            mixture_residual(h, logits, gate_up, down, h, 2, True, "silu", shared=shared)

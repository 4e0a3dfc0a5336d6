"""The modules of `minirt.nn` beside the modules that they replace: `torch.nn`'s, and transformers' as the independent reference.

Catches: another epsilon or weight, gate and up mixed up, a bias or residual left out, a state dict that does not fit, a packed
weight that is a second copy or is not what the given modules hold, quantized weights that are far off, silent use without
gradients.
"""

from functools import partial

import pytest
import torch
from support.raising import raises
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import minirt.nn as mn
from minirt.errors import InputError
from minirt.kernels import reference


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


@pytest.fixture
def t(generator):
    return lambda *shape, dtype=torch.float32: torch.randn(*shape, generator=generator).to(dtype)


@pytest.fixture
def linear(t):
    """linear(K, N, bias): a layer with values of our own generator."""

    def make(K, N, bias=False, dtype=torch.float32):
        made = nn.Linear(K, N, bias, dtype=dtype)
        for parameter in made.parameters():
            parameter.copy_(t(*parameter.shape, dtype=dtype) * 0.3)
        return made

    return make


def norm(t, H, dtype=torch.float32):
    made = LlamaRMSNorm(H, eps=1e-4).to(dtype)
    made.weight.copy_(t(H, dtype=dtype))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (2, 1, 5), (0, 3)])
def test_rms_norm(shape, dtype, t):
    """Equal bits in 16 bits: the rounding order is transformers'."""
    theirs = norm(t, 13, dtype)
    ours, x = mn.RMSNorm.from_module(theirs), t(*shape, 13, dtype=dtype) * 0.01
    assert ours.weight is theirs.weight
    torch.testing.assert_close(ours(x), theirs(x), **({} if dtype == torch.float32 else {"rtol": 0, "atol": 0}))


def test_rms_norm_of_strided_values_and_of_torch(t):
    """Heads inside a packed projection: rows are contiguous, the tensor is not. PyTorch's epsilon is that of the dtype."""
    theirs, packed = norm(t, 16), t(2, 5, 48)
    x = packed[..., 16:].unflatten(-1, (2, 16))
    torch.testing.assert_close(mn.RMSNorm.from_module(theirs)(x), theirs(x))
    torch.testing.assert_close(mn.RMSNorm.from_module(theirs)(x.mT.contiguous().mT), theirs(x))
    theirs, x = nn.RMSNorm(16), t(3, 16) * 1e-4
    theirs.weight.copy_(t(16))
    torch.testing.assert_close(mn.RMSNorm.from_module(theirs)(x), theirs(x))
    with torch.device("meta"):
        assert mn.RMSNorm.from_module(LlamaRMSNorm(8)).weight.is_meta


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3)])
def test_norm_linear(shape, bias, t, linear):
    first, second = norm(t, 19), linear(19, 11, bias)
    ours, x = mn.RMSNormLinear.from_modules(first, second), t(*shape, 19)
    torch.testing.assert_close(ours(x), second(first(x)))
    assert ours.weight is second.weight
    assert [name for name, _ in ours.named_parameters()] == ["norm_weight", "weight"] + ["bias"] * bias


def mlp(linear, bias=False, dtype=torch.float32):
    return linear(19, 11, bias, dtype), linear(19, 11, bias, dtype), linear(11, 19, bias, dtype)


@pytest.mark.parametrize(("activation", "name"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh")])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp(activation, name, bias, t, linear):
    """With transformers' activation functions; one token, several, and with a residual and a norm."""
    (gate, up, down), before = mlp(linear, bias), norm(t, 19)

    def theirs(x):
        return down(ACT2FN[name](gate(x)) * up(x))

    for shape in ((1,), (7,), (2, 3)):
        x, residual = t(*shape, 19), t(*shape, 19)
        expected, normalized = theirs(x), theirs(before(x))
        ours = mn.GatedMLP.from_linears(gate, up, down, activation)
        torch.testing.assert_close(ours(x), expected)
        torch.testing.assert_close(ours(x, residual), expected + residual)
        ours = mn.GatedMLP.from_linears(gate, up, down, activation, mn.RMSNorm.from_module(before))
        torch.testing.assert_close(ours(x, x), normalized + x)


def test_packing_makes_views(linear):
    """No second copy; the modules keep their parameters, values and state dict; a change of one is a change of both."""
    layers = q, k, v = linear(19, 8, True), linear(19, 4, True), linear(19, 3, True)
    before = [{name: value.clone() for name, value in layer.state_dict().items()} for layer in layers]
    parameters = [layer.weight for layer in layers]
    weight, bias = mn.pack_linears(layers)
    assert (weight.shape, bias.shape) == ((15, 19), (15,))
    assert all(layer.weight is parameter for layer, parameter in zip(layers, parameters, strict=True))
    assert {layer.weight.untyped_storage().data_ptr() for layer in layers} == {weight.untyped_storage().data_ptr()}
    for layer, saved in zip(layers, before, strict=True):
        assert all(torch.equal(layer.state_dict()[name], value) for name, value in saved.items())
    k.load_state_dict({"weight": torch.ones(4, 19), "bias": torch.ones(4)})
    assert bool((weight[8:12] == 1).all())
    assert torch.equal(weight[12:], v.weight)
    assert torch.equal(weight[:8], before[0]["weight"])
    assert q.weight.is_contiguous()


def test_what_cannot_be_packed_is_named_and_unchanged(linear):
    first = linear(19, 8)
    pointer = first.weight.data_ptr()
    for other, message in (
        (linear(18, 8), r"linears\[1\]\.weight: wrong shape"),
        (linear(19, 8, dtype=torch.float16), r"linears\[1\]\.weight: wrong dtype"),
        (linear(19, 8, True), r"linears\[1\]\.bias: a bias in some layers only"),
    ):
        raises(message, mn.pack_linears, [first, other])
    raises("linears: nothing to pack", mn.pack_linears, [])
    raises(r"linears\[1\]\.weight: the same parameter twice", mn.pack_linears, [first, first])
    assert first.weight.data_ptr() == pointer


def test_a_failed_from_linears_changes_nothing(linear):
    gate, up, _ = mlp(linear)
    pointers = gate.weight.data_ptr(), up.weight.data_ptr()
    for down, activation in ((linear(12, 19), "silu"), (linear(11, 19), "relu"), (linear(11, 19, dtype=torch.float16), "silu")):
        raises(r"down\.weight: wrong|activation: unknown", mn.GatedMLP.from_linears, gate, up, down, activation)
    with pytest.raises(InputError, match=r"up.weight: wrong number of rows; expected 11; found 12"):
        mn.GatedMLP.from_linears(gate, linear(19, 12), linear(11, 19), "silu")
    assert (gate.weight.data_ptr(), up.weight.data_ptr()) == pointers


def test_state_dict_of_a_gated_mlp(t, linear):
    """The names and shapes of the three modules, in both directions, inside a model, and strictly."""
    gate, up, down = mlp(linear)
    theirs = nn.ModuleDict({"gate_proj": gate, "up_proj": up, "down_proj": down})
    saved = {f"0.{name}": value.clone() for name, value in theirs.state_dict().items()}
    model = nn.Sequential(mn.GatedMLP(19, 11))
    model.load_state_dict(saved)
    state = model.state_dict()
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[name], value) for name, value in saved.items())
    assert state["0.gate_proj.weight"].untyped_storage().data_ptr() == model[0].gate_up_weight.untyped_storage().data_ptr()
    x = t(3, 19)
    torch.testing.assert_close(model(x), down(nn.functional.silu(gate(x)) * up(x)))
    wrong = [({key: value for key, value in saved.items() if key != name}, "Missing key") for name in saved]
    wrong.append(({name: value[:, 1:] for name, value in saved.items()}, "size mismatch"))
    wrong.append((saved | {"0.gate_proj.bias": torch.ones(11)}, "Unexpected key"))
    for tensors, words in wrong:
        raises(words, model.load_state_dict, tensors, error=RuntimeError)


def test_a_moved_module_computes_the_same(t, linear):
    """`.to(dtype)` changes all weights, the packed ones included."""
    ours, x = mn.GatedMLP.from_linears(*mlp(linear), "silu"), t(3, 19)
    expected = ours(x)
    torch.testing.assert_close(ours.to(torch.float16).to(torch.float32)(x), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("kind", "most"), [(mn.FP8Linear, 0.05), (mn.Int4Linear, 0.15)])
@pytest.mark.parametrize("bias", [False, True])
def test_quantized(kind, most, bias, t, linear):
    """The error is that of the format. The output is exactly that of the dequantized weights, and of quantized activations."""
    theirs = linear(130, 23, bias)
    ours = kind.from_linear(theirs)
    for shape in ((1,), (3,), (2, 5)):
        x = t(*shape, 130)
        expected, result = theirs(x), ours(x)
        assert result.shape == expected.shape
        assert ((result - expected).norm() / expected.norm()).item() < most
        if kind is mn.Int4Linear:
            weight = reference.dequantize_int4(ours.weight, ours.weight_scale, 130)
            values = x
        else:
            weight = reference.dequantize_fp8(ours.weight, ours.weight_scale)
            rows = x.reshape(-1, 130)
            values = rows if len(rows) == 1 else reference.dequantize_fp8(*reference.quantize_fp8(rows))
            values = values.view(x.shape)
        torch.testing.assert_close(result, nn.functional.linear(values, weight, theirs.bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [mn.FP8Linear, mn.Int4Linear])
def test_state_dict_of_a_quantized_linear(kind, t, linear):
    """Its own, and that of the layer that it replaces, which is quantized while it is loaded. Neither is taken for the other."""
    theirs, x = linear(130, 23, True), t(3, 130)
    expected = kind.from_linear(theirs)
    for saved in (theirs.state_dict(), expected.state_dict()):
        ours = nn.Sequential(kind.from_linear(linear(130, 23, True)))
        ours.load_state_dict({f"0.{name}": value for name, value in saved.items()})
        assert torch.equal(ours(x), expected(x))
    raises("weight: wrong shape", ours[0].load_state_dict, linear(131, 23, True).state_dict())
    mixed = {**theirs.state_dict(), "weight_scale": expected.weight_scale}
    raises("weight: wrong dtype", ours[0].load_state_dict, mixed)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: mn.RMSNorm.from_module(nn.Linear(3, 4)), "module: no epsilon; expected variance_epsilon or eps; found Linear"),
    (lambda: mn.RMSNorm.from_module(nn.ReLU()), "module: not an RMSNorm with a weight; found ReLU"),
    (lambda: mn.RMSNorm.from_module(GemmaRMSNorm(8)), "module: not an RMSNorm: its output"),
    (lambda: mn.RMSNorm.from_module(nn.LayerNorm(8)), "module: not an RMSNorm: its output"),
    (  # `.to(dtype)` of a model converts float8 parameters, too: then the values have lost their scale
        lambda: mn.FP8Linear.from_linear(nn.Linear(16, 8)).to(torch.float32)(torch.ones(2, 16)),
        r"weight: wrong dtype; expected torch\.float8_e4m3fn",
    ),
    (lambda: mn.RMSNorm.from_module(nn.RMSNorm((2, 3))), r"module\.weight: wrong shape"),
    (lambda: mn.RMSNorm.from_module(nn.RMSNorm(3).double()), r"module\.weight: unsupported dtype"),
    (lambda: mn.RMSNormLinear.from_modules(nn.RMSNorm(4), nn.Linear(3, 5)), "norm_weight: wrong shape"),
    (lambda: mn.RMSNormLinear.from_modules(nn.RMSNorm(3), nn.Linear(3, 5).half()), "norm_weight: wrong dtype"),
    (lambda: mn.RMSNorm(3, dtype=torch.float64), "weight: unsupported dtype"),
    (lambda: mn.GatedMLP(3, 5, dtype=torch.float64), "weight: unsupported dtype"),
    (lambda: mn.GatedMLP(3, 6, "swish"), "activation: unknown activation"),
    (lambda: mn.GatedMLP(3, 6, "silu", mn.RMSNorm(4)), r"norm\.weight: wrong shape"),
    (lambda: mn.GatedMLP(3, 6, norm=mn.RMSNorm(3), dtype=torch.float16), r"norm\.weight: wrong dtype"),
    (lambda: mn.FP8Linear.from_linear(nn.Linear(3, 4).double()), "weight: unsupported dtype"),
    (lambda: mn.RotaryEmbedding(7), "head_dim: rotary embedding rotates pairs"),
])  # fmt: skip
def test_wrong_weights_are_named(make, message):
    """Catches a module that computes something else than the one it replaces."""
    raises(message, make)


MADE = {  # a constructor, the modules that it replaces, and how it is made of them
    "RMSNorm": (partial(mn.RMSNorm, 19, eps=1e-4), lambda: [LlamaRMSNorm(19, eps=1e-4)], mn.RMSNorm.from_module),
    "GatedMLP": (
        partial(mn.GatedMLP, 19, 11, "gelu", bias=True),
        lambda: (nn.Linear(19, 11), nn.Linear(19, 11), nn.Linear(11, 19), "gelu"), mn.GatedMLP.from_linears,
    ),
    "RMSNormLinear": (
        partial(mn.RMSNormLinear, 19, 11, bias=False, eps=1e-4),
        lambda: (LlamaRMSNorm(19, eps=1e-4), nn.Linear(19, 11, bias=False)), mn.RMSNormLinear.from_modules,
    ),
    "FP8Linear": (partial(mn.FP8Linear, 19, 11), lambda: [nn.Linear(19, 11)], mn.FP8Linear.from_linear),
    "Int4Linear": (partial(mn.Int4Linear, 19, 11, False), lambda: [nn.Linear(19, 11, False)], mn.Int4Linear.from_linear),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_a_constructor_takes_sizes_and_a_state_dict(name, t):
    """As those of `torch.nn`; then it computes what the module made of modules does. Also without memory, by `assign`. Parameters
    need no gradient, so that a new module runs outside of `no_grad`."""
    make, theirs, convert = MADE[name]
    expected, x = convert(*theirs()), t(3, 19)
    with torch.enable_grad():
        ours = make()
        assert ours(x).isfinite().all()
    assert repr(ours) == repr(expected)
    ours.load_state_dict(expected.state_dict())
    assert torch.equal(ours(x), expected(x))
    late = make(device="meta")
    late.load_state_dict(expected.state_dict(), assign=True)
    assert torch.equal(late(x), expected(x))
    assert make(dtype=torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


def test_a_quantized_linear_without_memory_takes_weights_of_16_bits(linear, t):
    """Catches weights that are assigned without being quantized."""
    theirs, x = linear(19, 11), t(3, 19)
    ours = mn.FP8Linear(19, 11, False, device="meta")
    ours.load_state_dict(theirs.state_dict(), assign=True)
    assert torch.equal(ours(x), mn.FP8Linear.from_linear(theirs)(x))


@pytest.mark.parametrize("size", [torch.ones(8), 0, -4, 8.0, True, "8", None], ids=str)
@pytest.mark.parametrize("kind", ["RMSNorm", "RMSNormLinear", "GatedMLP", "FP8Linear", "Int4Linear", "RotaryEmbedding"])
def test_a_wrong_size_is_named(kind, size):
    """Catches PyTorch's own errors, or none, where a constructor's size is a tensor or no positive integer."""
    arguments = [size] if kind in ("RMSNorm", "RotaryEmbedding") else [size, 8]
    raises("not a size", getattr(mn, kind), *arguments)

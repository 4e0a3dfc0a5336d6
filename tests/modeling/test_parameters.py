"""`Interleaved`: parts of a checkpoint's linear that has several, in every format.

Catches rows of another part, of another head, or with another row's scale or zero point.
"""

import pytest
import torch

from minirt.errors import UnsupportedError
from minirt.kernels import reference
from minirt.modeling import formats
from minirt.modeling.parameters import Interleaved, PackedLinear, Part
from minirt.modeling.quantization_config import INT4_LAYOUTS, Scheme

HEADS, D, K = 3, 128, 384
CPU = torch.device("cpu")
FORMATS = {
    "none": None, "--fp8": formats.QuantizedToFp8(), "fp8": formats.StoredFp8(),
    "fp8, one scale": formats.StoredFp8(per_tensor=True), "fp8 blocks": formats.StoredFp8Blocks(),
    "--quantize int4": formats.QuantizedToInt4(), "packed": formats.StoredInt4(Scheme(INT4_LAYOUTS["packed"], 32)),
    "packed with zero points": formats.StoredInt4(Scheme(INT4_LAYOUTS["packed"], 64, symmetric=False)),
    "gptq": formats.StoredInt4(Scheme(INT4_LAYOUTS["gptq"], 64, symmetric=False, zero_offset=1), has_indices=True),
    "awq": formats.StoredInt4(Scheme(INT4_LAYOUTS["awq"], symmetric=False)),
}  # fmt: skip


def random_tensors(linear):
    """A tensor for each that fills the linear."""
    random, tensors = torch.Generator().manual_seed(5), {}
    for name, shape, dtypes, _, scale, values, _ in linear.expected():
        if values is not None:
            tensors[name] = torch.tensor(values)
        elif name.endswith("g_idx"):
            tensors[name] = torch.arange(K) // 64
        elif "I32" in dtypes:
            tensors[name] = torch.randint(-(2**31), 2**31, shape, generator=random).to(torch.int32)
            if name.endswith("qzeros"):
                tensors[name] &= 0x77777777
        elif scale is not None:
            tensors[name] = torch.rand(shape, generator=random) + 0.5
        else:
            tensor = torch.randn(shape, generator=random)
            tensors[name] = tensor.to(torch.float8_e4m3fn) if formats.E4M3 in dtypes else tensor
    return tensors


def values(linear):
    """The weights and the bias in fp32."""
    if linear.scale is None:
        return linear.weight, linear.bias
    if linear.scale.dtype == torch.int32:
        return reference.dequantize_int4(linear.weight, linear.scale, K), linear.bias
    return reference.dequantize_fp8(linear.weight, linear.scale), linear.bias


def filled(parts, format, tensors=None):
    linear = PackedLinear(parts, K, bias=True)
    linear.format = format
    linear.allocate(CPU, torch.float32)
    tensors = random_tensors(linear) if tensors is None else tensors
    for name, *_ in linear.expected():
        linear.load(name, tensors[name])
    return values(linear), tensors


@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_one_linear(name):
    """q and gate of each head in turn, as in q_proj of a gated attention; q is packed with a k of its own."""
    rows, form = HEADS * D, FORMATS[name]
    (whole, bias), tensors = filled([Part("q", 2 * rows), Part("k", D)], form)
    heads, biases = whole[: 2 * rows].view(HEADS, 2, D, K), bias[: 2 * rows].view(HEADS, 2, D)
    (gate, gate_bias), _ = filled([Part("q", rows, Interleaved((D, D), 1))], form, tensors)
    (q_k, q_k_bias), _ = filled([Part("q", rows, Interleaved((D, D), 0)), Part("k", D)], form, tensors)
    assert torch.equal(gate, heads[:, 1].flatten(0, 1))
    assert torch.equal(gate_bias, biases[:, 1].flatten())
    assert torch.equal(q_k, torch.cat((heads[:, 0].flatten(0, 1), whole[2 * rows :])))
    assert torch.equal(q_k_bias, torch.cat((biases[:, 0].flatten(), bias[2 * rows :])))


def test_blocks_of_several_heads_are_refused():
    """Catches a scale of two parts that is used for one of them."""
    linear = PackedLinear([Part("q", 4 * 64, Interleaved((64, 64), 0))], K)
    linear.format = formats.StoredFp8Blocks()
    linear.allocate(CPU, torch.float32)
    with pytest.raises(UnsupportedError, match=r"q\.weight_scale_inv: 512 rows are stored in 4 groups"):
        linear.load("q.weight_scale_inv", torch.ones(4, 3))


@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_several_sizes(name):
    """q, k, v and z of each key head in turn, as in in_proj_qkvz of Qwen3-Next: all of them in one packed linear, and two alone.

    Catches a block that begins at a wrong row, and a tensor that fills only one of its parts.
    """
    blocks, form = (D, D, 2 * D, 2 * D), FORMATS[name]
    (whole, bias), tensors = filled([Part("qkvz", HEADS * 6 * D)], form)
    expected = [part.flatten(0, 1) for part in whole.view(HEADS, 6 * D, K).split(blocks, 1)]
    biases = [part.flatten() for part in bias.view(HEADS, 6 * D).split(blocks, 1)]
    parts = [Part("qkvz", HEADS * rows, Interleaved(blocks, i)) for i, rows in enumerate(blocks)]
    for some in (slice(None), slice(3, 0, -2)):
        (weight, vector), _ = filled(parts[some], form, tensors)
        assert torch.equal(weight, torch.cat(expected[some]))
        assert torch.equal(vector, torch.cat(biases[some]))
    linear = PackedLinear(parts, K)
    linear.format = form
    names = [spec[0] for spec in linear.expected()]
    assert len(set(names)) == len(names)
    assert linear.modules == ("qkvz",)

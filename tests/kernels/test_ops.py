"""`torch.ops.minirt.*`: each op with a schema, on the CPU (its reference) and as the kernels that a GPU runs (here: interpreted).

Catches: a schema that hides a change of an argument or a result that shares memory, fake results of another shape, dtype or
strides, a kernel that is given other arguments than the reference, a graph break, an argument that is wrong but not named.
"""

import subprocess
import sys

import pytest
import torch
import torch.utils.checkpoint
from support.raising import raises
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from minirt.bench import bounds
from minirt.bench.kernels import declared
from minirt.errors import InputError, UnsupportedError
from minirt.kernels import ops, reference
from minirt.kernels.operations import OPERATIONS
from minirt.nn import functional

PACKED = ["packed_norm_linear", "packed_norm_gate_up"]
HAS_OP = [name for name, operation in OPERATIONS.items() if operation.no_op is None] + PACKED
WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
FP8 = {"rms_norm_quantize", "quantize"}  # their results are rounded to e4m3


def paged(make, dtype, device, lens=(17, 0, 1), Nkv=2, D=64, page_size=16):
    """(K, V, block tables, lengths) of sequences on pages of random values."""
    tables = torch.tensor([[3, 1], [0, 0], [2, 2]], dtype=torch.int32, device=device)
    k, v = (make(4, page_size, Nkv, D, dtype=dtype) for _ in range(2))
    return k, v, tables, torch.tensor(lens, dtype=torch.int32, device=device)


def eight(k, v):
    """FP8 pages of K and V, and their scales as options."""
    (k, k_scales), (v, v_scales) = reference.quantize_fp8(k), reference.quantize_fp8(v)
    return k, v, {"k_scales": k_scales, "v_scales": v_scales}


def declared_arguments(operation, case, t):
    """Calls made of the declaration: with the defaults and, if there are arguments of type bool, with these true."""
    values = declared.inputs(operation, case, t)
    by_name = {argument.name for argument in operation.declaration.arguments if argument.by_name}
    args = [value for key, value in values.items() if key not in by_name]
    yield tuple(args), {}
    if by_name:
        yield tuple(args), dict.fromkeys(by_name, True)


def arguments(name, dtype, make, device):
    """(args, options) of some calls of an op: one row, a prime number of rows, odd sizes, optional arguments given or not."""

    def t(*shape):
        return make(*shape, dtype=dtype)

    def ints(*values, like=torch.int64):
        return torch.tensor(values, dtype=like, device=device)

    operation = OPERATIONS.get(name)
    cases = operation.find(operation.cases)[:2] if operation and operation.cases else []
    if cases and declared.is_declared(operation, cases[0]):
        for case in (*cases, {**cases[0], "T": 0}):
            yield from declared_arguments(operation, case, t)
    elif name == "norm_linear":
        for T in (1, 3, 17):
            yield (t(T, 37), t(37), 1e-5, t(23, 37), t(23)), {}
        yield (t(5, 64), None, 0.0, t(1, 64)), {}
        values, scale = reference.quantize_fp8(t(11, 48))
        for T in (1, 3):
            yield (t(T, 48), t(48), 1e-5, values, None, scale), {}
        codes, scale, zero = reference.quantize_int4(t(11, 130), 128)
        packed = reference.pack_int4(codes), reference.pack_int4_scale(scale, zero)
        yield (t(3, 130), t(130), 1e-5, packed[0], t(11), packed[1]), {}
    elif name == "norm_gate_up":
        for T, activation in ((1, "silu"), (7, "gelu"), (3, "gelu_tanh")):
            yield (t(T, 37), t(37), 1e-5, t(26, 37) * 0.3, activation), {}
        yield (t(2, 32), None, 0.0, t(14, 32) * 0.3, "silu", t(14)), {}
        values, scale = reference.quantize_fp8_blocks(t(256, 131) * 0.3, 2)
        yield (t(3, 131), None, 0.0, values.contiguous(), "silu", None, scale), {}
    elif name == "linear_residual":
        for T in (1, 19):
            yield (t(T, 37), t(23, 37), t(T, 23)), {}
        yield (t(2, 37), t(23, 37), t(2, 23), t(23)), {}
        values, scale = reference.quantize_fp8(t(23, 37))
        yield (t(3, 37), values, t(3, 23), None, scale), {}
    elif name == "norm_rope":
        yield (t(2, 3, 5, 24), t(2, 5, 24), t(2, 5, 24), t(24), 1e-5), {}
        yield (t(2, 5, 3, 6).transpose(1, 2), t(1, 5, 6), t(1, 5, 6)), {}
    elif name == "qk_norm_rope":
        packed = t(2, 17, 8, 64)  # [B, T, heads, D], as a packed projection gives it
        q, k = packed[:, :, :5].transpose(1, 2), packed[:, :, 5:7].transpose(1, 2)
        yield (q, k, t(2, 17, 64), t(2, 17, 64)), {}
        yield (q, k, t(1, 17, 64), t(1, 17, 64), t(64), t(64), 1e-5), {}
        wide = t(1, 3, 10, 2)
        table = make(1, 3, 10, dtype=torch.float32)
        yield (wide.permute(0, 3, 1, 2), wide.permute(0, 3, 1, 2), table, table), {}  # channels far apart
    elif name == "qk_norm_rope_kv_write":
        k, v, *_ = paged(make, dtype, device)
        cos_sin = make(40, 64, dtype=torch.float32)
        rest = (3, 2, t(64), t(64), 1e-5)
        yield (t(3, 7 * 64), cos_sin, ints(5, 0, 39), ints(48, -1, 7), k, v, *rest), {}
        k, v, scales = eight(k, v)
        yield (t(3, 7 * 64), cos_sin, ints(5, 0, 39), ints(48, -1, 7), k, v, *rest), scales
        k, v = (make(3, 16, 2, 80, dtype=dtype) for _ in range(2))  # heads of 80 channels, of which 16 are rotated
        yield (t(3, 7 * 80), cos_sin[:, :16].contiguous(), ints(5, 0, 39), ints(40, -1, 7), k, v, 3, 2), {}
    elif name == "paged_attention_prefill":
        k, v, tables, _ = paged(make, dtype, device)
        rest = (tables, ints(0, 6, 6, 7, like=torch.int32), ints(17, 0, 1, like=torch.int32), 0.11)
        yield (t(9, 4, 64), k, v, *rest), {}
        yield (t(9, 4, 64), k, v, *rest), {"window": 5}
        k, v, scales = eight(k, v)
        yield (t(9, 4, 64), k, v, *rest), scales
    elif name == "paged_attention_decode":
        k, v, *rest = paged(make, dtype, device)
        yield (t(3, 4, 64), k, v, *rest, 0.11), {}
        k, v, scales = eight(k, v)
        yield (t(3, 4, 64), k, v, *rest, 0.11), scales
        k, v = (make(20, 16, 2, 64, dtype=dtype) for _ in range(2))
        tables = torch.arange(20, dtype=torch.int32, device=device).view(1, 20)
        yield (t(1, 4, 64), k, v, tables, ints(300, like=torch.int32), 0.11), {}  # two KV splits, so a workspace
        for window in (44, 45):  # the second split alone, and both
            yield (t(1, 4, 64), k, v, tables, ints(300, like=torch.int32), 0.11), {"window": window}
    elif name == "rope_paged_attention_decode":
        k, v, tables, lens = paged(make, dtype, device)
        yield (t(3, 8 * 64), make(40, 64, dtype=torch.float32), k, v, tables, lens, 0.11, 4, t(64), t(64), 1e-5), {}
        k, v, scales = eight(k, v)
        yield (t(3, 8 * 64), make(40, 64, dtype=torch.float32), k, v, tables, lens, 0.11, 4), scales | {"window": 3}
    elif name == "mixture_residual":
        for T in (1, 5):
            yield (t(T, 24), t(T, 6), t(6, 22, 24) * 0.3, t(6, 24, 11), t(T, 24), 3, True, "silu", t(24), 1e-5), {}
        yield (t(2, 16), t(2, 5), t(5, 14, 16) * 0.3, t(5, 16, 7), t(2, 16), 2, False, "gelu"), {}
        up, down = reference.quantize_fp8(t(5, 14, 16) * 0.3), reference.quantize_fp8(t(5, 16, 7))
        yield (t(2, 16), t(2, 5), up[0], down[0], t(2, 16), 2, True, "silu", None, 0.0, up[1], down[1]), {}
    elif name in PACKED:
        for args, _ in arguments(name.removeprefix("packed_"), dtype, make, device):
            schema = getattr(torch.ops.minirt, name).default._schema
            places = [i for i, argument in enumerate(schema.arguments) if isinstance(argument.type, torch.ListType)]
            args = [*args, *[None] * (len(schema.arguments) - len(args))]
            half = args[places[0]].shape[0] // 2
            if args[places[2]] is None or args[places[2]].shape[0] == args[places[0]].shape[0]:  # not scales of blocks
                for i in places:
                    args[i] = [] if args[i] is None else [args[i][:half], args[i][half:].clone()]
                yield tuple(args), {}
    else:
        pytest.fail(f"no cases of {name}")


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def flat(values):
    """The values, with those of lists of tensors."""
    return [item for value in values for item in (value if isinstance(value, list) else [value])]


def copy(value):
    """A copy with the same strides."""
    if isinstance(value, list):
        return [copy(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def run(function, args, options, dtype=None):
    """Results on copies of the arguments, and the arguments afterwards. `dtype`: floats of 16 bits are widened to it."""
    def widened(a):
        if isinstance(a, list):
            return [widened(item) for item in a]
        return a.to(dtype) if isinstance(a, torch.Tensor) and dtype is not None and a.dtype == torch.float16 else a

    args = [widened(copy(a)) for a in args]
    options = {key: copy(value) for key, value in options.items()}
    return tensors(function(*args, **options)) + [a for a in flat((*args, *options.values())) if isinstance(a, torch.Tensor)]


def check_equal_codes(result, expected, most):
    """FP8 values may be the neighbouring code, in a share `most` of them."""
    assert result.shape == expected.shape
    if not result.numel():
        return
    codes, wanted = (x.view(torch.uint8).int() for x in (result, expected))
    assert int((codes - wanted).abs().max()) <= 1
    assert (codes != wanted).float().mean().item() <= most


def test_every_operation_has_an_op_or_a_reason():
    """Catches a new operation that is forgotten here, and a schema that no implementation serves."""
    for name, operation in OPERATIONS.items():
        assert operation.arguments or operation.no_op, name
    assert set(ops.IMPLEMENTATIONS) == set(HAS_OP)


@pytest.mark.parametrize("name", HAS_OP)
def test_opcheck(name, make, device):
    """Schema, fake results, autograd registration and compilation with static and dynamic shapes, by PyTorch's own check."""
    op = getattr(torch.ops.minirt, name).default
    for args, options in arguments(name, torch.float32, make, device):
        given = flat([*args, *options.values()])
        if any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in given):
            # PyTorch cannot compare FP8 on a CPU, which the check of the schema does; the test below compares the arguments.
            torch.library.opcheck(op, args, options, test_utils=WITHOUT_SCHEMA)
        else:
            torch.library.opcheck(op, args, options)


@pytest.mark.parametrize("name", [name for name in HAS_OP if name not in FP8])
def test_kernels_beside_the_reference(name, make, device):
    """The function that a GPU runs, in the interpreter on a CPU; also what it writes into arguments.

    The reference of the same dtype and the result of the kernel are compared with the reference of fp32 values.
    """
    forms = ops.IMPLEMENTATIONS[name]
    for args, options in arguments(name, torch.float16, make, device):
        quantized = any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in flat(args))
        floor = bounds.floor(torch.float16, quantized)
        results = (
            run(forms.kernel, args, options), run(forms.reference, args, options),
            run(forms.reference, args, options, torch.float32),
        )  # fmt: skip
        for result, expected, exact in zip(*results, strict=True):
            assert (result.shape, result.dtype, result.stride()) == (expected.shape, expected.dtype, expected.stride())
            if not result.is_floating_point():
                assert torch.equal(result, expected)
            elif result.numel():
                errors = bounds.errors(result, exact), bounds.errors(expected, exact)
                assert bounds.fault(*errors, floor) is None


@pytest.mark.parametrize("name", sorted(FP8))
def test_quantizing_kernels_beside_the_reference(name, make, device):
    """A value may be the next e4m3 code, because the two norms differ in the last bit."""
    forms = ops.IMPLEMENTATIONS[name]
    for args, options in arguments(name, torch.float32, make, device):
        (values, scale), (expected, expected_scale) = forms.kernel(*args, **options), forms.reference(*args, **options)
        torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
        assert values.stride() == expected.stride()
        check_equal_codes(values, expected, 5e-3)


@pytest.mark.parametrize("name", HAS_OP)
def test_a_cpu_runs_the_reference(name, make):
    """Through the dispatcher, and directly by `call`: the same bits."""
    for args, options in arguments(name, torch.float32, make, torch.device("cpu")):
        if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in args):
            pytest.skip("the fixtures make tensors of the GPU")
        if not options:
            results = run(getattr(torch.ops.minirt, name), args, {}), run(lambda *given: ops.call(name, *given), args, {})
            for one, other in zip(*results, strict=True):
                assert torch.equal(one.float(), other.float())


def block(x, norm, gate_up, down, cos, sin):
    """A graph of several ops, and of PyTorch's between them."""
    h = ops.call("norm_gate_up", x, norm, 1e-5, gate_up, "silu")
    x = ops.call("linear_residual", h, down, x * 2)
    heads = x.view(1, x.shape[0], 4, -1).transpose(1, 2)
    q, k = ops.call("qk_norm_rope", heads, heads[:, :3], cos, sin)
    return q, k + 1


def block_arguments(make, T):
    float32 = {"dtype": torch.float32}
    tables = make(1, T, 8, **float32), make(1, T, 8, **float32)
    return (make(T, 32, **float32), make(32, **float32), make(14, 32, **float32), make(32, 7, **float32), *tables)


def test_compiled_whole_with_a_dynamic_size(make):
    """`torch.compile(fullgraph=True)`: no graph break, and no compilation for each number of tokens."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for T in (3, 5, 11):
        args = block_arguments(make, T)
        for result, expected in zip(compiled(*args), block(*args), strict=True):
            assert torch.equal(result, expected)
    assert counter.frame_count == 1


def test_fake_tensors_and_tracing_take_the_ops():
    """No kernel and no reference runs for a fake tensor, and `make_fx` records the op of real tensors."""
    with FakeTensorMode():
        out = ops.call("norm_linear", torch.empty(5, 8), None, 0.0, torch.empty(3, 8))
        assert (out.shape, type(out).__name__) == ((5, 3), "FakeTensor")
    x, weight = torch.ones(2, 8), torch.ones(8)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: ops.call("rms_norm", x, weight, 1e-6))(x)
    assert "minirt.rms_norm.default" in {str(node.target) for node in graph.graph.nodes}
    traced = torch.jit.trace(lambda x: ops.call("rms_norm", x, weight, 1e-6), x)
    assert "minirt::rms_norm" in str(traced.graph)


WRONG = [  # op, place of the argument that is replaced, what replaces it, the message
    ("rms_norm", 0, lambda x: x.double(), "x: unsupported dtype"), ("rms_norm", 1, lambda x: x[:-1], "weight: wrong shape"),
    ("rms_norm", 1, lambda x: x.half(), "weight: wrong dtype"),
    ("rms_norm", 0, lambda x: x.t().contiguous().t() if len(x) > 1 else x.repeat(1, 2)[:, ::2], "x: not contiguous"),
    ("rms_norm_quantize", 1, lambda x: x[1:], "weight: wrong shape"), ("quantize", 0, lambda x: x[0], "x: wrong shape"),
    ("embedding", 0, lambda x: x.int(), "tokens: wrong dtype"),
    ("norm_linear", 1, lambda x: x[1:], "norm_weight: wrong shape"),
    ("norm_linear", 3, lambda x: x[:, 1:], "weight: wrong shape"), ("norm_linear", 4, lambda x: x.half(), "bias: wrong dtype"),
    ("norm_gate_up", 3, lambda x: x[1:], "weight: odd number of rows"),
    ("norm_gate_up", 4, lambda x: "relu", "activation: unknown activation"),
    ("linear_residual", 2, lambda x: x[:, 1:], "residual: wrong shape"),
    ("norm_rope", 0, lambda x: x[..., 1:], "x: unsupported head size"),
    ("norm_rope", 1, lambda x: x[:, 1:], "cos: wrong shape"), ("norm_rope", 2, lambda x: x.half(), "sin: wrong dtype"),
    ("qk_norm_rope", 1, lambda x: x[:, :, 1:], "k: wrong shape"), ("qk_norm_rope", 1, lambda x: x.half(), "k: wrong dtype"),
    ("qk_norm_rope_kv_write", 2, lambda x: x.int(), "positions: wrong dtype"),
    ("paged_attention_prefill", 4, lambda x: x[1:], "query_starts: wrong shape"),
    ("paged_attention_decode", 3, lambda x: x.long(), "block_tables: wrong dtype"),
    ("rope_paged_attention_decode", 1, lambda x: x.half(), "cos_sin: wrong dtype"),
    ("mixture_residual", 5, lambda x: 99, "top_k: wrong number"),
    ("mixture_residual", 1, lambda x: x[1:] if len(x) > 1 else x[:0], "logits: wrong shape"),
    ("mixture_residual", 3, lambda x: x[1:], "down: wrong shape"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "place", "change", "message"), WRONG, ids=[f"{w[0]}-{w[1]}-{w[3]}" for w in WRONG])
def test_wrong_arguments_are_named(name, place, change, message, make, device):
    """By the kernels, by the reference, and for fake tensors, in the same words."""
    args, options = next(arguments(name, torch.float32, make, device))
    args = list(args)
    args[place] = change(args[place])
    forms, op = ops.IMPLEMENTATIONS[name], getattr(torch.ops.minirt, name)
    for function in (forms.kernel, forms.reference, op):
        raises(message, function, *args, **options)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(InputError, match=message):
        op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args), **options)


def test_another_device_is_named():
    """On the meta device as well, which no kernel serves."""
    x, weight = torch.ones(2, 8), torch.ones(8, device="meta")
    raises("weight: wrong device; expected cpu; found meta", ops.call, "rms_norm", x, weight, 1e-6)
    raises("x: unsupported device; expected cuda or cpu; found meta", ops.call, "rms_norm", weight[None], weight, 1e-6)


@pytest.mark.parametrize(("capability", "what"), [(0, "an AMD GPU"), (75, "compute capability 7.5")])
def test_a_gpu_without_kernels_is_refused(capability, what, make, device, monkeypatch):
    """As the layers' plan does. There is no silent use of the reference on a GPU."""
    args, options = next(arguments("norm_linear", torch.float32, make, device))
    monkeypatch.setattr(ops, "capability", lambda device: capability)
    with pytest.raises(UnsupportedError, match=f"x: no kernels for this device; .*found {what}"):
        ops.IMPLEMENTATIONS["norm_linear"].kernel(*args, **options)


def test_a_gpu_without_triton_says_what_to_install():
    """The function of a GPU, called with a CPU's tensors, as only it imports Triton."""
    script = (
        "import sys; sys.modules['triton'] = None\n" "import torch; from minirt.kernels import ops\n"
        "ops.IMPLEMENTATIONS['rms_norm'].kernel(torch.ones(1, 4), torch.ones(4), 0.0)"
    )  # fmt: skip
    out = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert "minirt.errors.UnsupportedError: rms_norm: Triton is not installed (pip install triton)" in out.stderr


@pytest.mark.parametrize("name", HAS_OP)
def test_gradients_are_refused_by_name(name, make, device):
    """Each tensor in turn, also those given by name. Otherwise the gradient would silently be missing, and the tangent be 0.

    The grad mode is of reverse mode only.
    """
    for args, options in arguments(name, torch.float32, make, device):
        given = dict(zip(ops.IMPLEMENTATIONS[name].names, args, strict=False)) | options
        for place, value in given.items():
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            functions = [lambda **named: getattr(torch.ops.minirt, name)(**named)]
            if not options:
                functions.append(lambda **named: ops.call(name, *named.values()))
            for function in functions:
                raises(f"^{place}: needs a gradient; ", function, **given | {place: value.detach().requires_grad_()})
                with torch.no_grad():
                    function(**given | {place: value.detach().requires_grad_()})
                if value.dtype == torch.float32:
                    with torch.no_grad(), forward_ad.dual_level():
                        dual = forward_ad.make_dual(value, torch.ones_like(value))
                        raises(rf"^{place}: needs a gradient \(forward mode\)", function, **given | {place: dual})


@pytest.mark.parametrize("function", [torch.ops.minirt.rms_norm, functional.rms_norm])
def test_transformed_functions_are_right_or_refused(function, make):
    """Transforms wrap tensors in others that look plain: a kernel that runs on them has no gradient, or the wrong memory."""
    x, weight, ones = make(3, 16, dtype=torch.float32), make(16, dtype=torch.float32), torch.ones(3, 16)

    def norm(x):
        return function(x, weight, 1e-5)

    def checkpointed(x):
        x = x.detach().requires_grad_()
        torch.utils.checkpoint.checkpoint(norm, x, use_reentrant=True).sum().backward()

    refused = [
        lambda: torch.func.jvp(norm, (x,), (ones,)), lambda: torch.func.jacfwd(norm)(x), lambda: torch.func.vjp(norm, x),
        lambda: torch.func.grad(lambda x: norm(x).sum())(x), lambda: torch.func.hessian(lambda x: norm(x).sum())(x),
        lambda: torch.func.jvp(torch.vmap(norm), (x[None],), (ones[None],)), lambda: checkpointed(x),
        lambda: torch.vmap(lambda v: torch.func.jvp(norm, (x,), (v,)))(ones[None]),
    ]  # fmt: skip
    for transformed in refused:
        raises(r"^x: needs a gradient", transformed)
    many = torch.stack([x, -2 * x])
    assert torch.equal(torch.vmap(norm)(many), torch.stack([norm(rows) for rows in many]))
    assert torch.equal(torch.func.jvp(lambda y: norm(x) * y, (x,), (ones,))[1], norm(x))


def test_pages_that_a_backward_pass_needs_are_not_written_unnoticed(make, device):
    """Without a new version of the pages, the gradient below would be that of other values, without an error."""
    args, options = next(arguments("qk_norm_rope_kv_write", torch.float32, make, device))
    pages = args[4]
    weight = torch.ones_like(pages).requires_grad_()
    loss = (pages * weight).sum()
    torch.ops.minirt.qk_norm_rope_kv_write(*args, **options)
    raises("modified by an inplace operation", loss.backward, error=RuntimeError)


def test_a_cpu_needs_no_triton():
    """The reference and the checks of an op must not import it."""
    script = (
        "import sys; sys.modules['triton'] = None\n" "import torch; from minirt.kernels import ops\n"
        "print(torch.ops.minirt.rms_norm(torch.ones(1, 4), torch.ones(4), 0.0).tolist())"
    )  # fmt: skip
    out = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert out.stdout.strip() == "[[1.0, 1.0, 1.0, 1.0]]", out.stderr


def test_scratch_is_not_shared():
    """Two launches on two streams must not add into the same memory, and counters begin at zero."""
    scratch = ops.Scratch(torch.device("cpu"))
    a, b = scratch.counters(4), scratch.counters(4)
    a += 1
    assert not b.any()
    first = scratch.sums(3)
    assert first.data_ptr() != scratch.sums(3).data_ptr()


def test_inductor_is_told_that_an_op_has_no_lowering(monkeypatch):
    """Before PyTorch 2.13 Inductor finds that out by writing the whole graph as text. Catches: an op that is not declared, or
    whose arguments may get other strides than they were traced with, and a renamed function of Inductor."""
    from torch._inductor import lowering

    op = torch.ops.minirt.rms_norm.default
    monkeypatch.setattr(ops, "WRITES_GRAPHS", True)
    monkeypatch.delitem(lowering.lowerings, op, raising=False)
    with FakeTensorMode():
        torch.ops.minirt.rms_norm(torch.empty(3, 16), torch.empty(16), 1e-5)
    assert op in lowering.lowerings
    exact = lowering.tag_to_layout_constraint(torch.Tag.needs_exact_strides)
    assert lowering.maybe_layout_constraints(op) is exact

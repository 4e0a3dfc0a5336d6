"""`minirt.patch` on tiny random models of every family: same outputs, same parameters, and the way back."""

import copy
import io
import json
import sys

import pytest
import torch
import torch.nn.utils.parametrize
import torch.nn.utils.prune
from support.checkpoints import distance as relative
from support.raising import raises
from torch import nn

import minirt
from minirt.bench.bounds import FACTOR, floor
from minirt.errors import InputError, UnsupportedError
from minirt.kernels import ops, reference

MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "llama": ("Llama", {}), "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, gelu": ("Llama", {"hidden_act": "gelu"}),
    "llama, tanh gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 1}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}), "llama3 rope": ("Llama", {"rope_parameters": LONG | LLAMA3}),
    "yarn": ("Qwen2", {"rope_parameters": LONG | {"rope_type": "yarn"}}),
    "dynamic rope": ("Llama", {"rope_parameters": LONG | {"rope_type": "dynamic"}, "max_position_embeddings": 16}),
    "mistral": ("Mistral", {}), "mistral with a window": ("Mistral", {"sliding_window": 7}), "qwen2": ("Qwen2", {}),
    "qwen2 with windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3 with windows": ("Qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3 moe": ("Qwen3Moe", MOE),
    "qwen3 moe, dense layer": ("Qwen3Moe", MOE | {"mlp_only_layers": [1], "norm_topk_prob": True}),
}  # fmt: skip
FAMILIES = ("llama", "mistral with a window", "qwen2", "qwen3", "qwen3 moe")
IDS = torch.randint(3, 211, (2, 19), generator=torch.Generator().manual_seed(7))
MASK = torch.ones_like(IDS).index_fill(1, torch.arange(3), 0) | torch.tensor([[1], [0]])  # the second prompt is padded


@pytest.fixture(scope="module")
def make(hf_folder):
    """A function that returns a new copy of a tiny model, in eval mode."""
    import transformers

    loaded = {}

    def model(name="llama", **options):
        key = (name, *options.items())
        if key not in loaded:
            family, settings = MODELS[name]
            folder = hf_folder(family, **settings | options)
            loaded[key] = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return copy.deepcopy(loaded[key]).eval()

    return model


@torch.inference_mode()
def logits(model, ids=IDS, **options):
    return model(ids, **options).logits


@torch.inference_mode()
def greedy(model, **options):
    return model.generate(IDS, attention_mask=MASK, max_new_tokens=12, min_new_tokens=12, do_sample=False, **options)


def layer(model):
    return model.model.layers[1]


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_the_unpatched_model(make, name):
    """A wrong order of q, k, v or gate, up; a lost bias, QK-norm, window, rope scaling or residual; a norm that is skipped."""
    model, original = make(name), make(name)  # two, because dynamic rope remembers the longest sequence
    table = minirt.patch(model)
    assert relative(logits(model, attention_mask=MASK), logits(original, attention_mask=MASK)) < 1e-5
    assert torch.equal(greedy(model), greedy(original))
    layers = [change for change in table.replaced if change.kind.endswith("DecoderLayer")]
    assert ["attention and mlp" in change.what for change in layers] == [True, True, True]


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_alone(make, name):
    """A part that works only because another one is replaced too."""
    for parts in (["norms"], ["attention"], ["attention", "rope"], ["mlp"], ["norms", "attention"], ["norms", "mlp"]):
        model = make(name)
        expected = logits(model)
        table = minirt.patch(model, parts=parts)
        assert relative(logits(model), expected) < 1e-5, parts
        for kind, part in (("Attention", "attention"), ("MLP", "mlp"), ("RMSNorm", "norms")):
            rows = [change for change in table.changes if change.kind.endswith(kind)]
            assert all(change.replaced == (part in parts) for change in rows), (parts, kind)


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_errs_no_more_than_the_unpatched_model(make, name):
    """A kernel that rounds where transformers does not: the truth is the same model in fp32."""
    options = {"num_experts_per_tok": 8} if "moe" in name else {}  # all experts: a choice would depend on near-ties
    truth = logits(make(name, **options))
    model = make(name, **options).bfloat16()
    theirs = relative(logits(model), truth)
    minirt.patch(model)
    assert relative(logits(model), truth) <= FACTOR * theirs + floor(torch.bfloat16).relative


@pytest.mark.parametrize("name", MODELS)
def test_attention_gets_the_same_arguments(make, name, monkeypatch):
    """A window, a scale or a field for Flash Attention that is lost. Other attention functions read them from the mask alone."""
    model, seen = make(name), []
    model.set_attn_implementation("eager")
    source = sys.modules[type(layer(model).self_attn).__module__]
    original = source.eager_attention_forward

    def attention(module, q, k, v, mask, **options):
        plain = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
        seen.append((module.layer_idx, q.shape, k.shape, v.shape, mask is None, plain))
        return original(module, q, k, v, mask, **options)

    monkeypatch.setattr(source, "eager_attention_forward", attention)
    logits(model)
    expected = seen.copy()
    seen.clear()
    minirt.patch(model)
    logits(model)
    assert seen == expected


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3 moe"])
def test_the_kernels_take_what_a_patched_model_gives_them(make, name, fp8, monkeypatch):
    """Strides, views or dtypes that only the PyTorch code takes: without a GPU, the kernels run in Triton's interpreter."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, original = make(name, num_hidden_layers=1), make(name, num_hidden_layers=1)
    minirt.patch(original, fp8=fp8)
    with torch.inference_mode():
        first = original(IDS[:, :3], use_cache=True)
        expected = first.logits, original(IDS[:, 3:4], past_key_values=first.past_key_values).logits
        minirt.patch(model.to(device), fp8=fp8)
        launched = set()

        def kernel(op, function):
            return lambda *args, **options: launched.add(op) or function(*args, **options)

        kernels = {op: forms._replace(reference=kernel(op, forms.kernel)) for op, forms in ops.IMPLEMENTATIONS.items()}
        monkeypatch.setattr(ops, "IMPLEMENTATIONS", kernels)
        ran = model(IDS[:, :3].to(device), use_cache=True)
        results = ran.logits, model(IDS[:, 3:4].to(device), past_key_values=ran.past_key_values).logits
    mlp = {"mixture_residual"} if "moe" in name else {"norm_gate_up"}
    assert device == "cuda" or launched == mlp | {"rms_norm", "norm_linear", "qk_norm_rope", "linear_residual"}
    limit = 2 * floor(torch.float32, quantized_activations=True).relative if fp8 else 1e-5  # two residual layers
    for mine, theirs in zip(results, expected, strict=True):
        assert relative(mine.cpu(), theirs) < limit


@pytest.mark.parametrize("name", ["llama", "qwen3 moe"])
def test_a_static_cache(make, name):
    """A cache that is not given the new keys, or keys in another layout."""
    model = make(name)
    tokens = greedy(model)
    minirt.patch(model)
    assert torch.equal(greedy(model, cache_implementation="static", disable_compile=True), tokens)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3 moe"])
def test_compiled_and_exported_graphs_give_the_same(make, name):
    """A graph break, an op without a fake implementation, or weights that a graph freezes or copies."""
    model = make(name)
    minirt.patch(model)
    expected = logits(model, use_cache=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(logits(compiled, use_cache=False), expected)
    with torch.no_grad():
        exported = torch.export.export(model, (IDS,), {"use_cache": False})
    assert any("minirt.packed_norm_linear" in str(node.target) for node in exported.graph.nodes)
    assert torch.equal(logits(exported.module(), use_cache=False), expected)


def test_a_compiled_model_follows_patch_and_unpatch(make):
    """A compiled graph that still runs the forward from before."""
    model, ran = make(), []
    torch._dynamo.reset()

    def backend(graph, inputs):
        ran.append(any("minirt" in str(node.target) for node in graph.graph.nodes))
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    expected = logits(compiled, use_cache=False)
    minirt.patch(model)
    assert relative(logits(compiled, use_cache=False), expected) < 1e-5
    minirt.unpatch(model)
    assert torch.equal(logits(compiled, use_cache=False), expected)
    assert ran[:2] == [False, True]


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_packed_without_a_second_copy(make, name):
    """q, k and v in storage of their own beside the packed weight; a key or a value that changes; another Parameter object."""
    model = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    minirt.patch(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    logits(model)  # reads the packed storage, and packs nothing again
    records = [vars(module)["_minirt"].record for module in model.modules() if "_minirt" in vars(module)]
    products = [weights.tensors(torch.ones(1)) for record in records for weights in record.weights]
    assert len(products) == (6 if name == "qwen3 moe" else 12)
    tensors = [tensor for product in products for tensor in product if tensor is not None] + list(parameters.values())
    stored = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert sum(stored.values()) == sum(parameter.nbytes for parameter in parameters.values())
    attention = layer(model).self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["llama with biases", "qwen2"])
def test_a_state_dict_loads_into_a_patched_model(make, name, assign):
    """Weights that are loaded into parameters, but not into what the kernels read. `assign` replaces the parameters."""
    source, model = make(name, seed=3), make(name)
    expected = logits(source)
    minirt.patch(model)
    model.load_state_dict({key: value.clone() for key, value in source.state_dict().items()}, assign=assign)
    assert relative(logits(model), expected) < 1e-5
    minirt.unpatch(model)
    assert torch.equal(logits(model), expected)


def test_a_patched_model_is_saved_as_before(make, tmp_path):
    """safetensors refuses tensors that share storage, unless they are disjoint."""
    import transformers

    model = make("qwen2")
    expected = logits(model)
    minirt.patch(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(logits(again), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_unpatch_restores_the_model_bit_for_bit(make, name):
    """A weight that stays a view of packed storage, a forward or hook that stays, a rounded value."""
    model = make(name)
    expected = logits(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = {key: set(vars(module)) for key, module in model.named_modules()}
    minirt.patch(model)
    minirt.unpatch(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert {key: set(vars(module)) for key, module in model.named_modules()} == attributes
    assert not any(module._load_state_dict_post_hooks or module._load_state_dict_pre_hooks for module in model.modules())
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in model.parameters())
    assert torch.equal(logits(model), expected)
    minirt.patch(model)
    assert relative(logits(model), expected) < 1e-5


@pytest.mark.parametrize("made_inside", [False, True])
def test_inference_mode(make, made_inside):
    """Inference tensors as parameters, which get storage only in inference mode; and parameters that become such tensors by
    unpatch, so that autograd refuses them."""
    model = make()
    with torch.inference_mode():
        model = make() if made_inside else model
        expected = model(IDS).logits
        minirt.patch(model)
        assert relative(model(IDS).logits, expected) < 1e-5
        minirt.unpatch(model)
        assert torch.equal(model(IDS).logits, expected)
    if not made_inside:
        model(IDS, labels=IDS).loss.backward()
        assert layer(model).self_attn.q_proj.weight.grad is not None


def test_moved_and_cast_models(make):
    """`model.to` maps parameters one by one, which would leave the kernels with weights of the old dtype."""
    model = make("qwen2")
    minirt.patch(model)
    model.to(torch.bfloat16)
    fresh = make("qwen2").to(torch.bfloat16)
    minirt.patch(fresh)
    assert torch.equal(logits(model), logits(fresh))
    attention = layer(model).self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.k_proj.weight.untyped_storage().data_ptr()


def test_a_deep_copy_has_weights_of_its_own(make):
    """A copy whose kernels read the weights of the first model."""
    model = make("qwen2")
    minirt.patch(model)
    expected = logits(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    assert torch.equal(logits(model), expected)
    assert not torch.equal(logits(other), expected)
    changed = logits(other)
    minirt.unpatch(other)
    assert relative(logits(other), changed) < 1e-5
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("name", ["llama", "qwen3 moe"])
def test_attentions_hidden_states_and_router_logits(make, name):
    """transformers records these outputs with hooks on modules that a patched model must still call."""
    model, kinds = make(name), ["attentions", "hidden_states", *(["router_logits"] if "moe" in name else [])]
    options = {f"output_{kind}": True for kind in kinds}
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(IDS, **options)
        minirt.patch(model)
        results = model(IDS, **options)
    for kind in kinds:
        assert len(results[kind]) == len(expected[kind]) > 2
        for mine, theirs in zip(results[kind], expected[kind], strict=True):
            assert relative(mine, theirs) < 1e-5


def rounded(x):
    """Each row rounded to e4m3, with a scale of its own."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def linears(model):
    return [module for module in model.model.layers.modules() if isinstance(module, nn.Linear)]


def fp8_by_hand(model, activations):
    """The unpatched model with FP8 weights in the decoder layers and, with `activations`, FP8 inputs of their products."""
    for linear in linears(model):
        linear.weight.data = rounded(linear.weight.data)
        if activations:
            linear.register_forward_pre_hook(lambda module, args: (rounded(args[0]),))
    return model


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ["llama with biases", "qwen2", "qwen3"])
def test_fp8(make, name, keep):
    """Scales of the wrong rows, a product that keeps its weights, a bias that is lost. One token does not round activations.
    Parameters that keep the 16-bit storage alive beside the FP8 weights."""
    model, one = make(name), IDS[:1, :1]
    table = minirt.patch(model, fp8=True, keep_original=keep)
    assert relative(logits(model, one), logits(fp8_by_hand(make(name), False), one)) < 1e-5
    by_hand = logits(fp8_by_hand(make(name), True))
    assert relative(logits(model), by_hand) < floor(torch.float32, quantized_activations=True).relative
    weights = sum(linear.weight.numel() for linear in linears(model))
    rows = sum(linear.out_features for linear in linears(model))
    assert table.fp8_bytes == weights + 4 * rows
    assert table.original_bytes == (4 * weights if keep else 0)
    assert ("Original weights, held for unpatch" in str(table)) == keep
    assert {linear.weight.dtype for linear in linears(model)} == {torch.float8_e4m3fn}
    if not keep:
        raises(r"the original weights were replaced by FP8 weights.*keep_original=True", minirt.unpatch, model)
        logits(model)  # still patched


def test_fp8_with_the_original_kept_is_undone_bit_for_bit(make):
    """Originals that are rounded, or kept for some products only. A weight that was changed has no original."""
    model = make("qwen2")
    expected = logits(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    minirt.patch(model, fp8=True, keep_original=True)
    changed = copy.deepcopy(model)
    layer(changed).mlp.down_proj.weight.data.zero_()
    assert not torch.equal(logits(changed), logits(model))
    raises(r"layers.1.mlp.down_proj.weight: changed after minirt.patch", minirt.unpatch, changed)
    minirt.unpatch(model)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("keep", [False, True])
def test_what_is_loaded_into_fp8_weights_is_quantized(make, keep):
    """A state dict whose values are copied into e4m3 parameters without a scale."""
    source, model = make(seed=3), make()
    minirt.patch(model, fp8=True, keep_original=keep)
    model.load_state_dict(source.state_dict())
    minirt.patch(source, fp8=True)
    assert torch.equal(logits(model), logits(source))


def test_a_state_dict_of_fp8_weights(make):
    """Weights without their scale in a state dict. It has both, and loads into another model with FP8 weights."""
    model, other = make(), make(seed=3)
    minirt.patch(model, fp8=True)
    minirt.patch(other, fp8=True)
    state = model.state_dict()
    weight, scale = (state[f"model.layers.1.self_attn.k_proj.{name}"] for name in ("weight", "weight_scale"))
    original = make().model.layers[1].self_attn.k_proj.weight
    assert relative(reference.dequantize_fp8(weight, scale), original) < 0.05
    other.load_state_dict(state)
    assert torch.equal(logits(other), logits(model))


def test_fp8_weights_are_not_cast(make):
    """`model.half()` would make e4m3 codes numbers without a scale. The refusal comes before anything is cast."""
    model = make()
    minirt.patch(model, fp8=True)
    expected = logits(model)
    raises("cannot be cast", model.half)
    model.to("cpu")
    assert torch.equal(logits(model), expected)


def test_training_gradients_and_autocast_are_refused(make):
    """A loss without gradients, or dropout or autocast that is skipped, without a word."""
    model = make()
    minirt.patch(model)
    raises(r"hidden_states: needs a gradient.*inference_mode", model, IDS)
    model.model.embed_tokens.requires_grad_(False)
    raises(r"weight: needs a gradient", model, IDS)
    model.requires_grad_(False)
    assert not model(IDS).logits.requires_grad
    with pytest.raises(InputError, match=r"torch.autocast: has no effect"), torch.autocast("cpu", torch.bfloat16):
        model(IDS)
    model.train()
    with pytest.raises(InputError, match=r"model.training: .*call model.eval\(\)"), torch.no_grad():
        model(IDS)
    raises(r"model.training: the model is in training mode", minirt.patch, make().train())


def test_wrong_calls(make):
    """An argument that is ignored, and a second patch that packs what is packed."""
    model = make()
    raises("the model is not patched", minirt.unpatch, model)
    for options, name in (
        ({"fp8": 1}, "fp8"), ({"keep_original": None}, "keep_original"), ({"keep_original": True}, "keep_original"),
        ({"parts": "norms"}, "parts"), ({"parts": []}, "parts"), ({"parts": ["norm"]}, "parts"), ({"parts": ["rope"]}, "parts"),
    ):  # fmt: skip
        raises(f"^{name}: ", minirt.patch, model, **options)
    raises(r"^model: not a model", minirt.patch, "Qwen2.5-7B")
    minirt.patch(model)
    raises(r"patched already.*unpatch", minirt.patch, model, fp8=True)


def test_an_unknown_architecture_is_refused_by_name(hf_folder):
    """A model that stays as it is although `patch` returns; the names of the classes say why."""
    import transformers

    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)
    with pytest.raises(UnsupportedError, match=r"nothing in this model can be replaced.*no rule for (GPT2|Conv1D|LayerNorm)"):
        minirt.patch(transformers.GPT2LMHeadModel(config).eval())


def test_known_modules_in_an_unknown_model(make):
    """A multimodal model, say: its language model is replaced by class, and the rest is named."""
    inner = make()
    expected = logits(inner)
    model = nn.ModuleDict({"vision": nn.LayerNorm(8), "language": inner}).eval()
    table = minirt.patch(model)
    assert relative(logits(inner), expected) < 1e-5
    assert [change.what for change in table.kept if change.module == "vision"] == ["no rule for LayerNorm"]


def test_a_subclass_is_left_alone(make):
    """A class of the user's own that computes something else, with a known name or a known base."""
    model = make()
    base = type(layer(model).mlp)
    layer(model).mlp.__class__ = type(base.__name__, (base,), {"forward": lambda self, x: 2 * base.forward(self, x)})
    expected = logits(model)
    table = minirt.patch(model)
    assert relative(logits(model), expected) < 1e-5
    assert [change.module for change in table.kept if change.kind == base.__name__] == []
    assert not hasattr(layer(model).mlp, "_minirt")


def shared_weight(model):
    model.model.layers[0].self_attn.k_proj.weight = layer(model).self_attn.k_proj.weight


# What was done to a model before `patch`, and why its attention is left alone.
LEFT_ALONE = {
    "v_proj is Sequential, not torch.nn.Linear": lambda m: setattr(
        layer(m).self_attn, "v_proj", nn.Sequential(layer(m).self_attn.v_proj)
    ),
    "o_proj has hooks": lambda m: after_call(layer(m).self_attn.o_proj),
    "another library has replaced its forward": lambda m: setattr(layer(m).self_attn, "forward", layer(m).self_attn.forward),
    "k_proj.weight is shared": shared_weight,
    "only some of q_proj, k_proj, v_proj have a bias": lambda m: biases(m, "q"),
}


@pytest.mark.parametrize("reason", LEFT_ALONE)
def test_what_is_left_alone_says_why(make, reason):
    """An adapter, a hook or another library's forward that the kernels would skip without a word."""
    model = make()
    LEFT_ALONE[reason](model)
    expected = logits(model)
    table = minirt.patch(model)
    assert relative(logits(model), expected) < 1e-5
    rows = {row.module: row for row in table.changes}
    assert reason in rows["model.layers.1.self_attn"].what
    assert not rows["model.layers.1.self_attn"].replaced
    assert rows["model.layers.1"].what.endswith("norm and residual of mlp")
    assert rows["model.layers.2.self_attn"].replaced


def test_norms_of_another_dtype_stay_separate(make):
    """A kernel that gets a norm's weight and a matrix of two dtypes."""
    model = make().bfloat16()
    for norm in (layer(model).input_layernorm, layer(model).post_attention_layernorm):
        norm.weight.data = norm.weight.data.to(torch.float16)
    table = minirt.patch(model)
    row = next(row for row in table.changes if row.module == "model.layers.1")
    assert not row.replaced


def test_other_arguments_of_a_forward_are_not_guessed(make, monkeypatch):
    """Another version of transformers may pass the cache in another way."""
    model = make()
    kind = type(layer(model).self_attn)
    original = kind.forward

    def forward(self, hidden_states, position_embeddings, attention_mask, kv, **kwargs):
        return original(self, hidden_states, position_embeddings, attention_mask, kv, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    table = minirt.patch(model)
    rows = [row for row in table.changes if row.kind == "LlamaAttention"]
    assert [not row.replaced and "has other arguments" in row.what for row in rows] == [True, True, True]


def new(K, N, bias=True):
    torch.manual_seed(5)
    return nn.Linear(K, N, bias)


def lora(model):
    attention = layer(model).self_attn
    attention.q_proj = nn.Sequential(attention.q_proj, new(attention.q_proj.out_features, attention.q_proj.out_features))


def new_linear(model):
    attention = layer(model).self_attn
    attention.v_proj = new(attention.v_proj.in_features, attention.v_proj.out_features, attention.v_proj.bias is not None)


def doubled(module):
    """Replace the forward of one module, as other libraries do."""
    forward = module.forward
    module.forward = lambda *args, **options: 2 * forward(*args, **options)


def biases(model, *names):
    for name in names:
        linear = getattr(layer(model).self_attn, f"{name}_proj")
        linear.bias = nn.Parameter(torch.linspace(-1, 1, linear.out_features))


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


def to_vector_and_back(model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(1.5 * vector, model.parameters())


def replaced(parameter, data):
    parameter.data = data


def after_call(module):
    module.register_forward_hook(lambda module, args, out: (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out)


# What may be done to a model after `patch`: it has its usual effect, or the next call says which part the kernels do not compute.
CHANGES = {
    "a vector": (to_vector_and_back, None),
    "data": (lambda m: replaced(layer(m).self_attn.v_proj.weight, 2 * layer(m).self_attn.v_proj.weight.data), None),
    "data of a single linear": (lambda m: replaced(layer(m).mlp.down_proj.weight, layer(m).mlp.down_proj.weight.data * 2), None),
    "transposed": (lambda m: replaced(layer(m).self_attn.q_proj.weight, layer(m).self_attn.q_proj.weight.data.t()), None),
    "in place": (lambda m: layer(m).mlp.up_proj.weight.data.mul_(2), None),
    "a new parameter": (lambda m: setattr(layer(m).mlp.up_proj, "weight", nn.Parameter(layer(m).mlp.up_proj.weight * 2)), None),
    "new biases": (lambda m: biases(m, "q", "k", "v", "o"), None),
    "one new bias": (lambda m: biases(m, "v"), r"q_proj.bias: is missing"),
    "emptied": (lambda m: layer(m).self_attn.v_proj.to_empty(device="cpu").weight.fill_(0.1), None),
    "a new linear": (new_linear, None),
    "an adapter": (lora, "layers.1.self_attn: changed after minirt.patch: q_proj is Sequential"),
    "a parametrization": (
        lambda m: nn.utils.parametrize.register_parametrization(layer(m).mlp.gate_proj, "weight", Twice()),
        "layers.1.mlp: changed after minirt.patch: gate_proj is ParametrizedLinear",
    ),
    "pruned": (lambda m: nn.utils.prune.l1_unstructured(layer(m).mlp.up_proj, "weight", 0.5), "up_proj has hooks"),
    "another activation": (lambda m: setattr(layer(m).mlp, "act_fn", nn.GELU()), "no kernel computes its activation GELU"),
    "a known activation": (lambda m: setattr(layer(m).mlp, "act_fn", type(m).GELU()), None),
    "forward of an activation": (lambda m: doubled(layer(m).mlp.act_fn), "no kernel computes its activation"),
    "forward of a linear": (lambda m: doubled(layer(m).mlp.up_proj), "up_proj has hooks, or another library"),
    "forward of an MLP": (lambda m: doubled(layer(m).mlp), None),
    "another MLP": (lambda m: setattr(layer(m), "mlp", new(64, 64)), None),
    "another norm": (lambda m: setattr(layer(m), "input_layernorm", nn.LayerNorm(64)), None),
    "a hook on a norm": (lambda m: after_call(layer(m).input_layernorm), None),
    "a hook on an attention module": (lambda m: after_call(layer(m).self_attn), None),
    "a hook on a linear": (lambda m: after_call(layer(m).self_attn.o_proj), "o_proj has hooks"),
    "an epsilon": (lambda m: setattr(layer(m).input_layernorm, "variance_epsilon", 0.5), None),
    "one of two epsilons": (lambda m: setattr(layer(m).self_attn.k_norm, "variance_epsilon", 0.5), "two epsilons"),
    "float64": (lambda m: m.double(), "unsupported dtype"),
    "float64 of one linear": (lambda m: layer(m).self_attn.v_proj.double(), "weight: wrong dtype"),
    "the meta device": (lambda m: m.to("meta"), "unsupported device"),
    "training of a part": (lambda m: layer(m).self_attn.train(), "model.training"),
    "tied weights": (
        lambda m: setattr(layer(m).self_attn.k_proj, "weight", m.model.layers[0].self_attn.k_proj.weight), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_later_has_an_effect_or_is_refused(make, change):
    """A weight, a submodule or a hook that a patched model ignores without a word."""
    import transformers

    act, refusal = CHANGES[change]
    model, original = make("qwen3", head_dim=16), make("qwen3", head_dim=16)
    type(model).GELU = transformers.activations.GELUActivation
    minirt.patch(model)
    before = logits(model)
    with torch.no_grad():
        act(model)
        act(original)
    if refusal is not None:
        raises(refusal, logits, model)
        return
    expected = logits(original)
    assert relative(before, expected) > 1e-3
    assert relative(logits(model), expected) < 1e-5
    assert relative(logits(model), expected) < 1e-5
    if change == "forward of an MLP":
        raises(r"layers.1.mlp: another library has replaced the forward", minirt.unpatch, model)
        return
    minirt.unpatch(model)
    assert relative(logits(model), expected) < 1e-5


def test_what_is_changed_back_runs_again(make):
    """An error that stays after its cause is gone."""
    model = make()
    minirt.patch(model)
    expected, mlp = logits(model), layer(model).mlp
    linear, mlp.up_proj = mlp.up_proj, nn.Sequential(mlp.up_proj)
    raises(r"up_proj is Sequential, not torch.nn.Linear", logits, model)
    mlp.up_proj = linear
    assert torch.equal(logits(model), expected)


def test_a_class_whose_forward_is_replaced_later(make, monkeypatch):
    """A library that replaces the forward of a class, whose instances keep that of minirt."""
    model = make()
    minirt.patch(model)
    for module in (layer(model).mlp, layer(model).mlp.up_proj):
        with monkeypatch.context() as patched:
            patched.setattr(type(module), "forward", lambda self, x: x)
            raises(f"the forward of {type(module).__name__}", logits, model)


@pytest.mark.parametrize("part", ["experts", "gate"])
def test_hooks_inside_a_mixture_are_refused(make, part):
    """The kernels compute the router's scores and the experts, so a hook would not be called, or have no effect."""
    model = make("qwen3 moe")
    minirt.patch(model)
    after_call(getattr(layer(model).mlp, part))
    raises(r"layers.1.mlp: changed after minirt.patch: its (experts are|router is)", logits, model)


def test_parameters_of_a_functional_call(make):
    """Parameters that a call replaces for its time, also with a dimension for `torch.vmap`."""
    model, original = make(), make()
    minirt.patch(model)
    expected = logits(original)
    parameters = {name: torch.stack([value, 1.3 * value]) for name, value in original.named_parameters()}

    def of(model):
        def call(given):
            return torch.func.functional_call(model, given, (IDS,), {"use_cache": False}).logits

        with torch.no_grad():
            return torch.vmap(call)(parameters), call({name: values[1] for name, values in parameters.items()})

    for mine, theirs in zip(of(model), of(original), strict=True):
        assert relative(mine, theirs) < 1e-5
    assert relative(logits(model), expected) < 1e-5


def test_a_compiled_or_exported_model_follows_later_changes(make):
    """A graph with weights that are no longer those of the model."""
    model, original = make(), make()
    minirt.patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    logits(compiled, use_cache=False)
    for change in ("a new parameter", "new biases", "forward of an MLP"):
        with torch.no_grad():  # before any other call
            CHANGES[change][0](original)
            CHANGES[change][0](model)
            exported = torch.export.export(model, (IDS,), {"use_cache": False}).module()
        expected = logits(original)
        assert relative(logits(exported, use_cache=False), expected) < 1e-5
        assert relative(logits(compiled, use_cache=False), expected) < 1e-5
    lora(model)
    with pytest.raises(Exception, match=r"layers.1.self_attn: changed after minirt.patch: q_proj is Sequential"):
        logits(compiled, use_cache=False)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "qwen3 moe"])
def test_a_patched_model_is_saved_and_loaded_as_a_whole(make, name, fp8):
    """Functions that cannot be pickled, and a loaded model that is half patched. It can be unpatched before its first call."""
    model = make(name)
    original = logits(model)
    minirt.patch(model, fp8=fp8, keep_original=fp8)
    expected = logits(model)
    for call_it in (True, False):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
        if call_it:
            assert torch.equal(logits(other), expected)
        minirt.unpatch(other)
        assert torch.equal(logits(other), original)


def test_the_table(make):
    """A table with a line for each of 200 modules, or values that JSON does not take."""
    table = minirt.patch(make("qwen3"))
    lines = str(table).splitlines()
    assert lines[0].split() == ["module", "class", "replaced", "how,", "or", "why", "not"]
    assert sum("model.layers.0-2.self_attn " in line and " yes " in line for line in lines) == 1
    assert len(lines) == 8
    plain = json.loads(json.dumps(table.as_dict()))
    assert plain["changes"][1]["module"] == "model.layers.0"
    assert (plain["fp8"], plain["fp8_bytes"], plain["original_bytes"]) == (False, 0, 0)

"""What may be registered and bound, on which devices Triton layers run, and which models CUDA graphs can hold.

Catches a name that `--impl` cannot select, a factory without a result, an AMD GPU taken for a Hopper, bfloat16 in Triton's
interpreter, and a model that runs without CUDA graphs while its plan does not say so.
"""

import ast
import importlib
import pkgutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.package import ROOT
from support.raising import raises

from minirt import device, kernels, models
from minirt.errors import InputError, UnsupportedError
from minirt.kernels import launch
from minirt.layers import base, implementation, register
from minirt.loading import checkpoint as weights
from minirt.modeling.model import Model
from minirt.modeling.parameters import Parameter
from minirt.modeling.plan import parse_impl
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import CacheSpec, KVCache, LayerCache

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SIZES = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 61,
    "max_position_embeddings": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Remove the implementations that a test registers after the test."""
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))


@pytest.fixture
def hopper(monkeypatch):
    """PyTorch says that there is a GPU of capability 9.0; nothing can run on it."""
    for module in pkgutil.walk_packages(kernels.__path__, "minirt.kernels."):
        importlib.import_module(module.name)  # kernels become interpreted ones, or not, when their module is imported
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    launch.capability.cache_clear()
    yield
    launch.capability.cache_clear()


def planned(impl, place=GPU, dtype=torch.float32):
    config = models.parse_config(SIZES)
    model = Model(config, models.build(config))
    model.device, model.dtype = place, dtype
    model.resolve(impl)
    return model


def eager(kind):
    return implementation(kind, "eager").factory


@pytest.mark.parametrize("name", ["", " ", "a=b", "a,b", "a b", "a\n", "a*", "é", "a\x1b[31m", "-a", ".a", None, 3, b"a", ["a"]])
def test_unusable_names_are_refused(name):
    with pytest.raises(InputError, match="unusable name") as caught:
        register("mlp", name)
    assert str(caught.value).isprintable()


def test_other_arguments_of_register():
    for name in ("a", "_a", "A-1.b+c", "0"):
        register("mlp", name)(eager("mlp"))
        assert implementation("mlp", name).capturable is False
    raises("unsupported= is not a function", register, "mlp", "x", unsupported="never")
    raises("capturable= is not a bool", register, "mlp", "x", capturable="yes")
    raises("not a factory", register("mlp", "x"), None)
    raises("unusable kind of layer", register, ["mlp"], "x")
    assert not base.has_implementation("mlp", "x")


@pytest.mark.parametrize("impl", [None, 3, [None], ["eager", 3], b"eager", [["eager"]]], ids=repr)
def test_choices_that_are_no_strings(impl):
    raises("not an implementation choice", parse_impl, impl, error=UnsupportedError)


def test_a_factory_without_a_result():
    register("mlp", "forgetful")(lambda layer: None)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp: the factory of implementation 'forgetful' returns no function"):
        planned("layers.*.mlp=forgetful", CPU)


def test_capability(hopper, monkeypatch):
    assert (device.compute_capability(GPU), launch.capability(GPU), base.LayerContext(1, GPU).pdl) == ((9, 0), 90, True)
    assert (device.compute_capability(CPU), base.LayerContext(1, CPU).pdl) == ((0, 0), False)
    launch.capability.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert (device.compute_capability(GPU), launch.capability(GPU), base.LayerContext(1, GPU).pdl) == ((0, 0), 0, False)


def test_an_amd_gpu_has_eager_layers(hopper, monkeypatch):
    assert {row.implementation for row in planned("auto").plan.rows} == {"triton"}
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert {row.implementation for row in planned("auto").plan.rows} == {"eager"}
    assert "AMD" in planned("auto").plan.rows[1].reason
    raises(r"--impl triton: triton cannot run embedding: .*AMD GPU", planned, "triton", error=UnsupportedError)


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_bfloat16_in_the_interpreter(value, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert planned("triton", CPU, torch.float16).plan.rows[0].implementation == "triton"
    for impl in ("triton", ["eager", "layers.1.mlp=triton"]):
        raises("interpreter gives wrong bfloat16 products", planned, impl, CPU, torch.bfloat16, error=UnsupportedError)
    assert planned("eager", CPU, torch.bfloat16).plan.rows[0].implementation == "eager"


def test_the_interpreter_is_no_gpu(hopper, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" in planned("auto").plan.rows[0].reason
    raises("TRITON_INTERPRET", planned, "triton", error=UnsupportedError)


def test_which_models_cuda_graphs_can_hold(hopper):
    register("mlp", "plain")(eager("mlp"))
    register("mlp", "fast", capturable=True)(eager("mlp"))
    rules = ("auto", "*.mlp=fast", "*.mlp=plain", "*.1.mlp=plain", "head=eager")
    why = "runs as {!r}, which is not registered as capturable"
    assert [planned(["auto", rule]).plan.not_capturable for rule in rules] == [
        None, None, f"layers.0.mlp {why.format('plain')} (1 more layer like it)", f"layers.1.mlp {why.format('plain')}",
        "head is eager, and CUDA graphs hold no eager layers",
    ]  # fmt: skip
    model = planned(["auto", "*.1.mlp=plain"])
    assert not model.capturable
    assert [row.capturable for row in model.plan.rows].count(False) == 1
    assert planned(["auto", "*.mlp=fast"]).capturable
    for kind in ("embedding", "attention", "mlp", "select", "head"):
        register(kind, "own", capturable=True)(eager(kind))
    assert planned("own").plan.not_capturable == "no layer runs on Triton"
    assert planned("own", CPU).plan.not_capturable == "the device is cpu"


def test_a_head_that_does_not_know_of_static_logits():
    """A CUDA graph's result is where the runner looks for it, whoever computed it."""
    register("head", "own", capturable=True)(eager("head"))
    config = models.parse_config(SIZES)
    model = Model(config, models.build(config))
    model.allocate(CPU, torch.float32, 128)
    model.resolve(["eager", "head=own"])
    weights.randomize(model)
    cache = KVCache(model.cache_specs, 2, CPU, model.kv_dtype)
    batch = Batch.build([Chunk([7, 8, 9], 0, [1])], cache.page_size)
    expected = model(batch, cache)
    static = torch.full_like(expected, torch.nan)
    out = model(replace(batch, logits=static), cache)
    assert torch.equal(static, expected)
    assert out.data_ptr() == static.data_ptr()


@pytest.mark.parametrize("contract", [base.Layer, CacheSpec, LayerCache, Parameter])
def test_what_a_kind_states_is_what_the_runtime_reads(contract):
    """Catches a method that only a benchmark or a test calls: every new kind of layer would have to think of it."""
    read = Counter()
    for folder in ("minirt", "models"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and not ast.unparse(node.value).startswith("super()"):
                    read[node.attr] += 1
    stated = {name for name in vars(contract) | contract.__annotations__ if not name.startswith("_")}
    assert len(stated) >= (1 if contract is LayerCache else 3)
    assert {name for name in stated if not read[name]} == set()

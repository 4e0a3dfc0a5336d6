"""Forms of config.json of published quantized repositories: each is planned from headers, or refused by name with a hint.

The headers describe models of real sizes, two layers deep, with the tensors that each producer writes. The files are sparse.
"""

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minirt import LoadOptions
from minirt.errors import MinirtError
from minirt.loading.load import plan_model

FORMS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("real_quantized.json").read_text(encoding="utf-8"))
CONFIGS = json.loads((Path(__file__).parents[1] / "modeling/real_configs.json").read_text(encoding="utf-8"))
LAYERS = 2
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "F8_E4M3": 1}
Tensor = tuple[str, str, tuple[int, ...]]  # the last component of its name, dtype, shape


def linear(style: str, n: int, k: int, name: str, has_bias: bool) -> Iterator[Tensor]:
    """The tensors of a quantized linear [n, k], from the documents of the producers."""
    groups = -(-k // 128)
    if style in ("awq", "gptq", "gptq_biases"):
        yield "qweight", "I32", (k, n // 8) if style == "awq" else (k // 8, n)
        yield "scales", "F16", (groups, n)
        yield "qzeros", "I32", (groups, n // 8)
        if style != "awq":
            yield "g_idx", "I32", (k,)
    elif style == "packed":
        yield "weight_packed", "I32", (n, k // 8)
        yield "weight_scale", "BF16", (n, groups)
        yield "weight_shape", "I64", (2,)
    else:
        blocks = (-(-n // 128), -(-k // 128))
        yield "weight", "F8_E4M3", (n, k)
        scales = {"block_inv": blocks, "block": blocks, "channel": (n, 1), "tensor": (1,), "modelopt": ()}
        yield "weight_scale_inv" if style == "block_inv" else "weight_scale", "BF16", scales[style]
        if style in ("tensor", "modelopt"):
            yield "input_scale", "F32", scales[style]
        if style == "modelopt" and name in ("k_proj", "v_proj"):
            yield f"{name[0]}_scale", "F32", ()
    if has_bias or style == "gptq_biases":
        yield "bias", "F16", (n,)


def tensors(config: dict[str, Any], style: str) -> Iterator[Tensor]:
    """All tensors of a model, by their full names."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    yield from ((f"{name}.weight", "BF16", (vocab, hidden)) for name in ("model.embed_tokens", "lm_head"))
    yield "model.norm.weight", "BF16", (hidden,)
    for i in range(LAYERS):
        block = f"model.layers.{i}"
        mlps = [(f"{block}.mlp", config["intermediate_size"])]
        if experts := config.get("num_experts"):
            yield f"{block}.mlp.gate.weight", "BF16", (experts, hidden)
            mlps = [(f"{block}.mlp.experts.{e}", config["moe_intermediate_size"]) for e in range(experts)]
        parts = {f"{block}.self_attn.{name}": shape for name, shape in (
            ("q_proj", (q, hidden)), ("k_proj", (kv, hidden)), ("v_proj", (kv, hidden)), ("o_proj", (hidden, q)),
        )}  # fmt: skip
        for mlp, size in mlps:
            parts |= {f"{mlp}.gate_proj": (size, hidden), f"{mlp}.up_proj": (size, hidden), f"{mlp}.down_proj": (hidden, size)}
        for module, (n, k) in parts.items():
            name = module.rpartition(".")[2]
            has_bias = config["model_type"] == "qwen2" and name[:2] in ("q_", "k_", "v_")
            yield from ((f"{module}.{last}", dtype, shape) for last, dtype, shape in linear(style, n, k, name, has_bias))
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head} if config["model_type"].startswith("qwen3") else {}
        yield from ((f"{block}.{name}.weight", "BF16", (size,)) for name, size in norms.items())


def write(folder: Path, form: dict[str, Any]) -> int:
    """Write config.json, hf_quant_config.json and a sparse safetensors file; returns the bytes of the layers in it."""

    def expanded(value: Any) -> Any:  # names of all layers for a name with {i}
        if isinstance(value, dict):
            return {name: expanded(item) for name, item in value.items()}
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return [name.replace("{i}", str(i)) for name in value for i in range(LAYERS if "{i}" in name else 1)]
        return value

    config = CONFIGS[form["base"]]["config"] | {"num_hidden_layers": LAYERS}
    stated = {"quantization_config": expanded(form["stated"])} if "stated" in form else {}
    (folder / "config.json").write_text(json.dumps(config | stated))
    if "hf" in form:
        (folder / "hf_quant_config.json").write_text(json.dumps(expanded(form["hf"])))
    if "tensors" not in form:
        return 0
    header, end, layers = {}, 0, 0
    for name, dtype, shape in tensors(config, form["tensors"]):
        start, end = end, end + ITEM_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        layers += end - start if name.startswith("model.layers.") else 0
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return layers


@pytest.mark.parametrize("name", FORMS)
def test_real_form(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    stored = write(tmp_path, form)
    options = LoadOptions(model=tmp_path, device="cpu", dtype="bfloat16")
    if "refused" in form:
        with pytest.raises(MinirtError) as error:
            plan_model(options)
        assert form["refused"] in str(error.value)
        assert str(error.value).endswith(")"), "a hint"
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = plan_model(options).plan
    assert plan.checkpoint == form["found"]
    kept = sum(row.bytes for row in plan.rows if row.layer.startswith("layers."))
    assert kept == pytest.approx(stored, rel=0.035), "scales are kept in fp32, 4-bit ones with their zero points"
    assert any("biases" in note for note in plan.notes) == (form["tensors"] == "gptq_biases")
    assert any("KV cache" in note for note in plan.notes) == (form["tensors"] == "modelopt")

"""quantization_config and hf_quant_config.json: what is read, and what is refused by name."""

import copy
import json

import pytest
from support.quantized import STYLES
from support.quantized_int4 import STYLES as INT4_STYLES
from support.raising import raises

from minirt.errors import ConfigError, UnsupportedError
from minirt.modeling.config import Fields
from minirt.modeling.quantization_config import INT4_LAYOUTS, Scheme, fp8_scheme, read_quantization

MODULE = "model.layers.3.mlp.up_proj"


def read(config, hf=None):
    return read_quantization(Fields(config, "config.json"), None if hf is None else Fields(hf, "hf_quant_config.json"))


def stated(style, ignore=("lm_head",)):
    form = STYLES[style]
    config = form.config(list(ignore))
    return {"quantization_config": config} if config else {}, form.hf and form.hf(list(ignore))


@pytest.mark.parametrize("style", STYLES)
def test_each_style(style):
    quantization = read(*stated(style, ["lm_head", "model.layers.4.mlp.up_proj"]))
    assert quantization.method == style.split()[0]
    scales = style.split()[1] if " " in style else "tensor"
    scheme = quantization.scheme(MODULE)
    assert (scheme.scales, scheme.layout.scale_name) == (scales, STYLES[style].scale)
    assert quantization.scheme("lm_head") is quantization.scheme("model.layers.4.mlp.up_proj") is None


def test_none_is_stated():
    assert read({}) is read({"quantization_config": None}) is None


def test_ignore_lists():
    config, _ = stated("compressed-tensors channel", ["re:.*self_attn.*", "model.layers.1.mlp.down_proj"])
    quantization = read(config)
    assert quantization.scheme("model.layers.1.self_attn.q_proj") is quantization.scheme("model.layers.1.mlp.down_proj") is None
    assert quantization.scheme("model.layers.11.mlp.down_proj") is not None
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["model.layers.1.*", "lm*"]}
    quantization = read({"quantization_config": modelopt})
    assert quantization.scheme("model.layers.1.mlp.up_proj") is quantization.scheme("lm_head") is None
    assert quantization.scheme("model.layers.11.mlp.up_proj") is not None
    assert read({"quantization_config": {"quant_method": "fp8"}}).scheme("lm_head") is not None, "the tensors decide"


def test_the_most_specific_group_counts():
    config, _ = stated("compressed-tensors channel")
    groups = config["quantization_config"]["config_groups"]
    for name, targets, strategy in (("a", [MODULE], "block"), ("b", [r"re:.*\.mlp\..*"], "tensor")):
        groups[name] = copy.deepcopy(groups["group_0"]) | {"targets": targets}
        groups[name]["weights"] |= {"strategy": strategy, "block_structure": "128x128"}
    quantization = read(config)
    assert quantization.scheme(MODULE) == fp8_scheme("block", "dynamic")
    assert quantization.scheme("model.layers.2.mlp.up_proj").scales == "tensor"
    assert quantization.scheme("model.layers.2.self_attn.q_proj").scales == "channel"


def test_null_counts_as_absent():
    """Producers write null for what they leave out. What is needed is still missed."""
    every = {**STYLES, **INT4_STYLES}
    for style, needed in (("gptq 128", ("bits", "group_size")), ("awq 128", ("bits", "group_size")), ("fp8 block", ())):
        config = every[style].config(["lm_head"])
        scheme = read({"quantization_config": config}).scheme(MODULE)
        for name in set(config) - {"quant_method", "weight_block_size"}:
            if name in needed:
                with pytest.raises(ConfigError, match=rf"quantization_config\.{name}: the field is missing"):
                    read({"quantization_config": config | {name: None}})
            else:
                assert read({"quantization_config": config | {name: None}}).scheme(MODULE) == scheme, name
    for name in ("strategy", "symmetric", "dynamic", "actorder"):
        scheme = read(int4("packed 32", **{f"group__weights__{name}": None})).scheme(MODULE)
        assert scheme == Scheme(INT4_LAYOUTS["packed"], 32, True)


def test_formats_of_single_groups():
    """A group's own format counts, not that of the whole."""
    config = changed("compressed-tensors channel", format="pack-quantized", config_groups__group_0__format="float-quantized")
    assert read(config).scheme(MODULE) == fp8_scheme("channel", "dynamic")
    config = changed("compressed-tensors channel", ignore=["re:^(?!.*experts).*$"], config_groups__group_0__format=None)
    assert read(config).scheme("model.layers.0.mlp.experts.1.up_proj") is not None
    assert read(config).scheme("model.layers.0.self_attn.q_proj") is None


def test_two_files_that_agree_or_contradict():
    nested = stated("modelopt")[1]
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    assert read(config, nested).method == "modelopt"
    for other in ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, {"quant_method": "fp8"}):
        raises(r"contradicts that of hf_quant_config\.json", read, {"quantization_config": other}, nested, error=ConfigError)


def changed(style, **changes):
    config = copy.deepcopy(stated(style)[0]["quantization_config"])
    for path, value in changes.items():
        *way, last = path.split("__")
        place = config
        for key in way:
            place = place[key]
        place[last] = value
    return {"quantization_config": config}


CT, WEIGHTS = "compressed-tensors channel", "config_groups__group_0__weights__"
REFUSED = [
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes is not planned"),
    ({"quantization_config": {"quant_method": "gguf"}}, "GGUF is not planned"),
    ({"quantization_config": {"quant_method": "modelopt_fp4"}}, "'modelopt_fp4' .planned"),
    *(
        ({"quantization_config": {"quant_method": name}}, f"expected fp8 or .* or awq or auto-round or mxfp4; found '{name}'")
        for name in ("hqq", "torchao", "aqlm", "quanto", "eetq", "fbgemm_fp8")
    ),
    ({"quantization_config": {}}, "'unnamed'"),
    ({"compression_config": {"quant_method": "compressed-tensors"}}, "older name"),
    (changed("fp8 block", weight_block_size=[64, 128]), r"weight_block_size: only blocks of 128 by 128.*\[64, 128\]"),
    (changed("fp8 block", weight_block_size=[1, 128, 3]), "weight_block_size"),
    (changed("fp8 block", fmt="e5m2"), "fmt: not supported.*e5m2"),
    (changed("fp8 block", activation_scheme="odd"), "activation_scheme"),
    (changed("fp8 block", modules_to_not_convert="lm_head"), "modules_to_not_convert.*a list of strings"),
    (changed(CT, format="pack-quantized"), "only FP8 weights and.*float of 8 bits, pack-quantized"),
    (changed(CT, format="nvfp4-pack-quantized"), "quantization_config.format.*planned"),
    (changed(CT, format="int-quantized"), "quantization_config.format"),
    (changed(CT, format="marlin-24"), "quantization_config.format"),
    (changed(CT, config_groups__group_0__format="nvfp4-pack-quantized"), "group_0.format.*planned"),
    (changed(CT, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format: sparse weights"),
    (changed(CT, transform_config={"config_groups": {"R1": {}}}), "transform_config.*Hadamard"),
    (changed(CT, quantization_status="calibration"), "quantization_status.*calibration"),
    (changed(CT, config_groups={}), "config_groups: no group has quantized weights"),
    (changed(CT, **{WEIGHTS + "type": "int", WEIGHTS + "num_bits": 4}), "only FP8 weights.*int of 4 bits"),
    (changed(CT, **{WEIGHTS + "num_bits": 4}), "float of 4 bits"),
    (changed(CT, **{WEIGHTS + "type": "int"}), "int of 8 bits"),
    (changed(CT, **{WEIGHTS + "strategy": "group", WEIGHTS + "group_size": 32}), "weights.strategy.*'group'"),
    (changed(CT, **{WEIGHTS + "strategy": "block", WEIGHTS + "block_structure": [1, 16]}), "block_structure"),
    (changed(CT, **{WEIGHTS + "symmetric": False}), "weights.symmetric.*expected true; found false"),
    (changed(CT, **{WEIGHTS + "dynamic": True}), "weights.dynamic"),
    (changed(CT, config_groups__group_0__input_activations={"type": "int", "num_bits": 8}), "activations.type.*int of 8 bits"),
    (changed(CT, config_groups__group_0__output_activations={"num_bits": 8}), "output_activations"),
    (changed(CT, ignore=[f"re:{i}" for i in range(300)]), "ignore: too many patterns.*found 300"),
    *(
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": name}}, f"quant_algo.*'{name}'.*planned")
        for name in ("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
    ),
    ({"quantization_config": {"quant_method": "modelopt"}}, "quant_algo.*none"),
    (changed("fp8 block", transform_config={"config_groups": {"R1": {}}}), "transform_config.*Hadamard"),
    ({"quantization_config": {"quant_method": "modelopt", "quant_algo": 5}}, "quant_algo.*a string"),
]


def int4(style, **changes):
    config = copy.deepcopy(INT4_STYLES[style].config(["lm_head"]))
    for name, value in changes.items():
        place = config["config_groups"]["group_0"] if name.startswith("group__") else config
        place = place["weights"] if name.startswith("group__weights__") else place
        place[name.rpartition("__")[2]] = value
    return {"quantization_config": config}


@pytest.mark.parametrize("style", INT4_STYLES)
def test_each_style_of_4_bits(style):
    form = INT4_STYLES[style]
    quantization = read({"quantization_config": form.config(["lm_head", "model.layers.4.mlp.up_proj"])})
    layout, group = style.split()[0], None if form.group == -1 else form.group
    offset = int(layout == "gptq" and style != "gptq v2")
    assert quantization.scheme(MODULE) == Scheme(INT4_LAYOUTS[layout], group, form.symmetric, offset)
    assert quantization.scheme("model.layers.4.mlp.up_proj") is None
    assert quantization.scheme("model.layers.14.mlp.up_proj") is not None


def auto_round(**changes):
    fields = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "packing_format": "auto_round:auto_gptq"}
    return {"quantization_config": fields | {"data_type": "int", "autoround_version": "0.16.1"} | changes}


def test_auto_round():
    """The zero points of its own form are not stored minus 1; modules with 16 bits are named or matched."""
    extra = {"model.layers.1.mlp.up_proj": {"bits": 16, "data_type": "float"}, r"model\.layers\.\d+\.self_attn": {"bits": 16}}
    quantization = read(auto_round(extra_config=extra, block_name_to_quantize="model.layers"))
    assert quantization.scheme(MODULE) == Scheme(INT4_LAYOUTS["gptq"], 128, True, 1)
    assert quantization.scheme("model.layers.1.mlp.up_proj") is quantization.scheme("model.layers.3.self_attn.k_proj") is None
    scheme = read(auto_round(packing_format="auto_round", sym=False)).scheme(MODULE)
    assert scheme == Scheme(INT4_LAYOUTS["gptq"], 128, False, 0)
    scheme = read(auto_round(packing_format="auto_round:auto_awq", sym=False)).scheme(MODULE)
    assert scheme == Scheme(INT4_LAYOUTS["awq"], 128, False, 0)


def test_names_of_a_decoder_inside_a_wrapper():
    """Lists name modules as the files do. Catches a pattern for the files' names that is matched with the model's, and a full
    name of either kind that is not found."""
    module, stored = "model.layers.4.mlp.up_proj", "model.language_model.layers.4.mlp.up_proj"
    for entry in (module, stored, r"re:model\.language_model\..*up_proj", "model.language_model.*up_proj"):
        quantization = read({"quantization_config": INT4_STYLES["packed 128"].config([entry])})
        assert quantization.scheme(module, stored) is None, entry
        assert quantization.scheme(module.replace("up", "down"), stored.replace("up", "down")) is not None
    outside = read({"quantization_config": INT4_STYLES["packed 128"].config([r"re:^(?!.*language_model).*$"])})
    assert outside.scheme(module, stored) is not None
    assert outside.scheme(module) is None


def test_older_names_of_awq():
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "format": "GEMM"}
    assert read({"quantization_config": config}).scheme(MODULE) == Scheme(INT4_LAYOUTS["awq"], 64, False)


REFUSED_4_BITS = [
    (int4("gptq 128", bits=3), "quantization_config.bits: only weights of 4 bits.*expected 4; found 3"),
    (int4("gptq 128", group_size=48), "group_size: not supported; expected 32, 64, a multiple of 128, or -1; found 48"),
    (int4("gptq 128", group_size=0), "group_size"),
    (int4("gptq 128", checkpoint_format="marlin"), "checkpoint_format: not supported.*found 'marlin'"),
    (int4("gptq 128", pack_dtype="int16"), "pack_dtype"),
    (int4("gptq 128", dynamic={"+:.*down.*": {"bits": 8}}), "dynamic: settings of single modules.*only '-:' entries"),
    (int4("awq 128", bits=8), "bits: only weights of 4 bits"),
    (int4("awq 128", version="gemv_fast"), "version: this order of weights.*expected gemm; found 'gemv_fast'"),
    (int4("awq 128", zero_point=False), "zero_point: AWQ without zero points"),
    (int4("awq 128", modules_to_not_convert=3), "modules_to_not_convert.*a list of strings"),
    (int4("packed 128", group__weights__num_bits=8), "weights.type: only FP8.*int of 8 bits, pack-quantized"),
    (int4("packed 128", group__weights__actorder="group"), "actorder: groups of columns in the order.*found 'group'"),
    (int4("packed 128", group__weights__strategy="tensor"), "strategy.*expected group or channel"),
    (int4("packed 128", group__weights__group_size=16), "group_size: not supported.*found 16"),
    (int4("packed 128", group__weights__dynamic=True), "dynamic"),
    (int4("packed 128", group__input_activations={"num_bits": 8, "type": "int"}), "input_activations: only 16-bit"),
    (int4("packed 128", format="float-quantized"), "int of 4 bits"),
    *((int4("gptq 128", bits=bits), "quantization_config.bits: only weights of 4 bits") for bits in (2, 8)),
    *((int4("gptq 128", bits=bits), r"quantization_config\.bits.*an integer") for bits in ("4", True, 4.5, None)),
    *((int4("awq 128", group_size=size), r"quantization_config\.group_size") for size in (-2, 1 << 40, "128", None, 127)),
    (int4("gptq 128", is_marlin_format=True), "is_marlin_format: this order of weights.*expected false; found true"),
    (int4("gptq 128", sym="yes"), r"quantization_config\.sym.*true or false"),
    (int4("awq 128", version="exllama"), "version: this order of weights"),
    (int4("awq 128", version="llm-awq"), "version: this order of weights"),
    (int4("packed 128", group__weights__actorder="dynamic"), "actorder: groups of columns in the order"),
    (int4("packed 128", group__weights__num_bits=3), "int of 3 bits"),
    (int4("packed 128", group__weights__symmetric="no"), r"weights\.symmetric.*true or false"),
    (int4("packed 128", group__weights__group_size=None), r"weights\.group_size"),
    (int4("packed 128", group__output_activations={"num_bits": 8}), "output_activations: only 16-bit"),
    (int4("packed 128", sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format: sparse weights"),
    (int4("packed 128", transform_config={"config_groups": {"R1": {}}}), "transform_config.*Hadamard"),
    (int4("packed 128", format="marlin-24"), "quantization_config.format"),
    (int4("gptq 128", adapter={"name": "eora", "rank": 16}), r"quantization_config\.adapter: adapters \(EoRA\) are not"),
    (int4("gptq 128", rotation="hadamard"), r"quantization_config\.rotation: rotations of weights.*'hadamard'"),
    (auto_round(bits=2), "bits: only weights of 4 bits"),
    (auto_round(packing_format="auto_round:fp8_static"), "packing_format: not supported.*'auto_round:fp8_static'"),
    (auto_round(data_type="mx_fp"), "data_type: not supported.*'mx_fp'"),
    (auto_round(act_bits=8), "act_bits: quantized activations"),
    (auto_round(rotation_config={"hadamard_type": "random"}), "rotation_config: transforms of weights"),
    (auto_round(extra_config={"lm_head": {"bits": 8}}), r"extra_config\.lm_head\.bits: settings of single modules"),
    (auto_round(extra_config={MODULE: {"group_size": 64}}), "bits: settings of single modules.*group_size"),
    (auto_round(extra_config={"re(": {"bits": 16}}), "extra_config"),
]


def test_desc_act_is_decided_by_the_tensors():
    """Catches a refusal by name: with static groups, the columns are in their own order in spite of desc_act."""
    assert read(int4("gptq 128", desc_act=True)).scheme(MODULE) == Scheme(INT4_LAYOUTS["gptq"], 128, True, 1, ordered=True)
    assert not read(int4("gptq row", desc_act=True)).scheme(MODULE).ordered  # one group: the order does not matter


CACHE_ONLY = [
    (changed(CT, config_groups={}, kv_cache_scheme={"num_bits": 8, "type": "float"}), "kv_cache_scheme"),
    ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}, "kv_cache_quant_algo"),
]


@pytest.mark.parametrize(("config", "field"), CACHE_ONLY)
def test_a_quantized_cache_alone(config, field):
    """Catches a refusal of plain weights, and scales that are dropped without a word."""
    with pytest.warns(UserWarning, match=rf"quantization_config\.{field}: the FP8 scales of the KV cache are not used"):
        assert read(config) is None
    (stated_fields,) = config.values()
    if stated_fields["quant_method"] == "modelopt":
        fields = Fields({"quantization": {**stated_fields, "quant_algo": None}}, "hf_quant_config.json")
        with pytest.warns(UserWarning, match=r"hf_quant_config\.json, field quantization\.kv_cache_quant_algo"):
            assert read_quantization(Fields({}), fields) is None


@pytest.mark.parametrize(("config", "words"), [*REFUSED, *REFUSED_4_BITS])
def test_refused_by_name(config, words):
    """Catches weights that are read in another form than the file's."""
    raises(words, read, json.loads(json.dumps(config)), error=ConfigError)


def test_a_bad_pattern_is_refused_with_its_field():
    """Catches a pattern that is matched in another way than in Python."""
    words = r"config\.json, field quantization_config\.ignore.*not simple enough.*found"
    raises(words, read, changed(CT, ignore=[r"re:(a)\1"]), error=UnsupportedError)

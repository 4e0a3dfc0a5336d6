"""Write tests/loading/packed_by_others: tiny models that other projects quantized and packed, and what those projects read back.

python tests/tools/pack_with_others.py        downloads the packages below from the package index, without installing them

Each folder has config.json and model.safetensors, and `weights.npz` with the fp32 weights [N, K] that the project itself computes
from the packed tensors. AutoRound writes whole folders, quantization_config included. AutoAWQ and AutoGPTQ pack the linears of
the same model; the fields of their quantization_config are those of `AwqConfig.to_transformers_dict` and
`BaseQuantizeConfig.to_dict`. Only the modules that pack are imported, as these packages need others that the recipe does not use.

Licences: AutoAWQ and AutoGPTQ MIT, AutoRound Apache-2.0. The folders hold random numbers and none of their code.
"""

import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

TARGET = Path(__file__).parents[1] / "loading" / "packed_by_others"
PACKAGES = {  # pip's arguments; AutoGPTQ's wheel is for Python 3.11, but its packing is plain Python
    "autoawq==0.2.7.post3": (),
    "auto-round==0.16.1": (),
    "auto-gptq==0.7.1": ("--python-version", "3.11", "--platform", "manylinux2014_x86_64"),
}
GROUP = 32
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float16", "eos_token_id": 2,
}  # fmt: skip
Weights = dict[str, Tensor]  # module → fp32 weight [N, K]


def fetch(folder: Path) -> None:
    """Download and unpack the packages, and make the modules importable."""
    for package, options in PACKAGES.items():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
        subprocess.run([*command, *options, package], check=True)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    sys.path.insert(0, str(folder))
    for name in ("awq", "awq.modules", "awq.modules.linear", "awq.utils", "auto_gptq", "auto_gptq.nn_modules"):
        package = types.ModuleType(name)  # in place of an __init__.py that imports everything
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    for name in ("datasets", "cpuinfo"):  # of AutoRound's calibration and its log
        stub = _Anything(name)
        stub.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = stub
    sys.modules["cpuinfo"].get_cpu_info = lambda: {"brand_raw": "", "flags": []}  # type: ignore[attr-defined]


class _Anything(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def model() -> Any:
    """A random model in fp16 whose rows differ in size and are not centred."""
    import transformers

    torch.manual_seed(17)
    own = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**CONFIG))
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.normal_(0.3 if parameter.ndim == 1 else 0.02, 0.1)
            if parameter.ndim == 2:
                parameter *= torch.rand(parameter.shape[0], 1) + 0.5
    return own.half()


def grid(linear: nn.Linear, symmetric: bool) -> tuple[nn.Linear, Tensor, Tensor]:
    """A linear whose weights are on a grid of 16 levels, since AutoAWQ and AutoGPTQ do not clamp; scales and zeros [N, groups].

    Zero points are from 1 to 15: AutoGPTQ stores them minus 1.
    """
    parts = linear.weight.float().unflatten(1, (-1, GROUP))
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scale = (parts.abs().amax(2) / 7.5 if symmetric else (high - low) / 15).half().float()
    zero = torch.full_like(scale, 8) if symmetric else (-low / scale).round().clamp(1, 15)
    levels = (parts / scale.unsqueeze(2) + zero.unsqueeze(2)).round().clamp(0, 15)
    rounded = nn.Linear(linear.in_features, linear.out_features, False)
    rounded.weight.copy_(((levels - zero.unsqueeze(2)) * scale.unsqueeze(2)).flatten(1))
    return rounded, scale, zero


def linears(own: nn.Module) -> dict[str, nn.Linear]:
    return {name: each for name, each in own.named_modules() if isinstance(each, nn.Linear) and name != "lm_head"}


def identity(layer: Any, columns: int) -> Tensor:
    """The weight [N, K] that a layer multiplies by, in fp32: the scales are not rounded once more."""
    layer.scales, layer.bias = layer.scales.float(), None
    return layer(torch.eye(columns)).T.contiguous()


def autoawq(_: Path) -> tuple[dict[str, Any], dict[str, Tensor], Weights]:
    WQLinear = importlib.import_module("awq.modules.linear.gemm").WQLinear_GEMM
    dequantize = importlib.import_module("awq.utils.packing_utils").dequantize_gemm
    own = model()
    tensors, weights = dict(own.state_dict()), {}
    for name, linear in linears(own).items():
        rounded, scale, zero = grid(linear, False)
        packed = WQLinear.from_linear(rounded, 4, GROUP, scales=scale.T.contiguous(), zeros=zero.T.contiguous())
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{last}": getattr(packed, last) for last in ("qweight", "qzeros", "scales")}
        weights[name] = dequantize(packed.qweight, packed.qzeros, packed.scales.float(), 4, GROUP).T.contiguous()
    stated = {"quant_method": "awq", "zero_point": True, "group_size": GROUP, "bits": 4, "version": "gemm"}
    return stated | {"modules_to_not_convert": None}, tensors, weights


def autogptq(symmetric: bool) -> Callable[[Path], tuple[dict[str, Any], dict[str, Tensor], Weights]]:
    def pack(_: Path) -> tuple[dict[str, Any], dict[str, Tensor], Weights]:
        QuantLinear = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
        own = model()
        tensors, weights = dict(own.state_dict()), {}
        for name, linear in linears(own).items():
            rounded, scale, zero = grid(linear, symmetric)
            packed = QuantLinear(4, GROUP, linear.in_features, linear.out_features, False)
            packed.pack(rounded, scale, zero)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{last}": getattr(packed, last) for last in ("qweight", "qzeros", "scales", "g_idx")}
            tensors[f"{name}.scales"] = packed.scales.half()
            weights[name] = identity(packed, linear.in_features)
        stated = {"bits": 4, "group_size": GROUP, "damp_percent": 0.01, "desc_act": False, "static_groups": False}
        stated |= {"sym": symmetric, "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model"}
        return stated | {"is_marlin_format": False, "quant_method": "gptq"}, tensors, weights

    return pack


def autoround(kind: str, symmetric: bool) -> Callable[[Path], tuple[dict[str, Any], dict[str, Tensor], Weights]]:
    def pack(scratch: Path) -> tuple[dict[str, Any], dict[str, Tensor], Weights]:
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        AutoRound = importlib.import_module("auto_round").AutoRound
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
        options = {"bits": 4, "group_size": GROUP, "sym": symmetric, "iters": 0, "disable_opt_rtn": True, "device_map": "cpu"}
        AutoRound(model(), tokenizer, **options).quantize_and_save(str(scratch), format=kind)
        (config,) = scratch.glob("**/config.json")
        tensors = load_file(config.with_name("model.safetensors"))
        stated = json.loads(config.read_text())["quantization_config"]
        shapes = {name: tuple(linear.weight.shape) for name, linear in linears(model()).items()}
        read = READ[stated.get("packing_format", kind).removeprefix("auto_round:")]
        return stated, tensors, {name: read(tensors, name, shape) for name, shape in shapes.items()}

    return pack


def read_gptq(tensors: dict[str, Tensor], name: str, shape: tuple[int, int]) -> Tensor:
    """By the layer that AutoRound's packer writes for."""
    QuantLinear = importlib.import_module("auto_round_extension.torch.qlinear_torch_zp").QuantLinear
    layer = QuantLinear(4, GROUP, shape[1], shape[0], False)
    layer.qweight, layer.qzeros, layer.scales = (tensors[f"{name}.{last}"] for last in ("qweight", "qzeros", "scales"))
    return identity(layer, shape[1])


def read_awq(tensors: dict[str, Tensor], name: str, _: tuple[int, int]) -> Tensor:
    dequantize = importlib.import_module("auto_round.export.export_to_awq.utils").dequantize_gemm
    scales = tensors[f"{name}.scales"].float()
    return dequantize(tensors[f"{name}.qweight"], tensors[f"{name}.qzeros"], scales, 4, GROUP).T.contiguous()


def read_packed(tensors: dict[str, Tensor], name: str, _: tuple[int, int]) -> Tensor:
    """By compressed-tensors, which defines the format."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(num_bits=4, strategy="group", group_size=GROUP)
    state = {last: tensors[f"{name}.{last}"] for last in ("weight_packed", "weight_scale", "weight_shape")}
    state["weight_scale"] = state["weight_scale"].float()
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    return BaseCompressor.get_value_from_registry("pack-quantized").decompress(state, scheme)["weight"]


READ = {"auto_gptq": read_gptq, "auto_awq": read_awq, "llm_compressor": read_packed}
FOLDERS = {
    "autoawq": autoawq,
    "autogptq": autogptq(True),
    "autogptq-zeros": autogptq(False),
    "autoround-gptq": autoround("auto_gptq", True),
    "autoround-gptq-zeros": autoround("auto_gptq", False),
    "autoround-awq": autoround("auto_awq", False),
    "autoround-own": autoround("auto_round", True),
    "autoround-own-zeros": autoround("auto_round", False),
    "autoround-compressed-tensors": autoround("llm_compressor", True),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        fetch(Path(scratch))
        for name, pack in FOLDERS.items():
            with torch.no_grad():
                stated, tensors, weights = pack(Path(scratch, name))
            folder = TARGET / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": stated}, indent=1) + "\n")
            tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
            np.savez_compressed(folder / "weights.npz", **{key: weight.numpy() for key, weight in weights.items()})
            print(name, sum(file.stat().st_size for file in folder.iterdir()), "bytes")


if __name__ == "__main__":
    main()

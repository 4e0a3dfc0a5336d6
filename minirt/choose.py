"""What a load is to run with: which files, device, dtype, length and memory; checked before anything is allocated."""

from collections.abc import Sequence
from pathlib import Path

import torch

from minirt import models, weights
from minirt.config import ModelConfig
from minirt.errors import ConfigError, DeviceError, InputError, ModelNotFoundError, TokenizerError
from minirt.graph import Model
from minirt.hub import ModelFiles, resolve
from minirt.kv_cache import PAGE_SIZE, page_bytes
from minirt.quantize import FP8, Quantization
from minirt.tokenizer import Tokenizer


def find(
    model: str | Path, revision: str | None, *, need_weights: bool, progress: bool = False
) -> tuple[ModelFiles | None, ModelConfig]:
    """The model's files and checked config. A preset whose weights are not needed has no files."""
    name = str(models.embedded()) if model == models.EMBEDDED else str(model)
    if not name:
        raise InputError("the model's name is empty", hint="give a folder, a Hub id or a preset")
    try:
        preset = models.preset(name) if not Path(name).expanduser().is_dir() else None
    except (OSError, RuntimeError) as error:  # a name that is too long, a folder that is not ours to see, an unknown user
        what = f"cannot be looked up: {error.strerror if isinstance(error, OSError) else error}"
        raise ModelNotFoundError(what, where=name[:80]) from error
    if preset is not None and not need_weights and revision is None:
        return None, preset.config
    try:
        name = preset.hub_id if preset else name
        files = resolve(name, revision=revision, weights=need_weights, progress=progress)
    except ModelNotFoundError as error:
        if "/" in name:
            raise
        known = ", ".join(p.name for p in models.presets() if not p.name.endswith("Instruct"))
        hint = f"a folder, a Hub id org/name, or one of {known}"
        raise ModelNotFoundError(error.what, where=error.where, hint=hint) from error
    return files, models.parse_config(files.config, where=str(files.folder / "config.json"))


def plan_model(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    impl: str | Sequence[str] = "auto",
    revision: str | None = None,
    quantization: Quantization | None = None,
) -> tuple[ModelConfig, Model]:
    """The model's config and its resolved graph, without reading or allocating any weight."""
    target = pick_device(device)
    _, config = find(model, revision, need_weights=False)
    graph = Model(config, models.build(config), quantization)
    graph.device, graph.dtype = target, pick_dtype(dtype, config, target)
    graph.resolve(impl)
    return config, graph


def pick_device(device: str) -> torch.device:
    """"auto", "cpu", "cuda" or "cuda:N" → a device that exists; never a silent CPU."""
    if device == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, number = str(device).partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()) or (kind == "cpu" and number):
        raise DeviceError("unknown device", where="--device", expected="auto, cpu, cuda or cuda:N", found=device)
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        hint = "use --device cpu, or install a CUDA build of torch"
        raise DeviceError("no usable CUDA device", where=f"--device {device}", hint=hint)
    index, count = int(number or 0), torch.cuda.device_count()
    if index >= count:
        raise DeviceError("no such device", where="--device", expected=f"below cuda:{count}", found=device)
    return torch.device("cuda", index)


def pick_dtype(dtype: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """"auto" → the checkpoint's dtype on a GPU, float32 on a CPU, where 16-bit arithmetic is slow."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        return known[config.dtype] if device.type == "cuda" else torch.float32
    if dtype not in known:
        raise ConfigError("unknown dtype", where="--dtype", expected=f"auto, {', '.join(known)}", found=dtype)
    return known[dtype]


def pick_kv_dtype(dtype: str, model: torch.dtype) -> torch.dtype:
    """"auto" → the model's; "fp8" → e4m3 with a scale for each token and head."""
    if dtype not in ("auto", "fp8"):
        raise ConfigError("unknown dtype", where="--kv-cache-dtype", expected="auto or fp8", found=dtype)
    return FP8 if dtype == "fp8" else model


def pick_length(config: ModelConfig, asked: int | None) -> int:
    """Positions to serve: those asked for, else all that the model has."""
    if asked is None:
        return config.context_len
    if type(asked) is not int or not 1 <= asked <= config.context_len:
        expected = f"1 to {config.context_len}"
        raise ConfigError("outside the model's context", where="--max-model-len", expected=expected, found=asked)
    return asked


def check_vocabulary(tokenizer: Tokenizer | None, config: ModelConfig) -> None:
    """Refuse a tokenizer of another model: one with ids that this model has no embedding for."""
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise TokenizerError(
            "the tokenizer has ids that the model does not", where="tokenizer.json",
            expected=f"at most {config.vocab_size} (vocab_size of config.json)", found=tokenizer.vocab_size,
        )


def check_memory(
    graph: Model, length: int, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype, kv_cache_memory: int | None,
    max_num_seqs: int,
) -> None:  # fmt: skip
    """Refuse what will not fit, before anything is allocated. Of `kv_cache_memory` counts what `page_count` takes of it."""
    # The rope tables are made on the CPU, where with what they are made from they take four times their size.
    tables = (16 if device.type == "cpu" else 4) * length * graph.config.head_dim
    needed = graph.weight_bytes(dtype) + tables
    what = f"{graph.num_parameters / 1e9:.2f} G weights and the tables of {length} positions"
    weights.require_memory(needed, device, what, "take --fp8, a smaller model, a 16-bit --dtype or a lower --max-model-len")
    if kv_cache_memory is not None:
        one = page_bytes(graph.kv_shapes, kv_dtype)
        pages = min(_pages_in(kv_cache_memory, one), max_num_seqs * -(-length // PAGE_SIZE)) * one
        weights.require_memory(needed + pages, device, f"{what}, and KV pages,", "lower --kv-cache-memory")


def page_count(model: Model, memory: int | None, max_num_seqs: int) -> int:
    """KV pages in `memory` bytes (None: as `Generator` says); at most what `max_num_seqs` full sequences need."""
    one = page_bytes(model.kv_shapes, model.kv_dtype)
    full = max_num_seqs * -(-model.max_model_len // PAGE_SIZE)
    if not one:
        return full
    if memory is not None:
        return min(_pages_in(memory, one), full)
    share = 0.9 if model.device.type == "cuda" else 0.25
    pages = min(int(weights.free_memory(model.device) * share) // one, full)
    if pages < 1:
        weights.require_memory(int(one / share), model.device, "KV pages", "take a smaller model or free memory")
    return pages


def _pages_in(memory: int, one: int) -> int:
    if type(memory) is not int or memory < max(one, 1):
        expected = f"{one} bytes (one page) or more"
        raise ConfigError("too small", where="--kv-cache-memory", expected=expected, found=memory)
    return memory // max(one, 1)

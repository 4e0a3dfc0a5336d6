"""What `LoadOptions` mean for a model on a device: its dtypes, and the number of positions to serve."""

import torch

from minirt.errors import ConfigError, UnsupportedError
from minirt.modeling.config import DTYPES, ModelConfig
from minirt.modeling.formats import FP8
from minirt.wording import warn

_DTYPE_NAMES = {
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32",
    "f32": "float32", "fp8_e4m3": "fp8", "float8_e4m3fn": "fp8", "q8_0": "fp8",
}  # fmt: skip  (names of vLLM, PyTorch and llama.cpp)


def pick_dtype(dtype: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """"auto" → the checkpoint's dtype on a GPU, float32 on a CPU, where 16-bit arithmetic is slow."""
    known = {name: getattr(torch, name) for name in DTYPES}
    auto = known[config.dtype] if device.type == "cuda" else torch.float32
    return _known(dtype, "--dtype", {"auto": auto, **known})


def pick_kv_dtype(dtype: str, model: torch.dtype) -> torch.dtype:
    """"auto" → the model's dtype; "fp8" → e4m3 with a scale for each token and head."""
    return _known(dtype, "--kv-cache-dtype", {"auto": model, "fp8": FP8})


def _known(dtype: str, place: str, known: dict[str, torch.dtype]) -> torch.dtype:
    if dtype in known:
        return known[dtype]
    plain = str(dtype).removeprefix("torch.")
    name = _DTYPE_NAMES.get(plain, plain)
    *names, last = known
    hint = f"did you mean {name}?" if name in known else None
    raise ConfigError("unknown dtype", where=place, expected=f"{', '.join(names)} or {last}", found=dtype, hint=hint)


def longest_length(config: ModelConfig) -> int:
    """Number of positions that may be asked for: above its sliding window, a model is refused."""
    return min(config.max_context_len, config.sliding_window or config.max_context_len)


def pick_length(config: ModelConfig, asked: int | None) -> int:
    """Number of positions to serve: `asked`, else all positions of the model.

    Raises:
        ConfigError: `asked` is no length that the model supports.
        UnsupportedError: a sliding window would change sequences of this length.
    """
    length = config.context_len if asked is None else asked
    if type(length) is not int or not 1 <= length <= config.max_context_len:
        what = "outside the model's context" if type(length) is int else "not a number of tokens"
        expected = f"an integer from 1 to {config.max_context_len}"
        raise ConfigError(what, where="--max-model-len", expected=expected, found=repr(length)[:80])
    window = config.sliding_window
    if window is not None and length > window:
        expected, shown = f"sequences of at most {window} tokens (sliding_window in config.json)", f"a length of {length}"
        hint = f"use --max-model-len {window}: up to there, the window changes nothing"
        raise UnsupportedError("sliding-window attention is not supported", expected=expected, found=shown, hint=hint)
    rope = config.rope
    if rope.kind in ("dynamic", "longrope") and length > rope.original_max_position:
        what = f"--max-model-len: above {rope.original_max_position} tokens, rope type {rope.kind!r} has other frequencies"
        why = f"with {length}, shorter sequences have them too, while transformers switches with the length of a sequence"
        warn(f"{what}; {why}")
    elif length > config.context_len:
        what = f"--max-model-len: {length} is more than max_position_embeddings of config.json ({config.context_len})"
        why = f"the model was trained for it only if that number does not include the rope factor ({config.rope.factor:g})"
        warn(f"{what}; {why}")
    return length

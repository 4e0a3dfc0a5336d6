"""`LoadOptions`: everything that decides how a model is loaded. The Python API, the command line and the benchmarks share it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minirt import models
from minirt.engine.limits import MAX_STEP_MS, check_limits
from minirt.errors import ConfigError, UnsupportedError, inside
from minirt.foreign_names import check_names
from minirt.layers import Layer
from minirt.loading.memory import MemoryOptions
from minirt.modeling.config import ModelConfig
from minirt.modeling.formats import FP8, Quantization
from minirt.sampling_params import OF_SAMPLING
from minirt.speculative.options import SpeculativeOptions, drafts_of
from minirt.wording import warn

if TYPE_CHECKING:
    from minirt.engine.runner import Proposer

_DTYPE_NAMES = {
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32",
    "f32": "float32", "fp8_e4m3": "fp8", "float8_e4m3fn": "fp8", "q8_0": "fp8",
}  # fmt: skip  (names of vLLM, PyTorch and llama.cpp)


OF_GENERATE = {name: f"generate takes {hint}" for name, hint in OF_SAMPLING.items()}


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How to load a model.

    Args:
        model: a folder with config.json and safetensors, a Hub id ("Qwen/Qwen2.5-7B"), a preset ("Qwen2.5-7B"), or "embedded",
            the small model that is part of the package.
        revision: a branch, tag or commit of a Hub model.
        device: "auto" (a GPU if there is one), "cuda", "cuda:N" or "cpu".
        dtype: "auto" (on a GPU the checkpoint's own; on a CPU float32), "bfloat16", "float16" or "float32".
        impl: which implementation each layer runs; see `minirt.modeling.plan.parse_impl`.
        quantization: None, or how the weights of all linear layers are quantized while they are loaded. "fp8": e4m3 with a scale
            for each output channel. "int4": 4 bits with a scale for each output channel and 128 input channels. Activations and
            the embedding keep the dtype. For a checkpoint that is quantized already: None.
        quantize_head: quantize the LM head too. None: with "fp8", unless it is tied to the embedding; with "int4", no.
        kv_cache_dtype: "auto" (the dtype), or "fp8": e4m3 with a scale for each token and head.
        kv_cache_memory: memory for KV pages, in bytes or as text: "4GiB". None: what `gpu_memory_utilization` leaves beside
            weights and steps; on a CPU, a quarter of the free memory. Never more than `max_num_seqs` full sequences need.
        gpu_memory_utilization: the share of a GPU's free memory that weights, KV pages and the memory of steps may take
            together. None: 0.9.
        max_model_len: maximum number of tokens of a sequence, prompt and completion together; an error if the KV cache cannot
            hold them. None: all positions of the model, or with a warning as many as the KV cache can hold.
            With linear rope, it may be up to the rope factor times max_position_embeddings. A model with a sliding window runs
            if this is at most the window.
        max_num_seqs: maximum number of requests in one step; further ones wait.
        max_num_batched_tokens: maximum number of tokens in one step. Longer prompts are computed in chunks, beside decoding
            requests. None: on a GPU the largest of 8,192, 4,096, 2,048 and 1,024 that leaves KV pages for one sequence of full
            length, else 1,024; on a CPU 256.
        threads: number of threads of PyTorch's CPU operations, in the whole process except in generators that exist. None:
            the value of OMP_NUM_THREADS, else PyTorch's own setting limited to the CPUs that this process may use (affinity and
            cgroup quota).
        max_waiting: maximum number of requests that wait while a step computes others. Further requests end with a
            `QueueFullError`. None: no limit.
        max_step_ms: on a GPU, milliseconds that a step may spend on prompts while other requests decode, which wait for it;
            by times measured at warm-up. 0: any time.
        prefix_cache: keep the KV pages of finished requests until their memory is needed, so that a request with the same
            beginning does not compute it again. Models with recurrent layers keep states, too (`state_cache_memory`).
        state_cache_memory: memory for kept states of recurrent layers, in bytes or as text. None: a quarter of the memory for KV
            pages and them, at most four states for each of `max_num_seqs`, and not more than `kv_cache_memory` leaves. 0: none,
            and no prefix cache.
        random_weights: fill the weights with random values from `seed` instead of reading them; a preset then needs no download.
        check_weights: refuse NaN and Inf in the checkpoint.
        layers: composes another model from the config: `layers(config) -> [Embedding, …, Head]`. The model inserts a
            `Select` unless the list has one. `Generator.unused_tensors` lists the checkpoint tensors that no layer uses.
        warmup: on a GPU, compile every kernel and capture every CUDA graph before loading returns. With False, loading
            is faster, but kernels are compiled and CUDA graphs captured during generation, at first use.
        cuda_graphs: on a GPU, run small steps as CUDA graphs. False launches every kernel of every step from the host (vLLM's
            `enforce_eager`). It does not select eager layers: `impl="eager"` does.
        speculative: propose tokens and verify several in one step, which changes no distribution: a `SpeculativeOptions`, a dict
            of its fields, a text as --speculate takes it ("ngram"), or a proposer (`minirt.engine.runner.Proposer`). Method
            "mtp" also loads the layers of multi-token prediction. None: a step yields one token of each sequence.
    Raises:
        ConfigError, InputError: values that exclude each other, or a limit that is no positive integer.
    """

    model: str | Path = models.EMBEDDED
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    impl: str | Sequence[str] = "auto"
    quantization: str | None = None
    quantize_head: bool | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    threads: int | None = None
    max_waiting: int | None = None
    max_step_ms: float = MAX_STEP_MS
    prefix_cache: bool = True
    state_cache_memory: int | str | None = None
    random_weights: bool = False
    seed: int = 0
    check_weights: bool = False
    layers: Callable[[ModelConfig], list[Layer]] | None = None
    warmup: bool = True
    cuda_graphs: bool = True
    speculative: "SpeculativeOptions | Proposer | None" = None

    def __new__(cls, *unnamed: Any, **given: Any) -> "LoadOptions":
        check_names(given, tuple(cls.__dataclass_fields__), cls.__name__, ConfigError, OF_GENERATE, unnamed)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.quantize_head is not None and self.quantization is None:
            what = "quantize_head needs a quantization"
            raise ConfigError(what, where="quantize_head", expected='quantization="fp8" or "int4"', found=self.quantization)
        if self.check_weights and self.random_weights:
            raise ConfigError("random weights have no checkpoint to check", where="check_weights", expected="False")
        if self.layers is not None and not callable(self.layers):
            expected = "a function that takes the model's config and returns a list of layers"
            raise ConfigError("not a function", where="layers", expected=expected, found=repr(self.layers)[:80])
        check_limits(self.max_num_seqs, self.max_num_batched_tokens, self.max_waiting, self.max_step_ms)
        if isinstance(self.speculative, str):
            object.__setattr__(self, "speculative", SpeculativeOptions.parse(self.speculative, "speculative"))
        if isinstance(self.speculative, Mapping):
            with inside("speculative"):
                object.__setattr__(self, "speculative", SpeculativeOptions(**self.speculative))
        self.memory  # noqa: B018  (checks its values)

    @property
    def memory(self) -> MemoryOptions:
        """The options that decide what the model takes of the memory."""
        return MemoryOptions(
            self.kv_cache_memory, self.max_num_seqs, self.max_num_batched_tokens, self.gpu_memory_utilization, self.cuda_graphs,
            *drafts_of(self.speculative), self.state_cache_memory, self.prefix_cache, self.max_model_len,
        )  # fmt: skip

    @property
    def formats(self) -> Quantization | None:
        """The weight formats; None: all weights keep the dtype."""
        return None if self.quantization is None else Quantization(self.quantization, self.quantize_head)


def pick_dtype(dtype: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """"auto" → the checkpoint's dtype on a GPU, float32 on a CPU, where 16-bit arithmetic is slow."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        return known[config.dtype] if device.type == "cuda" else torch.float32
    if dtype not in known:
        raise _unknown_dtype(dtype, "--dtype", ("auto", *known))
    return known[dtype]


def _unknown_dtype(dtype: object, where: str, known: Sequence[str]) -> ConfigError:
    """The error for a dtype that is not known by this name, with the name that it has here."""
    own = _DTYPE_NAMES.get(str(dtype).removeprefix("torch."), str(dtype).removeprefix("torch."))
    hint = f"did you mean {own}?" if own in known else None
    expected = f"{', '.join(known[:-1])} or {known[-1]}"
    return ConfigError("unknown dtype", where=where, expected=expected, found=dtype, hint=hint)


def pick_kv_dtype(dtype: str, model: torch.dtype) -> torch.dtype:
    """"auto" → the model's dtype; "fp8" → e4m3 with a scale for each token and head."""
    if dtype not in ("auto", "fp8"):
        raise _unknown_dtype(dtype, "--kv-cache-dtype", ("auto", "fp8"))
    return FP8 if dtype == "fp8" else model


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
        expected, found = f"sequences of at most {window} tokens (sliding_window in config.json)", f"a length of {length}"
        hint = f"use --max-model-len {window}: up to there, the window changes nothing"
        raise UnsupportedError("sliding-window attention is not supported", expected=expected, found=found, hint=hint)
    rope = config.rope
    if rope.kind in ("dynamic", "longrope") and length > rope.original_max_position:
        what = f"--max-model-len: above {rope.original_max_position} tokens, rope type {rope.kind!r} has other frequencies"
        more = f"with {length}, shorter sequences have them too, while transformers switches with the length of a sequence"
        warn(f"{what}; {more}")
    elif length > config.context_len:
        what = f"--max-model-len: {length} is more than max_position_embeddings of config.json ({config.context_len})"
        why = f"the model was trained for it only if that number does not include the rope factor ({config.rope.factor:g})"
        warn(f"{what}; {why}")
    return length

"""`Generator`: the public API. Text in, text out, on top of the engine's token ids."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minirt import models, weights
from minirt.config import ModelConfig
from minirt.cuda_graphs import GraphedModel
from minirt.engine import Engine, TokenOutput
from minirt.errors import ConfigError, DeviceError, InputError, MinirtError, ModelNotFoundError, NumericsError, TokenizerError
from minirt.graph import Model, Plan
from minirt.hub import ModelFiles, resolve as resolve_files
from minirt.kv_cache import PAGE_SIZE, KVCache, page_bytes
from minirt.layers import Layer
from minirt.sampling import EffectiveSampling, SamplingParams, resolve as resolve_sampling
from minirt.tokenizer import IncrementalDecoder, StopStrings, Tokenizer, eos_token_ids
from minirt.usage import peak_memory

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Piece:
    """A step of a stream: new text (empty while a character or a stop string is incomplete) and the token ids behind it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


@dataclass
class Completion:
    """The result of one prompt. Times in seconds; `decode_tokens_per_s` counts the tokens after the first."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str | None
    sampling: EffectiveSampling
    time_to_first_token_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    peak_memory_bytes: int = 0


@dataclass
class _Stream:
    """One request on its way from tokens to text."""

    completion: Completion
    decoder: IncrementalDecoder | None
    stops: StopStrings
    started: float
    first: float = 0.0
    parts: list[str] = field(default_factory=list)

    def push(self, output: TokenOutput) -> Piece:
        now = time.perf_counter()
        done = self.completion
        if not done.token_ids:
            self.first = now
            done.time_to_first_token_s = now - self.started
        if output.finish_reason == "error":
            raise NumericsError(
                "the logits are NaN or infinite", where=f"generated token {len(done.token_ids)}",
                hint="--check-weights finds damaged weights; --dtype float32 rules out overflow",
            )
        done.token_ids.append(output.token)
        done.finish_reason = output.finish_reason
        text, stopped = "", False
        if self.decoder is not None:
            text, stopped = self.stops.push(self.decoder.push(output.token))
            if not stopped and output.finish_reason is not None:
                tail, stopped = self.stops.push(self.decoder.flush())
                text += tail if stopped else tail + self.stops.flush()
            if stopped:
                done.finish_reason = "stop"
        self.parts.append(text)
        if done.finish_reason is not None:
            done.text = "".join(self.parts)
            done.peak_memory_bytes = peak_memory()
            if len(done.token_ids) > 1 and now > self.first:
                done.decode_tokens_per_s = (len(done.token_ids) - 1) / (now - self.first)
        return Piece(text, (output.token,), done.finish_reason)


class Generator:
    """A loaded model that generates. Make one with `from_pretrained`; use it as a context manager to free the device.

    Attributes:
        config, plan, tokenizer, eos_token_ids: what was loaded.
        load_time_s, bytes_read: how long loading took, and how much it read.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        *,
        name: str = "model",
        generation_config: dict | None = None,
        eos_token_ids: Sequence[int] = (),
        kv_cache_memory: int | None = None,
        max_num_seqs: int = 64,
    ) -> None:
        """Wrap a `Model` whose weights are allocated, filled and resolved.

        Args:
            kv_cache_memory: bytes for KV pages; None takes 90% of what a GPU has free, or on a CPU a quarter of the free
                memory at most, and never more than `max_num_seqs` sequences of full length need.
        """
        self.name, self.tokenizer, self.generation_config = name, tokenizer, generation_config
        self.eos_token_ids = tuple(eos_token_ids)
        self.load_time_s, self.bytes_read, self.unused_tensors = 0.0, 0, ()
        self._model: Model | None = model
        self.config, self.plan = model.config, model.plan
        self.decode_read_bytes = model.decode_read_bytes
        pages = _page_count(model, kv_cache_memory, max_num_seqs)
        self._cache: KVCache | None = KVCache(model.kv_shapes, pages, model.device, model.dtype)
        runnable = GraphedModel(model) if model.graphable else model
        self._engine = Engine(
            runnable, self._cache, vocab_size=model.config.vocab_size, max_model_len=model.max_model_len,
            max_num_seqs=max_num_seqs, device=model.device,
        )

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        impl: str | Sequence[str] = "auto",
        max_model_len: int | None = None,
        revision: str | None = None,
        random_weights: bool = False,
        seed: int = 0,
        check_weights: bool = False,
        layers: Callable[[ModelConfig], list[Layer]] | None = None,
        kv_cache_memory: int | None = None,
        max_num_seqs: int = 64,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Generator":
        """Load a model.

        Args:
            model: a folder with config.json and safetensors, a Hub id ("Qwen/Qwen2.5-7B"), or a preset ("Qwen2.5-7B").
            device: "auto" (a GPU if there is one), "cuda", "cuda:N" or "cpu".
            dtype: "auto" (on a GPU the checkpoint's own; on a CPU float32), "bfloat16", "float16" or "float32".
            impl: see `minirt.graph.parse_impl`.
            max_model_len: positions to serve; None: all that the model has.
            random_weights: skip the weights (and for a preset any download); `seed` fixes them.
            check_weights: refuse NaN and Inf in the checkpoint.
            layers: composes another model from the config: `layers(config) -> [Embedding, …, Head]`. Checkpoint tensors
                that it leaves out are listed in `unused_tensors` instead of refused.
            progress: called with (bytes read, bytes in all).
        Raises:
            ModelNotFoundError, ConfigError, UnsupportedError, CheckpointError, TokenizerError, DeviceError,
            OutOfMemoryError: each says what to do.
        """
        started = time.perf_counter()
        target = pick_device(device)
        files, config = find(model, revision=revision, need_weights=not random_weights)
        length = _model_length(config, max_model_len)
        graph = Model(config, layers(config) if layers else models.build(config))
        chosen = pick_dtype(dtype, config, target)
        tokenizer = Tokenizer.load(files.folder) if files else None
        _check_vocabulary(tokenizer, config)
        generation_config = files.generation_config if files else None
        needed = graph.num_parameters * chosen.itemsize
        weights.require_memory(needed, target, f"{graph.num_parameters / 1e9:.2f} G weights", "take a smaller model or --dtype")
        bytes_read, unused = 0, ()
        if random_weights:
            graph.allocate(target, chosen, length)
            graph.resolve(impl)
            weights.randomize(graph, seed)
        elif files:
            weights.match(graph, weights.read_headers(files.weight_files, files.weight_index), layers is not None)
            graph.allocate(target, chosen, length)
            graph.resolve(impl)
            report = weights.load(
                graph, files.weight_files, files.weight_index, allow_unused=layers is not None,
                check_weights=check_weights, progress=progress,
            )
            bytes_read, unused = report.bytes_read, report.unused
        raw = files.config if files else {}
        generator = cls(
            graph, tokenizer, name=str(model), generation_config=generation_config,
            eos_token_ids=eos_token_ids(generation_config, raw, tokenizer), kv_cache_memory=kv_cache_memory,
            max_num_seqs=max_num_seqs,
        )
        generator.bytes_read, generator.unused_tensors = bytes_read, unused
        generator.load_time_s = time.perf_counter() - started
        return generator

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Any:
        """Complete one prompt (→ `Completion`) or many at once (→ list of `Completion`, in input order).

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: one for all, or one for each prompt; None takes the model's own defaults.
        """
        if _is_single(prompts):
            return self._complete([prompts], [_one(params)])[0]
        if isinstance(params, SamplingParams) or params is None:
            return self._complete(list(prompts), [params] * len(prompts))
        if len(params) != len(prompts):
            raise InputError("one SamplingParams for each prompt", where="params", expected=len(prompts), found=len(params))
        return self._complete(list(prompts), list(params))

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> Completion:
        """Answer a conversation, messages of {"role", "content"}, through the model's chat template."""
        return self.generate(self.encode_chat(messages), params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Yield the completion piece by piece; the pieces' texts join to `Completion.text`. Closing the iterator aborts."""
        for _, piece in self._run([prompt], [params]):
            yield piece[0]

    def stream_completion(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[tuple[Piece, Completion]]:
        """As `stream`, with the completion as it stands after each piece."""
        for _, piece in self._run([prompt], [params]):
            yield piece

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Teacher-forced logits [T, V] fp32 on the CPU: row t predicts token t + 1."""
        return self._live.logits(token_ids)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds; ids pass through."""
        if not isinstance(prompt, str):
            return list(prompt)
        if not prompt:
            raise InputError("the prompt is empty", hint="give at least one character")
        return self._text().encode(prompt)

    def encode_chat(self, messages: Messages) -> list[int]:
        return self._text().encode_chat(list(messages))

    def effective_sampling(self, params: SamplingParams | None) -> EffectiveSampling:
        """The values that a request will run with, and where each comes from."""
        return resolve_sampling(params, self.generation_config)

    @property
    def max_len(self) -> int:
        """Tokens, prompt and completion together, that one request can have."""
        return self._live.max_len

    @property
    def kv_cache_bytes(self) -> int:
        return self._cache.nbytes if self._cache else 0

    def close(self) -> None:
        """Free the model and the cache. The generator cannot be used afterwards."""
        cuda = self._model is not None and self._model.device.type == "cuda"
        self._model = self._cache = None
        self.__dict__.pop("_engine", None)
        if cuda:
            torch.cuda.empty_cache()

    def __enter__(self) -> "Generator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _live(self) -> Engine:
        if self._model is None:
            raise MinirtError("the generator is closed", where=self.name)
        return self._engine

    def _text(self) -> Tokenizer:
        if self.tokenizer is None:
            raise TokenizerError("the model has no tokenizer", where=self.name, hint="give token ids instead of text")
        return self.tokenizer

    def _complete(self, prompts: list, params: list[SamplingParams | None]) -> list[Completion]:
        results: dict[int, Completion] = {}
        for index, (_, completion) in self._run(prompts, params):
            results[index] = completion
        return [results[i] for i in range(len(prompts))]

    def _run(self, prompts: Sequence[Any], params: Sequence[SamplingParams | None]) -> Iterator[tuple[int, tuple[Piece, Completion]]]:
        """Run requests to their ends, yielding (prompt's index, (piece, completion so far)); aborts all if left early."""
        engine = self._live
        work = [(self.encode(p), self.effective_sampling(q)) for p, q in zip(prompts, params, strict=True)]
        streams: dict[int, tuple[int, _Stream]] = {}
        try:
            for index, (tokens, sampling) in enumerate(work):
                if sampling.stop and self.tokenizer is None:
                    raise TokenizerError("stop strings need a tokenizer", where=self.name)
                request = engine.add(tokens, sampling, self.eos_token_ids)
                decoder = IncrementalDecoder(self.tokenizer) if self.tokenizer else None
                completion = Completion(tokens, [], "", None, sampling)
                stream = _Stream(completion, decoder, StopStrings(sampling.stop), time.perf_counter())
                streams[request] = index, stream
            while streams:
                for output in engine.step():
                    index, stream = streams[output.request_id]
                    piece = stream.push(output)
                    if piece.finish_reason is not None:
                        engine.abort(output.request_id)
                        del streams[output.request_id]
                    yield index, (piece, stream.completion)
        finally:
            for request in streams:
                engine.abort(request)


def find(model: str | Path, *, revision: str | None = None, need_weights: bool = True) -> tuple[ModelFiles | None, ModelConfig]:
    """The model's files and checked config. A preset whose weights are not needed has no files."""
    name = str(model)
    preset = models.preset(name) if not Path(name).expanduser().is_dir() else None
    if preset is not None and not need_weights:
        return None, preset.config
    try:
        files = resolve_files(preset.hub_id if preset else name, revision=revision, weights=need_weights)
    except ModelNotFoundError as error:
        if "/" in name or preset:
            raise
        known = ", ".join(p.name for p in models.presets() if not p.name.endswith("Instruct"))
        raise ModelNotFoundError(error.what, where=error.where, hint=f"a folder, a Hub id org/name, or one of {known}") from error
    return files, models.parse_config(files.config, where=str(files.folder / "config.json"))


def plan_model(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    impl: str | Sequence[str] = "auto",
    revision: str | None = None,
) -> tuple[ModelConfig, Model]:
    """The model's config and its resolved graph, without reading or allocating any weight."""
    target = pick_device(device)
    _, config = find(model, revision=revision, need_weights=False)
    graph = Model(config, models.build(config))
    graph.device, graph.dtype = target, pick_dtype(dtype, config, target)
    graph.resolve(impl)
    return config, graph


def pick_device(device: str) -> torch.device:
    """"auto", "cpu", "cuda" or "cuda:N" → a device that exists; never a silent CPU."""
    if device == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()) or (kind == "cpu" and number):
        raise DeviceError("unknown device", where="--device", expected="auto, cpu, cuda or cuda:N", found=device)
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError("no usable CUDA device", where=f"--device {device}", hint="use --device cpu, or install a CUDA build of torch")
    index = int(number or 0)
    if index >= torch.cuda.device_count():
        raise DeviceError("no such device", where="--device", expected=f"below cuda:{torch.cuda.device_count()}", found=device)
    return torch.device("cuda", index)


def pick_dtype(dtype: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """"auto" → the checkpoint's dtype on a GPU, float32 on a CPU, where 16-bit arithmetic is slow."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        return known[config.dtype] if device.type == "cuda" else torch.float32
    if dtype not in known:
        raise ConfigError("unknown dtype", where="--dtype", expected=f"auto, {', '.join(known)}", found=dtype)
    return known[dtype]


def _model_length(config: ModelConfig, asked: int | None) -> int:
    if asked is None:
        return config.max_position_embeddings
    if not 1 <= asked <= config.max_position_embeddings:
        raise ConfigError(
            "outside the model's context", where="--max-model-len", expected=f"1 to {config.max_position_embeddings}", found=asked
        )
    return asked


def _check_vocabulary(tokenizer: Tokenizer | None, config: ModelConfig) -> None:
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise TokenizerError(
            "the tokenizer has ids that the model does not", where="tokenizer.json",
            expected=f"at most {config.vocab_size} (vocab_size of config.json)", found=tokenizer.vocab_size,
        )


def _page_count(model: Model, memory: int | None, max_num_seqs: int) -> int:
    one = page_bytes(model.kv_shapes, model.dtype)
    full = max_num_seqs * -(-model.max_model_len // PAGE_SIZE)
    if not one:
        return full
    if memory is not None:
        weights.require_memory(memory, model.device, "KV pages", "lower --kv-cache-memory")
        if memory < one:
            raise ConfigError("too small for one page", where="--kv-cache-memory", expected=f"at least {one} bytes", found=memory)
        return min(memory // one, full)
    share = 0.9 if model.device.type == "cuda" else 0.25
    free = weights.free_memory(model.device)
    pages = min(int(free * share) // one, full)
    if pages < 1:
        weights.require_memory(int(one / share), model.device, "KV pages", "take a smaller model or free memory")
    return pages


def _is_single(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and all(isinstance(p, int) for p in prompts))


def _one(params: Any) -> SamplingParams | None:
    if params is None or isinstance(params, SamplingParams):
        return params
    raise InputError("one prompt takes one SamplingParams", where="params", found=type(params).__name__)

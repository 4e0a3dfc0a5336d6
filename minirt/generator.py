"""`Generator`: the public API. Text in, text out, on top of the engine's token ids."""

import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Generator as Generation
from contextlib import closing
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from minirt import models, weights
from minirt.choose import check_memory, check_vocabulary, find, page_count, pick_device, pick_dtype, pick_length
from minirt.config import ModelConfig
from minirt.cuda_graphs import GraphedModel
from minirt.engine import Engine, TokenOutput
from minirt.errors import InputError, MinirtError, NumericsError, TokenizerError
from minirt.graph import Model
from minirt.kv_cache import KVCache
from minirt.layers import Layer
from minirt.sampling import EffectiveSampling, SamplingParams
from minirt.sampling import resolve as resolve_sampling
from minirt.tokenizer import IncrementalDecoder, StopStrings, Tokenizer, eos_token_ids
from minirt.usage import peak_memory

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Piece:
    """A step of a stream: new text (empty while a character or a stop string is incomplete) and its token ids."""

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
            kv_cache_memory: bytes for KV pages; None takes 90% of what a GPU has free, or on a CPU a quarter of the
                free memory at most, and never more than `max_num_seqs` sequences of full length need.
        """
        self.name, self.tokenizer, self.generation_config = name, tokenizer, generation_config
        self.eos_token_ids = tuple(eos_token_ids)
        self.load_time_s, self.bytes_read = 0.0, 0
        self.unused_tensors: tuple[str, ...] = ()
        self._model: Model | None = model
        self.config, self.plan = model.config, model.plan
        self.decode_read_bytes = model.decode_read_bytes
        pages = page_count(model, kv_cache_memory, max_num_seqs)
        self._cache: KVCache | None = KVCache(model.kv_shapes, pages, model.device, model.dtype)
        runnable = GraphedModel(model) if model.graphable else model
        self._engine = Engine(
            runnable, self._cache, vocab_size=model.config.vocab_size, max_model_len=model.max_model_len,
            max_num_seqs=max_num_seqs, device=model.device,
        )
        self._inbox: dict[int, list[TokenOutput]] = {}  # by open request: what its stream has not taken yet

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
            layers: composes another model from the config: `layers(config) -> [Embedding, …, Head]`. Checkpoint
                tensors that it leaves out are listed in `unused_tensors` instead of refused.
            progress: called with (bytes read, bytes in all).
        Raises:
            ModelNotFoundError, ConfigError, UnsupportedError, CheckpointError, TokenizerError, DeviceError,
            OutOfMemoryError: each says what to do.
        """
        started = time.perf_counter()
        target = pick_device(device)
        files, config = find(model, revision, need_weights=not random_weights, progress=progress is not None)
        length = pick_length(config, max_model_len)
        graph = Model(config, layers(config) if layers else models.build(config))
        chosen = pick_dtype(dtype, config, target)
        tokenizer = Tokenizer.load(files.folder) if files else None
        check_vocabulary(tokenizer, config)
        checkpoint = files if not random_weights else None
        if checkpoint:
            entries = weights.read_headers(checkpoint.weight_files, checkpoint.weight_index)
            weights.match(graph, entries, layers is not None)
        check_memory(graph, length, chosen, target, kv_cache_memory)
        graph.allocate(target, chosen, length)
        graph.resolve(impl)
        report = weights.LoadReport(0, ())
        if checkpoint:
            report = weights.load(
                graph, checkpoint.weight_files, checkpoint.weight_index, allow_unused=layers is not None,
                check_weights=check_weights, progress=progress,
            )
        else:
            weights.randomize(graph, seed)
        generation_config = files.generation_config if files else None
        generator = cls(
            graph, tokenizer, name=str(model), generation_config=generation_config,
            eos_token_ids=eos_token_ids(generation_config, files.config if files else {}, tokenizer),
            kv_cache_memory=kv_cache_memory, max_num_seqs=max_num_seqs,
        )
        generator.bytes_read, generator.unused_tensors = report.bytes_read, report.unused
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
        if not isinstance(prompts, list | tuple):
            raise InputError("not a prompt, or a list of prompts", where="prompts", found=type(prompts).__name__)
        if isinstance(params, SamplingParams) or params is None:
            return self._complete(list(prompts), [params] * len(prompts))
        if not isinstance(params, list | tuple) or len(params) != len(prompts):
            what, found = "one SamplingParams for each prompt", repr(params)[:80]
            raise InputError(what, where="params", expected=len(prompts), found=found)
        return self._complete(list(prompts), list(params))

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> Completion:
        """Answer a conversation, messages of {"role", "content"}, through the model's chat template."""
        return self.generate(self.encode_chat(messages), params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Yield the completion piece by piece; the texts join to `Completion.text`. Closing the iterator aborts.

        Several streams may be open at once: they share the engine's steps.
        """
        with closing(self.stream_completion(prompt, params)) as pieces:  # with this iterator, not when it is collected
            for piece, _ in pieces:
                yield piece

    def stream_completion(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generation[tuple[Piece, Completion], None, None]:
        """As `stream`, with the completion as it stands after each piece."""
        with closing(self._run([prompt], [params])) as pieces:
            for _, piece in pieces:
                yield piece

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Teacher-forced logits [T, V] fp32 on the CPU: row t predicts token t + 1."""
        return self._live.logits(token_ids)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds; ids pass through."""
        if isinstance(prompt, list | tuple):
            return [int(t) if isinstance(t, Integral) and not isinstance(t, bool) else t for t in prompt]
        if not isinstance(prompt, str):
            found = type(prompt).__name__
            raise InputError("not a prompt", expected="a text, or a list or tuple of token ids", found=found)
        if not prompt:
            raise InputError("the prompt is empty", hint="give at least one character")
        return self._text().encode(prompt)

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation through the chat template, up to where the answer begins."""
        return self._text().encode_chat(list(messages))

    def check(self, token_ids: Sequence[int], params: SamplingParams | None = None) -> None:
        """Raise what a request would be refused for: InputError, ContextLengthError, ConfigError, TokenizerError."""
        self._live.abort(self._add(token_ids, self.effective_sampling(params)))

    def effective_sampling(self, params: SamplingParams | None) -> EffectiveSampling:
        """The values that a request will run with, and where each comes from."""
        if params is not None and not isinstance(params, SamplingParams):
            raise InputError("not SamplingParams", where="params", found=type(params).__name__)
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
        gc.collect()  # a layer and its bound implementation refer to each other
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

    def _add(self, tokens: Sequence[int], sampling: EffectiveSampling) -> int:
        if sampling.stop and self.tokenizer is None:
            raise TokenizerError("stop strings need a tokenizer", where=self.name)
        return self._live.add(tokens, sampling, self.eos_token_ids)

    def _run(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams | None]
    ) -> Generation[tuple[int, tuple[Piece, Completion]], None, None]:
        """Run requests to their ends, yielding (prompt's index, (piece, completion so far)); left early, it aborts."""
        work = [(self.encode(p), self.effective_sampling(q)) for p, q in zip(prompts, params, strict=True)]
        streams: dict[int, tuple[int, _Stream]] = {}
        try:
            for index, (tokens, sampling) in enumerate(work):
                request = self._add(tokens, sampling)
                decoder = IncrementalDecoder(self.tokenizer) if self.tokenizer else None
                completion = Completion(tokens, [], "", None, sampling)
                stream = _Stream(completion, decoder, StopStrings(sampling.stop), time.perf_counter())
                streams[request], self._inbox[request] = (index, stream), []
            while streams:
                for output in self._outputs(streams):
                    if output.request_id not in streams:  # it ended at a stop string; the engine was ahead
                        continue
                    index, stream = streams[output.request_id]
                    piece = stream.push(output)
                    if piece.finish_reason is not None:
                        self._forget(output.request_id)
                        del streams[output.request_id]
                    yield index, (piece, stream.completion)
        finally:
            for request in streams:
                self._forget(request)

    def _outputs(self, requests: Collection[int]) -> list[TokenOutput]:
        """The next outputs of `requests`; those of other open streams wait in their inboxes."""
        while not (ready := [output for request in requests for output in self._inbox[request]]):
            for output in self._live.step():
                self._inbox[output.request_id].append(output)
        for request in requests:
            self._inbox[request].clear()
        return ready

    def _forget(self, request: int) -> None:
        del self._inbox[request]
        if self._model is not None:
            self._engine.abort(request)


def _is_single(prompts: Any) -> bool:
    """Whether it is one prompt: a text, or a list of what can only be token ids."""
    if isinstance(prompts, str):
        return True
    return isinstance(prompts, list | tuple) and bool(prompts) and all(isinstance(p, Integral | float) for p in prompts)


def _one(params: Any) -> SamplingParams | None:
    if params is None or isinstance(params, SamplingParams):
        return params
    raise InputError("one prompt takes one SamplingParams", where="params", found=type(params).__name__)

"""`Generator`: the public API. Text in, text out, on top of the engine's token ids."""

import gc
import html
import time
import weakref
from collections import Counter, abc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, overload

import torch

from minirt.adapters.files import warn_of_base
from minirt.call_driver import CallDriver
from minirt.engine.engine import Engine
from minirt.engine.engine_thread import EngineThread
from minirt.engine.limits import EngineLimits, EngineOptions
from minirt.engine.request import DraftStats, Request, TokenOutput
from minirt.engine.schedule.prefix_cache import PrefixCacheStats
from minirt.errors import ConfigError, EngineError, InputError, UnsupportedError, printable
from minirt.foreign_names import check_names, checks_names
from minirt.gc_freeze import freeze_gc
from minirt.loading.load import LoadedModel, load
from minirt.loading.memory import measured_plan, out_of_memory_while
from minirt.loading.options import EMBEDDED, OF_GENERATE, LoadOptions
from minirt.modeling.model import Model
from minirt.outputs import Completion, CompletionStream, Piece, Score
from minirt.processor import AnyPrompt, Call, Messages, Params, Priority, Processor, Prompt, Prompts, is_single
from minirt.progress import LoadProgress, prompt_bar
from minirt.sampling_params import OF_SAMPLING, EffectiveSampling, SamplingParams, adapter_name, resolve
from minirt.settings import settings_of
from minirt.sizes import format_size
from minirt.speculative.proposers import proposer_of
from minirt.step.kv_cache import KVCache, page_bytes
from minirt.structured.constraints import Constraints
from minirt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minirt.profiling.profile import Profile

_LOADING = settings_of(LoadOptions)
_OF_LOADING = {name: f"Generator.from_pretrained({name}=…)" for name in _LOADING}  # arguments that belong to another call
_OPTIONS = [name for name, record in _LOADING.items() if record.engine]  # those of a loaded model


def _with_lora(params: Any, lora: str) -> Any:
    if params is not None and not isinstance(params, SamplingParams):
        return params  # refused later
    return replace(params or SamplingParams(), lora=lora)


@checks_names(_OF_LOADING | OF_SAMPLING, _OPTIONS)
class Generator:
    """A loaded model that generates text. Create it with `from_pretrained`, and use it as a context manager to free the device.

    All methods may be called from any thread. The requests of all callers share the steps of one engine, which runs in its own
    thread. An iterator (`stream`, `completions`) belongs to the thread that created it.

    Attributes:
        config, plan, tokenizer, eos_token_ids, device: what was loaded, and where.
        memory: what it takes of the memory, and the size of the KV cache.
        max_num_seqs, max_num_batched_tokens: how many requests and tokens a step has at most.
        max_waiting: how many requests may wait while a step computes others; further ones are refused. None: no limit.
        load_time_s, warm_up_time_s, bytes_read: how long loading and warming up took, and how much was read.
        decode_read_bytes, kv_bytes_per_token: bytes of weights that a step of one token reads; bytes of KV per cached token.
        step_state_bytes: bytes of the recurrent states of one sequence that a decode step reads and writes.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer | None = None, *, name: str = "model",
        generation_config: dict | None = None, eos_token_ids: Sequence[int] = (), **options: Any,
    ) -> None:  # fmt: skip
        """Wrap a `Model` with weights and chosen implementations.

        Args:
            options: those fields of `minirt.LoadOptions` that are about memory, steps and requests: max_model_len, max_num_seqs …
        """
        if not hasattr(model, "cache_specs"):  # the part of a model that the KV cache needs
            hint = f"Generator.from_pretrained({model!r}) loads a model by its name" if isinstance(model, str | Path) else None
            shown = repr(str(model)) if isinstance(model, str | Path) else type(model).__name__
            raise InputError("a Generator wraps a loaded model", where="model", expected="a minirt Model", found=shown, hint=hint)
        settings = LoadOptions(**options)
        self.speculative, cuda_graphs = settings.speculative, settings.cuda_graphs
        if num_drafts := settings.draft_needs.max_drafts:
            model.keep_undo(1 + num_drafts)
        self.name, self.tokenizer, self.generation_config = name, tokenizer, generation_config
        self.eos_token_ids = _end_ids(eos_token_ids, model.config.vocab_size)
        self.load_time_s, self.warm_up_time_s, self.bytes_read = 0.0, 0.0, 0
        self.unused_tensors: tuple[str, ...] = ()
        self._model: Model | None = model
        self.config, self.plan = model.config, model.plan.with_cuda_graphs(cuda_graphs)
        self.decode_read_bytes, self.device = model.decode_read_bytes, model.device
        self.kv_bytes_per_token = page_bytes(model.cache_specs, model.kv_dtype, 1)
        self.step_state_bytes = model.step_state_bytes
        self.memory = measured_plan(model, settings)
        if (ranks := getattr(model, "ranks", None)) is not None:
            self.memory = ranks.agree(self.memory)
        self._cache: KVCache | None = KVCache(
            model.cache_specs, self.memory.pages, model.device, model.kv_dtype, num_slots=self.memory.max_num_seqs,
            num_snapshots=self.memory.snapshots, window_pages=self.memory.window_pages,
        )  # fmt: skip
        self.max_num_seqs, self.max_num_batched_tokens = self.memory.max_num_seqs, self.memory.max_num_batched_tokens
        self.max_waiting = settings.max_waiting
        limits = EngineLimits(
            settings.max_model_len or model.max_model_len, self.max_num_seqs, self.max_num_batched_tokens, self.max_waiting,
            settings.max_step_ms, model_len=model.config.max_context_len,
        )
        running = EngineOptions(
            settings.prefix_cache, cuda_graphs and model.capturable, adaptive_drafts=getattr(self.speculative, "adaptive", True)
        )
        engine = Engine(
            model, self._cache, limits, running, vocab_size=model.config.vocab_size, device=model.device,
            proposer=proposer_of(self.speculative, model, self._cache),
            constraints=None if tokenizer is None else Constraints(tokenizer, model.config.vocab_size, self.eos_token_ids),
        )  # fmt: skip
        self._engine = EngineThread(engine)
        self._processor = Processor(
            self._engine, name, tokenizer, generation_config, self.eos_token_ids, model.config.vocab_size,
            self._engine.peak_memory,
        )  # fmt: skip
        self._stop = weakref.finalize(self, self._engine.stop)  # also when the generator is dropped, and at exit
        self._thaw: weakref.finalize | None = None

    @classmethod
    def from_pretrained(
        cls, model: str | Path | LoadOptions = EMBEDDED, *, progress: LoadProgress | None = None, **options: Any
    ) -> "Generator":
        """Load a model: `Generator.from_pretrained("Qwen2.5-7B", quantization="fp8")`.

        Args:
            model: a folder with config.json and safetensors, a Hub id ("Qwen/Qwen2.5-7B"), a preset ("Qwen2.5-7B"), or
                "embedded", the small model that is part of the package. Or all options as `minirt.LoadOptions`.
            progress: called with ("weights", bytes read, total bytes), then on a GPU with ("kernels", ready, total), or with
                ("compiling kernels", …) if some are not in Triton's cache, and with ("CUDA graphs", captured, total).
            options: the fields of `minirt.LoadOptions`, which documents them.
        Raises:
            ModelNotFoundError, ConfigError, UnsupportedError, CheckpointError, TokenizerError, DeviceError,
            OutOfMemoryError: each says what to do.
        """
        check_names(options, list(_LOADING), "from_pretrained", ConfigError, OF_GENERATE)
        if progress is not None and not callable(progress):
            expected, shown = "a function of three arguments", repr(progress)[:80]
            raise InputError("not a function", where="progress", expected=expected, found=shown)
        settings = replace(model, **options) if isinstance(model, LoadOptions) else LoadOptions(model=model, **options)
        return cls._of_rank(settings, progress=progress)

    @classmethod
    def _of_rank(cls, settings: LoadOptions, ranks: Any = None, progress: LoadProgress | None = None) -> "Generator":
        """`from_pretrained`, also for a rank other than 0. `ranks`: see `load`."""
        started = time.perf_counter()
        loaded = load(settings, progress, ranks)
        with loaded.model.ranks or nullcontext():
            return cls._of_loaded(loaded, settings, progress, started)

    @classmethod
    def _of_loaded(
        cls, loaded: LoadedModel, settings: LoadOptions, progress: LoadProgress | None, started: float
    ) -> "Generator":  # fmt: skip
        with out_of_memory_while("allocating KV pages", loaded.model.device):
            generator = cls(
                loaded.model, loaded.tokenizer, name=str(settings.model), generation_config=loaded.generation_config,
                eos_token_ids=loaded.eos_token_ids, **{name: getattr(settings, name) for name in _OPTIONS},
            )  # fmt: skip
        generator.bytes_read, generator.unused_tensors = loaded.bytes_read, loaded.unused_tensors
        generator.load_time_s = time.perf_counter() - started
        if settings.warm_up != "none":
            with out_of_memory_while("warming up", generator.device):
                lazy = settings.warm_up == "lazy" and settings.tensor_parallel == 1  # ranks capture graphs at the same time
                generator._engine.engine.warm_up(progress, lazy=lazy)
            generator.warm_up_time_s = time.perf_counter() - started - generator.load_time_s
        if generator.device.type == "cuda":  # a garbage collection would make the GPU wait
            generator._thaw = freeze_gc(generator)
        if generator._engine.engine.warming_up:
            generator._engine.start()
        return generator

    @overload
    def generate(
        self, prompts: Prompt, params: SamplingParams | None = None, *, priority: int = 0, progress: bool = False,
        lora: str | None = None,
    ) -> Completion: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: Prompts[AnyPrompt], params: Params = None, *, priority: Priority = 0, progress: bool = False,
        lora: str | None = None,
    ) -> list[Completion]: ...  # fmt: skip

    def generate(
        self, prompts: Prompt | Prompts, params: Params = None, *, priority: Priority = 0, progress: bool = False,
        lora: str | None = None,
    ) -> Completion | list[Completion]:  # fmt: skip
        """Complete one prompt (→ `Completion`) or many at once (→ list of `Completion`, in input order).

        A prompt whose `SamplingParams.n` is above 1 has `Samples` in place of a `Completion`. Type checkers do not see this; use
        `typing.cast`. Of more prompts than run at once, the first ones run while the others are prepared.

        Args:
            prompts: a text, token ids (a list, a tuple, or a NumPy array or tensor of one dimension), or a list of these.
            params: one for all, or one for each prompt; None: the model's defaults.
            priority: one for all, or one for each prompt. Requests with lower values run first.
            progress: draw a bar on stderr, if that is a terminal.
        Raises:
            MinirtError: a request failed, or a prompt is refused. Use `completions` to get the others.
        """
        if lora is not None:
            params = [_with_lora(one, lora) for one in params] if isinstance(params, list | tuple) else _with_lora(params, lora)
        all_at_once = progress or self.max_waiting is not None  # else the others are prepared while the first ones run
        call = self._prepare(prompts, params, priority, is_single(prompts), None if all_at_once else self.max_num_seqs)
        self._finish(call, progress, "token_ids")
        return call.result()

    def completions(self, prompts: Sequence[Prompt], params: Params = None, *, priority: Priority = 0) -> "Completions":
        """Complete many prompts at once. Iterating yields (index of the prompt, its result) in the order of finishing."""
        call = self._prepare(prompts, params, priority, single=False)
        return Completions(call, self._run(call))  # `Completions.all` has the tokens of requests that still run

    def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Completion:  # fmt: skip
        """Answer a conversation, a list of {"role", "content"}, through the model's chat template.

        Args:
            chat_template_kwargs: more variables of the template, such as {"enable_thinking": False}.
        """
        tokens = self.encode_chat(messages, self._processor.limit(params), chat_template_kwargs)
        return self.generate(tokens, params, priority=priority)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> Iterator[Piece]:
        """Return an iterator over the completion's pieces; their texts join to `Completion.text`. Closing it aborts.

        The prompt is checked by this call, and runs from the first piece on. With `n` > 1, the pieces of all samples come as
        they are generated; `Piece.sample` tells them apart. Several streams may be open at once: they share the engine's steps.
        """
        return (piece for piece, _ in self.stream_completion(prompt, params, priority=priority))

    def stream_completion(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> abc.Generator[tuple[Piece, Completion], None, None]:
        """Like `stream`, but each piece comes with the completion that it belongs to, so far."""
        running = self._run(self._prepare(prompt, params, priority, single=True), raises=True)
        return ((piece, stream.completion) for stream, piece in running)

    @overload
    def score(
        self, prompts: Prompt, completions: Prompt, *, priority: int = 0, progress: bool = False, lora: str | None = None
    ) -> Score: ...

    @overload
    def score(
        self, prompts: Prompt | Prompts[AnyPrompt], completions: Prompts[AnyPrompt], *, priority: Priority = 0,
        progress: bool = False, lora: str | None = None,
    ) -> list[Score]: ...  # fmt: skip

    def score(
        self, prompts: Prompt | Prompts, completions: Prompt | Prompts, *, priority: Priority = 0, progress: bool = False,
        lora: str | None = None,
    ) -> Score | list[Score]:  # fmt: skip
        """The log-probability of a completion after a prompt (→ `Score`), or of many in one batch (→ list of `Score`).

        Two texts are encoded together, and split after as many tokens as the prompt alone has, without the white space at its
        end; see `Processor.encode_pair`. Token ids are taken as they are. Nothing is generated.

        Args:
            prompts, completions: a text or token ids each, or a list of both; or one prompt with a list of its completions.
            priority, progress, lora: as in `generate`.
        Raises:
            InputError, ContextLengthError: a completion has no token, or nothing before it; both are too long together.
        """
        self._engine.wake()
        call = self._processor.prepare_scores(prompts, completions, priority, lora)
        self._finish(call, progress, "prompt_token_ids")
        return call.scores()

    def warm_prompt(self, prompt: Prompt) -> int:
        """Compute a prompt now and never evict its KV pages, so that requests that begin with it need not compute it again.

        If an exception in a layer ends the running requests, nothing is kept any more.

        Returns:
            The number of its first tokens that are kept: a multiple of the page size (64); with recurrent layers, whose state is
            kept too, any number.
        Raises:
            UnsupportedError: there is no prefix cache.
            ContextLengthError: pinned prompts would take more than half of the KV pages or of the states, or pages that an open
                request may need.
        """
        if self.prefix_cache_stats is None:
            raise UnsupportedError("there is no prefix cache to keep a prompt in", where=self.name)
        tokens = self.encode(prompt, self.max_len - 1)
        self.generate(tokens, SamplingParams(max_tokens=1, temperature=0.0))
        return self._engine.call(lambda engine: engine.pin(tokens))

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Teacher-forced logits [T, V] fp32 on the CPU: row t predicts token t + 1.

        Waits until the KV cache has room for them beside the running requests.
        """
        tokens = self.encode(token_ids)
        nothing = resolve(None, None).with_values(max_tokens=0)
        self._engine.engine.checks.check(tokens, nothing)
        outputs: SimpleQueue[list[TokenOutput]] = SimpleQueue()
        request = Request(self._engine.new_id(), tokens, nothing, logits_only=True)
        try:
            self._engine.submit([request], outputs)
            (output,) = outputs.get()
        finally:  # after an interrupt, it still runs
            self._engine.abort([request.id])
        if output.logits is None:
            raise output.error or EngineError("the engine returned no logits", where=self.name)
        return output.logits

    def profile(
        self, *, batch_size: int = 1, context_len: int = 128, prompt: bool = False, repeats: int = 10
    ) -> "Profile":  # fmt: skip
        """Divide the time of a step among its layers and kernels. What the KV pages hold is arbitrary.

        Args:
            batch_size: sequences of the step. Each has other tokens.
            context_len: tokens of each, the new one included.
            prompt: they are prompts, all of whose tokens are computed; False: a decode step.
            repeats: steps that are measured.
        Raises:
            InputError, ContextLengthError: not a step of this engine; the cache has no room for that many tokens.
            EngineError: requests are open.
            UnsupportedError: the model is no `Model`.
        """
        from minirt.profiling.profile import profile

        return self._engine.call(lambda engine: profile(engine, batch_size, context_len, prompt, repeats))

    def encode(self, prompt: Prompt, max_tokens: int | None = None) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds. Token ids are returned unchanged.

        `max_tokens`: raise, without tokenizing, if the number of characters shows that the text has more tokens.
        """
        return self._processor.encode(prompt, max_tokens)

    def encode_chat(
        self, messages: Messages, max_tokens: int | None = None, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation through the chat template, up to the start of the answer.

        Args:
            max_tokens: see `encode`.
            chat_template_kwargs: see `chat`.
        Raises:
            InputError: the template has no variable of such a name.
        """
        return self._processor.encode_chat(messages, max_tokens, chat_template_kwargs)

    def check(self, token_ids: Sequence[int], params: SamplingParams | None = None) -> None:
        """Raise the error with which this request would be refused.

        Raises:
            InputError, ContextLengthError, ConfigError, TokenizerError.
        """
        self._processor.check(token_ids, params)

    def effective_sampling(self, params: SamplingParams | None) -> EffectiveSampling:
        """The values that a request will run with, and where each comes from."""
        return self._processor.effective_sampling(params)

    @property
    def max_len(self) -> int:
        """Maximum number of tokens of a request, prompt and completion together."""
        return self._engine.engine.max_len

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Counters since loading: tokens looked up and found in the prefix cache, and pages evicted. None without the cache."""
        return self._engine.engine.prefix_cache_stats

    @property
    def draft_stats(self) -> DraftStats:
        """Counters of drafts since loading, all 0 without `speculative`."""
        return self._engine.engine.stats.drafts

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the KV cache; 0 after `close`."""
        return self._cache.nbytes if self._cache else 0

    def load_lora(self, name: str, folder: str | Path) -> None:
        """Load an adapter, or replace the one of this name for requests that come later. Needs a model that was loaded with room
        for it: with `max_lora_rank`, or with `loras` of the same linears.

        Raises:
            InputError: it is no name.
            ConfigError, UnsupportedError, CheckpointError: the adapter is refused.
        """
        adapters = self._engine.engine.adapters
        if adapters is None:
            what, hint = "the model was loaded without adapters", "load it with max_lora_rank=16"
            raise UnsupportedError(what, where="load_lora", hint=hint)
        adapter_name(name, "name")
        adapter = adapters.read(folder)
        warn_of_base(adapter, self.name)
        self._engine.call(lambda engine: engine.adapters.add(name, adapter))

    def unload_lora(self, name: str) -> None:
        """Drop an adapter. Requests that use it go on.

        Raises:
            InputError: there is none of this name.
        """
        self._engine.engine.checks.check_lora(name)
        self._engine.call(lambda engine: engine.adapters.remove(name))

    @property
    def loras(self) -> list[str]:
        """The names of the adapters."""
        adapters = self._engine.engine.adapters
        return [] if adapters is None else list(adapters.known)

    def close(self) -> None:
        """Free the model and the cache. Open requests of all threads end with an error, and so does every later use."""
        cuda = self._model is not None and self.device.type == "cuda" and not self._engine.failed
        self._stop()
        self._model = self._cache = None
        (self._thaw or gc.collect)()  # a layer and its bound implementation refer to each other
        if cuda:
            torch.cuda.empty_cache()

    def __repr__(self) -> str:
        name = printable(self.name)
        if self._model is None:
            return f"<minirt.Generator {name}, closed>"
        kinds = Counter(row.implementation for row in self.plan.rows)
        layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        dtypes = " · ".join(sorted({row.dtype for row in self.plan.rows} | set(self.plan.formats)))
        size = f"weights {format_size(self.plan.weight_bytes)} · KV cache {format_size(self.kv_cache_bytes)}"
        return f"<minirt.Generator {name} · {self.plan.title} · {dtypes} · layers: {layers} · {size} · {self.max_len} positions>"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>" if self._model is None else self.plan.html(self.name)

    def __enter__(self) -> "Generator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model(self) -> Model:
        """The model: layers, weights and chosen implementations."""
        if self._model is None:
            raise EngineError("the generator is closed", where=self.name)
        return self._model

    def _prepare(self, prompts: Any, params: Any, priority: Any, single: bool, first: int | None = None) -> Call:
        self._engine.wake()  # it wakes up while the prompts are encoded and checked
        return self._processor.prepare(prompts, params, priority, single=single, first=first)

    def _finish(self, call: Call, progress: bool, counted: str) -> None:
        """Run requests until all have ended. The progress bar counts the tokens of this field of each completion."""
        with closing(self._run(call, final_only=True)) as pieces, prompt_bar(len(call.streams), progress) as advance:
            for stream, piece in pieces:
                if piece.finish_reason is not None:
                    advance(n_finished=1, n_tokens=len(getattr(stream.completion, counted)))

    def _run(self, call: Call, **how: bool) -> abc.Generator[tuple[CompletionStream, Piece], None, None]:
        """Run requests until all have ended. Yields each piece with its stream. Closing the generator aborts them.

        `how`: see `CallDriver`.
        """
        outputs: SimpleQueue[list[TokenOutput]] = SimpleQueue()
        with CallDriver(call, self._engine, outputs, **how) as driver:
            for _ in driver.parts():
                while not outputs.empty():  # one may have ended, or hold a stop string
                    yield from filter(None, map(driver.push, outputs.get()))
            while call.open and self.model is not None:  # `model` raises if the generator is closed
                yield from filter(None, map(driver.push, outputs.get()))


def _end_ids(tokens: Any, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(tokens, list | tuple) or not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        expected, shown = f"a list of integers from 0 to {vocab_size - 1}", repr(tokens)[:80]
        raise InputError("not token ids of this model", where="eos_token_ids", expected=expected, found=shown)
    return tuple(tokens)


class Completions(Iterator[tuple[int, Any]]):
    """Running requests of many prompts. Iterating yields (index of the prompt, its result) in the order of finishing.

    A result is a `Completion`, or `Samples` if `n` is above 1. `all` lists every result so far, in the order of the prompts;
    `finish_reason` is None while a completion runs. `close` aborts the unfinished requests. A failed request has `error` set; the
    others continue.
    """

    def __init__(self, call: Call, pieces: abc.Generator[tuple[CompletionStream, Piece], None, None]) -> None:
        self.all = call.results
        self._open = Counter(stream.prompt for stream in call.streams)  # samples of each prompt that are not over
        self._pieces = pieces

    def __next__(self) -> tuple[int, Any]:
        for stream, piece in self._pieces:
            if piece.finish_reason is not None:
                self._open[stream.prompt] -= 1
                if self._open[stream.prompt] == 0:
                    return stream.prompt, self.all[stream.prompt]
        raise StopIteration

    def close(self) -> None:
        self._pieces.close()

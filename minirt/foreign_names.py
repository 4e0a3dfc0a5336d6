"""What vLLM, llama.cpp and transformers call an option, argument or class, and what it is here.

The command line, `Generator` and its methods, `SamplingParams`, the lines of `--prompts` and `import` take their hints from it.
The record of a setting has its other names (`Setting.elsewhere`); the table here has the rest, and `minirt.cli.suggestions` those
of commands and short options. docs/coming-from.md explains more.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial, wraps
from typing import Any, TypeVar

from minirt.errors import InputError, MinirtError, quoted

_T = TypeVar("_T")

_VLLM, _LLAMA, _HF = "vLLM's name", "llama.cpp's name", "transformers' name"
_ONE_GPU = "not supported: minirt uses one GPU"
_ONE_DEVICE = "not needed: a model is wholly on one GPU, or wholly on the CPU"
_LORA = "not supported: minirt has no LoRA adapters"
_DRAFTS = "not supported: minirt has no draft models in files of their own; --speculate is ngram or mtp"
_BEAMS = "not supported: minirt has no beam search"
_ALWAYS = "not needed: it is always on"
_NO_CODE = "not needed: minirt never runs code of a checkpoint"

_Entry = tuple[str, str | None, str | None] | str
# Name → (whose it is, its name on the command line, its name in Python). A text: why minirt has no such thing.
_REST: dict[str, _Entry] = {
    "load_format": (_VLLM, "--random-weights for dummy", 'random_weights=True for "dummy"'),
    "enforce_eager": (_VLLM, "--no-cuda-graphs", "cuda_graphs=False"),
    "enable_prefix_caching": (_VLLM, "on by default, and --no-prefix-cache is off", "prefix_cache=…"),
    "no_enable_prefix_caching": (_VLLM, "--no-prefix-cache", "prefix_cache=False"),
    "mamba_cache_mode": "not needed: states of recurrent layers are kept, with --state-cache-memory",
    "mamba_block_size": "not needed: states of recurrent layers are kept at any token", "num_iters": (_VLLM, "--repeats", None),
    "batch_size": (_LLAMA, "--max-num-batched-tokens of tokens, --max-num-seqs of sequences", None),
    "main_gpu": (_LLAMA, "--device cuda:N", "device=… with cuda:N"), "seed": (_LLAMA, "--seed", None),
    "system_prompt": (_LLAMA, "--system", None), "prompt": (_LLAMA, "PROMPT, without an option", None),
    "file": (_LLAMA, "--prompt-file", None), "input_len": (_VLLM, "--input-len-range", None),
    "output_len": (_VLLM, "--output-len-range", None),
    "do_sample": (_HF, "--temperature above 0", "SamplingParams(temperature=…) above 0"),
    "grammar_file": (_LLAMA, "--grammar, in Lark syntax", None), "sampling_params": (_VLLM, None, "params=…"),
    "use_tqdm": (_VLLM, None, "progress=… of Generator.generate and Generator.score"),
    "generation_config": (_HF, None, "params=SamplingParams(…)"), "inputs": (_HF, None, "prompts=…, a text or token ids"),
    "input_ids": (_HF, None, "prompts=…, token ids as a list"),
    "max_length": (_HF, "--max-tokens, of new tokens", "SamplingParams(max_tokens=…), of new tokens"),
    "streamer": (_HF, None, "minirt.Generator.stream(prompt)"), "LLM": (_VLLM, None, "minirt.Generator"),
    "LLMEngine": (_VLLM, None, "minirt.Generator"), "EngineArgs": (_VLLM, None, "minirt.LoadOptions"),
    "AsyncLLM": (_VLLM, None, "minirt.AsyncGenerator"), "AsyncLLMEngine": (_VLLM, None, "minirt.AsyncGenerator"),
    "AsyncEngineArgs": (_VLLM, None, "minirt.LoadOptions"), "RequestOutput": (_VLLM, None, "minirt.Completion"),
    "CompletionOutput": (_VLLM, None, "minirt.Completion"),
    "GuidedDecodingParams": (_VLLM, None, "minirt.StructuredOutputsParams"), "Llama": (_LLAMA, None, "minirt.Generator"),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "tensor_split"), _ONE_GPU),
    **dict.fromkeys(("n_gpu_layers", "gpu_layers", "split_mode", "cpu_offload_gb", "swap_space"), _ONE_DEVICE),
    **dict.fromkeys(("n_cpu_moe", "cpu_moe", "override_tensor"), _ONE_DEVICE),
    **dict.fromkeys(("embedding", "embeddings"), "not supported: minirt generates text"),
    **dict.fromkeys(("interactive", "conversation"), "minirt chat is a conversation"),
    **dict.fromkeys(("enable_lora", "lora_modules", "max_loras", "max_lora_rank", "lora", "lora_request", "LoRARequest"), _LORA),
    **dict.fromkeys(("speculative_model", "model_draft"), _DRAFTS),
    "speculative_config": (_VLLM, "--speculative-config", "speculative=SpeculativeOptions(…)"),
    "num_speculative_tokens": (_VLLM, "--speculate METHOD:k", "speculative=SpeculativeOptions(num_speculative_tokens=…)"),
    **dict.fromkeys(("use_beam_search", "num_beams", "BeamSearchParams", "length_penalty", "early_stopping"), _BEAMS),
    **dict.fromkeys(("enable_chunked_prefill", "flash_attn", "enable_auto_tool_choice", "jinja", "reasoning_parser"), _ALWAYS),
    "tools": "not supported here: requests to minirt serve may have it", "trust_remote_code": _NO_CODE,
    "request_id": "not needed: leaving an iterator aborts its request", "add_generation_prompt": _ALWAYS,
    "chat_template": "not supported: the chat template is that of the model's folder",
    "best_of": "not supported: n asks for several samples, and all are returned",
    "limit_mm_per_prompt": "not supported: minirt takes text only",
    "logits_processors": "not supported: logit_bias, bad_words and structured_outputs are",
    **dict.fromkeys(("mmap", "no_mmap", "mlock"), "not needed: weights are read once, to the device"),
    "block_size": "not needed: a page of the KV cache has 64 tokens",
    "tokenizer": "not supported: the tokenizer is that of the model's folder",
}  # fmt: skip
def names() -> dict[str, _Entry]:
    """`_REST`, and the names that the records of settings have."""
    import minirt
    from minirt.settings import Settings, settings_of

    _ = minirt.LoadOptions, minirt.SamplingParams  # so that their classes are known
    known = dict(_REST)
    for kind in Settings.__subclasses__():
        for name, record in settings_of(kind).items():
            in_file = {"transformers": record.file} if record.file not in (None, name) else {}
            for program, spellings in (*in_file.items(), *record.elsewhere.items()):
                whose = f"{program}'{'s' * (program[-1] != 's')} name"
                entry = whose, record.option_name, kind._python and kind._python.format(name)
                known.update(dict.fromkeys(spellings.split(), entry))
    return known


def python_hint(name: object) -> str | None:
    """What to write in Python for another library's name; None: no library's name that is known here."""
    return _hint(names().get(str(name)), 2)


def command_line_hint(name: str) -> str | None:
    """What to write on the command line for another program's option, with underscores; None: see `python_hint`."""
    return _hint(names().get(name), 1)


def similar(name: str, known: Iterable[str], most: int = 2) -> list[str]:
    """The `known` names that begin like a name, or else are spelled nearly like it. Dashes in front do not count."""
    spellings = {spelling.lstrip("-").lower(): spelling for spelling in known}
    bare = name.lstrip("-").lower()
    begun = [word for word in spellings if min(len(word), len(bare)) >= 3 and (word.startswith(bare) or bare.startswith(word))]
    return [spellings[word] for word in begun[:most] or get_close_matches(bare, spellings, n=most, cutoff=0.7)]


def check_names(
    given: Iterable[str], known: Sequence[str], place: str, error: type[MinirtError] = InputError,
    elsewhere: Mapping[str, str] | None = None, unnamed: Sequence[object] = (),
) -> None:
    """Refuse argument names that are not `known`, with what to write instead. `elsewhere`: what to write for names of others.
    `unnamed`: arguments without a name, all of which are refused."""
    if unnamed:
        what, expected = "an argument without its name", f"{place}({known[0]}=…), or another name"
        raise error(what, where=place, expected=expected, found=quoted(unnamed[0], 80))
    for name in given:
        if name not in known:
            hint = (elsewhere or {}).get(name) or python_hint(name)
            one_of = None if hint else f"one of {', '.join(known)}"
            if not hint and (near := similar(name, known)):
                hint = f"did you mean {' or '.join(near)}?"
            raise error("no such argument", where=place, expected=one_of, found=name, hint=hint)


def checks_names(elsewhere: Mapping[str, str], options: Sequence[str] = ()) -> Callable[[type[_T]], type[_T]]:
    """Decorator of classes: an argument name that `__init__` or a public method lacks is an `InputError` of `check_names`,
    not a TypeError.

    `options`: the names that `__init__` takes as `**options`.
    """

    def decorate(kind: type[_T]) -> type[_T]:
        for name, method in list(vars(kind).items()):
            if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
                known = [*inspect.signature(method).parameters][1:]  # without self
                known = [*known[:-1], *options] if known[-1:] == ["options"] else known
                place = method.__qualname__.removesuffix(".__init__")
                check = partial(check_names, known=known, place=place, elsewhere=elsewhere)
                setattr(kind, name, _checked(method, check))
        return kind

    return decorate


def _checked(method: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    @wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        check(named)
        return method(*arguments, **named)

    @wraps(method)
    async def call_async(*arguments: Any, **named: Any) -> Any:
        check(named)
        return await method(*arguments, **named)

    return call_async if inspect.iscoroutinefunction(method) else call


def _hint(entry: _Entry | None, side: int) -> str | None:
    if entry is None or isinstance(entry, str):
        return entry
    return f"{entry[0]}; here {entry[side]}" if entry[side] else None

"""`LoadOptions`: everything that decides how a model is loaded. The Python API, the command line and the benchmarks share it.

Imports no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minirt.errors import ConfigError, InputError, MinirtError, UnsupportedError, inside, quoted
from minirt.sampling_params import OF_SAMPLING, adapter_name
from minirt.settings import Integer, Number, Settings, one_of, setting, settings_of, switch, texts
from minirt.sizes import parse_size

if TYPE_CHECKING:
    from torch import Tensor

    from minirt.engine.proposer import Proposer
    from minirt.layers import Layer
    from minirt.modeling.config import ModelConfig
    from minirt.modeling.formats import Quantization
    from minirt.speculative.options import DraftNeeds, SpeculativeOptions

EMBEDDED = "embedded"  # the name of the model that is part of the package
OF_GENERATE = {name: f"generate takes {hint}" for name, hint in OF_SAMPLING.items()}
_WARM_UPS = ("lazy", "full", "none")
_COUNT = Integer(1, 1 << 20, text=f"an integer from 1 to {1 << 20}")  # sequences and tokens of a step: kernels have 32 bits


def _size(least: int | None) -> Callable[..., int]:
    """A check of sizes in bytes, or as text; the smallest one."""

    def check(value: Any, place: str, error: type[MinirtError], hint: str | None = None) -> int:
        try:
            size = parse_size(value, least or 1) if isinstance(value, str) else value
        except InputError:
            size = None
        if type(size) is not int or (least is not None and size < least):
            expected = "a number of bytes, or a text such as '4GiB'"
            raise ConfigError("not a size", where=place, expected=expected, found=quoted(value, 80), hint=hint)
        return size

    return check


def _share(value: Any, place: str, error: type[MinirtError], hint: str | None = None) -> float:
    return Number(0, 1, open_low=True)(value, place, ConfigError, hint)


def _folders(given: Any, merge: bool) -> dict[str, str]:
    """Folders of adapters by name. "NAME=FOLDER" → {NAME: FOLDER}; one to be merged has the name ""."""
    if isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        listed = texts("folders" if merge else "adapters, or a mapping")(given, "--lora", ConfigError)
        pairs = [("", text) if merge or "=" not in text else (text.partition("=")[0], text.partition("=")[2]) for text in listed]
    for name, folder in pairs:
        if not isinstance(folder, str | Path) or not str(folder) or (name == "") != merge:
            expected = "one folder, without a name, to be merged" if merge else "NAME=FOLDER, or with --merge FOLDER"
            shown = folder if name == "" else f"{name}={folder}"
            raise ConfigError("not an adapter", where="--lora", expected=expected, found=quoted(shown, 80))
        if not merge:
            adapter_name(name, "--lora", ConfigError)
    if merge and len(pairs) > 1:
        raise ConfigError("one adapter can be merged", where="--merge", expected="one --lora FOLDER", found=len(pairs))
    if len(dict(pairs)) < len(pairs):
        raise ConfigError("two adapters have one name", where="--lora", found=quoted([name for name, _ in pairs], 80))
    return {name: str(folder) for name, folder in pairs}


class LoadOptions(Settings):
    """How to load a model.

    Raises:
        ConfigError, InputError: values that exclude each other, or a limit that is no positive integer.
    """

    _name_error, _elsewhere, _python = ConfigError, OF_GENERATE, "{}=…"

    # fmt: off
    model: str | Path = setting(
        'A folder with config.json and safetensors, a Hub id ("Qwen/Qwen2.5-7B"), a preset ("Qwen2.5-7B"), or "embedded", the '
        "small model that is part of the package.",
        EMBEDDED, option="--model -m", scope="name", elsewhere={"llama.cpp": "hf_repo"},
        option_help="Folder, Hub id or preset. Also from MINIRT_MODEL. Default: the embedded model, a small story teller.")
    device: str = setting(
        "auto (a GPU if there is one), cpu, cuda or cuda:N.", "auto", scope="model", elsewhere={"transformers": "device_map"})
    dtype: str = setting(
        "auto, bfloat16, float16 or float32.", "auto", scope="model", elsewhere={"transformers": "torch_dtype"},
        details="auto: on a GPU the checkpoint's dtype, on a CPU float32.")
    tensor_parallel: int = setting(
        "GPUs of this machine that compute the model together, from `device` on, each with a share of every layer.", 1,
        check=Integer(1, 64, text="an integer from 1 to 64"), scope="model",
        details="Their number must divide the heads, and the neurons of MLP layers and experts. Not with adapters per request, "
        "`capture`, `edits`, `layers`, proposers or functions of your own, or `batch_invariant`. On a CPU, for tests: processes.",
        elsewhere={"vLLM": "tensor_parallel_size", "SGLang": "tp_size", "TensorRT-LLM": "tp"})
    quantization: str | None = setting(
        "Quantize the weights of all linear layers while they are loaded, to FP8 or to 4 bits.",
        option="--quantize", kind=("fp8", "int4", "mxfp4"), elsewhere={"vLLM": "quantization"}, short={"--fp8": "fp8"},
        scope="model",
        details='"fp8": e4m3 with a scale for each output channel. "int4": 4 bits with a scale for each output channel and 128 '
        'input channels. "mxfp4": E2M1 with a power of two for 32 of them. Activations and the embedding keep the dtype. None '
        "for a checkpoint that is quantized already.")
    quantize_head: bool | None = setting(
        "Quantize the LM head too. Default: with fp8, unless it is tied to the embedding; else no.",
        option="--quantize-head/--no-quantize-head --fp8-head/--no-fp8-head", scope="model")
    revision: str | None = setting("Branch, tag or commit of a Hub model.", scope="model")
    impl: str | Sequence[str] = setting(
        "Implementation: NAME for all layers, or GLOB=NAME.", "auto", kind="several", scope="model",
        details="In Python, one text or a list.")
    random_weights: bool = setting("Random weights: no download for a preset.", False, group="Model", scope="load")
    check_weights: bool = setting("Fail if the checkpoint contains NaN or Inf.", False, group="Model", scope="load")
    seed: int = setting("Seed of random weights.", 0, option="")
    layers: "Callable[[ModelConfig], list[Layer]] | None" = setting(
        "Composes another model from the config: `layers(config) -> [Embedding, …, Head]`.", option="",
        details="The model inserts a `Select` unless the list has one. `Generator.unused_tensors` lists the checkpoint tensors "
        "that no layer uses.")
    capture: Sequence[str] = setting(
        "Places whose hidden states requests may ask for: names of layers or blocks, such as layers.12 or layers.*.attention.",
        (), option="", check=texts("places"), details="Each takes memory for the tokens of the largest step.")
    edits: "Mapping[str, Callable[[Tensor, Tensor], Tensor] | str] | None" = setting(
        "Functions (x, factor) → x by place, which change the residual stream of requests that ask for it with "
        "`SamplingParams.steer`. `minirt.hooks.layer` makes some; module:name names one.", option="")
    max_model_len: int | None = setting(
        "Positions to serve, prompt and completion together.", kind="tokens", scope="memory", engine=True,
        details="None: the model's own, or with a warning as many as fit; a number that does not fit is an error. With linear "
        "rope, it may be up to the rope factor times max_position_embeddings.",
        option_help="Positions to serve; 32K is 32,768 and 32k is 32,000. Default, and auto: the model's own, or as many as fit. "
        "A number that does not fit is refused.",
        elsewhere={"vLLM": "max_seq_len", "llama.cpp": "ctx_size n_ctx"})
    max_num_seqs: int = setting(
        "Maximum number of sequences in one step; further requests wait. It sizes the KV cache and the CUDA graphs.", 64,
        check=_COUNT, scope="memory", engine=True, elsewhere={"llama.cpp": "parallel"},
        details="Fewer, with a warning, if the states of recurrent layers leave no room.")
    gpu_memory_utilization: float | None = setting(
        "The share of a GPU's free memory that weights, KV pages and steps may take; default: 0.9.", check=_share, scope="memory",
        engine=True)
    kv_cache_memory: int | str | None = setting(
        "Memory for KV pages, e.g. 4GiB; never more than `max_num_seqs` sequences of full length need.", kind="size",
        check=_size(None), scope="memory", engine=True, elsewhere={"vLLM": "kv_cache_memory_bytes"},
        details="In bytes, or as text. None: what `gpu_memory_utilization` leaves beside weights and steps; on a CPU, a quarter "
        "of the free memory.")
    kv_cache_dtype: str = setting(
        "auto (as `dtype`) or fp8.", "auto", scope="memory", elsewhere={"llama.cpp": "cache_type_k cache_type_v"},
        details="fp8: e4m3 with a scale for each token and head.")
    max_num_batched_tokens: int | None = setting(
        "Maximum number of tokens in one step. Longer prompts are computed in chunks, beside decoding requests. Default: 8,192 "
        "on a GPU, less where the memory is short; 256 on a CPU.", kind="tokens", check=_COUNT, scope="memory", engine=True,
        elsewhere={"llama.cpp": "ubatch_size"},
        details="Less is the largest of 4,096, 2,048 and 1,024 that leaves KV pages for one sequence of full length, else 1,024.")
    cuda_graphs: bool = setting(
        "On a GPU: run small steps as CUDA graphs.", True, option="--no-cuda-graphs --enforce-eager", scope="memory", engine=True,
        details='False launches every kernel of every step from the host. It does not select eager layers: `impl="eager"` does.',
        option_help="On a GPU: launch every kernel from the host instead of replaying CUDA graphs. --enforce-eager is vLLM's "
        "name for this; it does not select eager layers: use --impl eager.")
    state_cache_memory: int | str | None = setting(
        "Memory for states of recurrent layers (Qwen3.5, 3.6, 3.8) that the prefix cache keeps; 0: no prefix cache. Default: a "
        "quarter of the memory for them and KV pages, at most four states for each sequence.", kind="size", check=_size(0),
        scope="memory", engine=True, details="Never more than `kv_cache_memory` leaves.")
    batch_invariant: bool = setting(
        "A request's tokens and log-probabilities do not depend on other requests, chunks, cached prefixes or drafts, to the "
        "last bit.", False, scope="model", check=switch,
        details="On a GPU, for models of attention (heads of at most 256 channels), gated DeltaNet, MLPs and mixtures; experts "
        "in FP8 need Hopper. Others are refused. Steps take longer.",
        elsewhere={"vLLM": "VLLM_BATCH_INVARIANT", "SGLang": "enable_deterministic_inference"})
    max_step_ms: float = setting(
        "On a GPU: milliseconds that a step may spend on prompts while other requests decode; 0: no limit.", 60.0,
        check=Number(0, text="milliseconds, or 0 for any time"), scope="load", engine=True,
        details="Longer prompts are computed in more steps. Warm-up measures the times of steps: without it, no effect.")
    max_waiting: int | None = setting(
        "Requests that may wait; more are refused. Default: no limit.", check=Integer(0, text="an integer >= 0, or None"),
        scope="load", engine=True, details="They end with a `QueueFullError`.")
    threads: int | None = setting(
        "CPU threads. Default: OMP_NUM_THREADS, or the CPUs that this process may use (affinity and cgroup quota).", scope="load",
        details="They are those of the whole process, except of generators that exist.", elsewhere={"llama.cpp": "n_threads"})
    warm_up: str = setting(
        "On a GPU: which kernels are compiled and which CUDA graphs captured before loading returns. lazy: those that a prompt "
        "and a decode step need, the others while nothing runs and between steps. full: all. none: none, but each at its first "
        "use.", "lazy", kind=_WARM_UPS, check=one_of(*_WARM_UPS), scope="load",
        details="With drafts or without CUDA graphs, lazy is full. Benchmarks use full.")
    kernel_cache: str | Path | None = setting(
        "On a GPU: a folder that `minirt compile` has made for this GPU, so that no kernel is compiled at the start.",
        metavar="FOLDER", scope="load")
    prefix_cache: bool = setting(
        "Keep the KV pages of finished requests until their memory is needed, for requests with the same beginning.", True,
        scope="reuse", engine=True, details="With recurrent layers, their states are kept too (`state_cache_memory`).",
        option_help="Compute every prompt completely, even if the KV cache holds its beginning from an earlier request.")
    loras: "str | Sequence[str] | Mapping[str, str | Path]" = setting(
        "A LoRA adapter that requests may ask for by its name, a folder in PEFT's format.", (), option="--lora", kind="several",
        metavar="NAME=FOLDER", scope="memory", group="Model", elsewhere={"vLLM": "lora_modules"},
        details='In Python, a mapping {"name": folder}. With `merge_lora`, one folder without a name.',
        option_help="A LoRA adapter that requests may ask for by its name, a folder in PEFT's format; with --merge, a folder.")
    merge_lora: bool = setting(
        "Add the adapter to the weights while they are loaded, before they are quantized.", False, option="--merge",
        scope="memory", group="Model")
    max_loras: int = setting(
        "Adapters on the device at once; all others are on the host, and requests wait for a place.", 8, check=_COUNT,
        scope="memory", group="Model")
    max_lora_rank: int | None = setting(
        "Largest rank of adapters that are loaded later, of any linear layer.", check=Integer(1, 256), scope="memory",
        group="Model", details="Rounded up to a multiple of 16. None: there is room for linears and ranks of `loras` alone.",
        option_help="Largest rank of adapters that are loaded later, of any linear layer. Default: room for --lora alone.")
    speculative: "SpeculativeOptions | Proposer | None" = setting(
        "Speculative decoding: propose up to k tokens and verify them in one step. The distribution of the output stays the "
        "same. ngram (default k: 4): tokens that followed the same tokens before. mtp (default k: 3): tokens by the layers of "
        "multi-token prediction of Qwen3.5 (also 3.6, 3.8) and Qwen3-Next.",
        option="--speculate", metavar="ngram[:k]|mtp[:k]", scope="drafts", engine=True,
        details='In Python, a `SpeculativeOptions`, a dict of its fields, a text ("ngram:4"), or a proposer '
        "(`minirt.engine.proposer.Proposer`).")

    def __post_init__(self) -> None:
        if self.quantize_head is not None and self.quantization is None:
            place = "--quantize-head" if self.quantize_head else "--no-quantize-head"
            raise ConfigError("needs --quantize", where=place)
        if self.check_weights and self.random_weights:
            raise ConfigError("random weights have no checkpoint to check", where="--check-weights", hint="use one of the two")
        if self.layers is not None and not callable(self.layers):
            expected = "a function that takes the model's config and returns a list of layers"
            raise ConfigError("not a function", where="layers", expected=expected, found=repr(self.layers)[:80])
        super().__post_init__()
        self._set("loras", _folders(self.loras, self.merge_lora))
        if self.merge_lora and (len(self.loras) != 1 or self.random_weights or self.max_lora_rank is not None):
            expected = "one --lora FOLDER, without --random-weights and --max-lora-rank"
            raise ConfigError("an adapter is merged into the weights of a checkpoint", where="--merge", expected=expected)
        if self.batch_invariant and not self.merge_lora and (self.loras or self.max_lora_rank is not None):
            what, hint = "adapters per request depend on other requests in their last bits", "use --merge"
            expected = "neither --lora nor --max-lora-rank beside it"
            raise UnsupportedError(what, where="--batch-invariant", expected=expected, hint=hint)
        if self.tensor_parallel > 1:
            self._check_alone()
        if self.state_cache_memory and not self.prefix_cache:
            what, expected = "there is no prefix cache to keep states for", "none with --no-prefix-cache"
            raise ConfigError(what, where="--state-cache-memory", expected=expected, found=self.state_cache_memory)
        if self.speculative is not None:
            from minirt.speculative.options import SpeculativeOptions

            if isinstance(self.speculative, str):
                self._set("speculative", SpeculativeOptions.parse(self.speculative, "speculative"))
            if isinstance(self.speculative, Mapping):
                with inside("speculative"):
                    self._set("speculative", SpeculativeOptions(**self.speculative))
            self.draft_needs  # noqa: B018  (checks `speculative`)

    def _check_alone(self) -> None:
        """Refuse what only a single process can do."""
        names = "layers", "capture", "edits", "batch_invariant", "max_lora_rank"
        used = [name for name in names if getattr(self, name)] + ["loras"] * bool(self.loras and not self.merge_lora)
        if used:
            what, hint = f"{self._place(used[0])} is not supported beside it", "use one GPU, or leave it out"
            raise UnsupportedError(what, where="--tensor-parallel", expected=1, found=self.tensor_parallel, hint=hint)

    @classmethod
    def _place(cls, name: str) -> str:
        return settings_of(cls)[name].option_name or name

    @property
    def draft_needs(self) -> "DraftNeeds":
        """What an engine keeps for drafts.

        Raises:
            ConfigError: `speculative` is neither options nor a proposer.
        """
        from minirt.speculative.options import draft_needs

        return draft_needs(self.speculative)

    @property
    def adapter_folders(self) -> Mapping[str, str]:
        """Folders of adapters by name; of one to be merged, the name is ""."""
        return self.loras  # type: ignore[return-value]  # a mapping from __post_init__ on

    @property
    def kv_bytes(self) -> int | None:
        return self.kv_cache_memory  # type: ignore[return-value]  # a number from __post_init__ on

    @property
    def snapshot_bytes(self) -> int | None:
        return self.state_cache_memory  # type: ignore[return-value]

    @property
    def formats(self) -> "Quantization | None":
        """The weight formats; None: all weights keep the dtype."""
        from minirt.modeling.formats import Quantization

        return None if self.quantization is None else Quantization(self.quantization, self.quantize_head)

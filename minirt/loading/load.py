"""`load`: loads a model with its weights. `plan_model`: a model with its plan, without weights. `find`: files and config."""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from minirt import models
from minirt.adapters.adapters import Adapters
from minirt.adapters.files import warn_of_base
from minirt.adapters.merge import merging
from minirt.device import AbsentGPU, AnyDevice, compute_capability, pick_device, total_memory
from minirt.errors import ConfigError, InputError, MinirtError, ModelNotFoundError, UnsupportedError
from minirt.hooks.layer import with_hooks
from minirt.layers import Layer
from minirt.loading import checkpoint
from minirt.loading.checkpoint import Entries, Entry, shows_tied
from minirt.loading.hub import ModelFiles, find_model_files, remote_headers, with_present_weights
from minirt.loading.memory import MemoryPlan, does_not_fit, out_of_memory_while, plan_memory, sequences_that_fit
from minirt.loading.options import EMBEDDED, LoadOptions
from minirt.loading.stored_formats import StoredFormats, fuse_experts, stored_formats
from minirt.modeling.config import DTYPES, Fields, ModelConfig, check_token_ids
from minirt.modeling.formats import FP8, FormatChoice, Quantization
from minirt.modeling.model import CANNOT, Model, in_order
from minirt.modeling.parameters import Shard, SomeRows
from minirt.modeling.quantization_config import QuantizationConfig, read_quantization
from minirt.progress import LoadProgress
from minirt.sizes import format_size
from minirt.speculative.draft_vocabulary import draft_ids
from minirt.speculative.options import SpeculativeOptions
from minirt.text.tokenizer import Tokenizer, eos_token_ids
from minirt.threads import set_threads
from minirt.wording import warn, worded

if TYPE_CHECKING:
    from minirt.parallel.ranks import Ranks

Way = tuple[str, dict[str, Any]]  # how to make a model fit, in words, and the load options that change
# Values of a weight. An H200 reads this number of bytes in less than 1 µs; a kernel that rounds the input to FP8 takes 1.6 µs.
_SMALL = 4 << 20
_OTHER_FAMILIES = (  # names that users try
    "gemma-2", "gemma-3", "gemma-4-e2b", "gemma-4-e4b", "mixtral", "phi-2", "glm-", "deepseek-v", "falcon", "gpt2",
)  # fmt: skip
_QKV, _MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
_DTYPE_NAMES = {
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32",
    "f32": "float32", "fp8_e4m3": "fp8", "float8_e4m3fn": "fp8", "q8_0": "fp8",
}  # fmt: skip  (names of vLLM, PyTorch and llama.cpp)


class Source(NamedTuple):
    """A model's files, its checked config, and the stated format of quantized weights.

    `files` is None for a preset whose weights are not needed, `quantization` if the weights are not quantized.
    """

    files: ModelFiles | None
    config: ModelConfig
    quantization: QuantizationConfig | None = None


def find(model: str | Path, revision: str | None, *, need_weights: bool, progress: bool = False) -> Source:
    """Look a model up by its name."""
    name = str(models.embedded()) if model == EMBEDDED else str(model)
    if not name:
        raise InputError("the model's name is empty", hint="give a folder, a Hub id or a preset")
    try:
        preset = models.preset(name) if not Path(name).expanduser().is_dir() else None
    except (OSError, RuntimeError) as error:  # a name that is too long, a folder without permission, an unknown user
        what = f"cannot be looked up: {error.strerror if isinstance(error, OSError) else error}"
        raise ModelNotFoundError(what, where=name[:80]) from error
    if preset is not None and not need_weights and revision is None:
        return Source(None, preset.config, preset.quantization)
    try:
        name = preset.hub_id if preset else name
        files = find_model_files(name, revision=revision, weights=need_weights, progress=progress, check=models.parse_config)
    except ModelNotFoundError as error:
        raise _with_advice(error, name, preset, revision) from error
    config_file = str(files.folder / "config.json")
    config, fields = models.parse_config(files.config, config_file), models.decoder_fields(files.config)
    check_token_ids(fields, config_file, config.vocab_size)
    check_token_ids(files.generation_config or {}, str(files.folder / "generation_config.json"), config.vocab_size)
    stated, file = files.hf_quant_config, str(files.folder / "hf_quant_config.json")
    return Source(files, config, read_quantization(Fields(fields, config_file), None if stated is None else Fields(stated, file)))


def _with_advice(error: ModelNotFoundError, name: str, preset: models.Preset | None, revision: str | None) -> ModelNotFoundError:
    """The error for a model that is not there, with what may help: other names, or that minirt has no such family."""
    base = name.lower().rpartition("/")[2]
    if (family := next((family for family in _OTHER_FAMILIES if family in base), None)) is not None:
        expected = f"a model of one of the types {', '.join(models.ARCHITECTURES)}"
        hint = "minirt models lists presets" + (f"; {error.what}: {error.hint}" if "/" in name else "")
        what = f"minirt does not support {family.strip('-')} models"
        return ModelNotFoundError(what, where=error.where, expected=expected, hint=hint)
    known = preset or next((one for one in models.presets() if one.hub_id == name), None)
    hint = error.hint or ""
    if known is not None and hint and revision is None:
        hint += f"; --model {known.name} --random-weights measures without a download, with token ids as prompts"
    elif "/" not in name and "gguf" not in name.lower():
        hint = "give a folder, a Hub id org/name, or a preset; minirt models lists the presets"
        if near := _similar_presets(name):
            hint = f"did you mean {', '.join(near)}? Otherwise {hint}"
    return ModelNotFoundError(error.what, where=error.where, hint=hint or None)


def _similar_presets(name: str) -> list[str]:
    """At most three presets that begin like a name, also one of ollama's ("llama3.1:8b"), else some that are spelled like it."""

    def plain(text: str) -> str:
        return re.sub("[^a-z0-9]", "", text.lower())

    names = {preset.name.lower(): preset.name for preset in models.presets()}
    begun = [preset for lower, preset in names.items() if plain(name) and plain(lower).startswith(plain(name))]
    return begun[:3] or [names[lower] for lower in get_close_matches(name.lower(), names, n=3, cutoff=0.75)]


def build(options: LoadOptions, source: Source, entries: Entries | None, device: AnyDevice, rank: int = 0) -> Model:
    """The model without weights: its layers, how the checkpoint stores their experts, and the formats of their linears. With
    `tensor_parallel`, the share of a rank."""
    length = options.max_model_len
    config = source.config.within(length if type(length) is int else source.config.context_len)  # `pick_length` checks it
    speculative, rows, draft = options.speculative, None, list[Layer]()
    if isinstance(speculative, SpeculativeOptions) and speculative.has_draft_model:
        layers, draft = _build_with_drafts(options, config, entries, rows := speculative.draft_rows(config.vocab_size))
    else:
        layers = options.layers(config) if options.layers else models.build(config)
    if options.capture or options.edits:
        layers = with_hooks(config, layers, options.capture, options.edits or {})
    layers = in_order(config, layers)
    fuse_experts([*layers, *draft], entries)
    formats = choose_formats(options, [*layers, *draft], source, entries, device)
    if isinstance(formats, StoredFormats) and rows is not None:
        tied = config.tie_word_embeddings
        if any(formats.format_of(weights.modules, head=True, tied=tied) for weights in draft[-1].quantizable()):
            note = "drafts may have all ids, since the checkpoint stores a quantized head"  # some formats cannot be split by rows
            draft[-1], formats = models.build_with_drafts(config)[1][-1], replace(formats, notes=(*formats.notes, note))
    model = Model(config, layers, formats, draft, Shard(rank, options.tensor_parallel) if options.tensor_parallel > 1 else None)
    if drafts := options.draft_needs.max_drafts:  # states are larger, which plans count
        model.keep_undo(1 + drafts)
    model.batch_invariant = options.batch_invariant
    return model


def _build_with_drafts(
    options: LoadOptions, config: ModelConfig, entries: Entries | None, rows: int | None
) -> tuple[list[Layer], list[Layer]]:
    """The layers, and those of a draft model, whose head has `rows` ids; None: all."""
    if options.layers is not None:
        what, hint = "a composed model has no draft model", "use method 'ngram', or a proposer"
        raise UnsupportedError(what, where="speculative", expected="layers=None", found="layers", hint=hint)
    layers, draft = models.build_with_drafts(config, rows)
    if entries is not None:
        target_names, draft_names = (
            {spec[0].rpartition(".")[0] for layer in part for weights in layer.parameters() for spec in weights.expected()}
            for part in (layers, draft)
        )
        if draft_names.isdisjoint({name.rpartition(".")[0] for name in entries} - target_names):
            what, hint = "the checkpoint has no weights of the draft model", "leave out the drafts, or use --speculate ngram"
            raise UnsupportedError(what, where=str(options.model), expected=f"{min(draft_names - target_names)}, …", hint=hint)
    return layers, draft


def choose_formats(
    options: LoadOptions, layers: Sequence[Layer], source: Source, entries: Entries | None, device: AnyDevice
) -> FormatChoice | None:
    """The formats of the linears: those of the checkpoint, else those that `options` ask for.

    Args:
        entries: headers of the weight files; None: there are none.
    """
    stored = stored_formats(layers, entries, source.quantization)
    if stored is not None and options.quantization is not None:
        what, hint = "the checkpoint is quantized already", "leave it out (quantization=)"
        raise ConfigError(what, where="--quantize", found=stored.checkpoint, hint=hint)
    if stored is None and options.formats is not None and options.formats.format == "fp8" and device.type != "cpu":
        return faster_fp8(options.formats, layers)
    return stored or options.formats


def faster_fp8(formats: Quantization, layers: Sequence[Layer]) -> Quantization:
    """FP8 except for weights with which a step of several tokens on a GPU would be slower than with 16 bits.

    These are small weights whose input is rounded to FP8 by a separate kernel. Other inputs are rounded by the kernel that
    normalizes them. (docs/decisions/linear-decode.md)
    """
    ops = [op for layer in layers for op in layer.linear_ops() if op.residual]
    small = [op.linear for op in ops if op.linear.out_features * op.linear.in_features < _SMALL]
    if not small:
        return formats
    note = f"{len(small)} small weights stay in 16 bits: to round their inputs to FP8 would take longer than it saves"
    return replace(formats, unquantized=frozenset(name for linear in small for name in linear.modules), notes=(note,))


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


def pick_length(config: ModelConfig, asked: int | None) -> int:
    """Number of positions to serve: `asked`, else all positions of the model.

    Raises:
        ConfigError: `asked` is no length that the model supports.
    """
    length = config.context_len if asked is None else asked
    if type(length) is not int or not 1 <= length <= config.max_context_len:
        what = "outside the model's context" if type(length) is int else "not a number of tokens"
        expected = f"an integer from 1 to {config.max_context_len}"
        raise ConfigError(what, where="--max-model-len", expected=expected, found=repr(length)[:80])
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


def plan_model(options: LoadOptions, gpu: AbsentGPU | None = None) -> Model:
    """The model with its plan resolved. No weight is read or allocated. `gpu`: plan for it, instead of a device that is here.

    The headers of local weight files are read, and must be those of the model. If the weights are quantized, they are also read
    from the Hub. If that fails, the plan follows what config.json states, and has a note.
    """
    source, entries, settled = _headers(find(options.model, options.revision, need_weights=False), options)
    planned, notes = _without_weights(options, source, entries, pick_device(options.device) if gpu is None else gpu)
    planned.resolve(options.impl)
    planned.plan = planned.plan.with_cuda_graphs(options.cuda_graphs)
    _add_notes(planned, *notes, settled, _slow(planned, options))
    return planned


def _without_weights(
    options: LoadOptions, source: Source, entries: Entries | None, device: AnyDevice, rank: int = 0
) -> tuple[Model, list[str]]:  # fmt: skip
    """The model with its dtypes, compared with the headers of the checkpoint, and what `_match` returns."""
    model = build(options, source, entries, device, rank)
    model.device = cast(torch.device, device)
    model.dtype = pick_dtype(options.dtype, source.config, model.device)
    model.kv_dtype = pick_kv_dtype(options.kv_cache_dtype, model.dtype)
    notes = _match(model, entries, options) if entries is not None else []
    if (options.adapter_folders and not options.merge_lora) or options.max_lora_rank is not None:
        model.adapters = Adapters(model, options.adapter_folders, options.max_loras, options.max_lora_rank)
        for known in model.adapters.known.values():
            warn_of_base(known.adapter, options.model)
    return model, notes


def _slow(model: Model, options: LoadOptions) -> str | None:
    """Why the model will be slow on this device; None: it will not."""
    if model.device.type == "cpu":
        what = "on a CPU, quantized weights save memory, not time: every step unpacks them, which is slow"
        return what if model.plan.formats else None
    if compute_capability(model.device) < (8, 0):
        return "the Triton kernels need compute capability 8.0: on this GPU only eager layers run, which was never tested"
    return _eager_layers(model, options)


def _add_notes(model: Model, *notes: str | None) -> None:
    model.plan = replace(model.plan, notes=(*model.plan.notes, *filter(None, notes)))


def _eager_layers(model: Model, options: LoadOptions) -> str | None:
    """How many layers are eager on a GPU because Triton cannot run them, why, and which options change that."""
    rows = model.plan.rows
    reasons = [row.reason.removeprefix(CANNOT) for row in rows if row.reason.startswith(CANNOT)]
    if not reasons:
        return None
    what = f"{len(reasons)} of {len(rows)} layers run eager on this GPU, which is slow: {'; '.join(dict.fromkeys(reasons))}"
    ways = ["--quantize int4"] * (options.quantization == "fp8") + ["--kv-cache-dtype auto"] * (options.kv_cache_dtype == "fp8")
    return worded(f"{what} (use {' and '.join(ways)})") if ways and compute_capability(model.device) < (8, 9) else what


def _match(model: Model, entries: Entries, options: LoadOptions) -> list[str]:
    """Compare the headers with the model, and warn of tensors that it does not use. A composed model may use a part of them.

    Returns:
        Notes for the plan, of what needs no warning: a draft model that is left out, which changes no result, and the biases of
        zeros that AutoGPTQ writes (Qwen's releases have them).
    """
    matched, notes = checkpoint.match(model, entries, options.layers is not None), list[str]()
    if options.layers is None:
        mtp, unused = model.config.mtp, list(matched.unused)
        if mtp is not None and mtp.num_layers != 0:
            unused = [name for name in unused if not name.startswith(checkpoint.DRAFTS)]
            if count := len(matched.unused) - len(unused):
                notes += [worded(f"{count} tensors {checkpoint.DRAFTS}* are not loaded: --speculate mtp makes drafts with them")]
        checkpoint.warn_of_extras(unused, options.model)
    quantized = {m for p in model.parameters() if p.format is not None for m in p.modules}
    plain = sum(name.removesuffix(".bias") not in quantized for name in matched.zero_biases)
    what = "biases of linear layers that have none are not used; loading checks that they are zero"
    if plain:
        warn(f"{options.model}: {plain} {what}")
    return notes if plain == len(matched.zero_biases) else [*notes, f"{len(matched.zero_biases) - plain} {what}"]


def plan_load(options: LoadOptions, gpu: AbsentGPU | None = None) -> tuple[Model, MemoryPlan]:
    """`plan_model`, and what loading takes of the memory."""
    model = plan_model(options, gpu)
    return model, plan_memory(model, pick_length(model.config, options.max_model_len), model.device, options)


def remedy(options: LoadOptions, device: AnyDevice) -> str:
    """The options with which the model would fit, or what else can be done."""
    gpu = device if isinstance(device, AbsentGPU) else None
    capability = (99, 0) if device.type == "cpu" else compute_capability(cast(torch.device, device))
    fp8 = {"quantization": "fp8"} if capability >= (8, 9) else {}
    int4 = {"quantization": "int4"} if capability >= (8, 0) else {}
    narrow = {"dtype": "bfloat16"} if device.type == "cpu" or options.dtype == "float32" else {}
    ways: list[Way] = [
        ("lower --kv-cache-memory", {"kv_cache_memory": None}), ("lower --state-cache-memory", {"state_cache_memory": None}),
        ("use --dtype bfloat16", narrow), ("use --fp8", fp8), ("use --dtype bfloat16 --fp8", narrow | fp8),
        ("use --quantize int4", int4), ("use --dtype bfloat16 --quantize int4", narrow | int4),
        ("lower --max-model-len", {"max_model_len": 256}),
    ]  # fmt: skip
    current = plan_load(options, gpu)[1]
    if current.only_context_is_short:
        return _longer_context(options, gpu, current, [("use --kv-cache-dtype fp8", {"kv_cache_dtype": "fp8"}), *ways])
    least, how = current.least, ""
    for words, changes in ways:
        if (changed := _changed(options, changes, gpu)) is None:
            continue
        other, plan = changed
        if plan.fits:
            if other.kv_bytes is not None:
                return f"{words}: {format_size(plan.needed, up=True)}"
            return f"{words}: at least {format_size(plan.least, up=True)}"  # the pages take what is left
        if plan.least < least and words.startswith("use "):
            least, how = plan.least, f"at least {format_size(plan.least, up=True)} even with {words[4:]}: "
    if least > total_memory(device):
        return f"{how}use a smaller model, or a {'machine' if device.type == 'cpu' else 'GPU'} with more memory"
    here = "" if gpu else ", or free memory"
    return f"use a smaller model{here}" + ("" if device.type == "cpu" else ", or raise --gpu-memory-utilization")


def _longer_context(options: LoadOptions, gpu: AbsentGPU | None, plan: MemoryPlan, others: list[Way]) -> str:
    """The same where the context that was asked for does not fit, but a shorter one does. What loses least comes first: fewer
    sequences at once, then KV pages of FP8, then weights of fewer bits."""

    def fits(changes: dict[str, Any]) -> bool:
        changed = _changed(options, changes, gpu)
        return changed is not None and changed[1].fits

    pages = format_size(plan.least_pages * plan.page, up=True)
    memory = f"{'use' if options.kv_cache_memory is None else 'raise'} --kv-cache-memory {pages}"
    fewer = sequences_that_fit(lambda count: fits({"max_num_seqs": count}), options.max_num_seqs)
    ways: list[Way] = [(f"use --max-num-seqs {fewer}", {"max_num_seqs": fewer})] if fewer else []
    for words, changes in [*ways, (memory, {"kv_cache_memory": pages}), *others]:
        if words.startswith(("use ", "raise ")) and fits(changes):
            return f"{words}, or --max-model-len {plan.context}"
    return f"use --max-model-len {plan.context}"


def _changed(options: LoadOptions, changes: dict[str, Any], gpu: AbsentGPU | None) -> tuple[LoadOptions, MemoryPlan] | None:
    """Other options, and the plan with them. None: nothing changes, or it fails: no checkpoint is quantized twice."""
    changed = {name: value for name, value in changes.items() if getattr(options, name) != value}
    with suppress(MinirtError):
        return (other := replace(options, **changed), plan_load(other, gpu)[1]) if changed else None
    return None


def _settled(source: Source, files: ModelFiles) -> tuple[Source, Entries, str | None]:
    """The model with what the headers of its local weight files settle, the headers, and a note; see `inferred_config`."""
    entries = checkpoint.read_headers(files.weight_files, files.weight_index, tied=source.config.tie_word_embeddings)
    config, note = inferred_config(files.config, source.config, entries)
    if config.tie_word_embeddings != source.config.tie_word_embeddings:
        entries = checkpoint.read_headers(files.weight_files, files.weight_index, tied=config.tie_word_embeddings)
    return source._replace(config=config), entries, note


def _headers(source: Source, options: LoadOptions) -> tuple[Source, Entries | None, str | None]:
    """`_settled` with local files, else the headers from the Hub if the weights are quantized. None if there are none."""
    if source.files is None:
        return source, None, None
    files = with_present_weights(source.files)
    if files.weight_files:
        return _settled(source, files)
    if files.revision is None and not options.random_weights:
        warn(f"{files.folder}: there are no safetensors files, so the plan follows config.json alone")
    if files.revision is not None and source.quantization is not None:
        with suppress(ModelNotFoundError):
            return source, {tensor[0]: Entry(*tensor) for tensor in remote_headers(files)}, None
    return source, None, None


def inferred_config(raw: Mapping[str, Any], config: ModelConfig, entries: Entries) -> tuple[ModelConfig, str | None]:
    """The config with the values that the tensors show, for fields that the file does not state, or states twice and differently.

    Fields that the architecture does not have stay open. What the file states is not changed, so tensors that contradict it are
    refused later.

    Args:
        raw: config.json, from which `config` was read.
        entries: see `checkpoint.read_headers`.
    Returns:
        The config, and a note that names the fields; None: the defaults are right.
    """
    inner, changed = raw.get("text_config") or {}, dict[str, Any]()
    for name, value in _shown(config, entries).items():
        stated = [level[name] for level in (raw, inner) if level.get(name) is not None]
        if stated and all(statement == stated[0] for statement in stated):
            continue
        fields = changed | {name: value}
        # With `text_config`, the head's tie may stand at both levels, and other fields of the decoder only there.
        outer = {key: field for key, field in fields.items() if not inner or key == "tie_word_embeddings"}
        candidate = {**raw, **outer, **({"text_config": inner | fields} if inner else {})}
        with suppress(ConfigError, UnsupportedError):
            if (parsed := models.parse_config(candidate)) != config:
                config, changed = parsed, fields
    if not changed:
        return config, None
    values = ", ".join(f"{name} is {str(value).lower()}" for name, value in changed.items())
    return config, f"config.json does not say it clearly; by the tensors, {values}"


def _shown(config: ModelConfig, entries: Entries) -> dict[str, Any]:
    """The values that differ from `config`, by the names of their fields in config.json."""
    tied = config.tie_word_embeddings
    values: dict[str, tuple[Any, Any]] = {"tie_word_embeddings": (shows_tied(entries, tied), tied)}  # and those of `config`
    attention, mlp = (_modules(entries, name) for name in ("self_attn.q_proj", "mlp.gate_proj"))
    if attention:
        query, key, norm = (entries.get(f"{attention[0]}.{name}.weight") for name in ("q_proj", "k_proj", "q_norm"))
        if query is not None and key is not None and min(len(query.shape), len(key.shape)) == 2:
            size = query.shape[0] // config.num_heads if norm is None else math.prod(norm.shape)
            heads = key.shape[0] // max(1, size), config.num_kv_heads
            values |= {"head_dim": (size, config.head_dim), "num_key_value_heads": heads}
    for field, prefixes, names, expected in (
        ("qkv_bias", attention, _QKV, config.qkv_bias),
        ("attention_bias", attention, (*_QKV, "o_proj"), config.qkv_bias and config.o_bias),
        ("mlp_bias", mlp, _MLP, config.mlp_bias),
    ):
        biased = {f"{prefix}.{name}.bias" in entries for prefix in prefixes for name in names}
        if len(biased) == 1:
            values[field] = biased.pop(), expected
    if config.moe is not None:
        layers = range(config.num_layers)
        dense = [i for i in layers if f"model.layers.{i}.mlp" in mlp]
        values["mlp_only_layers"] = dense, [i for i in layers if not config.is_mixture(i)]
    return {name: shown for name, (shown, expected) in values.items() if shown != expected}


def _modules(entries: Entries, part: str) -> list[str]:
    """The modules of the decoder's layers that have a weight or a packed weight of `part`, in the order of the files."""
    weight = re.compile(rf"(model\.layers\.\d+\.{re.escape(part.rpartition('.')[0])})\.{part.rpartition('.')[2]}\.q?weight")
    return [match[1] for match in map(weight.fullmatch, entries) if match is not None]


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, and the other contents of its files.

    Attributes:
        tokenizer, generation_config: None if the model has no such file.
        eos_token_ids: the tokens that end a sequence.
        bytes_read: bytes of the checkpoint that were read.
        unused_tensors: checkpoint tensors that the model does not use: those of layers that a composed model leaves out, of
            multi-token prediction, and of a vision encoder.
    """

    model: Model
    tokenizer: Tokenizer | None
    generation_config: dict[str, Any] | None
    eos_token_ids: tuple[int, ...]
    bytes_read: int
    unused_tensors: tuple[str, ...]


def load(options: LoadOptions, progress: LoadProgress | None = None, ranks: "Ranks | None" = None) -> LoadedModel:
    """Find a model, check that it fits, and load its weights.

    Args:
        progress: called with ("weights", bytes read, total bytes). With it, downloads draw bars on a terminal.
        ranks: as a rank other than 0 sees them. None: with `tensor_parallel`, they are started.
    Raises:
        ModelNotFoundError, ConfigError, UnsupportedError, CheckpointError, TokenizerError, DeviceError, OutOfMemoryError.
    """
    if options.tensor_parallel > 1 and ranks is None:
        from minirt.parallel.ranks import Leader

        ranks = Leader(options)
    with nullcontext() if ranks is None else ranks:
        return _load(options, progress, ranks)


def _load(options: LoadOptions, progress: LoadProgress | None, ranks: "Ranks | None") -> LoadedModel:
    device, rank = (pick_device(options.device), 0) if ranks is None else (ranks.device, ranks.shard.rank)
    set_threads(options.threads)
    _prepare_kernels(options, device)
    bars = progress is not None and sys.stderr.isatty()
    source = find(options.model, options.revision, need_weights=not options.random_weights, progress=bars)
    files, entries, settled = source.files, None, None
    length = pick_length(source.config, options.max_model_len)
    weights = None if options.random_weights else files
    if weights is not None:
        source, entries, settled = _settled(source, weights)
    config = source.config
    model, notes = _without_weights(options, source, entries, device, rank)
    if ranks is not None:
        model.ranks = ranks
        ranks.prepare(model)
    tokenizer = Tokenizer.load(files.folder) if files else None
    check_vocabulary(tokenizer, config)
    if model.draft_model is not None and isinstance(options.speculative, SpeculativeOptions):
        for head in model.draft_model.layers[-1].parameters():
            if isinstance(head, SomeRows):  # the ids that drafts may have, before the rows are loaded
                head.ids = draft_ids(tokenizer, len(head.ids), config.vocab_size, options.speculative.draft_vocab_text)
    if weights is not None:
        checkpoint.check_total_size(entries or {}, weights.total_size)
    plan = plan_memory(model, length, device, options)
    if not plan.fits:
        raise does_not_fit(plan, str(device), remedy(options, device))
    with out_of_memory_while("allocating the weights", device):
        model.allocate(device, model.dtype, length, model.kv_dtype)
    model.resolve(options.impl)
    if model.adapters is not None:
        with out_of_memory_while("allocating adapters", device):
            model.adapters.allocate()
    _add_notes(model, *notes, settled, slow := _slow(model, options))
    if slow is not None:
        warn(slow)
    bytes_read, unused, merge = 0, tuple[str, ...](), None
    if options.merge_lora:
        adapter, merge = merging(options.adapter_folders[""], model)
        warn_of_base(adapter, options.model)
    with out_of_memory_while("loading the weights", device):
        if entries is None:
            checkpoint.randomize(model, options.seed, rank)
        else:
            bytes_read, unused = checkpoint.load(
                model, entries, allow_unused=options.layers is not None, check_weights=options.check_weights,
                progress=progress and partial(progress, "weights"), change=merge,
            )  # fmt: skip
    generation_config = files.generation_config if files else None
    eos = eos_token_ids(generation_config, dict(models.decoder_fields(files.config)) if files else {}, tokenizer)
    return LoadedModel(model, tokenizer, generation_config, known_end_ids(eos, config), bytes_read, unused)


def _prepare_kernels(options: LoadOptions, device: torch.device) -> None:
    """What kernels need that does not depend on the model."""
    if device.type == "cuda" and options.impl != "eager" and find_spec("triton") is not None:
        from minirt.kernels.compile.kernel_folder import take_kernels
        from minirt.kernels.compile.processes import hash_triton

        Thread(target=hash_triton, daemon=True).start()
        if options.kernel_cache is not None:
            take_kernels(Path(options.kernel_cache), device)
    elif options.kernel_cache is not None:
        warn(f"--kernel-cache has no effect: no kernel runs on {device}")


def check_vocabulary(tokenizer: Tokenizer | None, config: ModelConfig) -> None:
    """Warn of a tokenizer with ids that this model has no embedding for. Prompts that have such tokens are refused."""
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        what = f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, but vocab_size of config.json is {config.vocab_size}"
        ids = f"these {tokenizer.vocab_size - config.vocab_size} ids"
        warn(f"tokenizer.json: {what}: prompts with one of {ids}, and grammars, are refused")


def known_end_ids(tokens: Sequence[int], config: ModelConfig) -> tuple[int, ...]:
    """The ids that end a sequence, without those that this model has no logits for, which it never generates."""
    if unknown := [token for token in tokens if token >= config.vocab_size]:
        warn(f"ends of sequences that the model cannot generate, since vocab_size is {config.vocab_size}: {unknown}")
    return tuple(token for token in tokens if token < config.vocab_size)

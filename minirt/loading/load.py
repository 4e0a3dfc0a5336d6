"""`load`: loads a model with its weights. `plan_model`: a model with its plan, without weights. `find`: files and config."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from minirt import models
from minirt.device import compute_capability, pick_device, total_memory
from minirt.errors import ConfigError, InputError, MinirtError, ModelNotFoundError, UnsupportedError
from minirt.gpus import AbsentGPU
from minirt.layers import Layer
from minirt.loading import checkpoint
from minirt.loading.checkpoint import Entry
from minirt.loading.hub import ModelFiles, remote_headers, resolve, with_present_weights
from minirt.loading.memory import MemoryPlan, does_not_fit, out_of_memory_while, plan_memory, sequences_that_fit
from minirt.loading.options import EMBEDDED, LoadOptions
from minirt.loading.resolve import pick_dtype, pick_kv_dtype, pick_length
from minirt.loading.stored_experts import fuse_experts
from minirt.loading.stored_formats import StoredFormats, stored_formats
from minirt.loading.unstated import settle
from minirt.modeling.config import Fields, ModelConfig, check_token_ids
from minirt.modeling.formats import FormatChoice, Quantization
from minirt.modeling.model import CANNOT, Model, in_order
from minirt.modeling.parameters import SomeRows
from minirt.modeling.quantization_config import QuantizationConfig, read_quantization
from minirt.sizes import format_size
from minirt.speculative.draft_vocabulary import draft_ids
from minirt.speculative.options import SpeculativeOptions
from minirt.text.tokenizer import Tokenizer, eos_token_ids
from minirt.threads import set_threads
from minirt.wording import warn, worded

ProgressCallback = Callable[[str, int, int], None]  # (stage, done, total)
# Values of a weight: an H200 reads so many bytes in less than 1 µs, and a kernel that rounds the input to FP8 takes 1.6.
_SMALL = 4 << 20
_SLOW_ON_CPU = "on a CPU, quantized weights save memory, not time: every step unpacks them, which is slow"
_OLD_GPU = "the Triton kernels need compute capability 8.0: on this GPU only eager layers run, which was never tested"
_OTHER_FAMILIES = ("gemma", "mixtral", "gpt-oss", "phi-", "glm-", "deepseek-v", "falcon", "gpt2")  # names that users try


class Found(NamedTuple):
    """A model's files, its checked config, and the stated format of quantized weights.

    `files` is None for a preset whose weights are not needed, `quantization` if the weights are not quantized.
    """

    files: ModelFiles | None
    config: ModelConfig
    quantization: QuantizationConfig | None = None


def find(model: str | Path, revision: str | None, *, need_weights: bool, progress: bool = False) -> Found:
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
        return Found(None, preset.config, preset.quantization)
    try:
        name = preset.hub_id if preset else name
        files = resolve(name, revision=revision, weights=need_weights, progress=progress, check=models.parse_config)
    except ModelNotFoundError as error:
        if (family := next((own for own in _OTHER_FAMILIES if own in name.lower().rpartition("/")[2]), None)) is not None:
            expected = f"a model of one of the types {', '.join(models.ARCHITECTURES)}"
            hint = "minirt models lists presets" + (f"; {error.what}: {error.hint}" if "/" in name else "")
            what = f"minirt does not support {family.strip('-')} models"
            raise ModelNotFoundError(what, where=error.where, expected=expected, hint=hint) from error
        known = preset or next((own for own in models.presets() if own.hub_id == name), None)
        if known is not None and error.hint and revision is None:
            hint = f"{error.hint}; --model {known.name} --random-weights measures without a download, with token ids as prompts"
            raise ModelNotFoundError(error.what, where=error.where, hint=hint) from error
        if "/" in name or "gguf" in name.lower():
            raise
        hint = "give a folder, a Hub id org/name, or a preset; minirt models lists the presets"
        if near := _similar_presets(name):
            hint = f"did you mean {', '.join(near)}? Otherwise {hint}"
        raise ModelNotFoundError(error.what, where=error.where, hint=hint) from error
    config = models.parse_config(files.config, where=str(files.folder / "config.json"))
    stated_fields = models.decoder_fields(files.config)
    for file, content in (("config.json", stated_fields), ("generation_config.json", files.generation_config or {})):
        check_token_ids(content, str(files.folder / file), config.vocab_size)
    own = files.hf_quant_config
    stated = read_quantization(
        Fields(stated_fields, str(files.folder / "config.json")),
        None if own is None else Fields(own, str(files.folder / "hf_quant_config.json")),
    )
    return Found(files, config, stated)


def _similar_presets(name: str) -> list[str]:
    """At most three presets that begin like a name, also one of ollama's ("llama3.1:8b"), else some that are spelled like it."""

    def plain(text: str) -> str:
        return re.sub("[^a-z0-9]", "", text.lower())

    names = {own.name.lower(): own.name for own in models.presets()}
    begun = [own for lower, own in names.items() if plain(name) and plain(lower).startswith(plain(name))]
    return begun[:3] or [names[own] for own in get_close_matches(name.lower(), names, n=3, cutoff=0.75)]


def build(
    options: LoadOptions, found: Found, entries: Mapping[str, Entry] | None, device: torch.device | AbsentGPU
) -> Model:
    """The model without weights: its layers, how the checkpoint stores their experts, and the formats of their linears."""
    model = _build(options, found, entries, device)
    if drafts := options.drafts[0]:  # states are larger, which plans count
        model.keep_undo(1 + drafts)
    return model


def _build(
    options: LoadOptions, found: Found, entries: Mapping[str, Entry] | None, device: torch.device | AbsentGPU
) -> Model:
    config, speculative = found.config, options.speculative
    if isinstance(speculative, SpeculativeOptions) and speculative.has_draft_model:
        return _build_with_drafts(options, found, entries, device, speculative.draft_rows(config.vocab_size))
    layers = in_order(config, options.layers(config) if options.layers else models.build(config))
    if entries is not None:
        fuse_experts(layers, entries)
    return Model(config, layers, choose_formats(options, layers, found, entries, device))


def _build_with_drafts(
    options: LoadOptions, found: Found, entries: Mapping[str, Entry] | None, device: torch.device | AbsentGPU, rows: int | None
) -> Model:
    """The model with the layers of a draft model, whose head has `rows` ids; None: all."""
    config = found.config
    if options.layers is not None:
        what, hint = "a composed model has no draft model", "use method 'ngram', or a proposer"
        raise UnsupportedError(what, where="speculative", expected="layers=None", found="layers", hint=hint)
    layers, draft = models.build_with_drafts(config, rows)
    if entries is not None:
        of_target, of_draft = (
            {spec[0].rpartition(".")[0] for layer in own for weights in layer.parameters() for spec in weights.expected()}
            for own in (layers, draft)
        )
        if of_draft.isdisjoint({name.rpartition(".")[0] for name in entries} - of_target):
            what, hint = "the checkpoint has no weights of the draft model", "leave out the drafts, or use --speculate ngram"
            raise UnsupportedError(what, where=str(options.model), expected=f"{min(of_draft - of_target)}, …", hint=hint)
        fuse_experts([*layers, *draft], entries)
    formats, head = choose_formats(options, [*layers, *draft], found, entries, device), draft[-1]
    if isinstance(formats, StoredFormats) and rows is not None:
        stored = [formats.format_of(own.modules, head=True, tied=config.tie_word_embeddings) for own in head.quantizable()]
        if any(own is not None for own in stored):  # a part of its rows cannot be taken in each format
            note = "drafts may have all ids, since the checkpoint stores a quantized head"
            layers, draft = models.build_with_drafts(config, None)
            if entries is not None:
                fuse_experts([*layers, *draft], entries)
            formats = replace(formats, notes=(*formats.notes, note))
    return Model(config, layers, formats, draft)


def choose_formats(
    options: LoadOptions, layers: Sequence[Layer], found: Found, entries: Mapping[str, Entry] | None,
    device: torch.device | AbsentGPU,
) -> FormatChoice | None:  # fmt: skip
    """The formats of the linears: those of the checkpoint, else those that `options` ask for.

    Args:
        entries: headers of the weight files; None: there are none.
    """
    stored = stored_formats(layers, entries, found.quantization)
    if stored is not None and options.quantization is not None:
        what, hint = "the checkpoint is quantized already", "leave it out (quantization=)"
        raise ConfigError(what, where="--quantize", found=stored.checkpoint, hint=hint)
    if stored is None and options.formats is not None and options.formats.format == "fp8" and device.type != "cpu":
        return faster_fp8(options.formats, layers)
    return stored or options.formats


def faster_fp8(formats: Quantization, layers: Sequence[Layer]) -> Quantization:
    """FP8 without the weights with which a step of several tokens on a GPU would be slower than with those of 16 bits.

    These are small weights whose input needs a kernel of its own to be rounded to FP8. Other inputs are rounded by the kernel
    that normalizes them. (docs/decisions/linear-small-batches.md)
    """
    ops = [op for layer in layers for op in layer.linear_ops() if op.residual]
    small = [op.linear for op in ops if op.linear.out_features * op.linear.in_features < _SMALL]
    if not small:
        return formats
    note = f"{len(small)} small weights stay in 16 bits: to round their inputs to FP8 would take longer than it saves"
    return replace(formats, kept=frozenset(name for linear in small for name in linear.modules), notes=(note,))


def plan_model(options: LoadOptions, gpu: AbsentGPU | None = None) -> Model:
    """The model with its plan resolved. No weight is read or allocated. `gpu`: plan for it, instead of a device that is here.

    The headers of local weight files are read, and must be those of the model. If the weights are quantized, they are also read
    from the Hub. If that fails, the plan follows what config.json states, and has a note.
    """
    target = pick_device(options.device) if gpu is None else gpu
    found, entries, settled = _headers(find(options.model, options.revision, need_weights=False), options)
    config = found.config
    planned = build(options, found, entries, target)
    idle = _match(planned, entries, options) if entries is not None else None
    planned.device = cast(torch.device, target)
    planned.dtype = pick_dtype(options.dtype, config, planned.device)
    planned.kv_dtype = pick_kv_dtype(options.kv_cache_dtype, planned.dtype)
    planned.resolve(options.impl)
    _note(planned, idle)
    _note(planned, settled)
    planned.plan = planned.plan.with_cuda_graphs(options.cuda_graphs)
    _note_slow(planned, options)
    return planned


def _note_slow(model: Model, options: LoadOptions) -> str | None:
    """Have the plan say that the model will be slow on this device, and why. Returns the same text, or None."""
    if model.device.type == "cpu":
        slow = _SLOW_ON_CPU if model.plan.formats else None
    else:
        slow = _OLD_GPU if compute_capability(model.device) < (8, 0) else _eager_layers(model, options)
    _note(model, slow)
    return slow


def _note(model: Model, note: str | None) -> None:
    if note is not None:
        model.plan = replace(model.plan, notes=(*model.plan.notes, note))


def _eager_layers(model: Model, options: LoadOptions) -> str | None:
    """How many layers are eager on a GPU because Triton cannot run them, why, and which options change that."""
    rows = model.plan.rows
    reasons = [row.reason.removeprefix(CANNOT) for row in rows if row.reason.startswith(CANNOT)]
    if not reasons:
        return None
    what = f"{len(reasons)} of {len(rows)} layers run eager on this GPU, which is slow: {'; '.join(dict.fromkeys(reasons))}"
    ways = ["--quantize int4"] * (options.quantization == "fp8") + ["--kv-cache-dtype auto"] * (options.kv_cache_dtype == "fp8")
    narrow = ways and compute_capability(model.device) < (8, 9)
    return worded(f"{what} (use {' and '.join(ways)})") if narrow else what


def _match(model: Model, entries: Mapping[str, Entry], options: LoadOptions) -> str | None:
    """Compare the headers with the model, and warn of tensors that it does not use. A composed model may use a part of them.

    Returns:
        A note for the plan if a draft model is left out. That needs no warning, as it changes no result.
    """
    matched, idle = checkpoint.match(model, entries, options.layers is not None), None
    if options.layers is None:
        mtp, unused = model.config.mtp, list(matched.unused)
        if mtp is not None and mtp.num_layers != 0:
            unused = [name for name in unused if not name.startswith(checkpoint.DRAFTS)]
            if count := len(matched.unused) - len(unused):
                idle = worded(f"{count} tensors {checkpoint.DRAFTS}* are not loaded: --speculate mtp makes drafts with them")
        checkpoint.warn_of_extras(unused, options.model)
    quantized = {m for p in model.parameters() if p.format is not None for m in p.modules}  # of those, the plan has a note
    if biases := [name for name in matched.zero_biases if name.removesuffix(".bias") not in quantized]:
        what = f"{len(biases)} biases of linear layers that have none are not used; loading checks that they are zero"
        warn(f"{options.model}: {what}")
    return idle


def plan_load(options: LoadOptions, gpu: AbsentGPU | None = None) -> tuple[Model, MemoryPlan]:
    """`plan_model`, and what loading takes of the memory."""
    model = plan_model(options, gpu)
    length = pick_length(model.config, options.max_model_len)
    return model, plan_memory(model, length, model.device, options)


def _check_memory(options: LoadOptions, model: Model, length: int, device: torch.device) -> None:
    """Raise OutOfMemoryError if the model will not fit. Nothing is allocated yet."""
    plan = plan_memory(model, length, device, options)
    if not plan.fits:
        raise does_not_fit(plan, str(device), remedy(options, device))


def remedy(options: LoadOptions, device: torch.device | AbsentGPU) -> str:
    """The options with which the model would fit, or what else can be done."""
    gpu = device if isinstance(device, AbsentGPU) else None
    capability = (99, 0) if device.type == "cpu" else compute_capability(cast(torch.device, device))
    fp8 = {"quantization": "fp8"} if capability >= (8, 9) else {}
    int4 = {"quantization": "int4"} if capability >= (8, 0) else {}
    narrow = {"dtype": "bfloat16"} if device.type == "cpu" or options.dtype == "float32" else {}
    ways: list[tuple[str, dict[str, Any]]] = [
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
        changed = {name: value for name, value in changes.items() if getattr(options, name) != value}
        if changed:
            with suppress(MinirtError):  # a quantized checkpoint is not quantized again
                other = replace(options, **changed)
                plan = plan_load(other, gpu)[1]
                if plan.fits:
                    if other.kv_bytes is not None:
                        return f"{words}: {format_size(plan.needed, up=True)}"
                    return f"{words}: at least {format_size(plan.least, up=True)}"  # the pages take what is left
                if plan.least < least and words.startswith("use "):
                    least, how = plan.least, f"at least {format_size(plan.least, up=True)} even with {words[4:]}: "
    if least > total_memory(device):
        more = "machine" if device.type == "cpu" else "GPU"
        return f"{how}use a smaller model, or a {more} with more memory"
    if gpu is not None:
        return "use a smaller model, or raise --gpu-memory-utilization"
    return "use a smaller model, or free memory" + ("" if device.type == "cpu" else ", or raise --gpu-memory-utilization")


def _longer_context(
    options: LoadOptions, gpu: AbsentGPU | None, plan: MemoryPlan, others: list[tuple[str, dict[str, Any]]]
) -> str:
    """The same where the context that was asked for does not fit, but a shorter one does. What loses least comes first: fewer
    sequences at once, then KV pages of FP8, then weights of fewer bits."""

    def fits(changes: dict[str, Any]) -> bool:
        with suppress(MinirtError):  # a quantized checkpoint is not quantized again
            return plan_load(replace(options, **changes), gpu)[1].fits
        return False

    pages = format_size(plan.least_pages * plan.page, up=True)
    own = f"{'use' if options.kv_cache_memory is None else 'raise'} --kv-cache-memory {pages}"
    fewer = sequences_that_fit(lambda count: fits({"max_num_seqs": count}), options.max_num_seqs)
    ways: list[tuple[str, dict[str, Any]]] = [(f"use --max-num-seqs {fewer}", {"max_num_seqs": fewer})] if fewer else []
    for words, changes in [*ways, (own, {"kv_cache_memory": pages}), *others]:
        changed = {name: value for name, value in changes.items() if getattr(options, name) != value}
        if changed and words.startswith(("use ", "raise ")) and fits(changed):
            return f"{words}, or --max-model-len {plan.context}"
    return f"use --max-model-len {plan.context}"


def _settled(found: Found, files: ModelFiles) -> tuple[Found, Mapping[str, Entry], str | None]:
    """The model with what the headers of its local weight files settle, the headers, and a note; see `settle`."""
    entries = checkpoint.read_headers(files.weight_files, files.weight_index, tied=found.config.tie_word_embeddings)
    config, note = settle(files.config, found.config, entries)
    if config.tie_word_embeddings != found.config.tie_word_embeddings:
        entries = checkpoint.read_headers(files.weight_files, files.weight_index, tied=config.tie_word_embeddings)
    return found._replace(config=config), entries, note


def _headers(found: Found, options: LoadOptions) -> tuple[Found, Mapping[str, Entry] | None, str | None]:
    """`_settled` with local files, else the headers from the Hub if the weights are quantized. None if there are none."""
    if found.files is None:
        return found, None, None
    files = with_present_weights(found.files)
    if files.weight_files:
        return _settled(found, files)
    if files.revision is None and not options.random_weights:
        warn(f"{files.folder}: there are no safetensors files, so the plan follows config.json alone")
    if files.revision is not None and found.quantization is not None:
        with suppress(ModelNotFoundError):
            return found, {own.name: Entry(own.name, Path(own.file), own.shape, own.dtype) for own in remote_headers(files)}, None
    return found, None, None


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


def load(options: LoadOptions, progress: ProgressCallback | None = None) -> LoadedModel:
    """Find a model, check that it fits, and load its weights.

    Args:
        progress: called with ("weights", bytes read, total bytes). With it, downloads draw bars on a terminal.
    Raises:
        ModelNotFoundError, ConfigError, UnsupportedError, CheckpointError, TokenizerError, DeviceError, OutOfMemoryError.
    """
    device = pick_device(options.device)
    set_threads(options.threads)
    bars = progress is not None and sys.stderr.isatty()
    found = find(options.model, options.revision, need_weights=not options.random_weights, progress=bars)
    files, entries, settled = found.files, None, None
    length = pick_length(found.config, options.max_model_len)
    weights = None if options.random_weights else files
    if weights is not None:
        found, entries, settled = _settled(found, weights)
    config = found.config
    model = build(options, found, entries, device)
    dtype = pick_dtype(options.dtype, config, device)
    kv_dtype = pick_kv_dtype(options.kv_cache_dtype, dtype)
    tokenizer = Tokenizer.load(files.folder) if files else None
    check_vocabulary(tokenizer, config)
    if model.draft_model is not None and isinstance(options.speculative, SpeculativeOptions):
        _choose_draft_ids(model.draft_model, tokenizer, options.speculative)
    idle = None
    if weights is not None and entries is not None:
        idle = _match(model, entries, options)
        checkpoint.check_total_size(weights.weight_files, weights.total_size)
    model.dtype, model.kv_dtype = dtype, kv_dtype
    _check_memory(options, model, length, device)
    with out_of_memory_while("allocating the weights", device):
        model.allocate(device, dtype, length, kv_dtype)
    model.resolve(options.impl)
    _note(model, idle)
    _note(model, settled)
    if (slow := _note_slow(model, options)) is not None:
        warn(slow)
    report = checkpoint.LoadReport(0, ())
    with out_of_memory_while("loading the weights", device):
        if entries is None:
            checkpoint.randomize(model, options.seed)
        else:
            report = checkpoint.load(
                model, entries, allow_unused=options.layers is not None, check_weights=options.check_weights,
                progress=progress and partial(progress, "weights"),
            )
    generation_config = files.generation_config if files else None
    eos = eos_token_ids(generation_config, dict(models.decoder_fields(files.config)) if files else {}, tokenizer)
    return LoadedModel(model, tokenizer, generation_config, known_end_ids(eos, config), report.bytes_read, report.unused)


def _choose_draft_ids(draft_model: Model, tokenizer: Tokenizer | None, speculative: SpeculativeOptions) -> None:
    """Set the ids that drafts may have, before the rows of the head are loaded."""
    for head in draft_model.layers[-1].parameters():
        if isinstance(head, SomeRows):
            head.ids = draft_ids(tokenizer, len(head.ids), draft_model.config.vocab_size, speculative.draft_vocab_text)


def check_vocabulary(tokenizer: Tokenizer | None, config: ModelConfig) -> None:
    """Warn of a tokenizer with ids that this model has no embedding for. Prompts that have such tokens are refused."""
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        more = tokenizer.vocab_size - config.vocab_size
        what = f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, but vocab_size of config.json is {config.vocab_size}"
        more_than = f"prompts with one of these {more} ids, and grammars, are refused"
        warn(f"tokenizer.json: {what}: {more_than}")


def known_end_ids(tokens: Sequence[int], config: ModelConfig) -> tuple[int, ...]:
    """The ids that end a sequence, without those that this model has no logits for, which it never generates."""
    unknown = [token for token in tokens if token >= config.vocab_size]
    if unknown:
        what = f"ends of sequences that the model cannot generate, since vocab_size is {config.vocab_size}"
        warn(f"{what}: {unknown}")
    return tuple(token for token in tokens if token < config.vocab_size)

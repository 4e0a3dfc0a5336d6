"""`load`: loads a model with its weights. `plan_model`: a model with its plan, without weights. `find`: files and config."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from minirt import models
from minirt.device import pick_device
from minirt.errors import InputError, ModelNotFoundError, TokenizerError
from minirt.loading import checkpoint
from minirt.loading.hub import ModelFiles, resolve
from minirt.loading.memory import check_memory
from minirt.loading.options import LoadOptions, pick_dtype, pick_kv_dtype, pick_length
from minirt.modeling.config import ModelConfig, check_token_ids
from minirt.modeling.model import Model
from minirt.text.tokenizer import Tokenizer, eos_token_ids
from minirt.threads import set_threads

ProgressCallback = Callable[[str, int, int], None]  # (stage, done, total)


def find(
    model: str | Path, revision: str | None, *, need_weights: bool, progress: bool = False
) -> tuple[ModelFiles | None, ModelConfig]:
    """The model's files and checked config. A preset whose weights are not needed has no files."""
    name = str(models.embedded()) if model == models.EMBEDDED else str(model)
    if not name:
        raise InputError("the model's name is empty", hint="give a folder, a Hub id or a preset")
    try:
        preset = models.preset(name) if not Path(name).expanduser().is_dir() else None
    except (OSError, RuntimeError) as error:  # a name that is too long, a folder without permission, an unknown user
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
    config = models.parse_config(files.config, where=str(files.folder / "config.json"))
    for file, content in (("config.json", files.config), ("generation_config.json", files.generation_config or {})):
        check_token_ids(content, str(files.folder / file), config.vocab_size)
    return files, config


def plan_model(options: LoadOptions) -> Model:
    """The model with its plan resolved. No weight is read or allocated."""
    target = pick_device(options.device)
    _, config = find(options.model, options.revision, need_weights=False)
    planned = Model(config, options.layers(config) if options.layers else models.build(config), options.formats)
    planned.device, planned.dtype = target, pick_dtype(options.dtype, config, target)
    planned.resolve(options.impl)
    return planned


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, and the other contents of its files.

    Attributes:
        tokenizer, generation_config: None if the model has no such file.
        eos_token_ids: the tokens that end a sequence.
        bytes_read: bytes of the checkpoint that were read.
        unused_tensors: checkpoint tensors that a composed model does not use.
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
        progress: called with ("weights", bytes read, total bytes).
    Raises:
        ModelNotFoundError, ConfigError, UnsupportedError, CheckpointError, TokenizerError, DeviceError, OutOfMemoryError.
    """
    device, composed = pick_device(options.device), options.layers is not None
    set_threads(options.threads)
    files, config = find(options.model, options.revision, need_weights=not options.random_weights, progress=progress is not None)
    length = pick_length(config, options.max_model_len)
    model = Model(config, options.layers(config) if options.layers else models.build(config), options.formats)
    dtype = pick_dtype(options.dtype, config, device)
    kv_dtype = pick_kv_dtype(options.kv_cache_dtype, dtype)
    tokenizer = Tokenizer.load(files.folder) if files else None
    check_vocabulary(tokenizer, config)
    weights = None if options.random_weights else files
    if weights is not None:
        checkpoint.match(model, checkpoint.read_headers(weights.weight_files, weights.weight_index), composed)
        checkpoint.check_total_size(weights.weight_files, weights.total_size)
    check_memory(model, length, dtype, device, kv_dtype, options.kv_cache_memory, options.max_num_seqs)
    model.allocate(device, dtype, length, kv_dtype)
    model.resolve(options.impl)
    report = checkpoint.LoadReport(0, ())
    if weights is None:
        checkpoint.randomize(model, options.seed)
    else:
        report = checkpoint.load(
            model, weights.weight_files, weights.weight_index, allow_unused=composed, check_weights=options.check_weights,
            progress=progress and partial(progress, "weights"),
        )
    generation_config = files.generation_config if files else None
    eos = eos_token_ids(generation_config, files.config if files else {}, tokenizer)
    return LoadedModel(model, tokenizer, generation_config, tuple(eos), report.bytes_read, report.unused)


def check_vocabulary(tokenizer: Tokenizer | None, config: ModelConfig) -> None:
    """Refuse a tokenizer with ids that this model has no embedding for: it belongs to another model."""
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise TokenizerError(
            "the tokenizer has ids that the model does not", where="tokenizer.json",
            expected=f"at most {config.vocab_size} (vocab_size of config.json)", found=tokenizer.vocab_size,
        )



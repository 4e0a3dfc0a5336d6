"""From a model's name to its files and config, and to a `Model` whose plan is resolved."""

from collections.abc import Sequence
from pathlib import Path

from minirt import models
from minirt.device import pick_device
from minirt.errors import InputError, ModelNotFoundError, TokenizerError
from minirt.loading.hub import ModelFiles, resolve
from minirt.loading.options import pick_dtype
from minirt.modeling.config import ModelConfig
from minirt.modeling.formats import Quantization
from minirt.modeling.model import Model
from minirt.text.tokenizer import Tokenizer


def find(
    model: str | Path, revision: str | None, *, need_weights: bool, progress: bool = False
) -> tuple[ModelFiles | None, ModelConfig]:
    """The model's files and checked config. A preset whose weights are not needed has no files."""
    name = str(models.embedded()) if model == models.EMBEDDED else str(model)
    if not name:
        raise InputError("the model's name is empty", hint="give a folder, a Hub id or a preset")
    try:
        preset = models.preset(name) if not Path(name).expanduser().is_dir() else None
    except (OSError, RuntimeError) as error:  # a name that is too long, a folder that is not ours to see, an unknown user
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
    return files, models.parse_config(files.config, where=str(files.folder / "config.json"))


def plan_model(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    impl: str | Sequence[str] = "auto",
    revision: str | None = None,
    quantization: Quantization | None = None,
) -> tuple[ModelConfig, Model]:
    """The model's config and the resolved model, without reading or allocating any weight."""
    target = pick_device(device)
    _, config = find(model, revision, need_weights=False)
    planned = Model(config, models.build(config), quantization)
    planned.device, planned.dtype = target, pick_dtype(dtype, config, target)
    planned.resolve(impl)
    return config, planned


def check_vocabulary(tokenizer: Tokenizer | None, config: ModelConfig) -> None:
    """Refuse a tokenizer of another model: one with ids that this model has no embedding for."""
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise TokenizerError(
            "the tokenizer has ids that the model does not", where="tokenizer.json",
            expected=f"at most {config.vocab_size} (vocab_size of config.json)", found=tokenizer.vocab_size,
        )



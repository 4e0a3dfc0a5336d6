"""`resolve`: from a model's name to its files, in a local folder or in a Hub repository (downloaded into the Hub cache)."""

import contextlib
import glob
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirt.errors import CheckpointError, ConfigError, InputError, MinirtError, ModelNotFoundError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# The files to download besides weights: no .bin, no .pth, no original/ folder.
_SMALL = ("config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "chat_template.jinja")
_ACCEPTED = "give a local folder, a Hub id such as Qwen/Qwen2.5-7B-Instruct, or the name of a preset"


@dataclass(frozen=True)
class ModelFiles:
    """A model's checked files.

    `config` and `generation_config` are uninterpreted JSON objects; `generation_config` is None if the file is absent.
    `weight_files` holds model.safetensors, or the shards sorted by name; it is empty if no weights were requested.
    `weight_index` maps tensor → file name; None without shards. `revision` is the Hub commit of all files; None for a folder.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    weight_files: tuple[Path, ...]
    weight_index: dict[str, str] | None
    revision: str | None


def resolve(
    model: str, *, revision: str | None = None, token: str | None = None, weights: bool = True, progress: bool = True
) -> ModelFiles:
    """Find a model's files, download them if necessary, and check them.

    The environment variables HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE apply.

    Args:
        model: an existing folder, else a Hub id "org/name". A name that looks like a path is never looked up on the Hub.
        revision: a Hub branch, tag or commit; None: the default branch.
        token: a Hub token; None: HF_TOKEN or the stored login.
        weights: whether weight files are needed. If there are both model.safetensors and an index, the single file is
            used, as in transformers.
        progress: whether huggingface_hub shows its progress bars.
    Raises:
        ModelNotFoundError: the folder or repository does not exist or cannot be reached, or config.json is missing.
        ConfigError: a JSON file is damaged.
        CheckpointError: weight files are missing or have invalid names.
        InputError: there is a revision for a local folder.
    """
    folder = Path(os.path.expanduser(model))
    if model and os.path.isdir(folder):
        if revision is not None:
            raise InputError("a local folder has no revisions", where="revision", found=revision)
        return _check(folder.resolve().name, folder, None, weights)
    if model and os.path.exists(folder):
        raise ModelNotFoundError("is a file, not a folder", where=folder, hint="give the folder that holds config.json")
    if os.path.isabs(model) or model.startswith((".", "~")) or model.count("/") + model.count("\\") > 1:
        raise ModelNotFoundError("there is no such folder", where=model, hint=_ACCEPTED)
    if model.count("/") != 1:
        raise ModelNotFoundError("is neither a folder nor a Hub id", where=repr(model), hint=_ACCEPTED)
    folder = _download(model, revision, token, weights, progress)
    return _check(model, folder, folder.name, weights)


def _check(name: str, folder: Path, revision: str | None, weights: bool) -> ModelFiles:
    config = _read_object(folder / "config.json")
    if config is None:
        where = folder if revision is None else f"Hub model {name}"
        hint = f"a model in Hugging Face's layout, with safetensors, is needed{_contents(folder)}"
        raise ModelNotFoundError("there is no config.json", where=where, hint=hint)
    generation_config = _read_object(folder / "generation_config.json")
    files, index = _weight_files(folder) if weights else ((), None)
    return ModelFiles(name, folder, config, generation_config, files, index, revision)


def _read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, or None if the file does not exist."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ConfigError(f"cannot be read as JSON: {error}", where=path, hint="get the file again") from error
    if not isinstance(value, dict):
        raise ConfigError("is not a JSON object", where=path, found=type(value).__name__)
    return value


def _weight_files(folder: Path) -> tuple[tuple[Path, ...], dict[str, str] | None]:
    if (folder / _SINGLE).is_file():
        return (folder / _SINGLE,), None
    index = _read_index(folder / _INDEX)
    if index is None and os.path.lexists(folder / _SINGLE):
        raise CheckpointError("is not a file, or is a broken link", where=folder / _SINGLE, hint="get the file again")
    if index is None:
        hint = f"only safetensors files are read{_contents(folder)}"
        raise CheckpointError(f"there is neither {_SINGLE} nor {_INDEX}", where=folder, hint=hint)
    names = sorted(set(index.values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        what = f"{len(missing)} of the {len(names)} shards of {_INDEX} are missing: {', '.join(missing)}"
        raise CheckpointError(what, where=folder, hint="fetch them; with HF_HUB_OFFLINE set, only the cache is used")
    return tuple(folder / name for name in names), index


def _read_index(path: Path) -> dict[str, str] | None:
    """Read tensor → shard from an index file; None if there is no index. Shards must be file names in the same folder.

    Only the names are checked, not the files: in the Hub cache each file is a link into a folder of blobs.
    """
    content = _read_object(path)
    if content is None:
        return None
    index = content.get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise CheckpointError("weight_map does not map tensors to files", where=path, found=repr(index)[:80])
    for name in sorted(set(index.values())):
        plain = not set(name) & set("/\\:") and name.isprintable()
        if not plain or not name.endswith(".safetensors"):
            expected = "the name of a .safetensors file in the same folder"
            raise CheckpointError("bad shard name", where=path, expected=expected, found=repr(name))
    return index


def _contents(folder: Path) -> str:
    """The end of a hint that lists the folder's weight files with other names; "" if there are none."""
    files = sorted(os.listdir(folder)) if folder.is_dir() else []
    other = [name for name in files if name.endswith(".safetensors") and name != _SINGLE]
    if len(other) == 1:
        return f"; if {other[0]} is the whole model, rename it to {_SINGLE}"
    other = other or [name for name in files if name.endswith((".bin", ".pth", ".pt", ".gguf"))]
    return f"; found {', '.join(other[:4])}{' …' if len(other) > 4 else ''}" if other else ""


def _download(repo: str, revision: str | None, token: str | None, weights: bool, progress: bool) -> Path:
    """Download the needed files of one commit of `repo`. Returns the cache's snapshots/<commit> folder."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with _explained(repo, revision), _progress_bars(progress):
        patterns = [*_SMALL, _INDEX] if weights else list(_SMALL)
        folder = Path(snapshot_download(repo, revision=revision, token=token, allow_patterns=patterns))
        if not weights or not (folder / "config.json").exists():
            return folder
        commit = folder.name
        try:
            hf_hub_download(repo, _SINGLE, revision=commit, token=token)
            return folder
        except EntryNotFoundError as error:  # also raised if the file is neither cached nor reachable
            index = _read_index(folder / _INDEX)
            if index is None and isinstance(error, LocalEntryNotFoundError):
                raise
        if index is not None and not all((folder / name).exists() for name in index.values()):
            shards = [glob.escape(name) for name in sorted(set(index.values()))]
            snapshot_download(repo, revision=commit, token=token, allow_patterns=shards)
        return folder


@contextlib.contextmanager
def _progress_bars(wanted: bool) -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if wanted or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextlib.contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Turn exceptions of huggingface_hub into a ModelNotFoundError that says the cause and what to do."""
    from huggingface_hub import constants, errors

    local = "download it elsewhere and give the folder, or use --random-weights"
    try:
        yield
    except MinirtError:
        raise
    except Exception as error:  # network exceptions differ between versions of huggingface_hub
        where, detail = f"Hub model {repo}", str(error).strip().partition("\n")[0]
        match error:
            case errors.GatedRepoError():
                what, hint = "access is restricted", "accept its terms on the Hub, and set HF_TOKEN or log in"
            case errors.RepositoryNotFoundError():
                what, hint = "does not exist, or is private", "check the spelling; for a private one set HF_TOKEN"
            case errors.RevisionNotFoundError():
                what, hint = f"has no revision {revision!r}", "give a branch, a tag or a commit of it"
            case errors.HFValidationError():
                what, hint = f"is not a Hub id: {detail}", _ACCEPTED
            case _ if constants.HF_HUB_OFFLINE:
                what, hint = "is missing or incomplete in the cache, and HF_HUB_OFFLINE is set", f"unset it; or {local}"
            case errors.LocalEntryNotFoundError() | ConnectionError():
                what, hint = f"is not cached, and the Hub cannot be reached: {detail}", f"check the network; or {local}"
            case errors.HfHubHTTPError():
                what, hint = f"the Hub refused: {detail}", f"check HF_TOKEN, try again later; or {local}"
            case _:
                what, hint = f"cannot be downloaded: {type(error).__name__}: {detail}", local
        raise ModelNotFoundError(what, where=where, hint=hint) from error

"""`find_model_files`: from a model's name to its files, in a folder or in a Hub repository (downloaded into the Hub cache)."""

import contextlib
import errno
import glob
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minirt.errors import CheckpointError, ConfigError, InputError, MinirtError, ModelNotFoundError
from minirt.files import present, read_json
from minirt.wording import warn

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Bounds in bytes, several times the largest files on the Hub: lists of 100,000 class names, and an index of 140,000 tensors.
_CONFIG_LIMIT, _INDEX_LIMIT = 4 << 20, 32 << 20
_MAX_NAME = 255  # bytes of a file's name, the limit of common file systems
# The files to download besides weights: no .bin, no .pth, no original/ folder.
_SMALL = (
    "config.json", "hf_quant_config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "additional_chat_templates/*.jinja", "chat_template.json",
)  # fmt: skip
_NO_GGUF = (
    "GGUF files are not supported: there are no kernels for their block formats, such as Q4_K. Use the model's safetensors, with "
    "--quantize int4 for 4 bits"
)
Check = Callable[[dict[str, Any], str], object]  # called with the content of a config.json and its place; may raise
_ACCEPTED = "give a local folder, a Hub id such as Qwen/Qwen2.5-7B-Instruct, or the name of a preset"


@dataclass(frozen=True)
class ModelFiles:
    """A model's checked files.

    `config`, `generation_config` and `hf_quant_config` are uninterpreted JSON objects; None if the file is absent.
    `weight_files` holds model.safetensors, or the shards sorted by name; it is empty if no weights were requested.
    `weight_index` maps tensor → file name; None without shards. `revision` is the Hub commit of all files; None for a folder.
    `total_size` is the number of bytes that the index states for all tensors; None if it states none.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    weight_files: tuple[Path, ...]
    weight_index: dict[str, str] | None
    revision: str | None
    total_size: float | None = None
    hf_quant_config: dict[str, Any] | None = None


def find_model_files(
    model: str, *, revision: str | None = None, token: str | None = None, weights: bool = True, progress: bool = True,
    check: Check = lambda config, file: None,
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
        check: called before weights are downloaded.
    Raises:
        ModelNotFoundError: the folder or repository does not exist or cannot be reached, or config.json is missing.
        ConfigError: a JSON file is damaged.
        CheckpointError: weight files are missing or have invalid names.
        InputError: there is a revision for a local folder.
    """
    folder = _local_folder(model)
    if folder is not None:
        if revision is not None:
            raise InputError("a local folder has no revisions", where="--revision", found=revision)
        return _check(folder.resolve().name, folder, None, weights)
    if os.path.isabs(model) or model.startswith((".", "~")) or model.count("/") + model.count("\\") > 1:
        raise ModelNotFoundError("there is no such folder", where=model, hint=_accepted(model))
    if model.count("/") != 1:
        raise ModelNotFoundError("is neither a folder nor a Hub id", where=repr(model), hint=_accepted(model))
    folder = _download(model, revision, token, weights, progress, check)
    return _check(model, folder, folder.name, weights)


def with_present_weights(files: ModelFiles) -> ModelFiles:
    """`files` with the weight files of its folder, if all of them are there; nothing is downloaded."""
    if files.weight_files or not any(present(files.folder / name) for name in (_SINGLE, _INDEX)):
        return files
    try:
        return _with_weights(files)
    except CheckpointError:
        if files.revision is None:
            raise
        return files  # the cache of the Hub holds a part of them


def remote_headers(files: ModelFiles) -> list[tuple[str, Path, tuple[int, ...], str]]:
    """Name, file, shape and dtype ("BF16") of each tensor of a Hub model whose weights are not downloaded.

    They are in the headers of the files, some kilobytes of each.

    Raises:
        ModelNotFoundError: they cannot be read.
    """
    from huggingface_hub import get_safetensors_metadata

    with _explained(files.name, files.revision):
        headers = get_safetensors_metadata(files.name, revision=files.revision).files_metadata
        return [
            (str(name), Path(file), tuple(map(int, tensor.shape)), str(tensor.dtype))
            for file, header in headers.items() for name, tensor in header.tensors.items()
        ]  # fmt: skip


def _local_folder(model: str) -> Path | None:
    """The folder of this name; None if nothing has this name.

    Raises:
        ModelNotFoundError: the name is that of a file, a broken link or a link loop, or its parent folder cannot be read.
    """
    folder = Path(os.path.expanduser(model))
    if not model:
        return None
    try:
        is_folder = stat.S_ISDIR(os.stat(folder).st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG) and not os.path.islink(folder):
            return None
        why = "the link leads nowhere" if error.errno == errno.ENOENT else error.strerror
        raise ModelNotFoundError(f"cannot be looked up: {why}", where=folder, hint=_ACCEPTED) from error
    except ValueError:  # a null character, or a lone surrogate that stands for no byte of a name
        return None
    if not is_folder:
        hint = _NO_GGUF if folder.suffix.lower() == ".gguf" else "give the folder that holds config.json"
        raise ModelNotFoundError("is a file, not a folder", where=folder, hint=hint)
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        what = "the folder's name is not UTF-8, and the libraries that read safetensors and tokenizers need that"
        raise ModelNotFoundError(what, where=ascii(str(folder)), hint="rename it, or give a link to it") from error
    return folder


def _check(name: str, folder: Path, revision: str | None, weights: bool) -> ModelFiles:
    config = _read_object(folder / "config.json")
    if config is None:
        hint = f"a model in Hugging Face's layout, with safetensors, is needed{_contents(folder)}"
        raise ModelNotFoundError("there is no config.json", where=f"Hub model {name}" if revision else folder, hint=hint)
    generation_config, quantization = (_read_object(folder / f"{what}_config.json") for what in ("generation", "hf_quant"))
    files = ModelFiles(name, folder, config, generation_config, (), None, revision, hf_quant_config=quantization)
    return _with_weights(files) if weights else files


def _read_object(path: Path, limit: int = _CONFIG_LIMIT) -> dict[str, Any] | None:
    """The JSON object in `path`, or None if there is no such file. A broken link is an error."""
    return read_json(path, limit=limit, error=ConfigError) if present(path) else None


def _with_weights(files: ModelFiles) -> ModelFiles:
    """`files` with its weight files, checked to be there."""
    folder = files.folder
    index = None if present(folder / _SINGLE) else _read_index(folder / _INDEX)
    if index is None and not present(folder / _SINGLE):
        hint = f"only safetensors files are read{_contents(folder)}"
        raise CheckpointError(f"there is neither {_SINGLE} nor {_INDEX}", where=folder, hint=hint)
    names = [_SINGLE] if index is None else sorted(set(index[0].values()))
    unusable = [name for name in names if not os.path.isfile(folder / name)]
    if unusable and index is None:
        raise CheckpointError("is not a file, or is a broken link", where=folder / _SINGLE, hint="get the file again")
    if unusable:
        what = f"{len(unusable)} of the {len(names)} shards of {_INDEX} are missing, or are no files: {_some(unusable)}"
        raise CheckpointError(what, where=folder, hint="fetch them; with HF_HUB_OFFLINE set, only the cache is used")
    _warn_of_unread_shards(folder, names)
    tensors, total_size = index or (None, None)
    return replace(files, weight_files=tuple(folder / name for name in names), weight_index=tensors, total_size=total_size)


def _read_index(path: Path) -> tuple[dict[str, str], float | None] | None:
    """Tensor → shard, and the bytes of all tensors if the index states them; None: there is no index.

    Shards must be file names in the same folder.

    Only the names are checked, not the files: in the Hub cache each file is a link into a folder of blobs.
    """
    content = _read_object(path, _INDEX_LIMIT)
    if content is None:
        return None
    tensors = content.get("weight_map")
    if not isinstance(tensors, dict) or not tensors or not all(isinstance(name, str) for name in tensors.values()):
        raise CheckpointError("weight_map does not map tensors to files", where=path, found=repr(tensors)[:80])
    for name in sorted(set(tensors.values())):
        plain = not set(name) & set("/\\:") and name.isprintable() and len(name.encode()) <= _MAX_NAME
        if not plain or not name.endswith(".safetensors"):
            expected = f"the name of a .safetensors file in the same folder, of at most {_MAX_NAME} bytes"
            raise CheckpointError("bad shard name", where=path, expected=expected, found=repr(name)[:80])
    metadata = content.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else metadata
    if type(total_size) not in (int, float, type(None)):
        raise CheckpointError("metadata.total_size is not a number of bytes", where=path, found=repr(total_size)[:80])
    return tensors, total_size


def _warn_of_unread_shards(folder: Path, names: list[str]) -> None:
    """Warn of shards that are not read. Files with another stem, such as consolidated.safetensors, are common: no warning."""

    def stem(name: str) -> str | None:
        match = re.fullmatch(r"(.+?)(-\d+-of-\d+)?\.safetensors", name)
        return match and match[1]

    stems = {stem(name) for name in names}
    unread = [name for name in _listed(folder) if name.endswith(".safetensors") and stem(name) in stems and name not in names]
    if unread:
        reason = f"{_SINGLE} takes precedence" if names == [_SINGLE] else f"{_INDEX} does not name them"
        warn(f"{folder}: {len(unread)} weight files are not read, since {reason}: {_some([ascii(name) for name in unread])}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")


def _listed(folder: Path) -> list[str]:
    """The names in a folder, sorted; none if it cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _accepted(name: str) -> str:
    """The hint for a name that is not a model's: what is accepted, or that GGUF is not."""
    return _NO_GGUF if "gguf" in name.lower() else _ACCEPTED


def _contents(folder: Path) -> str:
    """The end of a hint that lists the folder's weight files with other names; "" if there are none.

    A Hub model's GGUF files are not downloaded, so only its name shows that it has them.
    """
    files = _listed(folder)
    if "adapter_config.json" in files:
        return "; the folder holds a LoRA adapter: give its model here, and the folder to --lora"
    other = [name for name in files if name.endswith(".safetensors") and name != _SINGLE]
    if len(other) == 1:
        return f"; if {other[0]} is the whole model, rename it to {_SINGLE}"
    other = other or [name for name in files if name.endswith((".bin", ".pth", ".pt", ".gguf"))]
    gguf = any(name.endswith(".gguf") for name in other) or (not other and "gguf" in str(folder).lower())
    return (f"; found {_some(other)}" if other else "") + (f"; {_NO_GGUF}" if gguf else "")


def _download(repo: str, revision: str | None, token: str | None, weights: bool, progress: bool, check: Check) -> Path:
    """Download the needed files of one commit of `repo`. Returns the cache's snapshots/<commit> folder."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    with _explained(repo, revision), contextlib.ExitStack() as afterwards:
        if not progress and not are_progress_bars_disabled():
            disable_progress_bars()
            afterwards.callback(enable_progress_bars)
        patterns = [*_SMALL, _INDEX] if weights else list(_SMALL)
        folder = Path(snapshot_download(repo, revision=revision, token=token, allow_patterns=patterns))
        config = _read_object(folder / "config.json") if weights else None
        if config is None:
            return folder
        check(config, str(folder / "config.json"))
        commit = folder.name
        try:
            hf_hub_download(repo, _SINGLE, revision=commit, token=token)
            return folder
        except EntryNotFoundError as error:  # also raised if the file is neither cached nor reachable
            index = _read_index(folder / _INDEX)
            if index is None and isinstance(error, LocalEntryNotFoundError):
                raise
        if index is not None and not all((folder / name).exists() for name in index[0].values()):
            shards = [glob.escape(name) for name in sorted(set(index[0].values()))]
            snapshot_download(repo, revision=commit, token=token, allow_patterns=shards)
        return folder


@contextlib.contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Turn exceptions of huggingface_hub into a ModelNotFoundError with the cause and a hint."""
    from huggingface_hub import constants, errors

    local = "download it elsewhere and give the folder"
    try:
        yield
    except MinirtError:
        raise
    except Exception as error:  # network exceptions differ between versions of huggingface_hub
        detail = str(error).strip().partition("\n")[0]
        cause = re.sub(r"(Got: )?(\b\w+(Error|Exception)\b:? ?)?(\[Errno -?\d+\] )?", "", detail, count=1)
        unreachable = "is not in the cache, and the Hub cannot be reached" + (f": {cause}" if cause else "")
        private = "check the spelling; for a private one set HF_TOKEN"
        offline = Exception if constants.HF_HUB_OFFLINE else ()
        kinds: tuple[tuple[Any, str, str], ...] = (
            (errors.GatedRepoError, "access is restricted", "accept its terms on the Hub, and set HF_TOKEN or log in"),
            (errors.RepositoryNotFoundError, "does not exist, or is private", private),
            (errors.RevisionNotFoundError, f"has no revision {revision!r}", "give a branch, a tag or a commit of it"),
            (errors.HFValidationError, f"is not a Hub id: {detail}", _accepted(repo)),
            (offline, "is missing or incomplete in the cache, and HF_HUB_OFFLINE is set", f"unset it; or {local}"),
            ((errors.LocalEntryNotFoundError, ConnectionError), unreachable, f"check the network; or {local}"),
            (errors.HfHubHTTPError, f"the Hub refused: {detail}", f"check HF_TOKEN, try again later; or {local}"),
            (Exception, f"cannot be downloaded: {type(error).__name__}: {detail}", local),
        )
        what, hint = next((what, hint) for kind, what, hint in kinds if isinstance(error, kind))
        raise ModelNotFoundError(what, where=f"Hub model {repo}", hint=hint) from error

"""Tuned launch configurations: where they are stored, and how a kernel looks up its own. A lookup never measures.

A kernel family has a `Tunable`. A launch asks its `find` for the bucket of its shape and falls back to the family's own rule.
`minirt tune` measures the registered cases and stores configurations that are faster than the rule's. They are valid for one GPU
model, one Triton version and one state of the kernel's source.
"""

import hashlib
import json
import os
import re
import secrets
import stat
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton

from minirt.errors import InputError, MinirtError
from minirt.sizes import format_size

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SCHEMA = 1
_MAX_FILE = 16 << 20  # bytes; `minirt tune` stores some kilobytes

ConfigLookup = TypeVar("ConfigLookup", bound=Callable[..., Any])
_cached_lookups: list[Any] = []  # lookups with cached answers
_overrides: dict[tuple[str, str], Any] = {}  # by family and bucket: used instead of stored ones


@dataclass(frozen=True)
class Tunable:
    """A kernel family whose configurations can be tuned.

    Args:
        name: the family's name in the output of `minirt tune`.
        config: the frozen dataclass of a configuration; its fields are numbers, strings, booleans or None.
        sources: files. A change to one of them makes stored configurations stale.
    """

    name: str
    config: type
    sources: tuple[str, ...]

    def find(self, device: torch.device, bucket: str) -> Any:
        """The stored configuration for a bucket of shapes, or None."""
        if (self.name, bucket) in _overrides:
            return _overrides[self.name, bucket]
        return _stored(self, device).get(bucket) if device.type == "cuda" else None


def cached_lookup(lookup: ConfigLookup) -> ConfigLookup:
    """Decorator of a family's own lookup (`find`, else its rule): caches answers until configurations change."""
    kept = cache(lookup)
    _cached_lookups.append(kept)
    return kept  # type: ignore[return-value]


def clear_config_caches() -> None:
    """Clear the caches of all lookups, after configurations or their folder have changed."""
    for lookup in (*_cached_lookups, _stored):
        lookup.cache_clear()


@contextmanager
def override_config(tunable: Tunable, bucket: str, config: Any) -> Iterator[None]:
    """Context in which launches of this bucket use this configuration instead of the stored one."""
    _overrides[tunable.name, bucket] = config
    clear_config_caches()
    try:
        yield
    finally:
        del _overrides[tunable.name, bucket]
        clear_config_caches()


@dataclass(frozen=True)
class Case:
    """One case to tune.

    Args:
        tunable: the kernel family.
        bucket: the bucket of shapes.
        default: the configuration that the family's rule chooses.
        candidates: other configurations to try.
        prepare: allocates inputs and returns two functions. `launch(config)` runs the kernel once on weights that no cache holds.
            `check(config)` raises NumericsError if the result is wrong.
        tokens: number of tokens of a model's step that uses this bucket. `minirt tune` confirms the choice in such steps. None if
            no step of a model does.
    """

    tunable: Tunable
    bucket: str
    default: Any
    candidates: tuple[Any, ...]
    prepare: Callable[[], tuple[Callable[[Any], None], Callable[[Any], None]]]
    tokens: int | None = None


def bucket(**facts: Any) -> str:
    """The name of a bucket of shapes, such as "N=4608 K=3584"."""
    return " ".join(f"{name}={value}" for name, value in facts.items())


@dataclass(frozen=True)
class LinearShape:
    """A linear layer of a model.

    Args:
        N: number of outputs. A gated layer computes them from 2N rows.
        K: number of inputs.
        gated: whether the layer is gate and up with an activation.
        residual: whether a residual is added.
        dtype: of the activations.
        fp8: whether the weights are fp8.
        logits: whether the outputs are fp32, as those of an LM head.
        experts: (E, k) if there are E such layers, of which each token uses k; None: a single one.
        blocks: whether fp8 weights have a scale for each block, not for each row.
        int4: whether the weights have 4 bits.
    """

    N: int
    K: int
    gated: bool
    residual: bool
    dtype: torch.dtype
    fp8: bool
    logits: bool = False
    experts: tuple[int, int] | None = None
    blocks: bool = False
    int4: bool = False


Cases = Callable[[Sequence[LinearShape], Sequence[int], torch.device], Iterator[Case]]
_REGISTERED: dict[str, Cases] = {}


def register(name: str, cases: Cases) -> None:
    """Register a kernel family, also one of your own, with `minirt tune`. Raises InputError if the name is taken.

    `cases(shapes, tokens, device)` yields the cases to tune for a model's linear layers. `tokens`: the sizes of steps.
    """
    if name in _REGISTERED:
        raise InputError("this name is taken", where=f"register({name!r})")
    _REGISTERED[name] = cases


def registered() -> dict[str, Cases]:
    """The registered kernel families by name."""
    return dict(_REGISTERED)


def folder() -> Path:
    """The folder of tuned configurations: $MINIRT_CACHE, or minirt in the user's cache folder."""
    if "MINIRT_CACHE" in os.environ:
        return Path(os.environ["MINIRT_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minirt"


def path(device: torch.device) -> Path:
    """The file of tuned configurations for the device's GPU model and this Triton version."""
    gpu = "".join(c if c.isalnum() else "-" for c in torch.cuda.get_device_name(device).lower())
    return folder() / f"tuned-{gpu}-triton-{triton.__version__}.json"


def stored_files() -> list[Path]:
    """The files of tuned configurations of all GPU models and Triton versions, sorted by name."""
    try:
        return sorted(file for file in folder().iterdir() if re.fullmatch(r"tuned-.+\.json", file.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise MinirtError("cannot be listed", where=folder(), found=error, hint="set MINIRT_CACHE") from error


@cache
def source_hash(sources: tuple[str, ...]) -> str:
    """A digest of the contents of the files `sources`."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:16]


def store(tunable: Tunable, file: Path, configs: dict[str, Any]) -> None:
    """Add configurations by bucket to the file, and drop those of an older source. Raises MinirtError if that fails.

    The file is replaced atomically. A lock makes processes take turns, so none loses what another adds. Nothing is written
    through a link: others may be able to write to the folder.
    """
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.parent):
            known = _read(file)
            own = known.get(tunable.name, {})
            kept = own.get("configs") if own.get("source") == source_hash(tunable.sources) else None
            kept = (kept if isinstance(kept, dict) else {}) | {bucket: asdict(config) for bucket, config in configs.items()}
            known[tunable.name] = {"source": source_hash(tunable.sources), "configs": kept}
            try:
                with temporary.open("x") as target:  # a new file, or an error
                    target.write(json.dumps({"schema": SCHEMA, "kernels": known}, indent=1))
                os.replace(temporary, file)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise MinirtError("cannot store tuned configurations", where=file, found=error, hint="set MINIRT_CACHE") from error
    clear_config_caches()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Context in which this process holds an exclusive lock on the folder, where the system has such locks."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def load(tunable: Tunable, file: Path) -> dict[str, Any]:
    """The file's configurations by bucket for the current state of the kernel's source.

    A file that cannot be read or is malformed is ignored with a warning, because a kernel without a tuned configuration is only
    slower. Configurations of an older source are ignored without a warning.
    """
    own = _read(file).get(tunable.name)
    if own is None:
        return {}
    names = {field.name for field in fields(tunable.config)}
    try:
        if own["source"] != source_hash(tunable.sources):
            return {}
        configs = own["configs"]
        for bucket, values in configs.items():
            if set(values) != names or not all(isinstance(v, int | float | str | None) for v in values.values()):
                raise ValueError(f"{bucket}: {values}")
        return {bucket: tunable.config(**values) for bucket, values in configs.items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        _warn(file, f"{tunable.name}: {type(error).__name__}: {error}")
        return {}


@cache
def _stored(tunable: Tunable, device: torch.device) -> dict[str, Any]:
    return load(tunable, path(device))


def _read(file: Path) -> dict[str, Any]:
    """The file's content by kernel. Empty if there is no file; empty, with a warning, if the file is malformed."""
    try:
        content = json.loads(_read_regular(file))
        if content["schema"] != SCHEMA or not all(isinstance(v, dict) for v in content["kernels"].values()):
            raise ValueError(f"schema {content['schema']}")
        return content["kernels"]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _warn(file, f"{type(error).__name__}: {error}")
        return {}


def _read_regular(file: Path) -> bytes:
    """The content of a regular file of limited size. Anything else is an OSError, and never makes the caller wait."""
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | getattr(os, "O_NONBLOCK", 0))) as source:
        state = os.fstat(source.fileno())
        if not stat.S_ISREG(state.st_mode) or state.st_size > _MAX_FILE:
            raise OSError(f"not a regular file of at most {format_size(_MAX_FILE)}")
        return source.read()


def _warn(file: Path, found: str) -> None:
    what = f"{file} holds no usable tuned configurations ({found})"
    warnings.warn(f"{what}; the kernels' own rules apply. `minirt tune` rewrites the file", RuntimeWarning, stacklevel=3)

"""Tuned launch configurations: where they are kept, and how a kernel finds its own. Looking up never measures.

A kernel family has a `Tunable`; a launch asks its `find` for the bucket of its shape and falls back to the family's own rule.
`minirt tune` measures the cases that are registered and stores what is faster. That holds for one GPU model, one Triton version
and one state of the kernel's source.
"""

import fcntl
import hashlib
import json
import os
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

SCHEMA = 1

ConfigLookup = TypeVar("ConfigLookup", bound=Callable[..., Any])
_cached_lookups: list[Any] = []  # look-ups whose answers are kept
_overrides: dict[tuple[str, str], Any] = {}  # by family and bucket: what `override_config` puts in the place of what is stored


@dataclass(frozen=True)
class Tunable:
    """A kernel family whose configurations can be tuned.

    Args:
        name: as `minirt tune` shows it.
        config: the frozen dataclass of a configuration; its fields are numbers, strings, booleans or None.
        sources: the files whose change makes stored configurations stale.
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
    """Decorator of a family's own look-up, which asks `find` and else applies its rule: answers are kept until configurations
    change."""
    kept = cache(lookup)
    _cached_lookups.append(kept)
    return kept  # type: ignore[return-value]


def clear_config_caches() -> None:
    """Look every configuration up anew: they, or where they are kept, have changed."""
    for lookup in (*_cached_lookups, _stored):
        lookup.cache_clear()


@contextmanager
def override_config(tunable: Tunable, bucket: str, config: Any) -> Iterator[None]:
    """Within it, launches of this bucket find this configuration, whatever is stored."""
    _overrides[tunable.name, bucket] = config
    clear_config_caches()
    try:
        yield
    finally:
        del _overrides[tunable.name, bucket]
        clear_config_caches()


@dataclass(frozen=True)
class Case:
    """One thing to tune: a bucket of shapes, what the rule takes there, what else to try, and how to run it.

    `prepare()` allocates inputs and returns `launch(config)`, which runs the kernel once on weights that are in no cache, and
    `check(config)`, which raises NumericsError if the result is wrong. `tokens`: those of a step of a model that runs this
    bucket, in which the choice is confirmed; None: no model does.
    """

    tunable: Tunable
    bucket: str
    default: Any
    candidates: tuple[Any, ...]
    prepare: Callable[[], tuple[Callable[[Any], None], Callable[[Any], None]]]
    tokens: int | None = None


def bucket(**facts: Any) -> str:
    """The name of a bucket of shapes."""
    return " ".join(f"{name}={value}" for name, value in facts.items())


@dataclass(frozen=True)
class LinearShape:
    """A linear layer of a model: N outputs (gated: from 2N rows), K inputs, the dtype of activations, whether a residual is
    added, whether the weights are fp8, and whether outputs are fp32, as an LM head's."""

    N: int
    K: int
    gated: bool
    residual: bool
    dtype: torch.dtype
    fp8: bool
    logits: bool = False


Cases = Callable[[Sequence[LinearShape], Sequence[int], torch.device], Iterator[Case]]
_REGISTERED: dict[str, Cases] = {}


def register(name: str, cases: Cases) -> None:
    """Make a kernel family known to `minirt tune`, one of your own as well: `cases(shapes, tokens, device)` yields what to tune
    for a model's linear layers in steps of so many tokens."""
    if name in _REGISTERED:
        raise InputError("this name is taken", where=f"register({name!r})")
    _REGISTERED[name] = cases


def registered() -> dict[str, Cases]:
    return dict(_REGISTERED)


def folder() -> Path:
    """Where tuned configurations are kept: $MINIRT_CACHE, or minirt in the user's cache folder."""
    if "MINIRT_CACHE" in os.environ:
        return Path(os.environ["MINIRT_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minirt"


def path(device: torch.device) -> Path:
    """The file for a GPU model and this Triton version."""
    gpu = "".join(c if c.isalnum() else "-" for c in torch.cuda.get_device_name(device).lower())
    return folder() / f"tuned-{gpu}-triton-{triton.__version__}.json"


@cache
def source_hash(sources: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:16]


def store(tunable: Tunable, file: Path, configs: dict[str, Any]) -> None:
    """Add configurations by bucket to the file, which is replaced as a whole; those of an older source are dropped. Processes
    take turns, so that none loses what another adds."""
    temporary = file.with_suffix(".tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.parent):
            known = _read(file)
            own = known.get(tunable.name, {})
            kept = own.get("configs", {}) if own.get("source") == source_hash(tunable.sources) else {}
            kept = kept | {bucket: asdict(config) for bucket, config in configs.items()}
            known[tunable.name] = {"source": source_hash(tunable.sources), "configs": kept}
            try:
                temporary.write_text(json.dumps({"schema": SCHEMA, "kernels": known}, indent=1))
                os.replace(temporary, file)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise MinirtError("cannot store tuned configurations", where=file, found=error, hint="set MINIRT_CACHE") from error
    clear_config_caches()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone among the processes that ask for this."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def load(tunable: Tunable, file: Path) -> dict[str, Any]:
    """The configurations by bucket that the file has for this state of the kernel's source.

    A file that cannot be read, or holds something else, is ignored with a warning: a kernel without a tuned configuration is
    only slower. One of an older source is no fault, and ignored.
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
    """What the file has for each kernel; nothing, with a warning, if it is not such a file."""
    try:
        content = json.loads(file.read_text())
        if content["schema"] != SCHEMA or not all(isinstance(v, dict) for v in content["kernels"].values()):
            raise ValueError(f"schema {content['schema']}")
        return content["kernels"]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _warn(file, f"{type(error).__name__}: {error}")
        return {}


def _warn(file: Path, found: str) -> None:
    what = f"{file} holds no tuned configurations that can be used ({found})"
    warnings.warn(f"{what}; the kernels' own rules apply. `minirt tune` writes it anew", RuntimeWarning, stacklevel=3)

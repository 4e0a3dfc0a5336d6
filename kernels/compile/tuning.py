"""Launch configurations: how a kernel gets one for a shape, and where tuned ones are stored.

A kernel's file declares a `Family`: on which facts of a shape its configuration depends, the rule that chooses one, candidates.
`minirt tune` measures the cases of registered families and stores configurations that are faster than the rule's. They are valid
for one GPU model, one Triton version and one state of the kernel's source.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
import triton

from minirt.errors import InputError, MinirtError
from minirt.files import cache_folder, present, read_json, replace_file
from minirt.kernels.launch import Gpu, gpu_of
from minirt.wording import warn

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SCHEMA = 1
_MAX_FILE = 16 << 20  # bytes; `minirt tune` stores some kilobytes

Config = TypeVar("Config")
Cached = TypeVar("Cached", bound=Callable[..., Any])
Prepared = tuple[Callable[[Any], None], Callable[[Any], None]]  # (launch, check), see `Case`
_cached_lookups: list[Any] = []  # lookups with cached answers
_overrides: dict[tuple[str, str], Any] = {}  # by family and bucket: used instead of stored ones


@dataclass(frozen=True, eq=False)  # equal only to itself, so that lookups hash it in no time
class Family(Generic[Config]):
    """A kernel, or several that share their launch configurations.

    Args:
        name: as `minirt tune` shows and stores it.
        config: the frozen dataclass of a configuration; its fields are numbers, strings, booleans or None.
        sources: files. A change to one of them makes stored configurations stale.
        facts: names of the facts that name a bucket. Facts are a NamedTuple with these fields and `T`, such as `ProductFacts`.
        rule: (facts, GPU) → the built-in choice.
        candidates: (facts, GPU) → other configurations, for `minirt tune`. None: the family is not tuned.
        tokens: number of tokens → the largest number that uses the same configuration.
        usable: (configuration, facts) → whether the bucket's stored configuration can be used for these facts.
    """

    name: str
    config: type[Config]
    sources: tuple[str, ...]
    facts: tuple[str, ...]
    rule: Callable[[Any, Gpu], Config]
    candidates: Callable[[Any, Gpu], Iterable[Config]] | None = None
    tokens: Callable[[int], int] = lambda tokens: tokens
    usable: Callable[[Config, Any], bool] = lambda config, facts: True

    def bucket(self, facts: Any) -> str:
        """The name of a bucket of shapes, such as "N=4608 K=3584"."""
        return " ".join(f"{name}={getattr(facts, name)}" for name in self.facts)

    def lookup(self, device: torch.device, facts: Any) -> Config:
        """The stored configuration for these facts or, if there is none, the rule's. Cached until configurations change."""
        return _lookup(self, device, facts)

    def case(self, facts: Any, device: torch.device, prepare: Callable[[], Prepared]) -> "Case | None":
        """The case of `minirt tune` for these facts: the rule's choice and candidates. None: no launch would use the winner."""
        gpu = gpu_of(device)
        rule = self.rule(facts, gpu)
        if self.candidates is None or not self.usable(rule, facts):
            return None
        usable = tuple(config for config in self.candidates(facts, gpu) if self.usable(config, facts))
        return Case(self, self.bucket(facts), rule, usable, prepare, facts.T)


def cached_lookup(lookup: Cached) -> Cached:
    """Decorator of a function of configurations that are looked up: caches answers until configurations change."""
    kept = cache(lookup)
    _cached_lookups.append(kept)
    return kept  # type: ignore[return-value]


@cached_lookup
def _lookup(family: Family[Config], device: torch.device, facts: Any) -> Config:
    free = device.type == "cuda" and not getattr(facts, "part", 0)  # else a stored one might change the order of sums
    bucket, stored = family.bucket(facts), _stored(family, device) if free else {}
    config = _overrides.get((family.name, bucket), stored.get(bucket))
    return config if config is not None and family.usable(config, facts) else family.rule(facts, gpu_of(device))


def clear_config_caches() -> None:
    """Clear the caches of all lookups, after configurations or their folder have changed."""
    for lookup in (*_cached_lookups, _stored):
        lookup.cache_clear()


@contextmanager
def override_config(family: Family[Any], bucket: str, config: Any) -> Iterator[None]:
    """Context in which launches of this bucket use this configuration instead of the stored one."""
    _overrides[family.name, bucket] = config
    clear_config_caches()
    try:
        yield
    finally:
        del _overrides[family.name, bucket]
        clear_config_caches()


@dataclass(frozen=True)
class Case:
    """One case to tune.

    Args:
        family: the kernel family.
        bucket: the bucket of shapes.
        default: the configuration that the family's rule chooses.
        candidates: other configurations to try.
        prepare: allocates inputs and returns two functions. `launch(config)` runs the kernel once on weights that no cache holds.
            `check(config)` raises NumericsError if the result is wrong.
        tokens: of a model's step that uses this bucket, in which `minirt tune` confirms the choice. None: no step uses it.
    """

    family: Family[Any]
    bucket: str
    default: Any
    candidates: tuple[Any, ...]
    prepare: Callable[[], Prepared]
    tokens: int | None = None


def around(value: int, most: int) -> list[int]:
    """Half of `value`, `value` and twice `value`, if from 1 to `most`: for candidates."""
    return sorted({n for n in (value // 2, value, 2 * value) if 1 <= n <= most})


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
        joins: whether each token also uses a shared expert of this form, which a step of few tokens computes with the others.
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
    joins: bool = False

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return 2 * self.N if self.gated else self.N


Cases = Callable[[Sequence[LinearShape], Sequence[int], torch.device], Iterator[Case]]
_REGISTERED: dict[str, tuple[Family[Any], Cases]] = {}


def register(family: Family[Any], cases: Cases) -> None:
    """Register a kernel family, of minirt or of the user, with `minirt tune`. Raises InputError if the name is taken.

    `cases(shapes, tokens, device)` yields the cases to tune for a model's linear layers. `tokens`: the sizes of steps.
    """
    if family.name in _REGISTERED:
        raise InputError("this name is taken", where=f"register({family.name!r})")
    _REGISTERED[family.name] = family, cases


def registered() -> dict[str, tuple[Family[Any], Cases]]:
    """The registered kernel families and their cases, by name."""
    return dict(_REGISTERED)


def path(device: torch.device) -> Path:
    """The file of tuned configurations for the device's GPU model and this Triton version."""
    gpu = "".join(c if c.isalnum() else "-" for c in torch.cuda.get_device_name(device).lower())
    return cache_folder() / f"tuned-{gpu}-triton-{triton.__version__}.json"


def stored_files() -> list[Path]:
    """The files of tuned configurations of all GPU models and Triton versions, sorted by name."""
    try:
        return sorted(file for file in cache_folder().iterdir() if re.fullmatch(r"tuned-.+\.json", file.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise MinirtError("cannot be listed", where=cache_folder(), found=error, hint="set MINIRT_CACHE") from error


@cache
def source_hash(sources: tuple[str, ...]) -> str:
    """A digest of the contents of the files `sources`."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:16]


def store(family: Family[Any], file: Path, configs: dict[str, Any]) -> None:
    """Add configurations by bucket to the file, and drop those of an older source. Raises MinirtError if that fails."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.parent):
            known = _read(file)
            entry, source = known.get(family.name, {}), source_hash(family.sources)
            kept = entry.get("configs") if entry.get("source") == source else None
            kept = (kept if isinstance(kept, dict) else {}) | {bucket: asdict(config) for bucket, config in configs.items()}
            known[family.name] = {"source": source, "configs": kept}
            replace_file(file, json.dumps({"schema": SCHEMA, "kernels": known}, indent=1).encode())
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


def load(family: Family[Config], file: Path) -> dict[str, Config]:
    """The file's configurations by bucket for the current state of the kernel's source.

    A file that cannot be read or is malformed is ignored with a warning. Configurations of an older source are ignored without
    one.
    """
    entry = _read(file).get(family.name)
    if entry is None:
        return {}
    names = {field.name for field in fields(cast(Any, family.config))}
    try:
        if entry["source"] != source_hash(family.sources):
            return {}
        configs = entry["configs"]
        for bucket, values in configs.items():
            if set(values) != names or not all(isinstance(v, int | float | str | None) for v in values.values()):
                raise ValueError(f"{bucket}: {values}")
        return {bucket: family.config(**values) for bucket, values in configs.items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        _warn(file, f"{family.name}: {type(error).__name__}: {error}")
        return {}


@cache
def _stored(family: Family[Any], device: torch.device) -> dict[str, Any]:
    return load(family, path(device))


def _read(file: Path) -> dict[str, Any]:
    """The file's content by kernel. Empty if there is no file; empty, with a warning, if the file is malformed."""
    if not present(file):
        return {}
    try:
        content = read_json(file, limit=_MAX_FILE, error=MinirtError)
        if content["schema"] != SCHEMA or not all(isinstance(v, dict) for v in content["kernels"].values()):
            raise ValueError(f"schema {content['schema']}")
        return content["kernels"]
    except MinirtError as error:
        _warn(file, error.what)
    except (ValueError, KeyError, AttributeError) as error:
        _warn(file, f"{type(error).__name__}: {error}")
    return {}


def _warn(file: Path, why: str) -> None:
    what = f"{file} holds no usable tuned configurations ({why})"
    warn(f"{what}; the kernels' own rules apply. `minirt tune` rewrites the file", RuntimeWarning)

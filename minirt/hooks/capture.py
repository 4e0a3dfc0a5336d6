"""`Capture`: which hidden states a request asks for; `Captured`: those that its sequence has. Imports no torch by itself."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minirt.errors import InputError, MinirtError
from minirt.settings import one_of

if TYPE_CHECKING:
    import numpy as np
    import torch

    from minirt.hooks.processors import DrawnLogits

LOGITS = "logits"  # a place that needs no hook: its rows are the draws
ROWS = ("all", "prompt", "answer", "last")
_MORE_ROWS = 2048  # of a sequence, that memory is taken for at a time
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Capture:
    """Hidden states that a request asks for, after edits: the residual stream behind layers, or the input of a last product.

    Args:
        places: names of layers, or of blocks, whose last layer is meant: "layers.12", "layers.*.attention", "embedding"; or
            within one: "layers.3.attention.heads", "layers.3.mlp.neurons". A star stands for one part of a name. The model was
            loaded with them (`LoadOptions.capture`). "logits", of any model: [N, V] fp32, a row for each token of the answer, as
            the model gives them.
        rows: "all": of each token but the last one, which is not computed; "prompt": of its tokens; "answer": of the tokens after
            it; "last": of the last computed token alone.
        dtype: float32, bfloat16 or float16; None: the model's.
        folder: write them to FOLDER/REQUEST.safetensors, with a number for each request.
    """

    places: tuple[str, ...]
    rows: str = "all"
    dtype: str | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        places = (self.places,) if isinstance(self.places, str) else self.places
        if not isinstance(places, list | tuple) or not places or not all(isinstance(name, str) for name in places):
            expected = "names of layers, such as layers.12"
            raise InputError("not places of a model", where="Capture.places", expected=expected, found=repr(places)[:200])
        object.__setattr__(self, "places", tuple(places))
        one_of(*ROWS)(self.rows, "Capture.rows", InputError)
        if self.folder is not None:
            object.__setattr__(self, "folder", str(self.folder))  # a path, too
        if self.dtype is not None:
            one_of(*_DTYPES)(self.dtype, "Capture.dtype", InputError)

        if self.rows == "prompt" and LOGITS in places:
            expected = "all, answer or last beside logits; Generator.logits gives those of a prompt"
            raise InputError("a prompt has no draws", where="Capture.rows", expected=expected, found=self.rows)

    @property
    def states(self) -> tuple[str, ...]:
        """The places but "logits"."""
        return tuple(name for name in self.places if name != LOGITS)

    def first(self, prompt_len: int) -> int:
        """The first token whose states are asked for."""
        return {"answer": prompt_len, "last": prompt_len - 1}.get(self.rows, 0)


def capture(value: Any, place: str, error: type[MinirtError], hint: str | None = None) -> Capture:
    """A check: a `Capture`, or its places."""
    return value if isinstance(value, Capture) else Capture(value)


def steering(value: Any, place: str, error: type[MinirtError], hint: str | None = None) -> dict[str, float]:
    """A check: edit → factor."""
    if not isinstance(value, Mapping) or not all(isinstance(n, str) and isinstance(f, int | float) for n, f in value.items()):
        raise error("not factors of edits", where=place, expected="edits with numbers", found=repr(value)[:200], hint=hint)
    return {name: float(factor) for name, factor in value.items()}


def matching(patterns: Iterable[str], names: Sequence[str], where: str) -> list[str]:
    """The names that match a pattern, in their order. Raises InputError for a pattern that matches none."""
    parts, chosen = {name: name.split(".") for name in names}, set[str]()
    for pattern in patterns:
        wanted = pattern.split(".")
        fits = [
            name for name, having in parts.items()
            if len(having) == len(wanted) and all(map(fnmatchcase, having, wanted))
        ]  # fmt: skip
        if not fits:
            few = ", ".join(names if len(names) <= 8 else [*names[:4], "…", *names[-4:]]) or "none"
            raise InputError("matches no place", where=f"{where} {pattern!r}", expected=few, found=pattern)
        chosen.update(fits)
    return [name for name in names if name in chosen]


class HostStates(NamedTuple):
    """The hidden states of a step at one place, on the host: uint8 [N, bytes], and what they are, [N, H]."""

    rows: "np.ndarray"
    states: "torch.Tensor"


class Captured:
    """The states that a sequence has so far.

    Attributes:
        asked: what its request asks for.
        names: the places.
        next: the first token whose states are missing. Those before it need not be computed again.
        logits: keeps those of the draws; None: they are not asked for.
    """

    def __init__(
        self, asked: Capture, names: Sequence[str], prompt_len: int, most: int, logits: "DrawnLogits | None" = None
    ) -> None:  # fmt: skip
        """`most`: tokens of the sequence when it ends."""
        self.asked, self.names, self._prompt_len, self._most, self.logits = asked, names, prompt_len, most, logits
        self.next, self._count = asked.first(prompt_len) if names else most, 0
        self._kept: dict[str, HostStates] = {}

    def wanted(self, start: int, stop: int) -> range:
        """Which of the tokens from `start` to `stop` are still asked for."""
        return range(max(start, self.next), min(stop, self._prompt_len) if self.asked.rows == "prompt" else stop)

    def add(self, states: Mapping[str, HostStates], first: int, count: int) -> None:
        """Keep the states of the next `count` tokens: those rows from `first` on, for each place."""
        if not count:
            return
        self.next += count
        if self.asked.rows == "last":
            self._count, first, count = 0, first + count - 1, 1
        begin, self._count = self._count, self._count + count
        for name in self.names:
            if name not in self._kept or self._count > len(self._kept[name].rows):
                self._kept[name] = self._grown(self._kept.get(name), states[name].states)
            self._kept[name].rows[begin : self._count] = states[name].rows[first : first + count]

    def _grown(self, kept: HostStates | None, like: "torch.Tensor") -> HostStates:
        """Memory for more rows, at best for all: what is not written takes none."""
        rows = self._count if self.asked.rows == "last" else max(2 * self._count, min(self._most, self._count + _MORE_ROWS))
        states = like.new_empty(rows, like.shape[1])
        if kept is not None:
            states[: len(kept.rows)] = kept.states
        return HostStates(as_bytes(states), states)

    def result(self, length: int) -> "dict[str, torch.Tensor]":
        """[N, H] for each place, on the CPU, when the sequence has `length` tokens."""
        import torch

        dtype = None if self.asked.dtype is None else getattr(torch, self.asked.dtype)
        result = {name: states[: self._count].to(dtype=dtype) for name, (_, states) in self._kept.items()}
        if self.logits is not None:
            first = length - 1 if self.asked.rows == "last" else self._prompt_len
            result[LOGITS] = self.logits.rows(first, length).to(dtype=dtype)
        return result


def as_bytes(states: "torch.Tensor") -> "np.ndarray":
    """The same memory as uint8 [N, bytes]: NumPy copies small rows faster, and has no bfloat16."""
    import torch

    return states.view(torch.uint8).numpy()


def save(states: "dict[str, torch.Tensor]", folder: str, number: int) -> Path:
    """Write a request's states. Raises InputError if the folder cannot be written."""
    from safetensors.torch import save_file

    file = Path(folder) / f"{number}.safetensors"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(states, file)
    except OSError as error:
        raise InputError("cannot be written", where=str(file), found=error.strerror or str(error)) from error
    return file

"""`UserProcessors`: logits processors that requests bring along, between a step's layers and its draw."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minirt.device import is_device_failure, to_device
from minirt.errors import InputError


class ProcessedRows(NamedTuple):
    """The rows of logits from `first` on of a request's sequence.

    Args:
        tokens: int32, the prompt and what was generated.
        drafts: the tokens that the rows after the first stand behind.
    """

    request_id: int
    first: int
    tokens: np.ndarray
    drafts: Sequence[int]
    functions: Sequence[Callable[[Tensor, Tensor], Tensor]]


class UserProcessors:
    """Applies them: logits [Q, V] → a copy, in which the rows of these requests are what their functions return.

    Attributes:
        errors: by request; its rows are as they were.
    """

    def __init__(self, rows: Sequence[ProcessedRows]) -> None:
        self._rows = rows
        self.errors: dict[int, InputError] = {}

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits.to(torch.float32, copy=True)
        for request_id, first, tokens, drafts, functions in self._rows:
            known = np.concatenate([tokens, np.array(drafts, np.int32)]).astype(np.int64)
            ids = to_device(torch.from_numpy(known), logits.device)
            try:
                for row in range(len(drafts) + 1):
                    changed = logits[first + row].clone()
                    for function in functions:
                        changed = _checked(function, function(ids[: len(tokens) + row], changed), changed)
                    logits[first + row] = changed
            except Exception as error:
                if is_device_failure(error):
                    raise
                self.errors[request_id] = error if isinstance(error, InputError) else _failed(error)
        return logits


class DrawnLogits:
    """A logits processor that keeps the logits of its sequence's draws: [V] fp32 by the number of tokens before the draw."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        self._kept[len(ids)] = logits.to("cpu", copy=True)  # behind a draft that was wrong, a later draw replaces them
        return logits

    def rows(self, start: int, stop: int) -> Tensor:
        """[N, V], of the draws behind `start` to `stop` − 1 tokens."""
        return torch.stack([self._kept[count] for count in range(start, stop)])


def _checked(function: Callable[..., Tensor], result: object, logits: Tensor) -> Tensor:
    if isinstance(result, Tensor) and result.shape == logits.shape and result.device == logits.device:
        return result
    shown = f"{tuple(result.shape)} on {result.device}" if isinstance(result, Tensor) else type(result).__name__
    expected = f"a tensor of shape {tuple(logits.shape)} on {logits.device}"
    name = getattr(function, "__qualname__", repr(function))
    raise InputError(f"{name} returned something else", where="logits_processors", expected=expected, found=shown)


def _failed(error: Exception) -> InputError:
    text = f"{type(error).__name__}: {error}"
    return InputError("a logits processor raised an exception", where="logits_processors", found=text[:500])

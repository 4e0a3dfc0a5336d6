"""`SamplingBatch`: the sampling settings of a step's draws, in the columns that `SamplingParams` declares. Knows no Triton."""

from collections import namedtuple
from collections.abc import Collection, Sequence
from typing import Any

import torch

from minirt.sampling_params import FILTERS, EffectiveSampling

_INTEGERS = [record.column is int for record in FILTERS.values()]
DTYPES = torch.float32, *(torch.int32 if i else torch.float32 for i in _INTEGERS), torch.int64, torch.int64
COLUMNS = "f" + "".join("i" if integer else "f" for integer in _INTEGERS)  # of the table of slots, for `struct`
_OFF = {name: record.unset for name, record in FILTERS.items()}
_NO_FILTERS = (None,) * len(FILTERS)
_LARGEST, _SMALLEST, _MAX_INT = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny, 2**31 - 1
_make: Any = namedtuple  # else mypy asks for literal names
_Settings: Any = _make("_Settings", ("temperature", *FILTERS, "seed", "step"))


class SamplingBatch(_Settings):
    """The settings of B draws: tensors [B] on the device.

    Attributes:
        temperature: fp32, 0 = greedy. None: all draws are greedy.
        top_k, top_p, … (each of FILTERS): int32 or fp32. None: no draw uses the filter, and it launches no work.
        seed: int64, the bit pattern of the uint64.
        step: int64, the index of the generated token within its request, from 0.
    """

    __slots__ = ()
    _fields = _Settings._fields  # Triton finds the names of a record's fields in the class itself, not in its base

    @classmethod
    def build(cls, requests: Sequence[tuple[EffectiveSampling, int]], device: torch.device | str = "cpu") -> "SamplingBatch":
        """From `requests`: for each row, its settings and the index of its next token within the request."""
        seeds = [s.seed - 2**64 if s.seed >= 2**63 else s.seed for s, _ in requests]
        values = [(*column_values(s), seed, step) for (s, step), seed in zip(requests, seeds, strict=True)]
        columns = zip(*values, strict=True) if values else [()] * len(DTYPES)
        every = cls(*(torch.tensor(c, dtype=dtype, device=device) for c, dtype in zip(columns, DTYPES, strict=True)))
        all_greedy = not any(fp32_temperature(s) for s, _ in requests)
        return every.needed({name for s, _ in requests for name in filters_of(s)}, all_greedy=all_greedy)

    @classmethod
    def variants(cls, device: torch.device) -> list["SamplingBatch"]:
        """One draw of each kind for which the kernels are compiled: greedy, without filters, and with all of them."""
        every = cls(*(torch.ones(1, dtype=dtype, device=device) for dtype in DTYPES))
        return [every.needed((), all_greedy=True), every.needed(()), every]

    @classmethod
    def unfiltered(cls, rows: int, device: torch.device | str) -> "SamplingBatch":
        """The filters of draws that use none, in columns of `rows`; the other columns are None."""
        columns = zip(_OFF.values(), DTYPES[1:-2], strict=True)
        return cls(None, *(torch.full((rows,), off, dtype=dtype, device=device) for off, dtype in columns), None, None)

    def with_all_filters(self, unfiltered: "SamplingBatch") -> "SamplingBatch":
        """The settings with a column for each filter. `unfiltered`: of at least as many rows, in place of what no draw uses."""
        kept = [other if column is None else column for column, other in zip(self[1:-2], unfiltered[1:-2], strict=True)]
        return SamplingBatch(self.temperature, *kept, self.seed, self.step)

    @property
    def filtered(self) -> bool:
        return self.temperature is not None and any(column is not None for column in self[1:-2])

    def needed(self, filters: Collection[str], *, all_greedy: bool = False) -> "SamplingBatch":
        """The settings without those that no draw uses."""
        kept = _NO_FILTERS
        if filters:
            kept = tuple(column if name in filters else None for name, column in zip(FILTERS, self[1:-2], strict=True))
        return SamplingBatch(None if all_greedy else self.temperature, *kept, self.seed, self.step)

    def part(self, rows: slice) -> "SamplingBatch":
        """Some of the draws."""
        return SamplingBatch(*(None if column is None else column[rows] for column in self))


def fp32_temperature(sampling: EffectiveSampling) -> float:
    """A temperature below the smallest normal fp32 number becomes 0, greedy; one above the fp32 range the largest number."""
    return 0.0 if sampling.temperature < _SMALLEST else min(sampling.temperature, _LARGEST)


def filters_of(sampling: EffectiveSampling) -> list[str]:
    """The filters that a request uses."""
    return [name for name, off in _OFF.items() if getattr(sampling, name) != off] if fp32_temperature(sampling) else []


def column_values(sampling: EffectiveSampling) -> list[float]:
    """What a request has in `COLUMNS`: its temperature, and each of FILTERS."""
    values = [getattr(sampling, name) for name in FILTERS]
    return [fp32_temperature(sampling), *(min(v, _MAX_INT) if i else v for v, i in zip(values, _INTEGERS, strict=True))]

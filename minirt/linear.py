"""Weights as layers hold them: `PackedLinear` (stacked logical parts) and `NormWeight`.

A holder knows the checkpoint tensors that fill it, so loading, random weights, byte counts and later formats (FP8, shards)
meet in one place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """One logical linear inside a packed one: its checkpoint prefix (`….q_proj`) and its number of rows."""

    name: str
    rows: int


class PackedLinear:
    """Linear weights of several parts (q, k, v; gate, up) stacked by rows: one matrix, one GEMM.

    `weight` is [N, K], K contiguous, N the sum of the parts' rows; `bias` is [N] or None.
    """

    def __init__(self, parts: Sequence[Part], in_features: int, bias: bool = False) -> None:
        self.parts = tuple(parts)
        self.in_features = in_features
        self.has_bias = bias
        self.weight: Tensor = torch.empty(0)
        self.bias: Tensor | None = None

    @property
    def out_features(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def num_parameters(self) -> int:
        return self.out_features * (self.in_features + self.has_bias)

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(checkpoint tensor, shape) for each tensor that fills this holder."""
        for part in self.parts:
            yield f"{part.name}.weight", (part.rows, self.in_features)
            if self.has_bias:
                yield f"{part.name}.bias", (part.rows,)

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        self.weight = torch.empty(self.out_features, self.in_features, device=device, dtype=dtype)
        self.bias = torch.empty(self.out_features, device=device, dtype=dtype) if self.has_bias else None

    def load(self, name: str, source: Tensor) -> None:
        """Copy one checkpoint tensor, already checked against `expected`, into its rows."""
        prefix, _, what = name.rpartition(".")
        start = 0
        for part in self.parts:
            if part.name == prefix:
                target = self.bias if what == "bias" else self.weight
                if target is not None:
                    target[start : start + part.rows].copy_(source)
                return
            start += part.rows

    def randomize(self, generator: torch.Generator) -> None:
        """Normal weights of variance 0.5 / K, so that activations keep their scale through many layers."""
        self.weight.normal_(0.0, (0.5 / self.in_features) ** 0.5, generator=generator)
        if self.bias is not None:
            self.bias.normal_(0.0, 0.1, generator=generator)


class NormWeight:
    """The scale of one RMSNorm: `weight` [size]."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.num_parameters = name, size
        self.weight: Tensor = torch.empty(0)

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.num_parameters,)

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        self.weight = torch.empty(self.num_parameters, device=device, dtype=dtype)

    def load(self, name: str, source: Tensor) -> None:
        self.weight.copy_(source)

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.uniform_(0.5, 1.5, generator=generator)


Parameter = PackedLinear | NormWeight

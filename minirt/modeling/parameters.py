"""Weights as layers hold them: `Parameter`, and its kinds.

A parameter knows which checkpoint tensors fill it and in which format it stores them. So loading, random weights and byte counts
are in one place.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from minirt.errors import UnsupportedError
from minirt.kernels.reference import MX_GROUP, WORDS
from minirt.modeling.formats import Axis, LinearFormat, PackedTensors, StoredMxfp4, TensorSpec


@dataclass(frozen=True)
class Shard:
    """A rank's share of a model that `ranks` GPUs compute together (tensor parallelism)."""

    rank: int
    ranks: int

    def of(self, count: int, what: str, where: str, *, repeated: bool = False) -> tuple[int, int]:
        """(the first, how many) of `count` heads or channels. `repeated`: if there are fewer than ranks, several have the same.

        Raises:
            UnsupportedError: they cannot be divided evenly.
        """
        if count % self.ranks == 0:
            return self.rank * count // self.ranks, count // self.ranks
        if repeated and self.ranks % count == 0:
            return self.rank * count // self.ranks, 1
        text, hint = f"{count} {what} cannot be divided evenly among {self.ranks} ranks", "use another --tensor-parallel"
        raise UnsupportedError(text, where=where, expected=f"a divisor of {count}", found=self.ranks, hint=hint)


@dataclass(frozen=True)
class Interleaved:
    """One of several linears in a checkpoint's linear, which has blocks of rows of each of them in turn, for each head.

    Attributes:
        blocks: the rows of each linear in its block. `index`: which of them this is.
    """

    blocks: tuple[int, ...]
    index: int

    def take(self, source: Tensor, rows: int, dimension: int, name: str) -> Tensor:
        """The part of a tensor of the linear, which has `rows` rows, alone or in groups in this dimension."""
        if source.numel() == 1:  # a scale of the whole weight
            return source
        group, largest = rows // source.shape[dimension], gcd(*self.blocks)
        if group * source.shape[dimension] != rows or largest % group:
            what = f"{rows} rows are stored in {source.shape[dimension]} groups, and each group must be of one head"
            raise UnsupportedError(what, where=name, expected=f"groups of at most {largest} rows, and a divisor of it")
        start, count = sum(self.blocks[: self.index]) // group, self.blocks[self.index] // group
        heads = source.unflatten(dimension, (-1, sum(self.blocks) // group))
        return heads.narrow(dimension + 1, start, count).flatten(dimension, dimension + 1)


@dataclass(frozen=True)
class Part:
    """One linear layer of the checkpoint inside a packed one: its name prefix (`….q_proj`) and its number of rows.

    `of`: the checkpoint's linear of that name holds others too, and this is one of them; None: it is this one. Several parts of a
    packed linear may be of one linear. `start`, `whole`: of a shard, the first of its rows, and how many there are of all ranks.
    """

    name: str
    rows: int
    of: Interleaved | None = None
    start: int = 0
    whole: int | None = None

    @property
    def stored_rows(self) -> int:
        """Rows of the checkpoint's linear."""
        rows = self.whole or self.rows
        return rows if self.of is None else rows // self.of.blocks[self.of.index] * sum(self.of.blocks)


def stacked(*parts: Part) -> list[Part]:
    """The parts of a packed linear. Those with one name are one linear of the checkpoint, which has their rows in this order."""
    together = {part.name: tuple(each.rows for each in parts if each.name == part.name) for part in parts}
    seen, placed = dict.fromkeys(together, 0), list[Part]()
    for part in parts:
        blocks, index = together[part.name], seen[part.name]
        placed.append(part if len(blocks) == 1 else replace(part, of=Interleaved(blocks, index)))
        seen[part.name] += 1
    return placed


class Parameter(ABC):
    """Weights of one layer. A layer's parameters are its attributes of this type. You may write subclasses.

    Attributes:
        format: the quantized format of the weights; None: the model's dtype.
        quantizable: whether `format` may be set, before `allocate`.
        modules: checkpoint prefixes of the linears that a checkpoint may store in a quantized format.
        sharded: whether each rank has other values.
        fused_tensor: name of a tensor that holds all these weights in some checkpoints; None: no checkpoint has one.
    """

    format: LinearFormat | None = None
    quantizable = False
    modules: tuple[str, ...] = ()
    sharded = False
    fused_tensor: str | None = None

    def fuse(self) -> None:
        """Expect `fused_tensor` instead of the other tensors. The loader calls it if the checkpoint has that tensor."""
        raise NotImplementedError

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Number of weights."""

    @abstractmethod
    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of these weights in a model of this dtype."""

    @abstractmethod
    def compile_key(self) -> tuple[Hashable, ...]:
        """Everything that kernels can depend on, except the values of the weights."""

    @abstractmethod
    def expected(self) -> Iterator[TensorSpec]:
        """The checkpoint tensors that fill this parameter. At least one."""

    @abstractmethod
    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        """Reserve uninitialized memory."""

    @abstractmethod
    def load(self, name: str, source: Tensor, first: int = 0) -> None:
        """Copy one checkpoint tensor, already checked against `expected`, into its place.

        If the tensor's spec has `pieces`, `source` may be a range of its first dimension that begins at `first`. Its memory is
        used again after the call, so the copy must have ended by then: no view of `source`, and no `non_blocking` copy.
        """

    def used(self, spec: TensorSpec) -> tuple[int, int, int] | None:
        """(first, count, period): of each `period` values of a tensor, `load` uses `count`, from `first` on. None: all."""
        return None

    @abstractmethod
    def randomize(self, generator: torch.Generator) -> None:
        """Fill with random values that keep activations in range. `generator`: the same on all ranks unless it is `sharded`."""


class PackedLinear(Parameter):
    """Linear weights of several parts (q, k, v; gate, up) stacked by rows: one matrix, one GEMM.

    `weight` is [N, K], K contiguous, N the sum of the parts' rows; `bias` is [N] or None. With a `format`, the weights are
    quantized: `weight` and `scale` are what the format allocates, see `minirt.modeling.formats`. Otherwise `scale` is None.
    `adapters`: see `minirt.adapters`; None: it can have none.
    """

    adapters: Any = None
    random_gain = 1.0  # factor of random weights
    adds_bias = True  # of shards by columns, whose results are summed, that of the first rank

    def __init__(self, parts: Sequence[Part], in_features: int, bias: bool = False, quantizable: bool = True) -> None:
        self.set_parts(parts)
        self.modules = tuple(dict.fromkeys(part.name for part in self.parts))
        self.in_features = self.stored_columns = in_features
        self.first_column = 0
        self.has_bias, self.quantizable = bias, quantizable
        self.weight: Tensor = torch.empty(0)
        self.scale: Tensor | None = None
        self.bias: Tensor | None = None

    def set_parts(self, parts: Sequence[Part]) -> None:
        """Have these parts, of the same linears. Before `allocate`."""
        self.parts = tuple(parts)
        self.rows = tuple(part.rows for part in self.parts)
        self.out_features = sum(self.rows)
        self._places: dict[str, list[tuple[Part, slice]]] = {part.name: [] for part in self.parts}
        for part, stop in zip(self.parts, accumulate(self.rows), strict=True):
            self._places[part.name].append((part, slice(stop - part.rows, stop)))

    def shard_rows(self, *shares: tuple[int, int, int]) -> None:
        """Keep some rows of each part: (the first, how many) of so many equal groups, such as heads. There are as many as parts,
        or as part names that repeat. Before `allocate`, with the format."""
        cut = list[Part]()
        for i, part in enumerate(self.parts):
            first, count, groups = shares[i % len(shares)]
            size = part.rows // groups
            cut.append(replace(part, rows=count * size, start=first * size, whole=part.rows))
        self.set_parts(cut)
        self.sharded = True

    def shard_columns(self, rank: int, first: int, count: int, groups: int) -> None:
        """Keep some columns: `count` of so many equal groups. The results of all ranks are to be added."""
        size = self.in_features // groups
        self.first_column, self.in_features = first * size, count * size
        self.adds_bias, self.sharded = rank == 0, True

    @property
    def num_parameters(self) -> int:
        return self.out_features * (self.in_features + self.has_bias)

    def nbytes(self, dtype: torch.dtype) -> int:
        if self.format is None:
            return self.num_parameters * dtype.itemsize
        return self.format.nbytes(self.rows, self.in_features) + self.has_bias * self.out_features * dtype.itemsize

    def compile_key(self) -> tuple[Hashable, ...]:
        kept: tuple[Hashable, ...] | None = None
        if self.format is not None:
            _, scale = self.format.allocate(self.rows, self.in_features, torch.device("meta"))
            kept = self.format.name, scale.shape, scale.dtype
        return self.out_features, self.in_features, self.has_bias, kept, self.adapters is not None

    def expected(self) -> Iterator[TensorSpec]:
        for part in {part.name: part for part in self.parts}.values():
            specs = self._tensors(part.name, part.stored_rows)  # blocks of rows are not taken from pieces
            yield from specs if part.of is None else (spec._replace(pieces=False) for spec in specs)
            if self.has_bias:
                yield TensorSpec(f"{part.name}.bias", (part.stored_rows,))

    def _tensors(self, name: str, rows: int) -> Iterator[TensorSpec]:
        if self.format is not None:
            return self.format.tensors(name, rows, self.stored_columns)
        return iter((TensorSpec(f"{name}.weight", (rows, self.stored_columns), pieces=True),))

    def used(self, spec: TensorSpec) -> tuple[int, int, int] | None:
        prefix, _, what = spec.name.rpartition(".")
        (part, _), *others = self._places[prefix]
        rows, columns = (Axis(0), Axis(1)) if self.format is None or what == "bias" else self.format.axes(what)
        if self._cuts_columns and columns is not None and what != "bias":
            return columns.used(spec, self.first_column, self.in_features, self.stored_columns)
        if rows is not None and part.whole is not None and part.of is None and not others:
            return rows.used(spec, part.start, part.rows, part.whole)
        return None

    @property
    def _cuts_columns(self) -> bool:
        return self.in_features < self.stored_columns and not (self.format and self.format.whole_rows)

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        if self.format is None:
            self.weight, self.scale = torch.empty(self.out_features, self.in_features, device=device, dtype=dtype), None
        else:
            self.weight, self.scale = self.format.allocate(self.rows, self.in_features, device)
        self.bias = torch.empty(self.out_features, device=device, dtype=dtype) if self.has_bias else None

    def load(self, name: str, source: Tensor, first: int = 0) -> None:
        prefix, _, what = name.rpartition(".")
        rows, columns = (Axis(0), Axis(1)) if self.format is None or what == "bias" else self.format.axes(what)
        source = source if source.ndim < 4 else source[:, 0, :, 0]  # some checkpoints' scales of blocks
        for part, place in self._places[prefix]:
            taken, begin = source, first
            if rows is not None and part.of is not None:
                taken = part.of.take(source, part.stored_rows, rows.dimension, name)
            if rows is not None and part.whole is not None and taken.numel() > 1:
                begin = max(part.start, first)
                count = min(part.start + part.rows, first + taken.shape[rows.dimension] * rows.group) - begin
                if count <= 0:
                    continue
                taken, begin = rows.narrow(taken, begin - first, count, part.whole - first, name), begin - part.start
            if columns is not None and what != "bias" and not (self.format and self.format.whole_rows):
                taken = self._columns(taken, columns, name)
            if what == "bias" and self.bias is not None:
                self.bias[place].copy_(taken).mul_(self.adds_bias)
            elif self.format is None or self.scale is None or self.format.whole_rows:
                self._load_rows(taken, place.start + begin)
            else:
                self.format.load(what, taken, PackedTensors(self.weight, self.scale, self.rows), place, begin)

    def _columns(self, source: Tensor, axis: Axis, name: str) -> Tensor:
        if self.in_features == self.stored_columns:
            return source
        return axis.narrow(source, self.first_column, self.in_features, self.stored_columns, name)

    def _load_rows(self, source: Tensor, start: int) -> None:
        """Copy or quantize 16- or 32-bit weights [n, K] into the rows from `start` on. With a format's `whole_rows`, K is that of
        the whole model, of which the columns of this rank are kept."""
        if self.format is None or self.scale is None:
            self.weight[start : start + source.shape[0]].copy_(source)
            return
        kept = slice(self.first_column, self.first_column + self.in_features)
        columns = kept if source.shape[1] > self.in_features else None
        self.format.store_rows(source, self.weight, self.scale, self.rows, start, columns)

    def randomize(self, generator: torch.Generator) -> None:
        """Normal weights of variance 0.5 / K, so that activations keep their scale through many layers."""
        deviation = self.random_gain * (0.5 / self.stored_columns) ** 0.5
        if self.format is None or self.scale is None:
            self.weight.normal_(0.0, deviation, generator=generator)
        else:
            for rows, scales in self.format.chunks(0, self.out_features, self.rows, self.in_features):
                values = torch.empty(rows.stop - rows.start, self.in_features, dtype=torch.float32, device=self.weight.device)
                values.normal_(0.0, deviation, generator=generator)
                self.format.store(values, self.weight, self.scale, rows, scales)
        if self.bias is not None:
            self.bias.normal_(0.0, 0.1, generator=generator).mul_(self.adds_bias)


class SomeRows(PackedLinear):
    """Some rows of a linear, such as those of a reduced draft vocabulary: `ids`, int64 in ascending order.

    They are rows of the checkpoint's tensor, so the format must be none, or one that quantizes while loading.

    Args:
        part: the whole linear. `count`: how many of its rows; the first ones, until `ids` says which.
    """

    def __init__(self, part: Part, in_features: int, count: int) -> None:
        super().__init__([Part(part.name, count)], in_features)
        self._whole, self.ids = part.rows, torch.arange(count)

    def expected(self) -> Iterator[TensorSpec]:
        return self._tensors(self.parts[0].name, self._whole)

    def load(self, name: str, source: Tensor, first: int = 0) -> None:
        start, stop = torch.searchsorted(self.ids, torch.tensor([first, first + source.shape[0]])).tolist()
        if start < stop:
            self._load_rows(source[(self.ids[start:stop] - first).to(source.device)], start)


class PackedExperts(PackedLinear):
    """The same linear (or packed linears) of E experts, stacked by rows: expert e has the rows e · N to (e + 1) · N.

    A checkpoint has a tensor for each expert and part, `PREFIX.{e}.{part}.weight`, or one of all experts, `PREFIX.{fused}`
    [E, N, K]. The loader finds out which (`minirt.loading.stored_formats`). With `--fp8`, each row of each expert has its own
    scale. With FP8 in blocks, no block has rows of two parts or experts.

    Experts with biases (gpt-oss) have another form: `PREFIX.{fused}` [E, K, N] or, in MXFP4, `…_blocks` and `…_scales`, and
    `…_bias` [E, N]. Their rows are those of the parts in turn, one of each.

    Args:
        prefix: the checkpoint prefix of all experts (`….mlp.experts`).
        parts: name (`gate_proj`) and rows of each part of one expert.
        fused: the name of the tensor that holds all experts, in checkpoints that have it (`gate_up_proj`); None: there are none.
        bias: whether they have biases.
    """

    def __init__(
        self, prefix: str, parts: Sequence[Part], in_features: int, num_experts: int, fused: str | None = None, bias: bool = False
    ) -> None:
        stacked = [Part(f"{prefix}.{e}.{part.name}", part.rows) for e in range(num_experts) for part in parts]
        super().__init__(stacked, in_features, bias)
        self.num_experts, self.fused, self.parts_in_turn = num_experts, False, len(parts)
        self.fused_tensor = None if fused is None or bias else f"{prefix}.{fused}"
        if bias:
            self.modules = (f"{prefix}.{fused}",)

    def fuse(self) -> None:
        self.fused = True
        self.modules = ()  # a fused tensor is never quantized

    @property
    def stacked(self) -> tuple[Tensor, Tensor | None]:
        """Views of the weight as [E, N, K], and of the scale as [E, …]."""
        scale = self.scale
        if scale is not None:
            rows = 1 if scale.dtype in WORDS else 0  # the words of scales have rows of the weight in the second dimension
            scale = scale.unflatten(rows, (self.num_experts, -1)).movedim(rows, 0)
        return self.weight.unflatten(0, (self.num_experts, -1)), scale

    @property
    def stacked_bias(self) -> Tensor | None:
        """A view of the bias as [E, N]."""
        return None if self.bias is None else self.bias.unflatten(0, (self.num_experts, -1))

    def compile_key(self) -> tuple[Hashable, ...]:
        return *super().compile_key(), self.num_experts

    def used(self, spec: TensorSpec) -> tuple[int, int, int] | None:
        if not (self.fused or self.has_bias):
            return super().used(spec)
        (_, first, *others), part, K = spec.shape, self.parts[0], self.stored_columns
        transposed, turns = self.has_bias and spec.name in self.modules, self.parts_in_turn if self.has_bias else 1
        if self._cuts_columns and others:
            size = first * others[0] if transposed else prod(others)  # values of all columns
            return self.first_column * size // K, self.in_features * size // K, size
        size = turns * (1 if transposed else prod(others))  # values of a row of each part
        return None if part.whole is None else (part.start * size, part.rows * size, part.whole * size)

    def _of_rank(self, rows: Tensor, name: str, group: int = 1) -> Tensor:
        """[n, parts, rows, K / group] of all ranks → [n · parts · rows, K / group] of this one."""
        rows = rows.narrow(2, self.parts[0].start, self.parts[0].rows)
        if rows.ndim > 3 and not (self.format and self.format.whole_rows):
            unit = self.format.axes("weight")[1] if self.format else None
            rows = self._columns(rows, Axis(3, group, group if unit is None else unit.unit), name)
        return rows.flatten(0, 2)

    def expected(self) -> Iterator[TensorSpec]:
        N, K = sum(part.stored_rows for part in self.parts[: self.parts_in_turn]), self.stored_columns
        if self.has_bias:
            (name,), E = self.modules, self.num_experts
            if isinstance(self.format, StoredMxfp4):
                yield from self.format.of_experts(name, E, N, K)
            else:
                yield TensorSpec(name, (E, K, N), pieces=True)
            yield TensorSpec(f"{name}_bias", (E, N))
        elif self.fused and self.fused_tensor is not None:
            yield TensorSpec(self.fused_tensor, (self.num_experts, N, K), pieces=True)
        else:
            yield from super().expected()

    def load(self, name: str, source: Tensor, first: int = 0) -> None:
        if self.has_bias:
            what = name.removeprefix(self.modules[0])
            rows = (source if what else source.transpose(1, 2)).to(self.weight.device)
            rows = self._of_rank(rows.unflatten(1, (-1, self.parts_in_turn)).transpose(1, 2), name, MX_GROUP if what else 1)
            start = first * (self.out_features // self.num_experts)
            if what == "_bias" and self.bias is not None:
                self.bias.copy_(rows).mul_(self.adds_bias)
            elif what and self.format is not None and self.scale is not None:
                tensors = PackedTensors(self.weight, self.scale, self.rows)
                self.format.load(what.removeprefix("_"), rows, tensors, slice(start, start + len(rows)))
            else:
                self._load_rows(rows, start)
        elif self.fused:
            start = first * (self.out_features // self.num_experts)
            self._load_rows(self._of_rank(source.unflatten(1, (self.parts_in_turn, -1)), name), start)
        else:
            super().load(name, source, first)


class Values(Parameter):
    """One tensor, named in full: `weight`. Random values are uniform in `spread`. `dtype` None: the model's."""

    def __init__(self, name: str, shape: tuple[int, ...], spread: tuple[float, float], dtype: torch.dtype | None = None) -> None:
        self.tensor, self.shape, self.spread, self.dtype = name, shape, spread, dtype
        self.stored_shape, self._kept = shape, list[slice]()
        self.weight: Tensor = torch.empty(0)

    def shard(self, *kept: tuple[int, int]) -> None:
        """Keep some ranges of the first dimension, (the first, how many) each."""
        self._kept, self.sharded = [slice(start, start + count) for start, count in kept], True
        self.shape = sum(count for _, count in kept), *self.stored_shape[1:]

    @property
    def num_parameters(self) -> int:
        return torch.Size(self.shape).numel()

    def nbytes(self, dtype: torch.dtype) -> int:
        return self.num_parameters * (self.dtype or dtype).itemsize

    def compile_key(self) -> tuple[Hashable, ...]:
        return self.shape, self.dtype

    def expected(self) -> Iterator[TensorSpec]:
        yield TensorSpec(self.tensor, self.stored_shape)

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        self.weight = torch.empty(self.shape, device=device, dtype=self.dtype or dtype)

    def load(self, name: str, source: Tensor, first: int = 0) -> None:
        self.weight.copy_(torch.cat([source[rows] for rows in self._kept]) if self._kept else source)

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.uniform_(*self.spread, generator=generator)


OF_ADDED = 0.05  # `NormWeight.typical` of norms of what layers add


class NormWeight(Values):
    """The scale of one RMSNorm: `weight` [size]. `zero_centered`: the checkpoint stores it minus 1, and loading adds 1.

    The sum is rounded to the model's dtype, while transformers multiplies by 1 + weight in fp32. `typical`: around which random
    weights are. (Where norms are all that limits what layers add, sums of values of 1 would amplify each rounding.)
    """

    def __init__(self, name: str, size: int, zero_centered: bool = False, typical: float = 1.0) -> None:
        super().__init__(f"{name}.weight", (size,), (0.5 * typical, 1.5 * typical))
        self.name, self.zero_centered = name, zero_centered

    def load(self, name: str, source: Tensor, first: int = 0) -> None:
        self.weight.copy_(source.float() + 1 if self.zero_centered else source)

"""`LinearFormat`: a format of quantized linear weights. `FormatChoice`: which weights of a model have one.

A format belongs to a packed linear (`minirt.modeling.parameters.PackedLinear`). Kernels see only what it allocates: `weight`
and `scale`. FP8: a weight [N, K]; a scale [N] is one for each row, a scale [⌈N / g⌉, ⌈K / 128⌉] is one for each block of g rows
and 128 columns. 4 bits: packed words and scale words. See `reference.linear`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from minirt.device import compute_capability, interpreting, on_device, triton_installed
from minirt.errors import CheckpointError, ConfigError
from minirt.kernels.reference import (
    FP8_BLOCK,
    INT4_CHUNK,
    INT4_ZERO,
    pack_int4,
    pack_int4_scale,
    quantize_fp8,
    quantize_fp8_blocks,
    quantize_int4,
)

FP8 = torch.float8_e4m3fn
CHUNK = 1 << 22  # weights quantized at a time; quantization to FP8 by PyTorch needs 9 temporary bytes per weight
FLOATS = ("F32", "F16", "BF16")  # names of dtypes in safetensors files
E4M3 = "F8_E4M3"
INT32 = "I32"
INT64 = "I64"


class TensorSpec(NamedTuple):
    """A checkpoint tensor that fills a parameter.

    Attributes:
        shape: the usual shape. `also`: other shapes of the same values.
        dtypes: the dtypes that it may have, by their names in safetensors files.
        positive: whether every value must be finite and above 0, as in a scale.
        nonzero: whether every value must be finite and not 0, as in a scale that may be negative.
        values: the values that it must have; None: any.
        pieces: whether ranges of the first dimension may be loaded one by one.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    also: tuple[tuple[int, ...], ...] = ()
    positive: bool = False
    nonzero: bool = False
    values: tuple[int, ...] | None = None
    pieces: bool = False


@dataclass(frozen=True)
class LinearFormat(ABC):
    """How the weights of a packed linear are stored in a checkpoint and kept in memory.

    `rows` are the numbers of rows of the parts, from top to bottom; K is the number of columns.

    Attributes:
        name: as the plan shows it. Formats with one name have the same memory and the same kernels.
        no_triton: why no Triton kernel computes it; None: the kernels do.
        capability: the lowest compute capability of its kernels.
        rounds_activations: whether steps of several tokens round activations to e4m3.
        quantizes: whether the checkpoint has weights of 16 or 32 bits, which `store_rows` quantizes, also a piece of a tensor.
            Otherwise `load` places what is stored.
        chunk: weights that are quantized or repacked at a time.
    """

    name: ClassVar[str]
    no_triton: ClassVar[str | None] = None
    capability: ClassVar[float] = 8.9
    rounds_activations: ClassVar[bool] = True
    quantizes: ClassVar[bool] = False
    chunk: ClassVar[int] = CHUNK

    @abstractmethod
    def tensors(self, module: str, rows: int, K: int) -> Iterator[TensorSpec]:
        """The checkpoint tensors of one part, its bias apart. `module`: the part's checkpoint prefix. The weight comes first."""

    @abstractmethod
    def scale_shape(self, rows: Sequence[int], K: int) -> tuple[int, ...]:
        """The shape of the scale, which is fp32."""

    def group_rows(self, rows: Sequence[int]) -> int:
        """How many rows of the weight share a row of the scale."""
        return 1

    def load(
        self, what: str, source: Tensor, weight: Tensor, scale: Tensor, rows: Sequence[int], part: int, first: int = 0
    ) -> None:
        """Copy a checkpoint tensor of one part into its rows. The default quantizes weights of 16 or 32 bits.

        Args:
            what: the last component of the tensor's name, such as "weight".
            source: the tensor, on any device, already checked against `tensors`.
            weight, scale: those of the packed linear.
            part: which part, an index of `rows`.
            first: the first row of `source` within the part; other than 0 only if the tensor's spec has `pieces`.
        """
        self.store_rows(source, weight, scale, rows, sum(rows[:part]) + first)

    @abstractmethod
    def quantize(self, source: Tensor, scale_rows: Tensor) -> Tensor:
        """Quantize `source` [n, K], all rows of `scale_rows`; writes their scales, returns the values."""

    def store(self, source: Tensor, weight: Tensor, scale: Tensor, own: slice, scales: slice) -> None:
        """Quantize `source` [n, K] into the rows `own` of the weight and `scales` of the scale, a pair of `chunks`."""
        weight[own] = self.quantize(source, scale[scales])

    def store_rows(self, source: Tensor, weight: Tensor, scale: Tensor, rows: Sequence[int], start: int) -> None:
        """Quantize `source` [n, K], on any device, into the rows from `start` on, a chunk at a time."""
        for own, scales in self.chunks(start, start + source.shape[0], rows, source.shape[1]):
            self.store(source[own.start - start : own.stop - start].to(weight.device), weight, scale, own, scales)

    def chunks(self, first: int, stop: int, rows: Sequence[int], K: int) -> Iterator[tuple[slice, slice]]:
        """(rows of the weight, rows of the scale), in pieces of about `chunk` weights that cover the rows `first` to `stop`."""
        g = self.group_rows(rows)
        step = max(1, self.chunk // K // g) * g
        for start in range(first, stop, step):
            end = min(start + step, stop)
            yield slice(start, end), slice(start // g, -(-end // g))

    def allocate(self, rows: Sequence[int], K: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Uninitialized weight and scale."""
        scale = torch.empty(self.scale_shape(rows, K), dtype=torch.float32, device=device)
        return torch.empty(sum(rows), K, dtype=FP8, device=device), scale

    def nbytes(self, rows: Sequence[int], K: int) -> int:
        """Bytes of weight and scale. A step of one token reads all of them."""
        return sum(rows) * K + 4 * torch.Size(self.scale_shape(rows, K)).numel()


class _Fp8Rows(LinearFormat):
    """e4m3 weights, one scale for each row."""

    name = "fp8"

    def scale_shape(self, rows: Sequence[int], K: int) -> tuple[int, ...]:
        return (sum(rows),)

    def quantize(self, source: Tensor, scale_rows: Tensor) -> Tensor:
        values, own = quantize_fp8(source)
        scale_rows.copy_(own)
        return values

    def store(self, source: Tensor, weight: Tensor, scale: Tensor, own: slice, scales: slice) -> None:
        if compute_capability(weight.device) >= (8, 9) and triton_installed() and not interpreting():
            from minirt.kernels.quantize import quantize  # one launch instead of a dozen, and no temporary bytes

            with on_device(weight.device):
                quantize(source, weight[own], scale[scales])
        else:
            super().store(source, weight, scale, own, scales)


@dataclass(frozen=True)
class QuantizedToFp8(_Fp8Rows):
    """`--fp8`: 16- or 32-bit weights in the checkpoint, quantized while they are loaded.

    The scale of a row is its largest magnitude divided by 448. Scales that minimize the error of the weights changed the error
    of the outputs by only about 2%, because the error of e4m3 is relative to each value. Only methods that use the layer's
    inputs could do better.
    """

    quantizes = True

    def tensors(self, module: str, rows: int, K: int) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{module}.weight", (rows, K), pieces=True)


@dataclass(frozen=True)
class StoredFp8(_Fp8Rows):
    """e4m3 weights in the checkpoint, with a scale for each row or, `per_tensor`, one for the whole weight.

    A scale for the whole weight is repeated for each of its rows, which gives the same numbers and lets the parts of a packed
    linear keep scales of their own.

    Attributes:
        scale: the last component of the scale's name.
    """

    per_tensor: bool = False
    scale: str = "weight_scale"

    def tensors(self, module: str, rows: int, K: int) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{module}.weight", (rows, K), (E4M3,), pieces=True)
        shape, also = ((1,), ((), (1, 1))) if self.per_tensor else ((rows, 1), ((rows,),))
        yield TensorSpec(f"{module}.{self.scale}", shape, also=also, positive=True)

    def load(
        self, what: str, source: Tensor, weight: Tensor, scale: Tensor, rows: Sequence[int], part: int, first: int = 0
    ) -> None:
        start = sum(rows[:part])
        if what == "weight":
            weight[start + first : start + first + source.shape[0]].copy_(source)
        else:
            scale[start : start + rows[part]].copy_(source.flatten())


@dataclass(frozen=True)
class StoredFp8Blocks(LinearFormat):
    """e4m3 weights in the checkpoint, with a scale for each block of 128 × 128 of each part. The last blocks may be smaller.

    The packed scale has a row for each g rows of weights: 128, or if parts do not begin at multiples of 128, the largest power of
    two that divides every beginning. Then the scales of a block stand in several rows.

    Attributes:
        scale: the last component of the scale's name.
    """

    name = "fp8 128x128"
    scale: str = "weight_scale_inv"  # in spite of its name, it multiplies

    def group_rows(self, rows: Sequence[int]) -> int:
        return gcd(FP8_BLOCK, *set(rows[:-1]))  # also divides the sums of rows, where parts begin

    def tensors(self, module: str, rows: int, K: int) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{module}.weight", (rows, K), (E4M3,), pieces=True)
        n, k = -(-rows // FP8_BLOCK), -(-K // FP8_BLOCK)
        yield TensorSpec(f"{module}.{self.scale}", (n, k), also=((n, 1, k, 1),), positive=True)

    def scale_shape(self, rows: Sequence[int], K: int) -> tuple[int, ...]:
        return -(-sum(rows) // self.group_rows(rows)), -(-K // FP8_BLOCK)

    def load(
        self, what: str, source: Tensor, weight: Tensor, scale: Tensor, rows: Sequence[int], part: int, first: int = 0
    ) -> None:
        start, own = sum(rows[:part]), rows[part]
        if what == "weight":
            weight[start + first : start + first + source.shape[0]].copy_(source)
            return
        g = self.group_rows(rows)
        table = source.flatten(1) if source.ndim == 2 else source[:, 0, :, 0]
        table = table.repeat_interleave(FP8_BLOCK // g, 0)[: -(-own // g)]
        scale[start // g : start // g + table.shape[0]].copy_(table)

    def quantize(self, source: Tensor, scale_rows: Tensor) -> Tensor:
        values, own = quantize_fp8_blocks(source, scale_rows.shape[0])
        scale_rows.copy_(own)
        return values


class _Int4(LinearFormat):
    """4-bit weights with a scale and a zero point for each row and group of columns, packed as in `reference.pack_int4`.

    Attributes:
        group: columns of a group: 32, 64 or 128.
    """

    name = "int4"
    capability = 8.0
    rounds_activations = False
    group: int

    def scale_shape(self, rows: Sequence[int], K: int) -> tuple[int, ...]:
        return -(-K // self.group), sum(rows)

    def allocate(self, rows: Sequence[int], K: int, device: torch.device) -> tuple[Tensor, Tensor]:
        words = torch.empty(sum(rows), self._words(K), dtype=torch.int16, device=device)
        return words, torch.zeros(self.scale_shape(rows, K), dtype=torch.int32, device=device)

    def nbytes(self, rows: Sequence[int], K: int) -> int:
        return 2 * sum(rows) * self._words(K) + 4 * torch.Size(self.scale_shape(rows, K)).numel()

    def quantize(self, source: Tensor, scale_rows: Tensor) -> Tensor:
        """The words of `source` [n, K]; writes their scale words, `scale_rows` [groups, n]."""
        codes, scale, zero = quantize_int4(source, self.group)
        scale_rows.copy_(pack_int4_scale(scale, zero))
        return pack_int4(codes)

    def store(self, source: Tensor, weight: Tensor, scale: Tensor, own: slice, scales: slice) -> None:
        weight[own] = self.quantize(source, scale[:, own])

    @staticmethod
    def _words(K: int) -> int:
        return -(-K // INT4_CHUNK) * (INT4_CHUNK // 4)


@dataclass(frozen=True)
class QuantizedToInt4(_Int4):
    """`--quantize int4`: 16- or 32-bit weights in the checkpoint, quantized while they are loaded.

    A scale and a zero point for each row and 128 columns, see `reference.quantize_int4`.
    """

    quantizes = True
    chunk = CHUNK // 2  # needs 14 temporary bytes per weight
    group: int = INT4_CHUNK

    def tensors(self, module: str, rows: int, K: int) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{module}.weight", (rows, K), pieces=True)


@dataclass(frozen=True)
class StoredInt4(_Int4):
    """4-bit weights in the checkpoint, repacked while they are loaded. Subclasses know a producer's tensors.

    Attributes:
        stored_group: columns of a group in the checkpoint; None: one group is a whole row. `group` is at most 128, because larger
            groups are kept as several equal ones.
        symmetric: whether all zero points are 8.
    """

    stored_group: int | None = INT4_CHUNK
    symmetric: bool = True

    @property
    def group(self) -> int:  # type: ignore[override]
        return min(self.stored_group or INT4_CHUNK, INT4_CHUNK)

    def _scales(self, name: str, shape: tuple[int, ...], also: tuple[tuple[int, ...], ...] = ()) -> TensorSpec:
        """The scales of a part. AutoRound writes negative ones of symmetric weights: the largest value of a group then has the
        code -8."""
        return TensorSpec(name, shape, also=also, positive=not self.symmetric, nonzero=self.symmetric)

    def stored_groups(self, K: int) -> int:
        """How many groups a row has in the checkpoint."""
        return 1 if self.stored_group is None else -(-K // self.stored_group)

    def _column_chunks(self, rows: int, K: int) -> Iterator[tuple[slice, slice]]:
        """(columns of a weight [rows, K], its words in memory), in pieces of about `chunk` weights. Pieces of a tensor that is
        stored transposed are contiguous, so the device never holds all of it."""
        step = max(1, self.chunk // rows // INT4_CHUNK) * INT4_CHUNK
        for first in range(0, K, step):
            stop = min(first + step, K)
            yield slice(first, stop), slice(first // 4, self._words(stop))

    def _place_scale(self, stored: Tensor, scale: Tensor, own: slice) -> None:
        """Write scales [n, stored groups] into the scale words. Each in-place operation changes only bits of its own, so threads
        may load scales and zero points in any order."""
        target = scale[:, own]
        target.bitwise_and_(15).bitwise_or_(pack_int4_scale(self._repeated(stored, scale), 0))
        if self.symmetric:
            target.bitwise_and_(-16).bitwise_or_(INT4_ZERO)

    def _place_zero(self, stored: Tensor, scale: Tensor, own: slice) -> None:
        """Write zero points [n, stored groups] from 0 to 15 into the scale words."""
        scale[:, own].bitwise_and_(-16).bitwise_or_(self._repeated(stored, scale).T.to(torch.int32))

    def _repeated(self, stored: Tensor, scale: Tensor) -> Tensor:
        repeats = scale.shape[0] if self.stored_group is None else max(1, self.stored_group // self.group)
        return stored.to(scale.device).repeat_interleave(repeats, 1)[:, : scale.shape[0]]


@dataclass(frozen=True)
class StoredInt4Packed(StoredInt4):
    """`pack-quantized` of compressed-tensors: words of eight neighbouring columns, the first in the lowest bits.

    Zero points are words of eight neighbouring rows.
    """

    def tensors(self, module: str, rows: int, K: int) -> Iterator[TensorSpec]:
        groups = self.stored_groups(K)
        yield TensorSpec(f"{module}.weight_packed", (rows, -(-K // 8)), (INT32,))
        yield self._scales(f"{module}.weight_scale", (rows, groups), also=((rows,),) if groups == 1 else ())
        yield TensorSpec(f"{module}.weight_shape", (2,), (INT64, INT32), values=(rows, K))
        if not self.symmetric:
            yield TensorSpec(f"{module}.weight_zero_point", (-(-rows // 8), groups), (INT32,))

    def load(
        self, what: str, source: Tensor, weight: Tensor, scale: Tensor, rows: Sequence[int], part: int, first: int = 0
    ) -> None:
        start, own = sum(rows[:part]), rows[part]
        if what == "weight_packed":
            for at, _ in self.chunks(0, own, (own,), 8 * source.shape[1]):
                codes = _nibbles(source[at].to(weight.device)).flatten(1)
                weight[start + at.start : start + at.stop] = pack_int4(codes)
        elif what == "weight_scale":
            self._place_scale(source.reshape(own, -1), scale, slice(start, start + own))
        elif what == "weight_zero_point":
            zeros = _nibbles(source).transpose(1, 2).flatten(0, 1)[:own]
            self._place_zero(zeros, scale, slice(start, start + own))


@dataclass(frozen=True)
class StoredInt4Gptq(StoredInt4):
    """GPTQ: words of eight neighbouring columns, stored transposed. Zero points are words of eight neighbouring rows.

    Attributes:
        zero_offset: what is added to a stored zero point: 1 in files of version 1, 0 in those of version 2.
        indices: whether there is a `g_idx`. Only the order of columns without `desc_act` is supported: the group of column k is
            k // g.
    """

    zero_offset: int = 1
    indices: bool = True

    def tensors(self, module: str, rows: int, K: int) -> Iterator[TensorSpec]:
        groups = self.stored_groups(K)
        yield TensorSpec(f"{module}.qweight", (-(-K // 8), rows), (INT32,))
        yield self._scales(f"{module}.scales", (groups, rows))
        yield TensorSpec(f"{module}.qzeros", (groups, -(-rows // 8)), (INT32,))
        if self.indices:
            yield TensorSpec(f"{module}.g_idx", (K,), (INT32, INT64))

    def load(
        self, what: str, source: Tensor, weight: Tensor, scale: Tensor, rows: Sequence[int], part: int, first: int = 0
    ) -> None:
        start, own = sum(rows[:part]), rows[part]
        if what == "qweight":
            for columns, words in self._column_chunks(own, 8 * source.shape[0]):
                codes = _nibbles(source[columns.start // 8 : columns.stop // 8].to(weight.device).T).flatten(1)
                weight[start : start + own, words] = pack_int4(codes)
        elif what == "scales":
            self._place_scale(source.T, scale, slice(start, start + own))
        elif what == "qzeros":
            zeros = _nibbles(source).flatten(1)[:, :own] + self.zero_offset
            if self.symmetric and (zeros != INT4_ZERO).any():
                what, expected = "zero points of symmetric weights", f"{INT4_ZERO - self.zero_offset} everywhere"
                found = f"{int((zeros != INT4_ZERO).sum())} other ones"
                hint = "config.json says sym: true; its checkpoint_format may be wrong"
                raise CheckpointError(what, expected=expected, found=found, hint=hint)
            if (zeros > 15).any():
                what, found = "zero points that writers of version 1 do not agree on", f"{int((zeros > 15).sum())} times 15"
                raise CheckpointError(what, expected="stored zero points from 0 to 14", found=found)
            self._place_zero(zeros.T, scale, slice(start, start + own))
        elif what == "g_idx":
            K = source.shape[0]
            if not torch.equal(source.long(), torch.arange(K, device=source.device) // (self.stored_group or K)):
                what, expected = "columns in the order of their activations are not supported", "g_idx[k] = k // group_size"
                raise CheckpointError(what, expected=expected, hint="quantize with desc_act: false")


_AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds its j-th row of the weight


@dataclass(frozen=True)
class StoredInt4Awq(StoredInt4):
    """AWQ, version "gemm": words of eight neighbouring rows of the weight, in an order of their own, stored transposed."""

    symmetric: bool = False

    def tensors(self, module: str, rows: int, K: int) -> Iterator[TensorSpec]:
        groups = self.stored_groups(K)
        yield TensorSpec(f"{module}.qweight", (K, -(-rows // 8)), (INT32,))
        yield self._scales(f"{module}.scales", (groups, rows))
        yield TensorSpec(f"{module}.qzeros", (groups, -(-rows // 8)), (INT32,))

    def load(
        self, what: str, source: Tensor, weight: Tensor, scale: Tensor, rows: Sequence[int], part: int, first: int = 0
    ) -> None:
        start, own = sum(rows[:part]), rows[part]
        if what == "qweight":
            for columns, words in self._column_chunks(own, source.shape[0]):
                codes = _nibbles(source[columns].to(weight.device))[:, :, _AWQ_COLUMNS].flatten(1)
                weight[start : start + own, words] = pack_int4(codes.T[:own])
        elif what == "scales":
            self._place_scale(source.T, scale, slice(start, start + own))
        elif what == "qzeros":
            zeros = _nibbles(source)[:, :, _AWQ_COLUMNS].flatten(1)[:, :own]
            self._place_zero(zeros.T, scale, slice(start, start + own))


def _nibbles(words: Tensor) -> Tensor:
    """int32 words [..., n] → [..., n, 8] uint8, the lowest four bits first."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).unflatten(-2, (-1, 4)).flatten(-2)


class FormatChoice(ABC):
    """Which linears of a model are quantized, and how.

    Attributes:
        checkpoint: the format of the checkpoint, for people; None: its weights are not quantized.
        notes: what a user should know of it.
        unused_scales: checkpoint tensors that are checked, and not used: scales of activations and of FP8 attention.
    """

    checkpoint: str | None = None
    notes: tuple[str, ...] = ()
    unused_scales: tuple[str, ...] = ()

    @abstractmethod
    def format_of(self, modules: Sequence[str], *, head: bool, tied: bool) -> LinearFormat | None:
        """The format of one parameter, None: the model's dtype.

        Args:
            modules: checkpoint prefixes of its parts.
            head: whether it belongs to the LM head. `tied`: the head uses the embedding's weights.
        """


_QUANTIZED: dict[str, LinearFormat] = {"fp8": QuantizedToFp8(), "int4": QuantizedToInt4()}
QUANTIZATIONS = tuple(_QUANTIZED)  # what `--quantize` takes


@dataclass(frozen=True)
class Quantization(FormatChoice):
    """Quantization while loading: every linear of the attention and MLP layers, and optionally the LM head.

    `head` None: FP8 covers the head unless it is tied to the embedding; 4 bits never do, as in other producers' checkpoints.
    Small models tie it, and rounding it harms SmolLM2-135M more than rounding all other linears
    (bench/results/cpu-fp8-quality.jsonl). A quantized copy of it would also take memory. `kept`: checkpoint prefixes of linears
    that keep the model's dtype, and `notes` why.
    """

    format: str
    head: bool | None = None
    kept: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.format not in _QUANTIZED:
            expected = " or ".join(_QUANTIZED)
            raise ConfigError("unknown quantization", where="quantization", expected=expected, found=repr(self.format))
        if not isinstance(self.head, bool | None):
            expected = "True, False or None"
            raise ConfigError("not an acceptable value", where="quantize_head", expected=expected, found=repr(self.head))

    def covers_head(self, tied: bool) -> bool:
        """Whether the LM head is quantized. `tied`: the head uses the embedding's weights."""
        return self.format == "fp8" and not tied if self.head is None else self.head

    def format_of(self, modules: Sequence[str], *, head: bool, tied: bool) -> LinearFormat | None:
        if not self.kept.isdisjoint(modules) or (head and not self.covers_head(tied)):
            return None
        return _QUANTIZED[self.format]

"""`LinearFormat`: a format of quantized linear weights. `FormatChoice`: which weights of a model have one.

A format belongs to a packed linear (`minirt.modeling.parameters.PackedLinear`). Kernels see only what it allocates: `weight`
and `scale`. FP8: a weight [N, K]; a scale [N] is one for each row, a scale [⌈N / g⌉, ⌈K / 128⌉] is one for each block of g rows
and 128 columns. 4 bits: packed words and scale words. See `reference.linear`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from minirt.device import compute_capability, interpreting, on_device, triton_installed
from minirt.errors import CheckpointError, ConfigError, UnsupportedError
from minirt.kernels import reference
from minirt.kernels.reference import FP8_BLOCK, INT4_CHUNK, INT4_ZERO, MX_GROUP, pack_int4, pack_int4_scale, pack_mxfp4_scale
from minirt.modeling.quantization_config import Scheme

FP8 = torch.float8_e4m3fn
CHUNK = 1 << 22  # weights quantized at a time; quantization to FP8 by PyTorch needs 9 temporary bytes per weight
FLOATS = ("F32", "F16", "BF16")  # names of dtypes in safetensors files
E4M3, INT32, INT64, UINT8 = "F8_E4M3", "I32", "I64", "U8"


class TensorSpec(NamedTuple):
    """A checkpoint tensor that fills a parameter.

    Attributes:
        shape: the usual shape. `also`: other shapes of the same values.
        dtypes: the dtypes that it may have, by their names in safetensors files.
        scale: "positive" or "nonzero": every value must be finite, and above 0 or not 0; None: they are not scales.
        values: the values that it must have; None: any.
        pieces: whether ranges of the first dimension may be loaded one by one.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    also: tuple[tuple[int, ...], ...] = ()
    scale: str | None = None
    values: tuple[int, ...] | None = None
    pieces: bool = False


class Axis(NamedTuple):
    """The dimension of a checkpoint tensor in which it has the rows or columns of a weight. An index stands for `group` of them,
    and a rank's share begins and ends at a multiple of `unit`; 0: of `group`."""

    dimension: int
    group: int = 1
    unit: int = 0

    def narrow(self, source: Tensor, start: int, count: int, whole: int, name: str) -> Tensor:
        """What a tensor of `whole` rows or columns has of `count`, from `start` on."""
        if source.shape[self.dimension] == 1 < whole:  # a scale of all
            return source
        first, size = self._place(start, count, whole, name)
        return source.narrow(self.dimension, first, size)

    def used(self, spec: TensorSpec, start: int, count: int, whole: int) -> tuple[int, int, int] | None:
        """The same as ranges of the tensor's values; see `Parameter.used`."""
        if spec.shape[self.dimension : self.dimension + 1] in ((), (1,)):
            return None
        first, size = self._place(start, count, whole, spec.name)
        inner = prod(spec.shape[self.dimension + 1 :])
        return first * inner, size * inner, spec.shape[self.dimension] * inner

    def _place(self, start: int, count: int, whole: int, name: str) -> tuple[int, int]:
        unit = self.unit or self.group
        if start % unit or (count % unit and start + count < whole):
            what, expected = f"a rank's {count} of {whole} rows or columns are not whole groups", f"a multiple of {unit}"
            raise UnsupportedError(what, where=name, expected=expected, found=count, hint="use another --tensor-parallel")
        return start // self.group, -(-count // self.group)


class PackedTensors(NamedTuple):
    """What is kept of a packed linear: `weight` and `scale` of its format, and the numbers of rows of its parts."""

    weight: Tensor
    scale: Tensor
    rows: Sequence[int]


@dataclass(frozen=True)
class LinearFormat(ABC):
    """How the weights of a packed linear are stored in a checkpoint and kept in memory.

    `rows` are the numbers of rows of the parts, from top to bottom; K is the number of columns.

    Attributes:
        name: as the plan shows it. Formats with one name have the same kernels, perhaps compiled for other dtypes of scales.
        capability: the lowest compute capability of its kernels; infinity: no Triton kernel computes it.
        rounds_activations: whether steps of several tokens round activations to e4m3.
        chunk: weights that are quantized or repacked at a time.
        unpacks: whether steps of more than `INT4_MAX_TOKENS` write a whole weight in the model's dtype, but on Hopper.
        whole_rows: whether the values of a row depend on all its columns, of which a shard may keep some.
    """

    name: ClassVar[str]
    capability: ClassVar[float] = 8.9
    rounds_activations: ClassVar[bool] = True
    chunk: ClassVar[int] = CHUNK
    unpacks: ClassVar[bool] = False
    whole_rows: ClassVar[bool] = False

    def tensors(self, module: str, rows: int, K: int) -> Iterator[TensorSpec]:
        """The checkpoint tensors of one part, its bias apart. `module`: the part's checkpoint prefix. The weight comes first. The
        default is a weight of 16 or 32 bits."""
        yield TensorSpec(f"{module}.weight", (rows, K), pieces=True)

    @abstractmethod
    def scale_shape(self, rows: Sequence[int], K: int) -> tuple[int, ...]:
        """The shape of the scale, which is fp32."""

    def group_rows(self, rows: Sequence[int]) -> int:
        """How many rows of the weight share a row of the scale."""
        return 1

    def axes(self, what: str) -> tuple[Axis | None, Axis | None]:
        """Where a checkpoint tensor has the rows of the weight, and its columns. `what`: the last component of its name."""
        return Axis(0), Axis(1)

    def load(self, what: str, source: Tensor, target: PackedTensors, place: slice, first: int = 0) -> None:
        """Copy a checkpoint tensor of one part into its rows. The default quantizes weights of 16 or 32 bits.

        Args:
            what: the last component of the tensor's name, such as "weight".
            source: the tensor, on any device, already checked against `tensors`.
            place: the rows of the part.
            first: the first row of `source` within the part; other than 0 only if the tensor's spec has `pieces`.
        """
        self.store_rows(source, target.weight, target.scale, target.rows, place.start + first)

    @abstractmethod
    def quantize(self, source: Tensor, scale_rows: Tensor) -> Tensor:
        """Quantize `source` [n, K], all rows of `scale_rows`; writes their scales, returns the values."""

    def store(self, source: Tensor, weight: Tensor, scale: Tensor, place: slice, scales: slice) -> None:
        """Quantize `source` [n, K] into the rows `place` of the weight and `scales` of the scale, a pair of `chunks`."""
        weight[place] = self.quantize(source, scale[scales])

    def store_rows(
        self, source: Tensor, weight: Tensor, scale: Tensor, rows: Sequence[int], start: int, columns: slice | None = None
    ) -> None:  # fmt: skip
        """Quantize `source` [n, K], on any device, into the rows from `start` on, a chunk at a time. `columns`: those of the
        result that are kept; None: all."""
        for place, scales in self.chunks(start, start + source.shape[0], rows, source.shape[1]):
            piece = source[place.start - start : place.stop - start].to(weight.device)
            if columns is None:
                self.store(piece, weight, scale, place, scales)
            else:
                weight[place] = self.quantize(piece, scale[scales])[:, columns]

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
        return sum(tensor.nbytes for tensor in self.allocate(rows, K, torch.device("meta")))


@dataclass(frozen=True)
class QuantizedToFp8(LinearFormat):
    """`--fp8`: e4m3 with a scale for each row; 16- or 32-bit weights in the checkpoint, quantized while they are loaded.

    The scale of a row is its largest magnitude divided by 448. Scales that minimize the error of the weights changed the error
    of the outputs by only about 2%, because the error of e4m3 is relative to each value. Only methods that use the layer's
    inputs could do better.
    """

    name = "fp8"
    whole_rows = True

    def scale_shape(self, rows: Sequence[int], K: int) -> tuple[int, ...]:
        return (sum(rows),)

    def quantize(self, source: Tensor, scale_rows: Tensor) -> Tensor:
        values, scales = reference.quantize_fp8(source)
        scale_rows.copy_(scales)
        return values

    def store(self, source: Tensor, weight: Tensor, scale: Tensor, place: slice, scales: slice) -> None:
        if compute_capability(weight.device) >= (8, 9) and triton_installed() and not interpreting():
            from minirt.kernels.quantize import quantize  # one launch instead of a dozen, and no temporary bytes

            with on_device(weight.device):
                quantize(source, weight[place], scale[scales])
        else:
            super().store(source, weight, scale, place, scales)


class _Stored(LinearFormat):
    """Values in the checkpoint as they are kept, with a scale that `place_scale` keeps."""

    def axes(self, what: str) -> tuple[Axis | None, Axis | None]:
        return Axis(0), Axis(1) if what == "weight" else None

    def load(self, what: str, source: Tensor, target: PackedTensors, place: slice, first: int = 0) -> None:
        if what == "weight":
            target.weight[place.start + first :][: source.shape[0]].copy_(source)
        else:
            self.place_scale(source, target.scale, target.rows, place)

    @abstractmethod
    def place_scale(self, source: Tensor, scale: Tensor, rows: Sequence[int], place: slice) -> None:
        """Copy a stored scale to that of the rows `place`, those of a part."""


@dataclass(frozen=True)
class StoredFp8(_Stored, QuantizedToFp8):
    """e4m3 weights in the checkpoint, with a scale for each row or, `per_tensor`, one for the whole weight.

    A scale for the whole weight is repeated for each of its rows. That gives the same numbers, and the parts of a packed linear
    may have different scales.

    Attributes:
        scale: the last component of the scale's name.
    """

    whole_rows = False
    per_tensor: bool = False
    scale: str = "weight_scale"

    def tensors(self, module: str, rows: int, K: int) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{module}.weight", (rows, K), (E4M3,), pieces=True)
        shape, also = ((1,), ((), (1, 1))) if self.per_tensor else ((rows, 1), ((rows,),))
        yield TensorSpec(f"{module}.{self.scale}", shape, also=also, scale="positive")

    def place_scale(self, source: Tensor, scale: Tensor, rows: Sequence[int], place: slice) -> None:
        scale[place].copy_(source.flatten())


@dataclass(frozen=True)
class StoredFp8Blocks(_Stored):
    """e4m3 weights in the checkpoint, with a scale for each block of 128 × 128 of each part. The last blocks may be smaller.

    The packed scale has a row for each g rows of weights: 128, or if parts do not begin at multiples of 128, the largest power of
    two that divides every beginning. Then the scales of a block stand in several rows.

    Attributes:
        scale: the last component of the scale's name.
    """

    name = "fp8 128x128"
    scale: str = "weight_scale_inv"  # in spite of its name, it multiplies

    def axes(self, what: str) -> tuple[Axis | None, Axis | None]:
        return super().axes(what) if what == "weight" else (Axis(0, FP8_BLOCK), Axis(1, FP8_BLOCK))

    def group_rows(self, rows: Sequence[int]) -> int:
        return gcd(FP8_BLOCK, *set(rows[:-1]))  # also divides the sums of rows, where parts begin

    def tensors(self, module: str, rows: int, K: int) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{module}.weight", (rows, K), (E4M3,), pieces=True)
        n, k = -(-rows // FP8_BLOCK), -(-K // FP8_BLOCK)
        yield TensorSpec(f"{module}.{self.scale}", (n, k), also=((n, 1, k, 1),), scale="positive")

    def scale_shape(self, rows: Sequence[int], K: int) -> tuple[int, ...]:
        return -(-sum(rows) // self.group_rows(rows)), -(-K // FP8_BLOCK)

    def place_scale(self, source: Tensor, scale: Tensor, rows: Sequence[int], place: slice) -> None:
        g = self.group_rows(rows)
        target = scale[place.start // g : -(-place.stop // g)]
        target.copy_(source.repeat_interleave(FP8_BLOCK // g, 0)[: target.shape[0]])

    def quantize(self, source: Tensor, scale_rows: Tensor) -> Tensor:
        values, scales = reference.quantize_fp8_blocks(source, scale_rows.shape[0])
        scale_rows.copy_(scales)
        return values


class _Int4(LinearFormat):
    """4-bit weights with a scale and a zero point for each row and group of columns, packed as in `reference.pack_int4`.

    Attributes:
        group: columns of a group: 32, 64 or 128.
        scale_dtype: of the scale words, see `reference.WORDS`.
    """

    name = "int4"
    capability = 8.0
    rounds_activations = False
    unpacks = True
    group: int
    scale_dtype: torch.dtype = torch.int32

    def axes(self, what: str) -> tuple[Axis | None, Axis | None]:
        return Axis(0), Axis(1, unit=self.group)

    def scale_shape(self, rows: Sequence[int], K: int) -> tuple[int, ...]:
        return -(-K // self.group), sum(rows)

    def allocate(self, rows: Sequence[int], K: int, device: torch.device) -> tuple[Tensor, Tensor]:
        words = torch.empty(sum(rows), -(-K // INT4_CHUNK) * (INT4_CHUNK // 4), dtype=torch.int16, device=device)
        return words, torch.zeros(self.scale_shape(rows, K), dtype=self.scale_dtype, device=device)

    def quantize(self, source: Tensor, scale_rows: Tensor) -> Tensor:
        """The words of `source` [n, K]; writes their scale words, `scale_rows` [groups, n]."""
        full = self.scale_dtype == torch.int32
        codes, scale, zero = reference.quantize_int4(source, self.group, None if full else self.scale_dtype)
        scale_rows.copy_(pack_int4_scale(scale, zero) if full else scale.T)
        return pack_int4(codes)

    def store(self, source: Tensor, weight: Tensor, scale: Tensor, place: slice, scales: slice) -> None:
        weight[place] = self.quantize(source, scale[:, place])


@dataclass(frozen=True)
class QuantizedToInt4(_Int4):
    """`--quantize int4`: 16- or 32-bit weights in the checkpoint, quantized while they are loaded.

    A scale and a zero point for each row and 128 columns, see `reference.quantize_int4`.
    """

    chunk = CHUNK // 2  # needs 14 temporary bytes per weight
    group: int = INT4_CHUNK


@dataclass(frozen=True)
class QuantizedToMxfp4(_Int4):
    """`--quantize mxfp4`: E2M1 with a power of two for each row and 32 columns, see `reference.quantize_mxfp4`."""

    name = "mxfp4"
    chunk = CHUNK // 8  # needs 60 temporary bytes per weight
    group: int = INT4_CHUNK  # columns of a scale word, which has four scales

    def axes(self, what: str) -> tuple[Axis | None, Axis | None]:
        return Axis(0), Axis(1, unit=MX_GROUP)

    def allocate(self, rows: Sequence[int], K: int, device: torch.device) -> tuple[Tensor, Tensor]:
        words, scale = super().allocate(rows, K, device)
        return words, scale.view(torch.uint32)

    def quantize(self, source: Tensor, scale_rows: Tensor) -> Tensor:
        words, scale = reference.quantize_weight(source, self.name)
        _copy_words(scale, scale_rows)
        return words


def _copy_words(words: Tensor, target: Tensor) -> None:
    target.view(torch.int32).copy_(words.view(torch.int32))  # PyTorch has few operations for uint32


@dataclass(frozen=True)
class StoredMxfp4(QuantizedToMxfp4):
    """MXFP4 experts in the checkpoint, repacked while they are loaded: tensors of all experts of a layer, see `PackedExperts`."""

    def of_experts(self, name: str, E: int, rows: int, K: int) -> Iterator[TensorSpec]:
        """A block is 32 columns, a byte two of them, the lower four bits first."""
        groups = -(-K // MX_GROUP)
        yield TensorSpec(f"{name}_blocks", (E, rows, groups, MX_GROUP // 2), (UINT8,), pieces=True)
        yield TensorSpec(f"{name}_scales", (E, rows, groups), (UINT8,), pieces=True)

    def load(self, what: str, source: Tensor, target: PackedTensors, place: slice, first: int = 0) -> None:
        """`what`: "blocks" or "scales", of the rows `place`."""
        if what == "blocks":
            pairs = source.flatten(1)
            target.weight[place] = pack_int4(torch.stack((pairs & 15, pairs >> 4), -1).flatten(1))
        elif (largest := int(source.max())) > reference.MX_LARGEST:
            raise CheckpointError("a scale above 2^63, or NaN", expected=f"bytes up to {reference.MX_LARGEST}", found=largest)
        else:
            _copy_words(pack_mxfp4_scale(source), target.scale[:, place])


@dataclass(frozen=True)
class StoredInt4(_Int4):
    """4-bit weights in the checkpoint, repacked while they are loaded.

    Attributes:
        scheme: what the checkpoint's tensors are.
        has_indices: whether the checkpoint has the tensor `scheme.layout.indices_name`. Only the order of columns without
            `desc_act` is supported: the group of column k is k // g.
        scale_dtype: of symmetric weights, that of all stored scales if it has 16 bits.
    """

    scheme: Scheme
    has_indices: bool = False
    scale_dtype: torch.dtype = torch.int32

    @property
    def group(self) -> int:  # type: ignore[override]
        """At most 128: larger groups are kept as several equal ones."""
        return min(self.scheme.group or INT4_CHUNK, INT4_CHUNK)

    def tensors(self, module: str, rows: int, K: int) -> Iterator[TensorSpec]:
        """AutoRound writes negative scales of symmetric weights: the largest value of a group then has the code -8."""
        layout, symmetric = self.scheme.layout, self.scheme.symmetric
        groups = 1 if self.scheme.group is None else -(-K // self.scheme.group)
        words = (-(-rows // 8), K) if layout.by_rows else (rows, -(-K // 8))

        def stored(shape: tuple[int, int]) -> tuple[int, ...]:
            return shape[::-1] if layout.transposed else shape

        yield TensorSpec(f"{module}.{layout.value_name}", stored(words), (INT32,))
        also = ((rows,),) if groups == 1 and not layout.transposed else ()
        sign = "nonzero" if symmetric else "positive"
        yield TensorSpec(f"{module}.{layout.scale_name}", stored((rows, groups)), also=also, scale=sign)
        if layout.shape_name is not None:
            yield TensorSpec(f"{module}.{layout.shape_name}", (2,), (INT64, INT32), values=(rows, K))
        if layout.symmetric_zeros or not symmetric:
            yield TensorSpec(f"{module}.{layout.zero_name}", stored((-(-rows // 8), groups)), (INT32,))
        if self.has_indices:
            yield TensorSpec(f"{module}.{layout.indices_name}", (K,), (INT32, INT64))

    def axes(self, what: str) -> tuple[Axis | None, Axis | None]:
        layout, group = self.scheme.layout, max(self.group, self.scheme.group or 0)
        if what in (layout.shape_name, layout.indices_name):
            return None, None
        rows, columns = (8, group) if what == layout.zero_name else (1, group)
        if what == layout.value_name:
            rows, columns = (8, 1) if layout.by_rows else (1, 8)
        return Axis(int(layout.transposed), rows), Axis(int(not layout.transposed), columns, group)

    def load(self, what: str, source: Tensor, target: PackedTensors, place: slice, first: int = 0) -> None:
        layout, rows = self.scheme.layout, place.stop - place.start
        if what == layout.value_name:
            self._place_codes(source, target.weight, place)
        elif what == layout.scale_name:
            self._place_scale(source.T if layout.transposed else source.reshape(rows, -1), target.scale[:, place])
        elif what == layout.zero_name:
            self._place_zero(self._values(source, by_rows=True)[:rows] + self.scheme.zero_offset, target.scale[:, place])
        elif what == layout.indices_name:
            K = source.shape[0]
            if not torch.equal(source.long(), torch.arange(K, device=source.device) // (self.scheme.group or K)):
                what, expected = "columns in the order of their activations are not supported", "g_idx[k] = k // group_size"
                raise CheckpointError(what, expected=expected, hint="quantize with desc_act: false")

    def _values(self, words: Tensor, by_rows: bool) -> Tensor:
        """Stored int32 words as their values [rows, columns], uint8. The lowest four bits of a word come first."""
        layout, pairs = self.scheme.layout, words.contiguous().view(torch.uint8)
        values = torch.stack((pairs & 15, pairs >> 4), -1).unflatten(-2, (-1, 4)).flatten(-2)
        if layout.transposed:
            values = values.transpose(0, 1)
        if layout.nibbles is not None:
            values = values[..., layout.nibbles]
        return values.transpose(1, 2).flatten(0, 1) if by_rows else values.flatten(1)

    def _place_codes(self, source: Tensor, weight: Tensor, place: slice) -> None:
        """Repack the words of the rows `place`, in pieces of about `chunk` weights along the first dimension of `source`. Those
        are contiguous, so the device never holds all of a tensor that is stored transposed."""
        layout, rows = self.scheme.layout, place.stop - place.start
        columns = 1 if layout.by_rows else 8  # of a word
        if layout.transposed:
            step = max(1, self.chunk // rows // INT4_CHUNK) * INT4_CHUNK // columns
        else:
            step = max(1, self.chunk // (columns * source.shape[1]))
        for first in range(0, source.shape[0], step):
            codes = self._values(source[first : first + step].to(weight.device), layout.by_rows)
            if layout.transposed:
                packed, begin = pack_int4(codes[:rows]), first * columns // 4
                weight[place, begin : begin + packed.shape[1]] = packed
            else:
                weight[place.start + first : place.start + first + codes.shape[0]] = pack_int4(codes)

    def _place_scale(self, stored: Tensor, words: Tensor) -> None:
        """Write scales [n, stored groups] into scale words. Each in-place operation changes only its bits, so threads may load
        scales and zero points in any order."""
        if words.dtype != torch.int32:
            words.copy_(self._repeated(stored, words).T)
            return
        words.bitwise_and_(15).bitwise_or_(pack_int4_scale(self._repeated(stored, words), 0))
        if self.scheme.symmetric:
            words.bitwise_and_(-16).bitwise_or_(INT4_ZERO)

    def _place_zero(self, zeros: Tensor, words: Tensor) -> None:
        """Write zero points [n, stored groups] from 0 to 15 into scale words."""
        if self.scheme.symmetric and (zeros != INT4_ZERO).any():
            what, expected = "zero points of symmetric weights", f"{INT4_ZERO - self.scheme.zero_offset} everywhere"
            hint = "config.json says sym: true; its checkpoint_format may be wrong"
            raise CheckpointError(what, expected=expected, found=f"{int((zeros != INT4_ZERO).sum())} other ones", hint=hint)
        if (zeros > 15).any():
            what, times = "zero points that writers of version 1 do not agree on", f"{int((zeros > 15).sum())} times 15"
            raise CheckpointError(what, expected="stored zero points from 0 to 14", found=times)
        if words.dtype == torch.int32:
            words.bitwise_and_(-16).bitwise_or_(self._repeated(zeros, words).T.to(torch.int32))

    def _repeated(self, stored: Tensor, words: Tensor) -> Tensor:
        """Values [n, stored groups] as [n, groups], on the device of `words` [groups, n]."""
        group = self.scheme.group
        repeats = words.shape[0] if group is None else max(1, group // self.group)
        return stored.to(words.device).repeat_interleave(repeats, 1)[:, : words.shape[0]]


@dataclass(frozen=True, kw_only=True)
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


_QUANTIZED: dict[str, LinearFormat] = {"fp8": QuantizedToFp8(), "int4": QuantizedToInt4(), "mxfp4": QuantizedToMxfp4()}


@dataclass(frozen=True)
class Quantization(FormatChoice):
    """Quantization while loading: every linear of the attention and MLP layers, and optionally the LM head.

    `head` None: FP8 covers the head unless it is tied to the embedding; 4 bits never do, as in other producers' checkpoints.
    Small models tie it, and rounding it harms SmolLM2-135M more than rounding all other linears
    (bench/results/cpu-fp8-quality.jsonl). A quantized copy of it would also take memory. `unquantized`: checkpoint prefixes of
    linears that keep the model's dtype, and `notes` why.
    """

    format: str
    head: bool | None = None
    unquantized: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.format not in _QUANTIZED:
            expected = " or ".join(_QUANTIZED)
            raise ConfigError("unknown quantization", where="quantization", expected=expected, found=repr(self.format))
        if not isinstance(self.head, bool | None):
            expected = "True, False or None"
            raise ConfigError("not an acceptable value", where="quantize_head", expected=expected, found=repr(self.head))

    def format_of(self, modules: Sequence[str], *, head: bool, tied: bool) -> LinearFormat | None:
        covers_head = self.format == "fp8" and not tied if self.head is None else self.head
        return None if (head and not covers_head) or not self.unquantized.isdisjoint(modules) else _QUANTIZED[self.format]

"""`LinearFormat`: a format of quantized linear weights. `FormatChoice`: which weights of a model have one.

A format belongs to a packed linear (`minirt.modeling.parameters.PackedLinear`). Kernels see only what it allocates: `weight`
[N, K] and `scale`. A scale [N] is one for each row. A scale [⌈N / g⌉, ⌈K / 128⌉] is one for each block of g rows and 128 columns,
see `reference.linear`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from minirt.errors import ConfigError
from minirt.kernels.reference import FP8_BLOCK, quantize_fp8, quantize_fp8_blocks

FP8 = torch.float8_e4m3fn
CHUNK = 1 << 22  # weights quantized at a time; quantization needs 9 temporary bytes per weight
FLOATS = ("F32", "F16", "BF16")  # names of dtypes in safetensors files
E4M3 = "F8_E4M3"


class TensorSpec(NamedTuple):
    """A checkpoint tensor that fills a parameter.

    Attributes:
        shape: the usual shape. `also`: other shapes of the same values.
        dtypes: the dtypes that it may have, by their names in safetensors files.
        positive: whether every value must be finite and above 0, as in a scale.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    also: tuple[tuple[int, ...], ...] = ()
    positive: bool = False


@dataclass(frozen=True)
class LinearFormat(ABC):
    """How the weights of a packed linear are stored in a checkpoint and kept in memory.

    `rows` are the numbers of rows of the parts, from top to bottom; K is the number of columns.

    Attributes:
        name: as the plan shows it. Formats with one name have the same memory and the same kernels.
        no_triton: why no Triton kernel computes it; None: the kernels do.
    """

    name: ClassVar[str]
    no_triton: ClassVar[str | None] = None

    @abstractmethod
    def tensors(self, module: str, rows: int, K: int) -> Iterator[TensorSpec]:
        """The checkpoint tensors of one part, its bias apart. `module`: the part's checkpoint prefix. The weight comes first."""

    @abstractmethod
    def scale_shape(self, rows: Sequence[int], K: int) -> tuple[int, ...]:
        """The shape of the scale, which is fp32."""

    def group_rows(self, rows: Sequence[int]) -> int:
        """How many rows of the weight share a row of the scale."""
        return 1

    @abstractmethod
    def load(self, what: str, source: Tensor, weight: Tensor, scale: Tensor, rows: Sequence[int], part: int) -> None:
        """Copy a checkpoint tensor of one part into its rows.

        Args:
            what: the last component of the tensor's name, such as "weight".
            source: the tensor, on any device, already checked against `tensors`.
            weight, scale: those of the packed linear.
            part: which part, an index of `rows`.
        """

    @abstractmethod
    def quantize(self, source: Tensor, scale_rows: Tensor) -> Tensor:
        """Quantize `source` [n, K], all rows of `scale_rows`; writes their scales, returns the values."""

    def chunks(self, first: int, stop: int, rows: Sequence[int], K: int) -> Iterator[tuple[slice, slice]]:
        """(rows of the weight, rows of the scale), in pieces of about CHUNK weights that cover the rows `first` to `stop`."""
        g = self.group_rows(rows)
        step = max(1, CHUNK // K // g) * g
        for start in range(first, stop, step):
            end = min(start + step, stop)
            yield slice(start, end), slice(start // g, -(-end // g))

    def allocate(self, rows: Sequence[int], K: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Uninitialized weight and scale."""
        return torch.empty(sum(rows), K, device=device, dtype=FP8), torch.empty(self.scale_shape(rows, K), device=device)

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


@dataclass(frozen=True)
class QuantizedToFp8(_Fp8Rows):
    """`--fp8`: 16- or 32-bit weights in the checkpoint, quantized while they are loaded.

    The scale of a row is its largest magnitude divided by 448. Scales that minimize the error of the weights changed the error
    of the outputs by only about 2%, because the error of e4m3 is relative to each value. Only methods that use the layer's
    inputs could do better.
    """

    def tensors(self, module: str, rows: int, K: int) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{module}.weight", (rows, K))

    def load(self, what: str, source: Tensor, weight: Tensor, scale: Tensor, rows: Sequence[int], part: int) -> None:
        start = sum(rows[:part])
        for own, scales in self.chunks(start, start + rows[part], rows, source.shape[1]):
            weight[own] = self.quantize(source[own.start - start : own.stop - start].to(weight.device), scale[scales])


@dataclass(frozen=True)
class StoredFp8(_Fp8Rows):
    """e4m3 weights in the checkpoint, with a scale for each row or, `per_tensor`, one for the whole weight.

    A scale for the whole weight is repeated for each of its rows, which gives the same numbers and lets the parts of a packed
    linear keep scales of their own.
    """

    per_tensor: bool = False

    def tensors(self, module: str, rows: int, K: int) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{module}.weight", (rows, K), (E4M3,))
        shape, also = ((1,), ((), (1, 1))) if self.per_tensor else ((rows, 1), ((rows,),))
        yield TensorSpec(f"{module}.weight_scale", shape, also=also, positive=True)

    def load(self, what: str, source: Tensor, weight: Tensor, scale: Tensor, rows: Sequence[int], part: int) -> None:
        start = sum(rows[:part])
        own = slice(start, start + rows[part])
        if what == "weight":
            weight[own].copy_(source)
        else:
            scale[own].copy_(source.flatten())


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
        starts = [sum(rows[:part]) for part in range(1, len(rows))]
        return gcd(FP8_BLOCK, *starts)

    def tensors(self, module: str, rows: int, K: int) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{module}.weight", (rows, K), (E4M3,))
        n, k = -(-rows // FP8_BLOCK), -(-K // FP8_BLOCK)
        yield TensorSpec(f"{module}.{self.scale}", (n, k), also=((n, 1, k, 1),), positive=True)

    def scale_shape(self, rows: Sequence[int], K: int) -> tuple[int, ...]:
        return -(-sum(rows) // self.group_rows(rows)), -(-K // FP8_BLOCK)

    def load(self, what: str, source: Tensor, weight: Tensor, scale: Tensor, rows: Sequence[int], part: int) -> None:
        start, own = sum(rows[:part]), rows[part]
        if what == "weight":
            weight[start : start + own].copy_(source)
            return
        g = self.group_rows(rows)
        table = source.flatten(1) if source.ndim == 2 else source[:, 0, :, 0]
        table = table.repeat_interleave(FP8_BLOCK // g, 0)[: -(-own // g)]
        scale[start // g : start // g + table.shape[0]].copy_(table)

    def quantize(self, source: Tensor, scale_rows: Tensor) -> Tensor:
        values, own = quantize_fp8_blocks(source, scale_rows.shape[0])
        scale_rows.copy_(own)
        return values


class FormatChoice(ABC):
    """Which linears of a model are quantized, and how.

    Attributes:
        checkpoint: the format of the checkpoint, for people; None: its weights are not quantized.
        notes: what a user should know of it.
        unused_scales: checkpoint tensors that are checked, and not used: scales of activations and of the KV cache.
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


@dataclass(frozen=True)
class Quantization(FormatChoice):
    """Quantization while loading: every linear of the attention and MLP layers, and optionally the LM head.

    `head` None quantizes the head unless it is tied to the embedding; a tied head stays in 16 bits. Small models tie it, and
    rounding it harms SmolLM2-135M more than rounding all other linears (bench/results/cpu-fp8-quality.jsonl). A quantized
    copy of it would also take memory.
    """

    format: str
    head: bool | None = None

    def __post_init__(self) -> None:
        if self.format != "fp8":
            raise ConfigError("unknown quantization", where="quantization", expected="fp8", found=repr(self.format))
        if not isinstance(self.head, bool | None):
            expected = "True, False or None"
            raise ConfigError("not an acceptable value", where="quantize_head", expected=expected, found=repr(self.head))

    def covers_head(self, tied: bool) -> bool:
        """Whether the LM head is quantized. `tied`: the head uses the embedding's weights."""
        return not tied if self.head is None else self.head

    def format_of(self, modules: Sequence[str], *, head: bool, tied: bool) -> LinearFormat | None:
        return None if head and not self.covers_head(tied) else QuantizedToFp8()

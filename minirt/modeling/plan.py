"""`Plan`: which implementation each layer runs, and why. `parse_impl` reads the `--impl` choices that decide it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minirt.errors import UnsupportedError


@dataclass(frozen=True)
class PlanRow:
    """How one layer runs.

    `dtype` is the dtype of the activations, `formats` are those of quantized weights. `bytes` is the size of the layer's weights;
    weights that several layers share count for the first of them. `capturable`: whether a CUDA graph can hold the layer.
    """

    layer: str
    kind: str
    implementation: str
    reason: str
    dtype: str
    formats: tuple[str, ...]
    bytes: int
    capturable: bool

    @property
    def dtypes(self) -> str:
        """As printed: "bfloat16 · fp8"."""
        return " · ".join((self.dtype, *self.formats))


@dataclass(frozen=True)
class Plan:
    """One row per layer, in execution order.

    `not_capturable` is the reason why no step of the model can run as a CUDA graph, or None if small steps can. `checkpoint` is
    the quantized format of the checkpoint, None if its weights are not quantized; `notes` say what differs from that format.
    """

    rows: tuple[PlanRow, ...]
    device: str
    not_capturable: str | None
    checkpoint: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of quantized weights, each once."""
        return tuple(sorted({name for row in self.rows for name in row.formats}))

    @property
    def weight_bytes(self) -> int:
        return sum(row.bytes for row in self.rows)


def not_capturable(rows: Sequence[PlanRow], device: str) -> str | None:
    """Why steps through these layers cannot run as CUDA graphs, or None if they can."""
    if not device.startswith("cuda"):
        return f"the device is {device}"
    blocking = [row for row in rows if not row.capturable]
    if not blocking:
        return None if any(row.implementation == "triton" for row in rows) else "no layer runs on Triton"
    first, more = blocking[0], len(blocking) - 1
    others = f" ({more} more layer{'s' * (more > 1)} like it)" if more else ""
    return f"{first.layer} runs as {first.implementation!r}, which is not registered as capturable{others}"


def parse_impl(impl: str | Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Split implementation choices into (default, [(glob, name), …]). Later rules take precedence.

    Args:
        impl: "auto", "eager", "triton" or a registered name, for all layers; or 'glob=name', for the layers whose names
            match; or a sequence of these.
    Raises:
        UnsupportedError: a choice is malformed, or there are two different defaults.
    """
    default, rules = "auto", []
    chosen = False
    items = [impl] if isinstance(impl, str) else list(impl) if isinstance(impl, Iterable) else [impl]
    for item in items:
        if not isinstance(item, str):
            expected = "a string, or a sequence of strings"
            raise UnsupportedError("not an implementation choice", where="impl", expected=expected, found=type(item).__name__)
        pattern, equals, name = item.rpartition("=")
        if not name or (equals and not pattern):
            raise UnsupportedError(
                "not an implementation choice", where=f"--impl {item!r}", expected="NAME or GLOB=NAME"
            )
        if equals:
            rules.append((pattern, name))
        elif chosen and name != default:
            raise UnsupportedError("two different defaults", where="--impl", found=f"{default} and {name}", hint="use GLOB=NAME")
        else:
            default, chosen = name, True
    return default, rules

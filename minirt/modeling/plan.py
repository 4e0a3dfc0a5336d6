"""`Plan`: which implementation each layer runs, and why. `parse_impl` reads the `--impl` choices that decide it."""

from collections.abc import Sequence
from dataclasses import dataclass

from minirt.errors import UnsupportedError


@dataclass(frozen=True)
class PlanRow:
    """How one layer runs. `dtype` is the activations', with the format of quantized weights; `bytes` counts the layer's own
    weights; a shared holder counts where it stands first."""

    layer: str
    kind: str
    implementation: str
    reason: str
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Plan:
    """One row a layer, in the order of execution."""

    rows: tuple[PlanRow, ...]
    device: str

    @property
    def weight_bytes(self) -> int:
        return sum(row.bytes for row in self.rows)


def parse_impl(impl: str | Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Split implementation choices into the default and the (glob, name) rules, later rules winning.

    Args:
        impl: "auto" | "eager" | "triton" | a registered name, for all layers; or 'glob=name' for the layers whose name
            matches; or a sequence of these.
    """
    default, rules = "auto", []
    chosen = False
    for item in [impl] if isinstance(impl, str) else impl:
        pattern, equals, name = item.rpartition("=")
        if not name or (equals and not pattern):
            raise UnsupportedError(
                "not an implementation choice", where=f"--impl {item!r}", expected="NAME or GLOB=NAME"
            )
        if equals:
            rules.append((pattern, name))
        elif chosen and name != default:
            raise UnsupportedError("two defaults", where="--impl", found=f"{default} and {name}", hint="use GLOB=NAME")
        else:
            default, chosen = name, True
    return default, rules

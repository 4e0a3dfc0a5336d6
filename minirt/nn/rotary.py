"""`RotaryEmbedding`: cosines and sines of positions, as transformers' rotary modules compute them."""

from typing import Self

import torch
from torch import Tensor, nn

from minirt.errors import InputError, UnsupportedError

_BY_LENGTH = ("dynamic", "longrope")  # rope types whose frequencies depend on the length of the sequence


class RotaryEmbedding(nn.Module):
    """The cosines and sines of the rotary embedding (Su et al. 2021), for `apply_rotary`. It has no parameters.

    Args:
        inv_freq: [D / 2] fp32, the angle per position of each pair of channels, in radians.
        attention_scaling: factor of cosines and sines; 1 except for yarn.
    Raises:
        InputError: `inv_freq` has another shape or dtype.
    """

    inv_freq: Tensor

    def __init__(self, inv_freq: Tensor, attention_scaling: float = 1.0) -> None:
        super().__init__()
        if inv_freq.ndim != 1 or inv_freq.dtype != torch.float32:
            found = f"{inv_freq.dtype} {list(inv_freq.shape)}"
            raise InputError("wrong tensor", where="inv_freq", expected="float32 [any]", found=found)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.attention_scaling = float(attention_scaling)

    @classmethod
    def from_module(cls, module: nn.Module) -> Self:
        """The table of transformers' `LlamaRotaryEmbedding` and its relatives; shares their frequencies.

        Raises:
            InputError: `module` has no `inv_freq` [D / 2].
            UnsupportedError: its frequencies depend on the length of the sequence (rope types dynamic and longrope).
        """
        kind, inv_freq = getattr(module, "rope_type", "default"), getattr(module, "inv_freq", None)
        if kind in _BY_LENGTH:
            what = "the frequencies of this rope type depend on the length of the sequence"
            raise UnsupportedError(what, where="module.rope_type", found=kind, hint="keep transformers' module")
        if not isinstance(inv_freq, Tensor):
            raise InputError("not a rotary embedding with inv_freq", where="module", found=type(module).__name__)
        return cls(inv_freq.float(), getattr(module, "attention_scaling", 1.0))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, T, D] of x's dtype and device, for positions [B, T]. x's values are not used."""
        if position_ids.ndim != 2:
            raise InputError("wrong shape", where="position_ids", expected="[B, T]", found=list(position_ids.shape))
        # The fp32 product, then cosine and sine, and one rounding: as in transformers
        angles = position_ids[..., None].float() * self.inv_freq.to(x.device, torch.float32)
        cos, sin = (part.repeat(1, 1, 2) * self.attention_scaling for part in (angles.cos(), angles.sin()))
        return cos.to(x.dtype), sin.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{2 * self.inv_freq.shape[0]}, attention_scaling={self.attention_scaling}"

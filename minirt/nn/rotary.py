"""`RotaryEmbedding`: cosines and sines of positions, as transformers' rotary modules compute them."""

from typing import Self

import torch
from torch import Tensor, nn

from minirt.errors import InputError, UnsupportedError
from minirt.nn.norm import Device, check_sizes

_BY_LENGTH = ("dynamic", "longrope")  # rope types whose frequencies depend on the length of the sequence


class RotaryEmbedding(nn.Module):
    """The cosines and sines of the rotary embedding (Su et al. 2021), for `apply_rotary`. It has no parameters.

    Args:
        head_dim: D, the channels of a head that are rotated; even.
        theta: the base of the frequencies, `rope_theta` of config.json.
        device: that of the frequencies.
    Raises:
        InputError: `head_dim` is not even.
    """

    inv_freq: Tensor  # [D / 2] fp32, the angle per position of each pair of channels, in radians
    attention_scaling = 1.0  # factor of cosines and sines; another one only for yarn

    def __init__(self, head_dim: int, theta: float = 10000.0, *, device: Device = None) -> None:
        super().__init__()
        check_sizes(head_dim=head_dim)
        if head_dim % 2:
            what, expected = "rotary embedding rotates pairs of channels", "an even number"
            raise InputError(what, where="head_dim", expected=expected, found=head_dim)
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
        self.register_buffer("inv_freq", 1.0 / theta**exponents, persistent=False)

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
        if not isinstance(inv_freq, Tensor) or inv_freq.ndim != 1:
            raise InputError("not a rotary embedding with inv_freq [D / 2]", where="module", found=type(module).__name__)
        rotary = cls(2 * inv_freq.shape[0], device="meta")
        rotary.inv_freq, rotary.attention_scaling = inv_freq.float(), float(getattr(module, "attention_scaling", 1.0))
        return rotary

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

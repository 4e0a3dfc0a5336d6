"""Philox-4x32-10, the sampler's counter-based random generator: the PyTorch reference of Triton's `tl.philox`.

Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). PyTorch has no uint32
arithmetic, so every 32-bit word is kept in an int64.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_2 = 0xD2511F53, 0xCD9E8D57  # of counter words 0 and 2
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85  # added to the key words after each round
_ROUNDS = 10


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for each key and counter, bit for bit those of `tl.philox(seed, c0, c1, c2, c3)`.

    Args:
        seed: int64, the bit pattern of the 64-bit key (low word = key word 0).
        c0, c1, c2, c3: int64; only the low 32 bits count. All arguments broadcast together.

    Returns:
        Four int64 tensors of the broadcast shape, with values 0 … 2³² - 1.
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c2 = c0 & _MASK, c2 & _MASK
    for _ in range(_ROUNDS):
        # A product may exceed 2⁶³ and wrap; its 64 bits are still right. The mask removes the sign bits that the arithmetic
        # shift brings in. c1, c3 and the key enter only through that masked xor, so their high halves need no mask.
        product_0, product_2 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_2
        c0 = ((product_2 >> 32) ^ (c1 ^ k0)) & _MASK
        c2 = ((product_0 >> 32) ^ (c3 ^ k1)) & _MASK
        c1, c3 = product_2, product_0
        k0, k1 = k0 + _WEYL_0, k1 + _WEYL_1
    return c0, c1 & _MASK, c2, c3 & _MASK


def uniform(word: Tensor) -> Tensor:
    """Random words (int64, 0 … 2³² - 1) → fp32 u in [2⁻³³, 1 - 2⁻²⁴], never 0 and never 1.

    u = min(fp32(word) · 2⁻³² + 2⁻³³, 1 - 2⁻²⁴), each step in fp32, rounded to nearest even. The product is exact (a
    power of two), so a compiler that contracts it and the sum into one FMA gets the same bits. Small u are not rounded
    at all: below 2⁻⁹ they are odd multiples of 2⁻³³.
    """
    return (word.to(torch.float32) * 2.0**-32 + 2.0**-33).clamp_(max=1 - 2.0**-24)

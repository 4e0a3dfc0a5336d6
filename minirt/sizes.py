"""Sizes in bytes as text, in the form that options take: "4GiB". `ranges`: several numbers."""

import math
import re
from collections.abc import Sequence
from itertools import pairwise

from minirt.errors import InputError

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str, least: int = 1) -> int:
    """"512MiB", "4GB", "1000000" → bytes; KiB, MiB, GiB are powers of 1024, kB, MB, GB (and k, M, G) of 1000.

    Raises:
        InputError: not a size, or less than `least` bytes.
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([kmgt]?)(i?)b?", text.strip().lower())
    value = int(float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2]]) if match else -1
    if value < least:
        raise InputError(f"{text!r} is not a size; an example is 4GiB")
    return value


def format_size(count: int, *, up: bool = False) -> str:
    """4294967296 → "4GiB", with at most two decimals; `up`: rounded up, for a size that has to be enough."""
    exponent = min(4, max(0, (count.bit_length() - 1) // 10))
    value = count / 1024**exponent
    value = math.ceil(value * 100) / 100 if up else value
    number = f"{value:.2f}".rstrip("0").rstrip(".")
    return number + ("B" if exponent == 0 else "KMGT"[exponent - 1] + "iB")


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] → "0-2,5". Of many equal runs at equal distances the first two and the last: "3,7,…,63"."""
    ordered = sorted(set(numbers))
    firsts, lasts = ([n for n in ordered if n + step not in ordered] for step in (-1, 1))
    runs = list(zip(firsts, lasts, strict=True))
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    steps = {(after[0] - run[0], after[1] - run[1]) for run, after in pairwise(runs)}  # equal runs: both are the same
    if len(runs) > 3 and len(steps) == 1 and all(first == last for first, last in steps):
        texts = [*texts[:2], "…", texts[-1]]
    return ",".join(texts)

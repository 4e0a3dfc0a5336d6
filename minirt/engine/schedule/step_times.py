"""How long steps take: measured at warm-up on a GPU, learned from the steps that have run on a CPU."""

import math
from typing import NamedTuple

import numpy as np

from minirt.engine.buckets import Bucket, Buckets


class PromptTime(NamedTuple):
    """A prompt's token takes `token_s` seconds, plus `context_s` for each token before it.

    (The cost of linear layers is the same for every token, that of attention grows with the tokens before it.)
    """

    token_s: float
    context_s: float = 0.0

    def seconds(self, start: int, tokens: int) -> float:
        """Seconds for `tokens` prompt tokens, the first at position `start`."""
        return tokens * (self.token_s + self.context_s * (start + tokens / 2))

    def tokens(self, start: int, seconds: float) -> int:
        """Number of prompt tokens from `start` that fit in `seconds`."""
        each = self.token_s + self.context_s * start
        return int(2 * seconds / (each + math.sqrt(each * each + 2 * self.context_s * seconds))) if seconds > 0 else 0


class OnlineStepTimes:
    """Step times from the steps that have run: a line over the number of tokens, fitted with less weight on older steps.

    For a CPU, where a step has ended when `start` returns.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of 1, tokens, tokens², seconds, tokens · seconds

    def observe(self, tokens: int, seconds: float) -> None:
        """A step with `tokens` tokens took `seconds`."""
        self._sums = 0.98 * self._sums + (1, tokens, tokens * tokens, seconds, tokens * seconds)

    def seconds(self, seqs: int, tokens: int) -> float | None:
        """Seconds for a step of `seqs` sequences that decode `tokens` tokens, or None if unknown."""
        count, x, xx, y, xy = self._sums.tolist()
        spread = count * xx - x * x
        # Nearly all steps had the same size: the weight of the others is too small for a line.
        if spread <= 1e-2 * count * count:
            return y / count if count and round(x / count) == tokens else None
        slope = max(0.0, (count * xy - x * y) / spread)
        return max(1e-9, (y - slope * x) / count + slope * tokens)


class GraphTimes(NamedTuple):
    """Seconds of decode steps, measured at warm-up."""

    buckets: Buckets
    measured: dict[Bucket, float]

    def seconds(self, seqs: int, tokens: int) -> float:
        """Of the CUDA graph for `seqs` sequences with `tokens` tokens together; infinite if there is none."""
        bucket = self.buckets.for_decode(seqs, tokens)
        return math.inf if bucket is None else self.measured[bucket]

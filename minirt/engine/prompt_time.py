"""`PromptTime`: how long a step takes to compute prompt tokens, measured at warm-up."""

import math
from typing import NamedTuple


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

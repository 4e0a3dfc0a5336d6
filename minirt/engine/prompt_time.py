"""`PromptTime`: how long a step takes to compute prompt tokens, measured at warm-up."""

import math
from typing import NamedTuple


class PromptTime(NamedTuple):
    """A prompt's token takes `token_s` seconds, and `context_s` more for each token before it.

    (Linear layers cost the same for every token, attention as much as a token has before it.)
    """

    token_s: float
    context_s: float = 0.0

    def seconds(self, start: int, tokens: int) -> float:
        """Of so many tokens, the first at position `start`."""
        return tokens * (self.token_s + self.context_s * (start + tokens / 2))

    def tokens(self, start: int, seconds: float) -> int:
        """As many as so many seconds allow, the first at position `start`."""
        each = self.token_s + self.context_s * start
        return int(2 * seconds / (each + math.sqrt(each * each + 2 * self.context_s * seconds))) if seconds > 0 else 0

"""`Sequence`: what the host knows of one request while it waits and runs."""

from array import array
from dataclasses import dataclass, field


@dataclass(eq=False)
class Sequence:
    """The state of one request. `tokens` holds the prompt and the tokens generated so far, at most `final_len` in total.

    After an admission, steps compute the tokens known then (`prefill_len`), in one or several chunks. From then on, the device
    has the next token of the sequence's slot, and the host reads each step's tokens later. Until then, the host knows bounds.
    """

    id: int
    tokens: array  # of int32
    prompt_len: int
    final_len: int
    priority: int = 0  # the lowest runs first
    group: int | None = None  # the sequences of one group have the same prompt
    leads: bool = False  # whether the others of its group wait until its prompt is computed
    rank: tuple[int, int] = (0, -1)  # its priority and its place among all arrivals: the order of admission
    num_prefilled: int = 0  # of the first `prefill_len` tokens: those that are cached, or computed by a step that was started
    prefill_len: int = 0  # tokens known at the admission
    steps: int = 0  # steps that were started and yield tokens which the host has not read
    unread: int = 0  # the most tokens that these steps yield
    pages: array = field(default_factory=lambda: array("i"))
    num_sent: int = -1  # number of its pages that the device knows; −1: it does not know the sequence
    slot: int = -1  # its row of the table of slots while it runs; −1: none
    logits_only: bool = False  # no token is drawn: the caller wants the logits of all tokens
    prompt_logprobs: int | None = None  # number of most probable tokens to list for each prompt token; None: no scores
    num_unscored: int = 1  # number of first prompt tokens that are not scored: at least the first one
    num_scored: int = 0  # number of prompt tokens after the first that need no scores, or whose scores are known or in a step
    salt: str | None = None
    keys: list[bytes] = field(default_factory=list)  # keys of its first full pages; see `PrefixCache`
    num_registered: int = 0  # number of its pages that are in the prefix cache
    num_cached: int = -1  # tokens that were found in the prefix cache when it first ran; -1: it has not run
    added_at: float = 0.0  # the time at which it was queued
    queue_time_s: float | None = None  # from then until its first admission; None before, and once it was reported

    @property
    def prefills(self) -> bool:
        """Whether a step must compute tokens that the host knows, before it can go on."""
        return self.num_prefilled < self.prefill_len

    @property
    def least_len(self) -> int:
        """The least number of its tokens after all steps that were started."""
        return min(len(self.tokens) + self.steps, self.final_len)

    @property
    def most_len(self) -> int:
        """The greatest number of its tokens after all steps that were started."""
        return min(len(self.tokens) + self.unread, self.final_len)

    @property
    def unscored(self) -> int:
        """Number of prompt tokens that still are to be scored."""
        return 0 if self.prompt_logprobs is None else self.prompt_len - 1 - self.num_scored

    @property
    def has_started(self) -> bool:
        """Whether it holds pages, or a token was sampled or scored for it."""
        return len(self.pages) > 0 or len(self.tokens) > self.prompt_len or self.num_scored >= self.num_unscored

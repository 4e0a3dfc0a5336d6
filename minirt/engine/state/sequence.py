"""`Sequence`: what the host knows of one request while it waits and runs."""

from array import array
from typing import Any

import numpy as np
from torch import Tensor

from minirt.engine.request import Request, TokenLogprobs
from minirt.engine.state.slots import NEVER, HostSlots
from minirt.engine.token_constraints import TokenConstraint
from minirt.hooks.capture import Captured
from minirt.step.plan import NO_TOKENS
from minirt.step.rules import Rules

_NO_TIMES = np.zeros(0)


class Sequence:
    """The state of one request.

    While it runs, it has a slot: what changes with each step is in its row of `HostSlots`, and the properties here read it there.
    After an admission, steps compute the tokens known then (`prefill_len`), in one or several chunks. From then on, the device
    has the next token of the slot, and the host reads each step's tokens later. Until then, it knows bounds.

    Args:
        final_len: tokens at its end, at most.
        ends: tokens that end it.
    """

    def __init__(self, request: Request, final_len: int, ends: tuple[int, ...] = (), rules: Rules | None = None) -> None:
        self.request, self.final_len, self.ends, self.rules = request, final_len, ends, rules
        self.id, self.sampling, self.prompt_len = request.id, request.sampling, len(request.prompt_token_ids)
        self.group = request.group  # the sequences of one group have the same prompt
        self.logits_only = request.logits_only  # no token is drawn: the caller wants the logits of all tokens
        self.constraint: TokenConstraint | None = None  # written by the engine, once it is compiled

        self.adapter: Any = None  # the `Known` adapter of its request; None: it has none
        self.adapter_place = -1  # of its adapter on the device, written by the scheduler; −1: none

        # Written by `take_slot` and `leave_slot`:
        self.slot = -1  # its row of the table of slots while it runs; −1: none
        self.host: HostSlots | None = None  # the arrays with this row; None: it does not run
        # Without a slot: int32 tokens, faster by `array` than by NumPy from a list; times; and `num_drafts`.
        self._tokens, self._times = np.frombuffer(array("i", request.prompt_token_ids), np.int32), _NO_TIMES
        self._drafted = 0, 0

        # Written by the scheduler, while it waits:
        self.leads = False  # whether the others of its group wait until its prompt is computed
        self.arrival_rank = (0, -1)  # its priority and its place among all arrivals
        self.added_at = 0.0  # the time at which it was queued
        self.size = 0  # tokens to compute when it began to wait: those that were not in the prefix cache
        self.passes_until = 0  # if it is first and does not fit, others pass it until `Scheduler.tokens_done` reaches this
        self.blocked_at = -1  # `PageAllocator.num_changes` when it did not fit

        # Written by the scheduler, while its known tokens are computed:
        self.num_prefilled = 0  # of the first `prefill_len` tokens: those that are cached, or computed by a step that was started
        self.prefill_len = 0  # tokens known at the admission
        # The first prompt token whose logits steps are still to compute for the caller: of all with `logits_only`, else of those
        # before a scored token.
        self.logits_from = request.first_scored - 1
        self.num_cached = -1  # tokens that were found in the prefix cache when it first ran; −1: it has not run

        # Written by the prefix cache:
        self.keys: list[bytes] = []  # keys of its first full pages; see `PrefixCache`
        self.last_snapshot: int = NEVER  # tokens in the last snapshot of its state, taken or found; `NEVER`: it takes none
        self.next_snapshots: tuple[int, ...] = ()  # numbers of prompt tokens after which snapshots are to be taken

        # Written by the collector, which also tells the caller:
        self.queue_time_s: float | None = None  # from `added_at` to the first admission; None before, and once it was told
        self.unused = 0  # once it has ended: tokens of its last step that it did not take
        self.logprobs: list[TokenLogprobs] = []  # of tokens that the caller has not got
        # Log-probabilities of the prompt, until they are delivered; None: the request does not ask for them.
        self.scores: list[TokenLogprobs] | None = None if self.sampling.prompt_logprobs is None else []
        self.logits: list[Tensor] = []  # of all tokens, with `logits_only`
        self.captured: Captured | None = None  # hidden states that its request asks for

    @property
    def watched(self) -> bool:
        """Whether a caller, a constraint or log-probabilities need each token when it is known."""
        return not self.request.final_only or self.sampling.structured_outputs is not None or self.sampling.logprobs is not None

    @property
    def num_drafts(self) -> tuple[int, int]:
        """Drafts that were verified, and that were right."""
        if self.host is None:
            return self._drafted
        return int(self.host.num_drafted[self.slot]), int(self.host.num_accepted[self.slot])

    @property
    def tokens(self) -> np.ndarray:
        """The prompt and the tokens generated so far, at most `final_len` in total."""
        return self._tokens if self.host is None else self.host.tokens[self.slot, : self.host.lengths[self.slot]]

    @property
    def times(self) -> np.ndarray:
        """The `time.perf_counter` at which each generated token was known."""
        if self.host is None:
            return self._times
        return self.host.times[self.slot, self.prompt_len : self.host.lengths[self.slot]]

    @property
    def pages(self) -> np.ndarray:
        """Its KV pages."""
        return NO_TOKENS if self.host is None else self.host.page_tables[self.slot, : self.host.num_pages[self.slot]]

    @property
    def size_rank(self) -> tuple[int, int, int]:
        """By its priority, by the tokens to compute as a power of two, then by arrival.

        (Prompts of about the same length, which often have the same beginning, go one after the other.)
        """
        left = self.size if self.slot < 0 else self.prefill_len - self.num_prefilled
        priority, arrival = self.arrival_rank
        return priority, left.bit_length(), arrival

    @property
    def num_to_score(self) -> int:
        """Number of prompt tokens that still are to be scored."""
        return 0 if self.sampling.prompt_logprobs is None else self.prompt_len - 1 - self.logits_from

    @property
    def has_started(self) -> bool:
        """Whether it runs, or a token was sampled or scored for it."""
        return self.slot >= 0 or len(self._tokens) > self.prompt_len or self.logits_from >= self.request.first_scored

    def take_slot(self, host: HostSlots, pages: list[int]) -> None:
        """Run in a free slot, with these pages."""
        self.slot, self.host = host.admit(self), host
        host.add_pages(self.slot, pages)

    def leave_slot(self) -> None:
        """Free the slot, and keep what the host knows: it may go on later, and draws the tokens again that the host has not read.
        Its pages are the caller's to release."""
        if self.host is not None:
            self._tokens, self._times, self._drafted = self.tokens.copy(), self.times.copy(), self.num_drafts
            self.host.release(self.slot)
            self.slot, self.host, self.num_prefilled = -1, None, 0

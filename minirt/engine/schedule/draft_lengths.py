"""`DraftLengths`: how many drafts of each sequence the next step verifies.

The host chooses before it knows which drafts the step will find: on a GPU it is one step ahead. It goes by what the proposer has
reported for the last step that the host has read, by how often each sequence's drafts were right, and by how long steps take. To
verify no draft is a choice, and such a step is a plain one. The drafts of a sequence are compared with its tokens even if none
was verified, so that a choice of 0 is no dead end.

Expected tokens for k drafts that are each right with probability a: 1 + a + … + aᵏ (Leviathan et al. 2023).
"""

import numpy as np

from minirt.engine.buckets import draft_sizes
from minirt.engine.limits import EngineLimits
from minirt.engine.request import DraftStats
from minirt.engine.schedule.step_times import GraphTimes, OnlineStepTimes
from minirt.engine.state.slots import HostSlots
from minirt.errors import EngineError

_PRIOR_RIGHT, _PRIOR_TRIALS = 1.2, 2.0  # of a sequence whose drafts were never compared
_KEPT = 0.9  # of the evidence, with each step that adds to it


class DraftLengths:
    """The drafts of all slots that the host has read.

    Args:
        vocab_size: number of token ids.

    Attributes:
        times: None: each step verifies as many drafts as it can.
    """

    def __init__(self, limits: EngineLimits, host: HostSlots, vocab_size: int) -> None:
        count, most = limits.max_num_seqs, limits.max_drafts
        self.times: GraphTimes | OnlineStepTimes | None = None
        self._host, self._sizes = host, draft_sizes(most)
        self._epochs, self._counts = np.full(count, -1, np.int64), np.zeros(count, np.int64)
        self._drafts, self._vocab = np.zeros((count, most), np.int32), vocab_size
        self._right, self._trials = np.zeros(count), np.zeros(count)
        self._num_drafts = self._num_proposals = 0
        self._verified, self._accepted = np.zeros(most, np.int64), np.zeros(most, np.int64)  # by position

    @property
    def stats(self) -> DraftStats:
        accepted = self._accepted.tolist()
        return DraftStats(self._num_drafts, int(self._verified.sum()), sum(accepted), tuple(accepted), self._num_proposals)

    def of(self, slot: int) -> list[int]:
        """The drafts of a slot that the next step to be read verifies, at most."""
        known = self._epochs[slot] == self._host.epochs[slot]
        return self._drafts[slot, : self._counts[slot]].tolist() if known else []

    def choose(self, slots: np.ndarray, most_rows: int) -> np.ndarray:
        """Maximum number of new tokens of each slot [B] in the next step: [B] int64, together at most `most_rows`, or one each.
        """
        counts = np.where(self._epochs[slots] == self._host.epochs[slots], self._counts[slots], 0)
        known = counts > 0
        if not known.any():
            return 1 + counts
        # A step that the host has not read may have proposed more.
        counts[known & (self._host.steps[slots] > 0)] = self._sizes[-1]
        room = most_rows - len(slots)
        chosen = max((size for size in self._sizes if int(np.minimum(counts, size).sum()) <= room), default=0)
        if self.times is not None and chosen:
            rates = self._right[slots[known]] / self._trials[slots[known]]
            chosen = self._best(len(slots), rates, counts[known], [size for size in self._sizes if size <= chosen])
        return 1 + np.minimum(counts, chosen)

    def _best(self, seqs: int, rates: np.ndarray, counts: np.ndarray, sizes: list[int]) -> int:
        """The number of drafts with the most expected tokens a second. `rates`, `counts`: of the sequences with drafts."""
        if self.times is None or (plain := self.times.seconds(seqs, seqs)) is None:
            return 0
        best, speed = 0, seqs / plain
        expected, power, done = np.ones_like(rates), np.ones_like(rates), 0
        for size in sizes:
            for i in range(done, size):
                power = power * rates
                expected = expected + power * (counts > i)
            done = size
            seconds = self.times.seconds(seqs, seqs + int(np.minimum(counts, size).sum()))
            if seconds is None:  # it is known after this step
                return size
            if (tokens_s := (seqs - len(rates) + float(expected.sum())) / seconds) > speed:
                best, speed = size, tokens_s
        return best

    def compare(
        self, slots: np.ndarray, planned: np.ndarray, counts: np.ndarray, tokens: np.ndarray, proposed: np.ndarray
    ) -> None:
        """Compare the drafts of a step with its tokens, and keep the drafts that were proposed after it.

        Call it before the tokens are appended to `HostSlots`.

        Args:
            slots: [N], with the sequence that they had when the step was started.
            planned: [N], the most tokens that the step computed.
            counts, tokens: [N] and [N, 1 + drafts], what it yields.
            proposed: [N, 2 + drafts]: `report` of `kernels/step/table.py`.
        Raises:
            EngineError: the proposer breaks its protocol (`Proposer` in `engine/proposer.py`).
        """
        host, most = self._host, self._drafts.shape[1]
        self._check(counts, proposed)
        new = self._epochs[slots] != host.epochs[slots]
        if new.any():
            fresh = slots[new]
            self._epochs[fresh], self._counts[fresh] = host.epochs[fresh], 0
            self._right[fresh], self._trials[fresh] = _PRIOR_RIGHT, _PRIOR_TRIALS
        had, each = self._counts[slots], np.arange(most)
        if had.any() and most:
            equal = (tokens[:, :most] == self._drafts[slots]) & (each < had[:, None]) & (each < counts[:, None])
            run = np.logical_and.accumulate(equal, 1).sum(1)
            left = host.final_lens[slots] - host.lengths[slots] - 1
            verified = np.clip(np.minimum(np.minimum(planned - 1, had), left), 0, None)
            accepted = np.minimum(run, verified)
            compared = np.minimum(np.maximum(verified, np.minimum(had, 1)), run + 1)
            tried = (compared > 0) & (counts > 0)
            self._right[slots[tried]] = _KEPT * self._right[slots[tried]] + np.minimum(run, compared)[tried]
            self._trials[slots[tried]] = _KEPT * self._trials[slots[tried]] + compared[tried]
            self._num_drafts += int((verified > 0).sum())
            self._verified += (each < verified[:, None]).sum(0)
            self._accepted += (each < accepted[:, None]).sum(0)
            host.num_drafted[slots] += verified
            host.num_accepted[slots] += accepted
        drafts = np.where(proposed[:, 0] > 0, np.maximum(proposed[:, 1] - 1, 0), 0)
        self._counts[slots] = drafts
        self._num_proposals += int(np.count_nonzero(drafts))
        self._drafts[slots] = proposed[:, 2:]

    def _check(self, counts: np.ndarray, proposed: np.ndarray) -> None:
        """Raise EngineError unless each sequence has gone on, and has drafts that a step can verify."""
        most, matched, following, drafts = self._drafts.shape[1], proposed[:, 0], proposed[:, 1], proposed[:, 2:]
        if not counts.all():
            what, expected, value = "NUM_NEXT of a sequence that goes on", "1 + the number of drafts", "0"
        elif len(following) and not 0 <= following.min() <= following.max() <= 1 + most:
            what, expected = "NUM_NEXT", f"1 to {1 + most}, max_drafts and the next token"
            value = f"{following.min()} to {following.max()}"
        elif (matched[following > 1] <= 0).any():
            what, expected, value = "MATCHED of a sequence with drafts", "a positive number", f"{matched[following > 1].min()}"
        elif len(drafts) and not 0 <= drafts.min() <= drafts.max() < self._vocab:
            what, expected, value = "a draft", f"a token id below {self._vocab}", f"{drafts.min()} to {drafts.max()}"
        else:
            return
        raise EngineError(f"the proposer has written a wrong value: {what}", where="speculative", expected=expected, found=value)

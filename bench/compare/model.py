"""The whole model in both implementations over a text: KL divergence, top-1 agreement, and errors of the logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minirt.bench.bounds import FACTOR, Errors, Floor, limits
from minirt.bench.compare.layers import CHUNK, Place, empty_cache, exact, pages_for_prompt, stream
from minirt.layers import Forward
from minirt.modeling.model import Model
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import PAGE_SIZE

ROWS = 64  # logit rows converted to fp64 at a time


@dataclass(frozen=True)
class TextComparison:
    """The candidate's logits over a text against PyTorch in the same dtype and against the truth (eager in fp64, see `exact`).

    Attributes:
        tokens: number of compared positions.
        kl_mean, kl_max: KL(PyTorch ‖ candidate) of the next-token distribution, in nats.
        kl_truth_torch, kl_truth: mean KL(truth ‖ PyTorch) and mean KL(truth ‖ candidate), in nats.
        agree: number of positions where candidate and PyTorch have the same most probable token.
        clear: number of positions where the truth's top logit leads by more than 2 · FACTOR times PyTorch's largest error in the
            row. An error within the bound cannot change the top token there.
        clear_agree: number of clear positions where the candidate has the truth's top token.
        relative, relative_torch, limit: relative error of all the candidate's logits, of PyTorch's, and the largest allowed.
        faults: broken bounds.
    """

    tokens: int
    kl_mean: float
    kl_max: float
    kl_truth_torch: float
    kl_truth: float
    agree: int
    clear: int
    clear_agree: int
    relative: float
    relative_torch: float
    limit: float
    faults: tuple[str, ...]


class _Sums:
    """Accumulates figures over the rows of a text."""

    def __init__(self, least: Floor) -> None:
        self._least, self._tokens, self._kl_max = least, 0, 0.0
        self._sums = torch.zeros(9, dtype=torch.float64)

    def add(self, eager: Tensor, candidate: Tensor, truth: Tensor) -> None:
        """Add the logits [R, V] of the next tokens of the text."""
        e, c, t = eager.double(), candidate.double(), truth.double()
        log_e, log_c, log_t = (x.log_softmax(-1) for x in (e, c, t))
        divergence = _kl(log_e, log_c)
        self._tokens += len(e)
        self._kl_max = max(self._kl_max, divergence.max().item()) if divergence.isfinite().all() else torch.nan
        top = t.topk(2, -1)
        noise = (e - t).abs().amax(-1) + self._least.relative * t.square().mean(-1).sqrt()
        clear = top.values[:, 0] - top.values[:, 1] > 2 * FACTOR * noise
        figures = divergence, _kl(log_t, log_e), _kl(log_t, log_c), e.argmax(-1) == c.argmax(-1), clear
        squares = (x.square().sum(-1) for x in (c - t, e - t, t))
        right = clear & (c.argmax(-1) == top.indices[:, 0])
        self._sums += torch.stack([x.double().sum() for x in (*figures, right, *squares)]).cpu()

    def result(self) -> TextComparison:
        *divergences, agree, clear, right, mine, theirs, truth = self._sums.tolist()
        mine, theirs = (mine / truth) ** 0.5, (theirs / truth) ** 0.5
        limit = limits(Errors(theirs, theirs, 0.0, 0.0), self._least).relative
        faults = []
        if not mine <= limit:
            faults.append(f"logits: relative error {mine:.2e}, PyTorch's {theirs:.2e}, limit {limit:.2e}")
        if right < clear:
            positions = f"{clear - right:.0f} of {clear:.0f} clear positions, where PyTorch has the right one"
            faults.append(f"top-1: wrong token at {positions}")
        kl, kl_torch, kl_truth = (total / self._tokens for total in divergences)
        return TextComparison(
            self._tokens, kl, self._kl_max, kl_torch, kl_truth, int(agree), int(clear), int(right), mine, theirs, limit,
            tuple(faults),
        )  # fmt: skip


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p ‖ q) [R] of log-probabilities [R, V], clamped because rounding can make it slightly negative."""
    return (p.exp() * (p - q)).sum(-1).clamp_min(0)


@torch.inference_mode()
def compare_text(
    model: Model, sequence: Sequence[Place], tokens: Sequence[int], least: Floor,
    progress: Callable[[float], None] = lambda share: None,
) -> TextComparison:  # fmt: skip
    """Run a text through the eager layers, the candidates, and the truth. `least` is the floor of the bound.

    To save memory, the truth's layers are converted to fp64 one at a time. `progress` is called with the share that is done, at
    least 10% apart: in Triton's interpreter this takes minutes.
    """
    sums = _Sums(least)
    total, done, following = -(-len(tokens) // CHUNK) * 3 * len(sequence), 0, 0.1

    def counted(forward: Forward) -> Forward:
        def run(x: Tensor, batch: Batch, kv: Any) -> Tensor:
            nonlocal done, following
            out, done = forward(x, batch, kv), done + 1
            if following * total <= done < total:
                progress(done / total)
                following = done / total + 0.1
            return out

        return run

    pages = -(-len(tokens) // PAGE_SIZE) + 1
    caches = [empty_cache(model, pages), empty_cache(model, pages), empty_cache(model, pages, wide=True)]
    page_lists = [pages_for_prompt(cache, [len(tokens)])[0] for cache in caches]
    variants = [p.eager for p in sequence], [p.candidate for p in sequence], [_exactly(p) for p in sequence]
    for start in range(0, len(tokens), CHUNK):
        part, logits = list(tokens[start : start + CHUNK]), []
        for forwards, cache, block_table in zip(variants, caches, page_lists, strict=True):
            chunk = Chunk(part, start, block_table, num_logits=len(part), slot=0)
            batch = Batch.build([chunk], cache.page_size).to(model.device)
            logits.append(stream(list(map(counted, forwards)), sequence, batch, cache))
        for row in range(0, len(part), ROWS):
            sums.add(*(x[row : row + ROWS] for x in logits))
    return sums.result()


def _exactly(place: Place) -> Forward:
    """The truth of a layer, converted to fp64 when it is called."""
    return lambda x, batch, kv: exact(place.layer)(x, batch, kv)

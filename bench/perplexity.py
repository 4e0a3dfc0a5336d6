"""`perplexity`: how well a model predicts a text. The yardstick for a change of kernel, format or dtype."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from minirt.errors import ContextLengthError, InputError, NumericsError
from minirt.generator import Generator

DEFAULT_WINDOW = 2048  # tokens; less where the model or its cache holds less
ROWS = 64  # of logits that are in fp64 at one time: [64, 152064] take 78 MB

ProgressCallback = Callable[[int, int], None]  # (tokens scored, in all)


@dataclass(frozen=True)
class Perplexity:
    """The result of `perplexity`.

    Attributes:
        tokens: how many were scored: all but the first.
        nll: the sum of their negative log likelihoods, in nats.
        windows: how many sequences the model computed; `window` and `stride` are their length and distance in tokens.
        bytes: UTF-8 bytes of the text that the scored tokens stand for; None without a tokenizer.
    """

    tokens: int
    nll: float
    windows: int
    window: int
    stride: int
    bytes: int | None

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log likelihood of a token."""
        return math.exp(self.nll / self.tokens) if self.nll / self.tokens < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between models of different tokenizers; None without a tokenizer."""
        return self.nll / math.log(2) / self.bytes if self.bytes else None


def perplexity(
    generator: Generator,
    text: str | Sequence[int],
    *,
    window: int | None = None,
    stride: int | None = None,
    progress: ProgressCallback | None = None,
) -> Perplexity:
    """Score every token of a text but the first, each once, teacher-forced.

    The text is tokenized once, as a prompt is. Windows of `window` tokens begin at tokens 0, `stride`, 2 · `stride`, …; the
    last is the one that reaches the end. A token is scored in the first window that holds it with a token before it, so that
    it is predicted from at least `window` - `stride` tokens (or all that precede it). The logits are the model's in fp32; the
    log-softmax and all sums are fp64, in the order of the text, so that one build on one device always gives one result.

    Args:
        text: a text, or its token ids.
        window: tokens; None: 2048, or as many as the model and its cache hold if that is less.
        stride: tokens, below `window`; None: half of it.
    Raises:
        InputError: fewer than two tokens, or a window or stride that scores none.
        ContextLengthError: a window beyond what the model and its cache hold.
        NumericsError: the model gives NaN or no finite logit, or gives a token of the text the probability 0.
    """
    tokens = generator.encode(text)
    if len(tokens) < 2:
        raise InputError("too short to be scored", where="text", expected="at least 2 tokens", found=len(tokens))
    window = min(generator.max_len, DEFAULT_WINDOW) if window is None else window
    stride = max(window // 2, 1) if stride is None else stride
    _check(window, stride, generator.max_len)
    nll, done, count = 0.0, 1, 0
    for start, stop in _windows(len(tokens), window, stride):
        logits = generator.logits(tokens[start:stop])
        for first in range(done, stop, ROWS):
            last = min(first + ROWS, stop)
            nll += _nll(logits[first - 1 - start : last - 1 - start], tokens[first:last], first)
        done, count = stop, count + 1
        if progress:
            progress(done - 1, len(tokens) - 1)
    size = None
    if generator.tokenizer is not None:
        size = len(generator.tokenizer.decode(tokens[1:], skip_special_tokens=False).encode())
    return Perplexity(len(tokens) - 1, nll, count, window, stride, size)


def _check(window: int, stride: int, longest: int) -> None:
    if window > longest:
        raise ContextLengthError("the window is too long", where="window", expected=f"at most {longest}", found=window)
    if window < 2:
        raise InputError("the window is too short", where="window", expected="at least 2 tokens", found=window)
    if not 1 <= stride < window:
        raise InputError("not an acceptable stride", where="stride", expected=f"from 1 to {window - 1}", found=stride)


def _windows(count: int, window: int, stride: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each window over `count` tokens."""
    start = 0
    while start + window < count:
        yield start, start + window
        start += stride
    yield start, count


def _nll(logits: torch.Tensor, targets: Sequence[int], first: int) -> float:
    """The sum of the targets' negative log likelihoods under `logits` [R, V]; `first` is the place of the first of them."""
    scores = -torch.log_softmax(logits.double(), dim=-1).gather(1, torch.tensor(targets).unsqueeze(1)).squeeze(1)
    bad = (~torch.isfinite(scores)).nonzero()
    if len(bad):
        row = int(bad[0])
        raise NumericsError(
            "the logits give this token no probability", where=f"token {first + row}", found=float(scores[row]),
            hint="--check-weights finds damaged weights; --dtype float32 rules out overflow",
        )
    return float(scores.sum())

"""Perplexity: how well a model predicts a text. It measures the effect of a change of kernel, format or dtype."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from minirt.errors import ContextLengthError, InputError, NumericsError
from minirt.generator import Generator

DEFAULT_WINDOW = 2048  # tokens; smaller if the model or its KV cache holds fewer
ROWS = 64  # logit rows converted to fp64 at a time: [64, 152064] take 78 MB

ProgressCallback = Callable[[int, int], None]  # (tokens scored, tokens to score)


@dataclass(frozen=True)
class Perplexity:
    """The result of `perplexity`.

    Attributes:
        tokens: number of scored tokens: all but the first.
        nll: sum of their negative log-likelihoods, in nats.
        windows: number of windows that the model computed.
        window, stride: length of a window, and distance between the starts of two windows, in tokens.
        bytes: UTF-8 bytes of the scored tokens' text; None without a tokenizer.
    """

    tokens: int
    nll: float
    windows: int
    window: int
    stride: int
    bytes: int | None

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-likelihood of a token."""
        return math.exp(self.nll / self.tokens) if self.nll / self.tokens < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, comparable between models with different tokenizers; None without a tokenizer."""
        return self.nll / math.log(2) / self.bytes if self.bytes else None


def perplexity(
    generator: Generator, text: str | Sequence[int], *, window: int | None = None, stride: int | None = None,
    progress: ProgressCallback | None = None,
) -> Perplexity:
    """Score every token of a text but the first, each once, teacher-forced.

    The text is tokenized once, like a prompt. Windows of `window` tokens start at tokens 0, `stride`, 2 · `stride`, …; the last
    window reaches the end of the text. A token is scored in the first window that holds both it and a token before it. So it is
    predicted from at least `window` - `stride` tokens, or from all tokens before it. The logits are fp32; the log-softmax and all
    sums are fp64 in the order of the text. One build on one device always gives the same result.

    Args:
        text: a text, or its token ids.
        window: tokens; None: 2048, or as many as the model and its KV cache hold if that is less.
        stride: tokens, less than `window`; None: half of `window`.
        progress: called after each window.
    Raises:
        InputError: the text has fewer than two tokens, or `window` or `stride` is out of range.
        ContextLengthError: `window` is longer than the model or its KV cache allows.
        NumericsError: the logits contain NaN or are all infinite, or a token of the text has probability 0.
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
        raise InputError("the stride is out of range", where="stride", expected=f"from 1 to {window - 1}", found=stride)


def _windows(count: int, window: int, stride: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each window over `count` tokens."""
    start = 0
    while start + window < count:
        yield start, start + window
        start += stride
    yield start, count


def _nll(logits: torch.Tensor, targets: Sequence[int], first: int) -> float:
    """Return the sum of the targets' negative log-likelihoods under `logits` [R, V]. `first` is the position of `targets[0]`."""
    scores = -torch.log_softmax(logits.double(), dim=-1).gather(1, torch.tensor(targets).unsqueeze(1)).squeeze(1)
    bad = (~torch.isfinite(scores)).nonzero()
    if len(bad):
        row = int(bad[0])
        raise NumericsError(
            "the logits give this token a probability of 0 or NaN", where=f"token {first + row}", found=float(scores[row]),
            hint="--check-weights finds damaged weights; --dtype float32 rules out overflow",
        )
    return float(scores.sum())

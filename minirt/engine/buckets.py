"""`Buckets`: the sizes of steps that CUDA graphs are captured for, and which of them a step is padded to.

Decode steps have buckets of sequences. Steps with prompts have buckets of tokens, up to a size from which the GPU takes longer
than the host. A graph serves every context length: pages, lengths and splits lie in static buffers, and grids are sized by
bounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from minirt.engine.step_input import Chunk
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.kernels.regimes import Axis, next_end, operations

SHORT_SEQS = 8  # decode steps of at least this many sequences have a graph for short sequences, too
MAX_PROMPT_TOKENS = 2048  # larger steps with prompts take the GPU longer than the host, also in fp8, and are not captured


class Bucket(NamedTuple):
    """What a graph is captured for.

    `tokens`: 0 for decode steps, in which each sequence has one token. `short`: no sequence is longer than a KV split, its new
    tokens included, so attention has no splits to combine.
    """

    seqs: int
    tokens: int = 0
    short: bool = False


def batch_bucket(count: int) -> int:
    """The captured batch size for `count` sequences: 1, 2, 4, 8, then multiples of 8, of 16 and of 32, and wherever a kernel's
    regime ends."""
    if count <= 8:
        size = 1 << (count - 1).bit_length()
    else:
        step = 8 if count <= 64 else 16 if count <= 128 else 32
        size = -(-count // step) * step
    return min(size, _regime_end(count, size, "tokens"), _regime_end(count, size, "sequences"))


def token_bucket(count: int) -> int:
    """The captured number of tokens for `count`: 16, 32, 64, 128, then multiples of 128, and wherever a kernel's regime or its
    padding ends."""
    size = max(16, 1 << (count - 1).bit_length()) if count <= 128 else -(-count // 128) * 128
    return size if count <= 16 else min(size, _regime_end(count, size, "tokens"))


def _regime_end(count: int, most: int, axis: Axis) -> int:
    ends = (next_end(count, regimes) for regimes in operations(axis))
    return min((end for end in ends if end is not None), default=most)


def max_splits(count: int, max_seq_len: int, capacity: int) -> int:
    """KV splits that `count` sequences can have together, in a cache that holds `capacity` tokens."""
    return min(count * -(-max_seq_len // KV_SPLIT), capacity // KV_SPLIT + count)


@dataclass(frozen=True)
class Buckets:
    """The buckets of an engine.

    Args:
        max_num_seqs: sequences of the largest step.
        max_num_batched_tokens: tokens of the largest step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int

    @cached_property
    def _batches(self) -> list[int]:
        """The bucket of each number of sequences."""
        return [batch_bucket(max(1, count)) for count in range(self.max_num_seqs + 1)]

    @cached_property
    def _tokens(self) -> list[int]:
        """The bucket of each number of tokens."""
        return [token_bucket(max(1, count)) for count in range(self.max_tokens + 1)]

    @property
    def max_seqs(self) -> int:
        """Sequences of the largest bucket, and so the most rows that want logits in one."""
        return batch_bucket(self.max_num_seqs)

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest step with prompts that has a bucket."""
        return min(MAX_PROMPT_TOKENS, token_bucket(self.max_num_batched_tokens))

    def all(self) -> list[Bucket]:
        """Every bucket, largest first, so that the graphs of smaller ones find their memory in the pool of larger ones."""
        decode = {Bucket(seqs) for seqs in self._batches}
        prompts = {Bucket(seqs, tokens) for seqs in (1, self.max_seqs) for tokens in self._tokens}
        short = {bucket._replace(short=True) for bucket in decode | prompts if _has_short_graph(bucket)}
        return sorted(decode | prompts | short, key=lambda b: (b.tokens, b.seqs, b.short), reverse=True)

    def decode(self, chunks: Sequence[Chunk]) -> Bucket:
        """The bucket for a decode step."""
        return _for_lengths(Bucket(self._batches[len(chunks)]), chunks)

    def find(self, chunks: Sequence[Chunk]) -> Bucket | None:
        """The bucket for a step; None: such steps have no graph."""
        if all(len(c.tokens) == c.num_logits == 1 for c in chunks):
            return self.decode(chunks)
        tokens = sum(len(c.tokens) for c in chunks)
        if tokens > self.max_tokens or any(c.num_logits > 1 for c in chunks):
            return None
        return _for_lengths(Bucket(1 if len(chunks) == 1 else self.max_seqs, self._tokens[tokens]), chunks)


def _has_short_graph(bucket: Bucket) -> bool:
    """Whether short sequences have a graph of their own: decode steps of many, which one kernel less makes about 1% faster, and a
    prompt alone, which attention would otherwise treat as the end of a longer one."""
    return bucket.seqs >= SHORT_SEQS if not bucket.tokens else bucket.seqs == 1 and bucket.tokens <= KV_SPLIT


def _for_lengths(bucket: Bucket, chunks: Sequence[Chunk]) -> Bucket:
    """The bucket for sequences as long as these."""
    return bucket._replace(short=_has_short_graph(bucket) and all(c.start + len(c.tokens) <= KV_SPLIT for c in chunks))

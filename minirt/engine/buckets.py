"""`Buckets`: the step sizes with a CUDA graph, and the size to which a step is padded.

Decode steps have buckets of sequences. Steps with prompts have buckets of tokens. Larger steps with prompts have none, because
the GPU then takes longer than the host. One CUDA graph serves every context length: pages, lengths and splits are in static
buffers, and grid sizes are upper bounds.
"""

from typing import NamedTuple

from minirt.engine.limits import EngineLimits
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.kernels.regimes import Axis, next_end, operations
from minirt.step.plan import StepPlan

SHORT_SEQS = 5  # decode steps of at least this many sequences have a CUDA graph for short sequences, too
# In larger steps with prompts, the GPU takes longer than the host, also in FP8; they are not captured. With small layers, the
# host is slower up to more tokens: it launches at most 5 kernels for a residual layer, in some 0.2 ms on a slow host.
MAX_PROMPT_TOKENS = 2048
MAX_PROMPT_TOKENS_SMALL = 4096
SMALL_LAYER = 50e6  # floating-point operations of a token: 4096 tokens at 1000 TFLOP/s take 0.2 ms


class Bucket(NamedTuple):
    """The sizes that one CUDA graph is captured for.

    `tokens`: 0 for decode steps. `short`: no sequence, including its new tokens, is longer than a KV split, so attention has no
    splits to combine. `drafts`: of a decode step, for each sequence on average; 0: each sequence has one token. `hooked`: a
    request asks for what hooks do. `adapted`: a sequence has an adapter.
    """

    seqs: int
    tokens: int = 0
    short: bool = False
    drafts: int = 0
    hooked: bool = False
    adapted: bool = False

    @property
    def num_tokens(self) -> int:
        return self.tokens or self.seqs * (1 + self.drafts)

    @property
    def num_logits(self) -> int:
        """Rows of logits."""
        return min(self.tokens, self.seqs) if self.tokens else self.num_tokens

    @property
    def one_token(self) -> bool:
        """Whether each sequence has one token."""
        return not self.tokens and not self.drafts

    @property
    def cost(self) -> tuple[int, int]:
        """By which buckets that serve the same step are compared."""
        return self.num_tokens, self.seqs

    def serves(self, other: "Bucket") -> bool:
        """Whether steps of another bucket may be padded to this one."""
        same_kind = (self.tokens > 0, self.drafts, *self[4:]) == (other.tokens > 0, other.drafts, *other[4:])
        return same_kind and self.seqs >= other.seqs and self.tokens >= other.tokens and self.short <= other.short


def batch_bucket(count: int) -> int:
    """The bucket of `count` sequences. Each number up to 8 has one, because a mixture reads experts for padding, too. Further
    buckets end at multiples of 8, 16 and 32, and wherever a kernel's regime ends."""
    if count <= 8:
        size = count
    else:
        step = 8 if count <= 64 else 16 if count <= 128 else 32
        size = -(-count // step) * step
    return min(size, _regime_end(count, size, "tokens"), _regime_end(count, size, "sequences"))


def token_bucket(count: int) -> int:
    """The bucket of `count` tokens. Buckets end at 16, 32, 64, 128, then at multiples of 128, from 2,048 on at multiples of 256,
    and wherever a kernel's regime or its padding ends."""
    step = 128 if count <= MAX_PROMPT_TOKENS else 256
    size = max(16, 1 << (count - 1).bit_length()) if count <= 128 else -(-count // step) * step
    return size if count <= 16 else min(size, _regime_end(count, size, "tokens"))


def draft_sizes(most: int) -> list[int]:
    """The numbers of drafts, beside 0, that a step verifies: powers of two, and the most."""
    return sorted({min(1 << i, most) for i in range(most.bit_length())} | ({most} if most else set()))


def drafts_to_propose(most: int, verified: int | None, adapts: bool) -> int:
    """Number of drafts to propose after a step that verifies `verified` of each sequence on average: one size more, so that the
    number can grow.

    Args:
        most: the limit. `verified`: None: a step with prompts, after which nothing is known.
        adapts: whether steps verify only as many drafts as pay.
    """
    if verified is None or not adapts:
        return most
    return next((size for size in draft_sizes(most) if size > verified), most)


def max_prompt_tokens(flops: float) -> int:
    """Tokens of the largest step with prompts that has a CUDA graph. `flops`: of a token, in a residual layer on average."""
    return MAX_PROMPT_TOKENS_SMALL if flops <= SMALL_LAYER else MAX_PROMPT_TOKENS


def _regime_end(count: int, most: int, axis: Axis) -> int:
    ends = (next_end(count, regimes) for regimes in operations(axis))
    return min((end for end in ends if end is not None), default=most)


class Buckets:
    """The buckets of an engine.

    Args:
        limits: of the engine.
        max_prompt_tokens: tokens of the largest step with prompts that has a CUDA graph.
        adapted: steps may have adapters.

    Attributes:
        max_seqs, max_tokens: sizes of the largest bucket of sequences, and of tokens of steps with prompts.
        max_logits: rows of logits of the bucket that has most.
    """

    def __init__(self, limits: EngineLimits, max_prompt_tokens: int = MAX_PROMPT_TOKENS, adapted: bool = False) -> None:
        self._adapted = adapted
        self.limits, self.max_seqs, sizes = limits, batch_bucket(limits.max_num_seqs), draft_sizes(limits.max_drafts)
        self.max_tokens = min(max_prompt_tokens, token_bucket(limits.max_num_batched_tokens))
        # The bucket of each number of sequences, and of tokens; for each bucket of sequences, the numbers of drafts with a graph.
        self._batches = [batch_bucket(max(1, count)) for count in range(limits.max_num_seqs + 1)]
        self._tokens = [token_bucket(max(1, count)) for count in range(self.max_tokens + 1)]
        self._draft_sizes = {
            seqs: [size for size in sizes if seqs * (1 + size) <= limits.max_logits_rows] for seqs in {*self._batches}
        }
        self.max_logits = max(bucket.num_logits for bucket in self.all())

    def for_decode(self, seqs: int, tokens: int) -> Bucket | None:
        """The bucket of a decode step of `seqs` sequences with `tokens` tokens together; None: there is none."""
        if seqs > self.limits.max_num_seqs:
            return None
        padded = self._batches[seqs]
        if tokens <= seqs:
            return Bucket(padded)
        return next((Bucket(padded, drafts=k) for k in self._draft_sizes[padded] if padded * (1 + k) >= tokens), None)

    def all(self) -> list[Bucket]:
        """Every bucket, largest first, so that smaller CUDA graphs reuse the memory pool of larger ones."""
        decode = {Bucket(seqs) for seqs in self._batches}
        prompts = {Bucket(seqs, tokens) for seqs in (1, self.max_seqs) for tokens in self._tokens}
        decode |= {Bucket(seqs, drafts=size) for seqs, sizes in self._draft_sizes.items() for size in sizes}
        short = {bucket._replace(short=True) for bucket in decode | prompts if _has_short_graph(bucket.seqs, bucket.tokens)}
        buckets = decode | prompts | short
        buckets |= {bucket._replace(adapted=True) for bucket in buckets if self._adapted}
        return sorted(buckets, key=lambda b: (b.tokens, b.num_tokens, b.seqs, b.short, b.adapted), reverse=True)

    def find(self, plan: StepPlan) -> Bucket | None:
        """The bucket for a step, or None if such steps have no CUDA graph."""
        sequences = plan.sequences
        tokens, logits, draws = sequences.total_tokens, sequences.total_logits, sequences.total_draws
        if tokens == len(sequences.slots) == draws == logits:
            return _for_lengths(Bucket(self._batches[len(sequences.slots)]), plan)
        if self.limits.max_drafts and draws == logits == tokens and sequences.starts.max() < 0:
            bucket = self.for_decode(len(sequences.slots), tokens)
            return None if bucket is None else _for_lengths(bucket, plan)
        many = logits > draws or (self.limits.max_drafts and sequences.num_draws.max() > 1)
        if tokens > self.max_tokens or many:  # more than one row of logits of a sequence: scored ones, or drafts
            return None
        return _for_lengths(Bucket(1 if len(sequences.slots) == 1 else self.max_seqs, self._tokens[tokens]), plan)


def _has_short_graph(seqs: int, tokens: int) -> bool:
    """Whether a bucket has a separate CUDA graph for short sequences.

    Decode steps of many sequences have one: without the kernel that combines splits they are about 1% faster. So does a single
    short prompt: otherwise attention would treat it as the end of a longer prompt.
    """
    return seqs >= SHORT_SEQS if not tokens else seqs == 1 and tokens <= KV_SPLIT


def _for_lengths(bucket: Bucket, plan: StepPlan) -> Bucket:
    """The bucket, short if all sequences of the step are."""
    short = _has_short_graph(bucket.seqs, bucket.tokens) and max(plan.sequences.seq_lens.tolist()) <= KV_SPLIT
    return Bucket(bucket.seqs, bucket.tokens, True, bucket.drafts) if short else bucket

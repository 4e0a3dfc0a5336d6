"""Which steps warm-up runs, so that every kernel that serving can need is compiled before the first request."""

from itertools import product

from minirt.engine.cuda_graphs import token_bucket
from minirt.engine.step_input import Chunk
from minirt.sampling_params import SamplingParams


def _prompts(count: int, longest: int) -> list[Chunk]:
    """Prompts of `count` tokens together, none longer than `longest`, all on the cache's first pages; logits for one."""
    lengths = [min(longest, count - start) for start in range(0, count, longest)]
    return [Chunk([0] * n, 0, range(n), wants_logits=i == 0) for i, n in enumerate(lengths)]


def warm_up_steps(limit: int, longest: int, seqs: int) -> list[list[Chunk]]:
    """Steps of at most `limit` tokens that together run every configuration of the kernels: prompts alone, and, since attention
    has forms for batches, beside single tokens. The head's kernels are those of graphs."""
    mixed = {min(count, limit) for count in (384, 640, 1152)}  # attention's other forms begin at 512 or 1024 tokens
    steps = [_prompts(count, longest) for count in sorted({*_token_counts(limit), *mixed})]
    for count in sorted(mixed):
        for together in (2, 33, *(1 << i | 1 for i in range(8, 16))):
            if together <= min(seqs, count):
                steps.append(_prompts(count - together + 1, longest) + [Chunk([0], 0, [0])] * (together - 1))
    return steps


def _token_counts(limit: int) -> list[int]:
    """A number of tokens from each of the kernels' regimes up to `limit`, a small one, so that the steps take little memory."""
    counts = [n for n in (16, 32, 64, 128, 192, 256, 384, 512, *((512 << i) + 128 for i in range(10))) if n < limit]
    return counts if counts and _regime(counts[-1]) == _regime(limit) else [*counts, limit]


def _regime(tokens: int) -> int:
    """Tokens as the kernels' configurations know them: up to 512 the buckets of graphs, and beyond those powers of two."""
    return token_bucket(tokens) if tokens <= 512 else 1 << (tokens - 1).bit_length()


def sampling_kinds() -> list[SamplingParams]:
    """Every combination of what the sampling kernels are compiled for."""
    kinds = [SamplingParams(temperature=0.0)]
    for top_k, top_p, min_p in product((0, 5), (1.0, 0.9), (0.0, 0.1)):
        kinds.append(SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p, seed=0))
    return kinds

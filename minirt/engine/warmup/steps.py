"""The steps that warm-up runs. They need every kernel that serving can need, so all are compiled before the first request.

The sizes follow from the regimes that the kernels' dispatch modules declare; nothing here restates them.
"""

from minirt.engine.buckets import Bucket, Buckets, batch_bucket, token_bucket
from minirt.engine.limits import EngineLimits
from minirt.kernels.attention.limits import KV_SPLIT, MAX_WIDENED_TOKENS
from minirt.kernels.regimes import operations, paired_operations, representatives
from minirt.step.batch import Chunk
from minirt.step.kv_cache import PAGE_SIZE

# Sizes of the CUDA graphs that are captured first: sequences of decode steps, and tokens of steps with prompts. 384 is below the
# kernel for long prompts, which takes longest to compile (5 s).
_MIDDLE_SEQS, _FEW_TOKENS, MIDDLE_TOKENS = 64, 64, 384


def warm_up_steps(limits: EngineLimits) -> list[list[Chunk]]:
    """Steps that together launch every compiled kernel: prompts alone, beside single tokens, several of equal length, with logits
    of all tokens, and two tokens of each sequence, as when drafts are verified.

    Those that need most memory come first, so that PyTorch's allocator uses their blocks for the others.
    """
    limit, longest, seqs = limits.max_num_batched_tokens, limits.max_model_len, limits.max_num_seqs
    steps = [_prompts(count, longest) for count in representatives(limit, operations("tokens"), _small)]
    for by_tokens, by_sequences in paired_operations():
        for count in representatives(limit, by_tokens, _small):
            for together in representatives(min(seqs, count), by_sequences, lambda first, last: first):
                if together > 1:
                    steps.append(_prompts(count - together + 1, longest) + [Chunk([0], 0, [0])] * (together - 1))
    for together in representatives(min(seqs, limit // 2), operations("sequences"), lambda first, last: first):
        if longest > 1:  # the first sequence has two KV splits to combine, if sequences may be so long
            ends = [min(longest, KV_SPLIT + 1)] + [2] * (together - 1)
            steps.append([Chunk([0] * 2, end - 2, [0] * -(-end // PAGE_SIZE)) for end in ends])
    # A token more than what is computed as a draft, in each of several prompts.
    length = limits.max_drafts + 2
    for together in representatives(min(seqs, limit // length), operations("prompts"), lambda first, last: last):
        if together > 1 and longest >= length:
            steps.append([Chunk([0] * length, 0, range(length), num_logits=int(i == 0)) for i in range(together)])
    scored = min(limit, longest, limits.max_logits_rows)  # with `prompt_logprobs`, each token of a prompt needs logits
    for count in representatives(scored, operations("tokens"), _small):
        steps.append([Chunk([0] * count, 0, range(count), num_logits=count)])
    return sorted(steps, key=lambda chunks: (sum(c.num_logits for c in chunks), sum(len(c.tokens) for c in chunks)), reverse=True)


def largest_prompts(limits: EngineLimits) -> list[Chunk]:
    """Prompts that launch the kernels of the steps with most tokens."""
    return _prompts(representatives(limits.max_num_batched_tokens, operations("tokens"), _small)[-1], limits.max_model_len)


def first_buckets(buckets: Buckets) -> list[Bucket]:
    """The buckets whose CUDA graphs are captured first, largest first. Decode steps, and others of at most `MIDDLE_TOKENS`
    tokens, can be padded to them.

    A decode step of 64 sequences takes some 1.25 × as long as one of a single sequence (7B parameters in 16 bits on an H100).
    """
    seqs, tokens = buckets.limits.max_num_seqs, buckets.max_tokens
    decode = {batch_bucket(min(seqs, count)) for count in (1, _MIDDLE_SEQS, seqs)}
    prompts = {min(tokens, token_bucket(count)) for count in (_FEW_TOKENS, MIDDLE_TOKENS)}
    wanted = {Bucket(count) for count in decode}
    wanted |= {Bucket(prompts_together, count) for prompts_together in (1, buckets.max_seqs) for count in prompts}
    return [bucket for bucket in buckets.all() if bucket._replace(adapted=False) in wanted]


def _prompts(count: int, longest: int) -> list[Chunk]:
    """Prompts with `count` tokens in total, each at most `longest`, all on the first pages of the cache.

    Only the first prompt needs logits.
    """
    lengths = [min(longest, count - start) for start in range(0, count, longest)]
    return [Chunk([0] * n, 0, range(n), num_logits=int(i == 0)) for i, n in enumerate(lengths)]


def _small(first: int, last: int) -> int:
    """A number of tokens from `first` to `last`: `last`, to which CUDA graphs pad; above 512 a small one, to save memory."""
    return last if last <= 512 else min(last, (first // 128 + 1) * 128)


def largest_steps(limits: EngineLimits) -> list[list[Chunk]]:
    """Steps of the most tokens at the end of the longest contexts: one prompt, the most prompts, and the most whose FP8 pages
    attention copies to 16 bits. All are on page 0. One step has the most rows of logits."""
    tokens, longest, seqs = limits.max_num_batched_tokens, limits.max_model_len, limits.max_num_seqs
    steps = []
    for count in sorted({1, min(seqs, tokens), max(1, min(seqs, tokens, MAX_WIDENED_TOKENS // longest))}):
        count = max(count, -(-tokens // longest))
        end = longest if count * longest <= max(MAX_WIDENED_TOKENS, longest) else max(MAX_WIDENED_TOKENS // count, 1)
        lengths = [tokens // count + (i < tokens % count) for i in range(count)]
        ends = [max(end, length) for length in lengths]
        steps.append([
            Chunk([0] * n, stop - n, [0] * -(-stop // PAGE_SIZE), num_logits=int(i < seqs))
            for i, (n, stop) in enumerate(zip(lengths, ends, strict=True)) if n
        ])  # fmt: skip
    rows = min(limits.max_logits_rows, len(steps[0][0].tokens))
    return [[steps[0][0]._replace(num_logits=rows), *steps[0][1:]], *steps[1:]]

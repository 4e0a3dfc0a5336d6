"""What warming up runs. Catches prompts beyond the model's positions (the rope table ends there) or the cache's pages, and a
regime of the kernels that no step of the warm-up reaches."""

import pytest
import torch
from test_engine import Mock

from minirt.batch import Chunk
from minirt.cuda_graphs import MAX_PROMPT_TOKENS, Bucket, StepGraphs, batch_bucket, token_bucket
from minirt.kv_cache import KVCache
from minirt.runner import Runner, _prompts, _sampling_kinds, _token_counts


@pytest.mark.parametrize(("count", "longest"), [(16, 512), (8192, 512), (8192, 500), (128, 1), (300, 299), (512, 512)])
def test_prompts_stay_within_the_model(count, longest):
    chunks = _prompts(count, longest)
    assert sum(len(c.tokens) for c in chunks) == count
    assert max(c.start + len(c.tokens) for c in chunks) == min(longest, count)
    assert [c.wants_logits for c in chunks] == [True] + [False] * (len(chunks) - 1)


def test_prompts_fit_the_smallest_cache():
    cache = KVCache([(1, 1)], 3, page_size=4)
    runner = Runner(
        Mock(), cache, torch.device("cpu"), vocab_size=97, max_num_seqs=4, max_seq_len=12, max_num_batched_tokens=40, graphs=False
    )
    for count in (1, 11, 12, 40):
        runner._run(_prompts(count, 12))


def test_every_regime_is_reached():
    counts = _token_counts(8192)
    assert counts == sorted(set(counts))
    assert counts[-1] == 8192
    assert {16, 32, 64, 128, 256, 512, 1024, 2048, 4096} <= set(counts)
    assert _token_counts(100) == [16, 32, 64, 100]
    filters = {(s.temperature > 0, (s.top_k or 0) > 0, (s.top_p or 1) < 1, (s.min_p or 0) > 0) for s in _sampling_kinds()}
    assert len(filters) == 9


@pytest.mark.parametrize("seqs", [1, 3, 64, 100])
@pytest.mark.parametrize("budget", [8192, 100, 5])
def test_every_step_finds_its_graph(seqs, budget):
    """No step of decode rows, and no small one with prompts, may capture a graph after warm-up, or write past its layout."""
    graphs = object.__new__(StepGraphs)  # its choice of buckets alone: the rest needs a GPU
    graphs._previous, graphs._most_seqs = torch.zeros(seqs), batch_bucket(seqs)
    graphs._most_tokens = min(MAX_PROMPT_TOKENS, token_bucket(budget))
    known = set(graphs.buckets)
    for count in range(1, seqs + 1):
        bucket = graphs.bucket([Chunk([1], 5, [0])] * count)
        assert bucket in known
        assert (bucket.tokens, bucket.seqs >= count) == (0, True)
    for tokens in (2, 16, 17, 100, 128, 129, 511, 512):
        alone = graphs.bucket([Chunk([1] * tokens, 0, [0])])
        if tokens > min(budget, MAX_PROMPT_TOKENS):
            assert alone is None or alone in known
            continue
        others = min(seqs - 1, tokens - 2)
        together = graphs.bucket([Chunk([1] * (tokens - others), 0, [0])] + [Chunk([1], 3, [0])] * others)
        for bucket in (alone, together):
            assert bucket in known
            assert bucket.tokens >= tokens
        assert together.seqs > others
        assert alone == Bucket(1, token_bucket(tokens))
    assert graphs.bucket([Chunk([1] * 513, 0, [0])]) is None
    assert graphs.bucket([Chunk([1, 2], 0, [0], all_logits=True)]) is None
    middle = graphs.bucket([Chunk([1], 0, [0], wants_logits=False)])
    assert middle == Bucket(1, 16), "a chunk of one token that ends nothing is no decode row"

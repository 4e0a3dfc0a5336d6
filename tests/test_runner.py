"""What warming up runs. Catches prompts beyond the model's positions (the rope table ends there) or the cache's pages, and a
regime of the kernels that no step of the warm-up reaches."""

import pytest
import torch
from test_engine import Mock

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
    runner = Runner(Mock(), cache, torch.device("cpu"), vocab_size=97, max_num_seqs=4, max_seq_len=12, graphs=False)
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

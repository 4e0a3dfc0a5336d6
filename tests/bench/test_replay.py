"""`replay_times` refuses what it cannot time. Catches a graph of another size instead of the one asked for, and pages kept."""

import pytest

from minirt import Generator
from minirt.bench.replay import replay_times
from minirt.errors import ContextLengthError, InputError, UnsupportedError


@pytest.fixture(scope="module")
def generator():
    with Generator.from_pretrained(device="cpu", max_num_seqs=2, max_model_len=256, kv_cache_memory=1 << 20) as generator:
        yield generator


@pytest.mark.parametrize("step", [(0, 5), (3, 5), (1, 0), (1, 257)])
def test_a_step_that_does_not_fit(generator, step):
    with pytest.raises(InputError, match="replay_times: not a step of this engine; expected 1 to 2 sequences of 1 to "):
        replay_times(generator, *step)


def test_without_a_cuda_graph_nothing_is_kept(generator):
    allocator = generator._cache.allocator
    free = allocator.num_free
    with pytest.raises(UnsupportedError, match=r"there is no CUDA graph to time; .* found device cpu"):
        replay_times(generator, 1, 100)
    assert allocator.num_free == free
    held = allocator.allocate(free - 1)
    with pytest.raises(ContextLengthError, match="too few KV pages; expected 2 free pages; found 1"):
        replay_times(generator, 1, 100)
    allocator.release(held)

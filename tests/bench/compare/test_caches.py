"""What a comparison sees of the cache: names of parts, copies, and caches without a view.

Catches what one part has written in place of another's, a copy that shares memory, and a cache that is left out silently.
"""

import pytest
import torch

from minirt.bench.compare.caches import view
from minirt.errors import UnsupportedError
from minirt.modeling.formats import FP8
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import CacheRoom, CombinedSpec, PagesSpec, StateSpec

HEADS, DIM, PAGE = 3, 16, 4
KV = PagesSpec(HEADS, DIM)
STATE = StateSpec((("sum", (7,), torch.float32), ("count", (2, 3), torch.int32)))


def written(*specs):
    """What a step of three tokens has written. All values of the n-th tensor of the cache are n."""
    cache = CombinedSpec(specs).allocate(CacheRoom(2, PAGE, 1, torch.float32, "cpu"))
    for i, tensor in enumerate(cache.tensors()):
        tensor.fill_(i)
    written = view(cache).written(Batch.build([Chunk([5, 6, 7], 0, [1], slot=0)], PAGE))
    assert all(rows.dtype == torch.float64 for rows in written.values())
    return {name: rows.unique().item() for name, rows in written.items()}


def test_each_part_has_names_of_its_own():
    assert written(KV, STATE) == {"k": 0, "v": 1, "state.sum": 2, "state.count": 3}
    assert written(KV, STATE, KV) == {"0.k": 0, "0.v": 1, "1.state.sum": 2, "1.state.count": 3, "2.k": 4, "2.v": 5}
    nested = written(CombinedSpec((KV, KV)), KV, KV)
    assert nested == {f"{part}.{name}": i for i, (part, name) in enumerate(
        (part, name) for part in ("0.0", "0.1", "1", "2") for name in "kv"
    )}  # fmt: skip


@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, torch.float64), (FP8, FP8)], ids=str)
def test_a_copy_is_wide_where_it_can_be(dtype, wide):
    """Values in fp64; FP8 codes with their scales, and integers, as they are. Nothing is shared with the original."""
    cache = CombinedSpec((KV, STATE)).allocate(CacheRoom(2, PAGE, 3, dtype, "cpu"))
    for tensor in cache.tensors():
        tensor.view(torch.uint8).zero_()
    copied = view(cache).clone(wide=True)
    pages, state = copied
    assert pages.k.dtype == pages.v.dtype == wide
    assert dtype != FP8 or pages.k_scale.dtype == pages.v_scale.dtype == torch.float32
    assert (state["sum"].dtype, state["count"].dtype) == (torch.float64, torch.int32)
    for tensor in copied.tensors():
        tensor.view(torch.uint8).fill_(1)
    assert not any(tensor.view(torch.uint8).any() for tensor in cache.tensors())


def test_a_cache_without_a_view_is_refused():
    class Own:
        pass

    for cache in (Own(), {"sum": torch.zeros(1)}, (torch.zeros(1),)):
        with pytest.raises(UnsupportedError, match=rf"class {type(cache).__name__}: .*view\.register"):
            view(cache)

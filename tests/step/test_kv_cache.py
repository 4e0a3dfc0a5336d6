"""Cache specs: their bytes are those that they allocate, and the parts of a combined cache keep their names apart.

Catches scales of FP8 pages that are not counted, and what one part has written in place of another's.
"""

import pytest
import torch

from minirt.kernels.attention.operands import KVPages
from minirt.modeling.formats import FP8
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import CacheRoom, CombinedSpec, KVCache, PagesSpec, StateSpec, page_bytes, state_bytes

HEADS, DIM, PAGE, PAGES = 3, 16, 4, 5
KV = PagesSpec(HEADS, DIM)
STATE = StateSpec((("sum", (7,), torch.float32), ("count", (2, 3), torch.int32)))


@pytest.mark.parametrize(("dtype", "row"), [(FP8, DIM + 4), (torch.bfloat16, 2 * DIM), (torch.float32, 4 * DIM)])
@pytest.mark.parametrize("specs", [[KV], [CombinedSpec((KV, STATE)), KV]], ids=["pages", "combined"])
def test_bytes_are_those_allocated(specs, dtype, row):
    assert KV.page_bytes(dtype, PAGE) == 2 * PAGE * HEADS * row
    assert page_bytes(specs, dtype, PAGE) == len(specs) * 2 * PAGE * HEADS * row
    assert state_bytes(specs) == (0 if len(specs) == 1 else 7 * 4 + 6 * 4)
    cache = KVCache(specs, PAGES, dtype=dtype, page_size=PAGE, num_slots=2)
    assert cache.nbytes == PAGES * page_bytes(specs, dtype, PAGE) + 2 * state_bytes(specs)


@pytest.mark.parametrize("record", [KVPages, *KVPages.__subclasses__()])
def test_kernels_find_the_fields_of_pages(record):
    """Triton looks for a record's `_fields` in the class itself. If they are its base's, only a GPU would tell."""
    assert vars(record)["_fields"] == ("k", "v", "k_scale", "v_scale")


def test_specs_of_equal_parts_are_equal():
    """Also those of a list, which could not be hashed."""
    assert hash(CombinedSpec([KV, STATE])) == hash(CombinedSpec((KV, STATE)))
    assert CombinedSpec([KV, STATE]) == CombinedSpec((KV, STATE))


def written(*specs):
    """What a step of three tokens has written. All values of the n-th tensor of the cache are n."""
    own = CombinedSpec(specs).allocate(CacheRoom(2, PAGE, 1, torch.float32, "cpu"))
    for i, tensor in enumerate(own.tensors()):
        tensor.fill_(i)
    found = own.written(Batch.build([Chunk([5, 6, 7], 0, [1], slot=0)], PAGE))
    assert all(rows.dtype == torch.float64 for rows in found.values())
    return {name: rows.unique().item() for name, rows in found.items()}


def test_each_part_has_names_of_its_own():
    assert written(KV, STATE) == {"k": 0, "v": 1, "state.sum": 2, "state.count": 3}
    assert written(KV, STATE, KV) == {"0.k": 0, "0.v": 1, "1.state.sum": 2, "1.state.count": 3, "2.k": 4, "2.v": 5}
    nested = written(CombinedSpec((KV, KV)), KV, KV)
    assert nested == {f"{part}.{name}": i for i, (part, name) in enumerate(
        (part, name) for part in ("0.0", "0.1", "1", "2") for name in "kv"
    )}  # fmt: skip

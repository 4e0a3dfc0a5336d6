"""Cache specs: their bytes are those that they allocate.

Catches scales of FP8 pages that are not counted, and specs that cannot be hashed.
"""

import pytest
import torch

from minirt.kernels.attention.operands import KVPages
from minirt.modeling.formats import FP8
from minirt.step.kv_cache import CombinedSpec, KVCache, PagesSpec, StateSpec, page_bytes, state_bytes

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

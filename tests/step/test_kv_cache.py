"""Cache specs: their bytes are those that they allocate.

Catches scales of FP8 pages that are not counted, and specs that cannot be hashed.
"""

import pytest
import torch

from minirt.kernels.attention.operands import KVPages
from minirt.modeling.formats import FP8
from minirt.step import kv_cache
from minirt.step.kv_cache import CombinedSpec, KVCache, PagesSpec, StateSpec, page_bytes, state_bytes
from minirt.step.plan import Copies

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


def test_states_are_stored_where_all_layers_can():
    """Steps go on where a state is kept only if each layer with a state stores it, so at a multiple of all their numbers."""
    tensors, mixed = STATE.tensors, KVCache([KV, StateSpec((), 0, 64)], 1)
    assert mixed.snapshot_tokens == 1, "no layer has a state"
    for numbers, expected in (((64,), 64), ((64, 48), 192), ((64, 0), 0), ((0,), 0)):
        specs = [CombinedSpec((KV, StateSpec(tensors, 0, number))) for number in numbers]
        assert KVCache([KV, *specs], 1, num_slots=1).snapshot_tokens == expected


def test_specs_of_equal_parts_are_equal():
    """Also those of a list, which could not be hashed."""
    assert hash(CombinedSpec([KV, STATE])) == hash(CombinedSpec((KV, STATE)))
    assert CombinedSpec([KV, STATE]) == CombinedSpec((KV, STATE))


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_copies_are_of_all_layers_in_order(dtype, by_kernel, monkeypatch):
    """States of slots and of snapshots, and pages with their scales: nothing else changes, and a row may be copied on."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(kv_cache, "is_nvidia", lambda _: by_kernel)  # in Triton's interpreter without a GPU
    specs = [CombinedSpec((KV, STATE)), STATE, KV]
    cache = KVCache(specs, PAGES, device, dtype, page_size=PAGE, num_slots=2, num_snapshots=3)
    assert cache.nbytes == PAGES * page_bytes(specs, dtype, PAGE) + 5 * state_bytes(specs)
    assert (cache._tables[0] is not None) == by_kernel
    draw = torch.Generator().manual_seed(1)
    tensors = [tensor for layer in cache.layers for tensor in layer.tensors()]
    for tensor in tensors:
        words = tensor.view(torch.uint8)
        words.copy_(torch.randint(0, 100, words.shape, generator=draw, dtype=torch.uint8))
    expected = [tensor.clone().view(torch.uint8) for tensor in tensors]
    cache.copy(Copies(((1, 4), (4, 0), (0, 2)), ((3, 1), (1, 4))))
    for tensor, before in zip(tensors, expected, strict=True):
        size = 1 if len(tensor) == 5 else PAGE
        rows = (4, 0, 2) if size == 1 else (1, 4)
        source = 1 if size == 1 else 3
        for row in rows:
            before[row * size : (row + 1) * size] = before[source * size : (source + 1) * size]
        assert torch.equal(tensor.view(torch.uint8), before)

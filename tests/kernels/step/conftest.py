"""Fixtures of the tests of the table of slots."""

import pytest
import torch

from minirt.kernels.sampling.batch import DTYPES, SamplingBatch
from minirt.kernels.step.table import StepTensors


@pytest.fixture
def garbage():
    """garbage(columns, B, T, R, Q, device): a step's tensors and settings, with NaN and numbers that no step writes."""

    def build(columns, B, T, R, Q, device="cpu"):
        def filled(*shape, dtype=torch.int32):
            return torch.full(shape, float("nan") if dtype.is_floating_point else -77, dtype=dtype, device=device)

        def long(n):
            return filled(n, dtype=torch.int64)

        settings = SamplingBatch(*(filled(Q, dtype=dtype) for dtype in DTYPES))
        return StepTensors(
            tokens=long(T), positions=long(T), slot_mapping=filled(columns.groups, T, dtype=torch.int64),
            query_starts=filled(B + 1), seq_lens=filled(B), split_starts=filled(columns.groups, B + 1), seq_slots=filled(B),
            snapshots=filled(0),
            block_tables=filled(columns.groups, B, columns.pages), logits_indices=long(R), draw_rows=long(Q),
            draw_slots=filled(Q), draw_logprobs=filled(Q), draw_drafts=filled(Q),
        ), settings  # fmt: skip

    return build

"""The LM head's share with row maxima, as in steps that store them. Ranks take turns, and gather in memory that they share."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from minirt import models
from minirt.engine.execute.runner import Forward, Runner
from minirt.kernels.argmax import MAX_INT
from minirt.kernels.linear.product import RowMaxima
from minirt.layers import Head, LayerContext, implementation
from minirt.modeling.parameters import Shard
from minirt.parallel.reduction import Reduction
from minirt.parallel.runner import RankRunner
from minirt.step.batch import Batch, Chunk
from minirt.step.plan import PlannedSequences, StepPlan

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
HIDDEN, VOCAB, RANKS = 64, 212, 2


class Turns(Reduction):
    """Of a rank whose parts, by dtype, the next rank gathers. Only the last rank has them all."""

    def __init__(self, rank, parts):
        self.ranks, self._rank, self._of_maxima, self._parts = RANKS, rank, None, parts

    def gather(self, part, out=None):
        parts = self._parts.setdefault(part.dtype, [])
        parts.append(part.clone())
        gathered = torch.cat(parts, 1)
        return gathered if out is None or len(parts) < RANKS else out.copy_(gathered)


def config():
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    return models.parse_config({"model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": 64, **sizes})


def head(rank, weights, parts):
    layer = Head(config(), norm="norm", weight="w")
    layer.context = LayerContext(64, DEVICE)
    if rank is not None:
        layer.shard(Shard(rank, RANKS))
        layer.context.reduction = Turns(rank, parts)
    for parameter in layer.parameters():
        parameter.allocate(DEVICE, torch.float32)
        for name, *_ in parameter.expected():
            parameter.load(name, weights[name])
    layer.bind(implementation("head", "triton"))
    return layer


@pytest.mark.parametrize("padded", [0, 3], ids=["without a CUDA graph", "in a static buffer"])
@pytest.mark.parametrize("needed", [0, 1])
def test_a_share_with_row_maxima(needed, padded):
    """Catches ids that count from a rank's first one, the wrong token of equal logits, logits gathered where nobody reads them,
    and rows of a static buffer taken for rows of the whole vocabulary."""
    random = torch.Generator().manual_seed(3)
    weights = {"norm.weight": torch.ones(HIDDEN), "w.weight": torch.randn(VOCAB, HIDDEN, generator=random)}
    weights["w.weight"][150] = weights["w.weight"][20]  # equal logits on both ranks
    rows = 5
    x = torch.randn(rows + padded, HIDDEN, generator=random)
    x[1] = 4 * weights["w.weight"][20]
    x = x.to(DEVICE)
    batch = Batch.build([Chunk([0] * len(x), 0, [0])], 64).to(DEVICE)
    expected = head(None, weights, None)(x, batch, None)
    parts = {}
    for rank in range(RANKS):
        layer = head(rank, weights, parts)
        assert (layer.row_maxima_tiles(len(x)), layer.row_maxima_tiles(0)) == (RANKS, 0)
        values = torch.full((len(x), RANKS), -7, dtype=torch.int64, device=DEVICE)
        buffer = torch.full((len(x), VOCAB), float("nan"), device=DEVICE) if padded else None
        maxima = RowMaxima(values, torch.tensor([needed], dtype=torch.int32, device=DEVICE))
        logits = layer(x, replace(batch, row_maxima=maxima, logits=buffer), None)
        assert logits.shape == (len(x), VOCAB // RANKS)
        assert torch.float32 not in parts or rank
        whole = layer.whole((logits if buffer is None else buffer)[:rows]) if needed else None
    best = values.amax(1)
    assert torch.equal(MAX_INT.value - (best & MAX_INT.value), expected.argmax(1))
    assert torch.equal((best >> 32).int() >= 0, expected.amax(1) >= 0)
    assert expected[1].argmax() == 20
    assert torch.float32 in parts if needed else torch.float32 not in parts
    if needed:
        assert torch.equal(whole, expected[:rows])
        assert buffer is None or whole.data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize(("maxima", "needed"), [(True, True), (True, False), (False, True)])
def test_logits_are_gathered_only_for_draws_that_read_them(maxima, needed, monkeypatch):
    """Catches a draw from one rank's logits, and logits that are gathered a second time."""
    plan, logits = StepPlan(PlannedSequences.of(())), torch.zeros(2, VOCAB)
    forward = Forward(plan, None, logits, torch.zeros(2, 2) if maxima else None, None, None, False, needed)
    monkeypatch.setattr(Runner, "_forward", lambda self, plan: forward)
    layer, runner = Head(config()), object.__new__(RankRunner)
    layer.sharded, layer.whole = True, lambda part: part + 1
    runner.model = SimpleNamespace(layers=[layer])
    assert runner._forward(plan).logits.sum() == (logits.numel() if maxima and needed else 0)

"""The synthetic mode of bench/tools/speculation.py: as many drafts are right as it is told."""

from types import SimpleNamespace

import pytest
from engine.test_drafts import engine, outputs_of, request_of

from minirt.bench.tools.speculation import Synthetic, force


@pytest.mark.parametrize(("rate", "wanted"), [(1.0, 1.0), (0.0, 0.0)])
def test_forced_draws_are_drafts_at_the_rate(rate, wanted):
    """Catches a draw of the engine that has other arguments than the one that replaces it."""
    it = engine(Synthetic(3))
    force(SimpleNamespace(_engine=SimpleNamespace(engine=it)), rate)
    outputs_of(it, request_of([5, 6, 7], temperature=0.0))
    stats = it.stats.drafts
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_tokens / stats.num_draft_tokens == pytest.approx(wanted, abs=0.4)

"""Row maxima of all ranks. Each rank runs alone, with what the others store already in its mailbox."""

import pytest
import torch
from support.raising import raises

from minirt.kernels.argmax import MAX_INT
from minirt.kernels.collectives.gather_maxima import CASES, gather_maxima
from minirt.kernels.collectives.peers import peers_of

USE = 1 << 31
WIDTH = 76_032  # ids of a rank


def world(ranks, rows, device, spins=3):
    memories = [torch.zeros(2, ranks, rows, 16, dtype=torch.int64, device=device) for _ in range(ranks)]
    return memories, [peers_of(rank, memories, torch.int64, spins) for rank in range(ranks)]


def packed(logits):
    """Row maxima of logits [R, P] of ids 0 … P - 1, by `sortable` and `pack` in other words; see `kernels/argmax.py`."""
    bits = logits.view(torch.int32).long()
    keys = torch.where(bits < 0, -(bits & MAX_INT.value) - 1, bits)
    keys = torch.where(logits.isnan(), MAX_INT.value, torch.where(logits == 0, 0, keys))
    return (keys << 32) | (MAX_INT.value - torch.arange(logits.shape[1], device=logits.device))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_against_logits(ranks, case, make, device):
    """Catches ids of another rank, another rank's or row's place, a value of an older call taken for a new one, the bit of
    the use in the result, and ties, infinities and NaN that get another order by the offset of ids."""
    R, P = case["R"], case["P"]
    memories, peers = world(ranks, R + 2, device)
    for call in range(6):
        logits = make(ranks, R, P, dtype=torch.float32, scale=4.0).round()  # ties within a rank and between ranks
        logits[:, 0, 0] = torch.tensor([float("-inf"), float("nan"), 0.0][:ranks] if call % 2 else [-0.0, 0.0, 3.0][:ranks])
        shares = [packed(each) for each in logits]
        expected = torch.stack([share.amax(1) - rank * WIDTH for rank, share in enumerate(shares)], 1)
        use = 0 if call // 2 % 2 else USE
        for rank in range(ranks):
            for source in range(ranks):
                if source != rank:
                    memories[rank][call % 2, source, :R, 0] = expected[:, source] | use
            before = [memory.clone() for memory in memories]
            out = torch.full((R, ranks), -7, dtype=torch.int64, device=device)
            assert gather_maxima(shares[rank], peers[rank], rank * WIDTH, out) is out
            assert torch.equal(out, expected)
            for other, (memory, old) in enumerate(zip(memories, before, strict=True)):
                if other != rank:
                    old[call % 2, rank, :R, 0] = expected[:, rank] | use
                assert torch.equal(memory, old)
        ids = MAX_INT.value - (out.amax(1) & MAX_INT.value)
        flat = torch.where(logits == 0, 0.0, logits).permute(1, 0, 2).reshape(R, ranks * P)
        rank, tile = flat.argmax(1) // P, flat.argmax(1) % P  # of NaN, too
        assert torch.equal(ids, rank * WIDTH + tile)
    assert not any(box.mailbox.failed.item() for box in peers)


def test_a_value_that_does_not_arrive_is_noticed(device):
    """Catches a wait without end, and a value of the place's last use that counts as new."""
    memories, peers = world(2, 2, device)
    maxima = torch.ones(2, 5, dtype=torch.int64, device=device)
    memories[0][0, 1, :, 0] = 5 | USE
    gather_maxima(maxima, peers[0], 0)
    memories[0][1, 1, :, 0] = 5 | USE
    gather_maxima(maxima, peers[0], 0)
    assert not peers[0].mailbox.failed.item()
    gather_maxima(maxima, peers[0], 0)  # the values of the first call are still there
    assert peers[0].mailbox.failed.item()


def test_the_host_ends_a_wait(device):
    """Catches a wait that goes on after `stop`."""
    _, (peers, _) = world(2, 1, device, spins=1 << 30)
    peers.stop()
    gather_maxima(torch.ones(1, 5, dtype=torch.int64, device=device), peers, 0)
    assert peers.mailbox.failed.item()


def test_empty_and_wrong_arguments(device):
    _, (peers, _) = world(2, 4, device)
    maxima = torch.ones(5, 3, dtype=torch.int64, device=device)
    assert gather_maxima(maxima[:0], peers, 0).shape == (0, 2)
    raises("peers: wrong mailbox; expected 5 rows of 1 torch.int64; found 4 of 16 torch.int64", gather_maxima, maxima, peers, 0)
    raises("maxima: wrong dtype", gather_maxima, maxima.int(), peers, 0)

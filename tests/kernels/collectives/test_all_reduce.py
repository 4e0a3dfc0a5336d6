"""Sums over ranks. Each rank runs alone, with what the others store already in its mailbox; in `test_ranks.py` all together."""

import itertools
import threading

import pytest
import torch
from support.raising import raises

from minirt.kernels.collectives import all_reduce as kernel
from minirt.kernels.collectives.peers import peers_of
from minirt.kernels.collectives.reference import sum_of

BITS = {2: torch.int16, 4: torch.int32}


class Ranks:
    """The mailboxes of N ranks in one process. `deliver` does by hand what the other ranks' kernels do."""

    def __init__(self, ranks, rows, hidden, dtype, device, spins=3):
        bits, width = BITS[dtype.itemsize], -(-hidden // 16) * 16
        self.memories = [torch.zeros(2, ranks, rows, width, dtype=bits, device=device) for _ in range(ranks)]
        self.peers = [peers_of(rank, self.memories, dtype, spins) for rank in range(ranks)]
        self.empty = torch.iinfo(bits).min

    def stored(self, rank, source, call, T, H):
        return self.memories[rank][call % 2, source, :T, :H]

    def deliver(self, rank, parts, call):
        for source, part in enumerate(parts):
            if source != rank:
                bits = (part + 0.0).view(self.memories[0].dtype)  # -0.0 + 0.0 is 0.0
                self.stored(rank, source, call, *part.shape).copy_(bits)

    def reduce(self, rank, parts, call, **arguments):
        """One call of one rank. Checks what it stored in the other mailboxes, and empties them for the next rank's turn."""
        self.deliver(rank, parts, call)
        result = kernel.all_reduce(parts[rank], self.peers[rank], **arguments)
        assert bool((self.memories[rank] == self.empty).all())  # received, and emptied
        for other, memory in enumerate(self.memories):
            if other != rank:
                sent = self.stored(other, rank, call, *parts[rank].shape)
                assert torch.equal(sent, (parts[rank] + 0.0).view(memory.dtype))
                sent.fill_(self.empty)
                assert bool((memory == self.empty).all())  # nothing else was stored
        return result


def inputs(make, ranks, T, H, dtype):
    parts = [make(T, H, dtype=dtype, scale=3.0) for _ in range(ranks)]
    for part in parts:
        part.view(-1)[:: max(1, T * H // 5)] = -0.0
    return parts, make(T, H, dtype=dtype, scale=5.0)


@pytest.mark.parametrize("case", kernel.CASES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_against_reference(ranks, case, dtype, make, nan, agrees):
    """Catches another order than that of the ranks, a sum rounded before the residual is added, a part that is lost or another
    row's, -0.0 that is taken for a missing value; from the second call on, the place of another."""
    T, H = case["T"], case["H"]
    world = Ranks(ranks, T + 1, H, dtype, make(1, dtype=dtype).device)
    for call in range(3):
        parts, residual = inputs(make, ranks, T, H, dtype)
        exact = residual.double() + sum(part.double() for part in parts)
        expected = sum_of(parts, residual)
        for rank in range(ranks):
            out = nan(T, H, dtype=dtype)
            if call == 2:
                world.reduce(rank, parts, call, out=out)
                assert torch.equal(out, sum_of(parts))
                continue
            world.reduce(rank, parts, call, residual=residual, out=out)
            assert torch.equal(out, expected)
            agrees(out, expected, exact)


def test_in_place_and_empty(make, device):
    parts, residual = inputs(make, 2, 5, 64, torch.float32)
    world, expected = Ranks(2, 5, 64, torch.float32, device), sum_of(parts, residual)
    assert torch.equal(world.reduce(0, parts, 0, residual=residual, out=residual), expected)
    out = kernel.all_reduce(parts[0][:0], world.peers[0], residual[:0])
    assert out.shape == (0, 64)


def test_calls_of_fewer_rows_keep_their_places_in_turn(make, device):
    """Catches one count of calls for all rows: after calls of fewer rows, ranks would store into the place that is in use."""
    world, counts = Ranks(2, 4, 32, torch.float32, device), [0, 0, 0, 0]
    for T in (4, 2, 3, 1, 4, 4, 2):
        parts, residual = inputs(make, 2, T, 32, torch.float32)
        for t in range(T):
            world.memories[0][counts[t] % 2, 1, t] = (parts[1][t] + 0.0).view(torch.int32)
            counts[t] += 1
        assert torch.equal(kernel.all_reduce(parts[0], world.peers[0], residual), sum_of(parts, residual))
        assert bool((world.memories[0] == world.empty).all())
    assert world.peers[0].mailbox.calls.tolist() == counts


def test_a_part_that_does_not_arrive_is_noticed(make, device):
    """Catches a wait without end, and one element that is missing and not noticed."""
    world = Ranks(3, 2, 48, torch.float32, device, spins=2)
    parts, residual = inputs(make, 3, 2, 48, torch.float32)
    peers = world.peers[1]
    world.deliver(1, parts, 0)
    assert not peers.mailbox.failed.item()
    world.stored(1, 2, 0, 2, 48)[1, 47] = world.empty
    kernel.all_reduce(parts[1], peers, residual)
    assert peers.mailbox.failed.item()


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the interpreter's turns of a wait")
def test_a_wait_goes_on_while_all_others_give_signs_of_life(make):
    """Catches a wait that gives up while the others live, and one that goes on although one of them is silent."""
    parts, residual = inputs(make, 3, 1, 16, torch.float32)
    for silent in (None, 2):
        world = Ranks(3, 1, 16, torch.float32, "cpu", spins=1030)
        peers, ended = world.peers[1], threading.Event()
        peers.signs[1] = 5

        def live(world=world, peers=peers, silent=silent, ended=ended):
            for i in itertools.count():
                for rank in {0, 2} - {silent}:
                    peers.signs[1, rank] += 1
                if ended.wait(0.0005):
                    return
                if silent is None and i == 500:
                    world.deliver(1, parts, 0)

        living = threading.Thread(target=live)
        living.start()
        kernel.all_reduce(parts[1].cpu(), peers, residual.cpu())
        ended.set()
        living.join()
        assert bool(peers.mailbox.failed) == bool(peers.signs[0, 1]) == (silent is not None)


def test_the_host_ends_a_wait(make, device):
    """Catches a wait that goes on after `stop`, and a later call that waits again."""
    world = Ranks(2, 1, 16, torch.float32, device, spins=1 << 30)
    (part, _), residual = inputs(make, 2, 1, 16, torch.float32)
    peers = world.peers[0]
    peers.stop()
    for _ in range(2):
        kernel.all_reduce(part, peers, residual)
        assert peers.mailbox.failed.item()


def test_wrong_arguments_are_named(make, device):
    peers = Ranks(2, 4, 32, torch.float32, device).peers[0]
    x = make(2, 32, dtype=torch.float32)
    raises("residual: wrong shape", kernel.all_reduce, x, peers, x[:1])
    for rows, width, dtype in (2, 32, torch.float16), (2, 33, torch.float32), (5, 32, torch.float32):
        words = f"peers: wrong mailbox; expected {rows} rows of {width} {dtype}; found 4 of 32 torch.float32"
        raises(words, kernel.all_reduce, make(rows, width, dtype=dtype), peers)

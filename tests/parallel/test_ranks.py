"""Ranks as processes: the engine of rank 0 with all that requests can ask for, and ranks that fail."""

import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
import torch
from support import model_cases
from support.tiny import add_tokenizer

from minirt import Generator, LoadOptions, SamplingParams, user_code
from minirt.engine.execute.runner import Runner
from minirt.errors import InputError, MinirtError, OutOfMemoryError, RankFailedError, UnsupportedError
from minirt.layers import base
from minirt.outputs import Samples
from minirt.parallel import ranks
from minirt.parallel.ranks import plain_options
from minirt.parallel.runner import _Watched

OPTIONS = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 8, "kv_cache_memory": 1 << 20}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model_cases.make("smollm3", folder, intermediate_size=96, vocab_size=212)
    return add_tokenizer(folder)


@pytest.fixture(scope="module")
def pair(folder):
    with Generator.from_pretrained(folder, tensor_parallel=2, **OPTIONS) as generator:
        yield generator


@pytest.fixture(scope="module")
def alone(folder):
    with Generator.from_pretrained(folder, **OPTIONS) as generator:
        yield generator


def followers(generator):
    return [psutil.Process(process.pid) for process in generator.model.ranks._processes]


@pytest.mark.parametrize("params", [
    SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, logit_bias={7: 3.0, 9: -2.0}),
    SamplingParams(max_tokens=9, temperature=0.0, min_tokens=4, bad_words=["the"], logprobs=3, prompt_logprobs=2),
    SamplingParams(max_tokens=9, temperature=0.7, seed=1, n=3),
    SamplingParams(max_tokens=24, temperature=0.0, structured_outputs={"regex": "[ab]{3}c+d"}),
], ids=["greedy", "sampled", "penalties", "lists", "several", "grammar"])  # fmt: skip
def test_requests_give_the_same_as_on_one_rank(params, pair, alone):
    """Catches a plan whose values do not arrive, masks of another step, and ranks that draw different tokens: their next sums
    would be wrong."""
    for prompts in ("the quick brown", "dogs"), ("the quick brown", "the quick brown fox jumps over" * 3, "x"):
        of_pair, expected = (generator.generate(list(prompts), params) for generator in (pair, alone))
        assert tokens(of_pair) == tokens(expected)


def tokens(results):
    return [[one.token_ids for one in result] if isinstance(result, Samples) else result.token_ids for result in results]


def test_the_logits_are_those_of_one_rank(pair, alone):
    """Catches ids of another rank."""
    tokens = list(range(3, 60))
    assert (pair.logits(tokens) - alone.logits(tokens)).abs().max() < 1e-4


def test_aborts_preemption_and_many_requests(pair, alone):
    """Catches a rank that is left at another step after requests that end early, wait for pages, or are aborted."""
    prompts = [[3 + i % 200, 5, 7 + i % 13] * (1 + i % 9) for i in range(24)]
    streams = [pair.stream(prompt, GREEDY) for prompt in prompts[:5]]
    for stream in streams:
        next(stream)
        stream.close()
    of_pair, expected = (tokens(generator.generate(prompts, GREEDY)) for generator in (pair, alone))
    assert of_pair == expected


@pytest.mark.exhaustive
def test_a_thousand_requests(folder):
    """Catches what only many steps show: ranks whose tables, pages or drafts come apart after requests were preempted, aborted at
    any moment, sampled, or masked. It takes a minute or two."""
    options = {"model": folder, "device": "cpu", "max_model_len": 128, "max_num_seqs": 8, "speculative": "ngram:3"}
    draw, requests = random.Random(7), []
    for i in range(1000):
        prompt = [draw.randrange(3, 200) for _ in range(draw.randrange(1, 6))] * draw.randrange(1, 16)
        kind = {"temperature": 0.0} if i % 3 else {"temperature": 0.8, "seed": i, "top_k": 20}
        kind |= {"structured_outputs": {"regex": "[ab]{9}"}} if i % 50 == 1 else {"ignore_eos": True}
        requests.append((prompt, SamplingParams(max_tokens=draw.randrange(1, 40), **kind), draw.randrange(4), i % 5 == 0))
    results, preemptions = zip(*(all_of(requests, options, ranks) for ranks in (1, 2)), strict=True)
    assert results[0] == results[1]
    assert min(preemptions) > 5, preemptions


def all_of(requests, options, ranks):
    """The tokens of requests that run 40 at a time, None where one was aborted, and how often one was preempted."""
    left, running, tokens = list(enumerate(requests))[::-1], {}, {}
    memory = 6 * (80 << 10) // ranks  # 6 pages
    with Generator.from_pretrained(**options, kv_cache_memory=memory, tensor_parallel=ranks) as generator:
        while left or running:
            while left and len(running) < 40:
                i, (prompt, params, steps, aborted) = left.pop()
                running[i] = generator.stream_completion(prompt, params), steps if aborted else None
            for i, (stream, steps) in list(running.items()):
                piece = next(stream, None) if steps != 0 else None
                if piece is not None:
                    tokens[i] = list(piece[1].token_ids)
                    running[i] = stream, None if steps is None else steps - 1
                    continue
                stream.close()
                tokens[i] = None if requests[i][3] else tokens.get(i)
                del running[i]
        return tokens, generator._engine.engine.stats.num_preemptions


def test_what_other_ranks_cannot_have_is_refused(pair, folder):
    """Catches functions that change the logits of one rank only, and settings that are dropped on the way."""
    def change(logits, tokens):
        return logits

    with pytest.raises(UnsupportedError, match="not supported beside --tensor-parallel"):
        pair.generate([3, 4], SamplingParams(logits_processors=[change]))
    for options in {"edits": {"layers.0": change}}, {"layers": change}, {"capture": ["layers.0"]}, {"batch_invariant": True}:
        with pytest.raises(UnsupportedError, match="not supported beside it"):
            LoadOptions(model=folder, tensor_parallel=2, **options)
    with pytest.raises(InputError, match="an integer from 1 to 64"):
        LoadOptions(tensor_parallel=0)
    options = LoadOptions(model=folder, tensor_parallel=2, speculative="ngram:3", kv_cache_memory="4MiB", loras=[])
    again = LoadOptions(**plain_options(options))
    assert plain_options(again) == plain_options(options)
    assert again.speculative == options.speculative
    with pytest.raises(UnsupportedError, match="does not reach the other ranks"):
        plain_options(LoadOptions(speculative=_Proposer()))


MINE = """
from minirt.kernels import reference
from minirt.layers import register

@register("mlp", "mine")
def mine(layer):
    def forward(x, batch, kv):
        h = reference.rms_norm(x, layer.norm.weight, layer.config.rms_norm_eps)
        gate, up = reference.linear(h, layer.gate_up.weight).chunk(2, dim=-1)
        return x + layer.summed(reference.linear(gate.sigmoid() * up, layer.down.weight))
    return forward
"""


def test_implementations_of_users_reach_the_ranks_by_import(folder, tmp_path, monkeypatch):
    """Catches files that rank 0 alone runs, and ranks that compute another implementation: without SiLU, tokens differ."""
    monkeypatch.setattr(base, "_REGISTRY", {**base._REGISTRY})
    monkeypatch.setattr(user_code, "imported", imported := [])
    monkeypatch.setattr(ranks, "imported", imported)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "of_all_ranks.py").write_text(MINE)
    user_code.import_file(str(tmp_path / "of_all_ranks.py"))
    try:
        prompts, results = [[3, 4, 5], [9, 8, 7, 6]], []
        for count in 1, 2:
            with Generator.from_pretrained(folder, tensor_parallel=count, impl=["auto", "*.mlp=mine"], **OPTIONS) as generator:
                results.append(tokens(generator.generate(prompts, GREEDY)))
        with Generator.from_pretrained(folder, **OPTIONS) as generator:
            assert results[0] == results[1] != tokens(generator.generate(prompts, GREEDY))
    finally:
        del sys.modules["of_all_ranks"]
    imported.clear()  # as if the caller's script had registered it
    with pytest.raises(UnsupportedError, match=r"^rank 1.*\*\.mlp=mine.*no implementation 'mine'.*import_file"):
        Generator.from_pretrained(folder, tensor_parallel=2, impl=["auto", "*.mlp=mine"], **OPTIONS)


class _Proposer:
    max_drafts, needs_history, capturable = 2, False, False

    def propose(self, *arguments):
        pass


@pytest.mark.parametrize(("how", "words"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "has not answered")])
def test_a_rank_that_ends_or_stops_ends_the_engine(how, words, folder, monkeypatch):
    """Catches a caller that waits for ever, and processes that are left."""
    monkeypatch.setattr(ranks, "SILENT_SECONDS", 2.0)
    generator = Generator.from_pretrained(folder, tensor_parallel=2, speculative="ngram:2", **OPTIONS)
    (process,) = followers(generator)
    threading.Timer(0.3, process.send_signal, [how]).start()
    began = time.monotonic()
    with pytest.raises(RankFailedError, match=words):
        generator.generate([[3, 4, 5]] * 4000, GREEDY)
    assert time.monotonic() - began < 10
    with pytest.raises(RankFailedError, match=words):
        generator.generate([3, 4], GREEDY)
    generator.close()
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_waits_on_the_device_end_before_a_failure_is_known():
    """Catches a thread that hears of a failure and drops a CUDA graph, which holds the GIL, while that graph waits for a rank."""
    order, leader = list[str](), object.__new__(ranks.Leader)

    def hear():
        try:
            while True:
                leader.check()
        except RankFailedError:
            order.append("known")

    hearing = threading.Thread(target=hear)

    class Signs(dict):
        def __setitem__(self, place, value):
            hearing.join(0.2)
            order.append("stopped")

    leader.failure, leader._closed, leader._changed, leader._processes = None, False, threading.Condition(), []
    leader.device, leader._signs = torch.device("cpu"), Signs({(0, 0): 0})
    hearing.start()
    leader._fail(RankFailedError("a rank failed"))
    hearing.join()
    assert order == ["stopped", "known"]


def test_a_gpu_that_never_ends_a_step_is_not_waited_for(folder, monkeypatch):
    """Catches a wait within the driver, which no error of another rank would end."""
    generator = Generator.from_pretrained(folder, tensor_parallel=2, **OPTIONS)
    (process,) = followers(generator)

    class Never:
        def query(self):
            with suppress(psutil.NoSuchProcess):
                process.kill()
            return False

    with pytest.raises(RankFailedError, match="has ended"):
        _Watched(Never(), generator._engine.engine.ranks).synchronize()
    generator.close()


def test_a_driver_that_never_returns_does_not_keep_the_process(monkeypatch):
    """Catches a process that stays at its exit, and one that is ended although nothing keeps it."""
    codes, ended = list[int](), threading.Event()
    monkeypatch.setattr(ranks.os, "_exit", codes.append)
    (thread := threading.Thread(target=ended.wait, daemon=True)).start()
    ranks._leave(thread)
    assert codes == [1]
    ended.set()
    thread.join()
    ranks._leave(thread)
    assert codes == [1]


OUT_OF_MEMORY = """
import torch
from {module} import {kind}
method, calls = {kind}.{name}, iter(range(1000))

def fails(*arguments):
    if next(calls) == 3:
        raise {error}
    return method(*arguments)

{kind}.{name} = fails
"""
STEPS = {"module": "minirt.engine.execute.runner", "kind": "Runner", "name": "start"}
DRAFTS = {"module": "minirt.speculative.proposers", "kind": "NgramProposer", "name": "propose"}
ERRORS = "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 7.00 GiB.')", "MemoryError('no room')"


@pytest.mark.parametrize("error", ERRORS)
def test_a_rank_without_memory_ends_the_engine(error, folder, tmp_path, monkeypatch):
    """Catches a caller that waits for a rank which has left the step, and an error that says nothing of memory."""
    (tmp_path / "short_of_memory.py").write_text(OUT_OF_MEMORY.format(**STEPS, error=error))
    monkeypatch.setattr(ranks, "imported", [str(tmp_path / "short_of_memory.py")])
    with Generator.from_pretrained(folder, tensor_parallel=2, **OPTIONS) as generator:
        processes, began = followers(generator), time.monotonic()
        with pytest.raises(RankFailedError, match=r"rank 1: no memory left for a step.*(7\.00 GiB|no room).*--max-num-seqs"):
            generator.generate([[3, 4, 5]] * 40, GREEDY)
        assert time.monotonic() - began < 10
        with pytest.raises(RankFailedError, match="no memory left for a step"):
            generator.generate([3, 4], GREEDY)
    assert not any(process.is_running() for process in processes)


def test_rank_0_without_memory_ends_the_engine(folder, monkeypatch):
    """Catches a step that rank 0 tries again with fewer tokens, while the other rank is at the one before."""
    def fails(self, plan):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")

    with Generator.from_pretrained(folder, tensor_parallel=2, **OPTIONS) as generator:
        assert generator.generate([3, 4], GREEDY).token_ids
        monkeypatch.setattr(Runner, "_forward", fails)
        began = time.monotonic()
        with pytest.raises(RankFailedError, match=r"rank 0: no memory left for a step.*7\.00 GiB"):
            generator.generate([[3, 4, 5]] * 4, GREEDY)
        assert time.monotonic() - began < 10


def test_a_rank_without_memory_for_drafts_ends_the_engine(folder, tmp_path, monkeypatch):
    """Catches a rank that goes on without drafts, while the others verify theirs: tokens would differ."""
    text = OUT_OF_MEMORY.format(**DRAFTS, error=ERRORS[0])
    (tmp_path / "short_of_memory.py").write_text(text)
    monkeypatch.setattr(ranks, "imported", [str(tmp_path / "short_of_memory.py")])
    with (
        Generator.from_pretrained(folder, tensor_parallel=2, speculative="ngram:2", **OPTIONS) as generator,
        pytest.raises(RankFailedError, match="rank 1: no memory left for a step"),
    ):
        generator.generate([[3, 4, 5]] * 4, GREEDY)


REFUSES = """
from minirt.parallel.ranks import Ranks
Ranks.has_memory = lambda self, model, cache, batch: {fits}
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_refuse_a_step_that_one_has_no_memory_for(rank, folder, alone, tmp_path, monkeypatch):
    """Catches a rank that runs a step alone, and would wait for the others; tables that come apart when the step is tried again
    with fewer tokens; an engine that ends. A long sequence never fits: its request alone fails, by an error that names a rank.
    """
    fits = f"self.shard.rank != {rank} or batch.num_tokens <= 7 and batch.max_seq_len < 90"
    (tmp_path / "refuses.py").write_text(REFUSES.format(fits=fits))
    monkeypatch.setattr(ranks, "imported", [str(tmp_path / "refuses.py")])
    monkeypatch.setattr(ranks.Ranks, "has_memory", ranks.Ranks.has_memory)  # the file changes it here, too
    prompts = [[3 + i % 200, 5, 7 + i % 13] * (1 + i % 9) for i in range(12)]
    grammar = SamplingParams(max_tokens=24, temperature=0.0, structured_outputs={"regex": "[ab]{3}c+d"})
    with Generator.from_pretrained(folder, tensor_parallel=2, **OPTIONS) as generator:
        exec(REFUSES.format(fits=fits))
        for params in GREEDY, grammar:
            assert tokens(generator.generate(prompts, params)) == tokens(alone.generate(prompts, params))
        began = time.monotonic()
        with pytest.raises(OutOfMemoryError, match=f"no memory left for a step of one token.*too little on rank {rank}"):
            generator.generate([4] * 95, GREEDY)
        assert time.monotonic() - began < 10
        assert generator.generate(prompts[3], GREEDY).token_ids == alone.generate(prompts[3], GREEDY).token_ids


def test_what_a_rank_says_of_its_memory(monkeypatch):
    """Catches a dry run before each step, or one that would write to the cache; and an error that counts as too little memory."""
    one, dry_runs = object.__new__(ranks.Ranks), []
    one.device, one._step_bytes = torch.device("cuda", 0), 1000
    model = SimpleNamespace(plan=SimpleNamespace(rows=[SimpleNamespace(implementation="triton")]))
    monkeypatch.setattr(ranks, "free_memory", lambda device: free)

    def dry_run(batch, cache):
        dry_runs.append(batch)
        raise error

    model.dry_run, free, error = dry_run, 1000, torch.OutOfMemoryError("CUDA out of memory.")
    assert one.has_memory(model, None, "enough")
    free = 999
    assert not one.has_memory(model, None, "short")
    model.dry_run = lambda batch, cache: dry_runs.append(batch)
    assert one.has_memory(model, None, "fits")
    model.dry_run, error = dry_run, RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        one.has_memory(model, None, "broken")
    model.plan.rows.append(SimpleNamespace(implementation="eager"))
    assert one.has_memory(model, None, "eager")
    assert dry_runs == ["short", "fits", "broken"]


def test_the_other_ranks_end_with_the_first():
    """Catches processes that outlive a caller that was killed. Here the caller only connects, and is killed once the other
    rank has sent its first message."""
    script = (
        "import socket, subprocess, sys; here, there = socket.socketpair(); number = there.fileno()\n"
        "command = [sys.executable, '-P', '-m', 'minirt.parallel.follower', str(number), '0']\n"
        "other = subprocess.Popen(command, pass_fds=[number], stdin=subprocess.DEVNULL, start_new_session=True)\n"
        "there.close(); here.recv(1); print(other.pid, flush=True); sys.stdin.read()"
    )  # fmt: skip
    first = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    other = psutil.Process(int(first.stdout.readline()))
    first.kill()
    first.communicate()
    other.wait(10)


def test_an_error_of_another_rank_is_the_error_of_the_caller(folder, monkeypatch):
    """Catches a start that hangs, or says nothing, if another rank cannot load its share."""
    monkeypatch.setattr(ranks, "plain_options", lambda options: plain_options(options) | {"max_model_len": 1 << 20})
    with pytest.raises(MinirtError, match=r"rank 1.*outside the model's context"):
        Generator.from_pretrained(folder, tensor_parallel=2, **OPTIONS)

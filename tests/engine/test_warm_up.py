"""A lazy warm-up. Catches a step for which no CUDA graph is ready, a padded step with other tokens, a capture before its kernels
are compiled, a piece that comes again after its exception, and a large step while its kernels are compiled."""

import ctypes
import gc
import threading
from collections import deque
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
from engine.test_engine import engine
from engine.test_graph_steps import Graphs, run
from layers.test_triton_layers import build

from minirt import head_start
from minirt.engine.buckets import Bucket, Buckets
from minirt.engine.engine import Engine, Request
from minirt.engine.engine_thread import EngineThread
from minirt.engine.execute import step_buffers, step_graphs
from minirt.engine.limits import EngineLimits
from minirt.engine.warmup import warm_up
from minirt.engine.warmup.steps import MIDDLE_TOKENS, first_buckets
from minirt.errors import InputError
from minirt.kernels.compile import ahead_of_time
from minirt.loading.options import LoadOptions
from minirt.modeling.model import Model
from minirt.progress import COMPILING
from minirt.sampling_params import SamplingParams, resolve


@pytest.mark.parametrize(("seqs", "tokens"), [(1, 16), (5, 64), (64, 8192), (256, 8192), (700, 512), (3, 100)])
def test_every_smaller_step_has_a_graph_from_the_start(seqs, tokens):
    buckets = Buckets(EngineLimits(4096, seqs, tokens))
    first = first_buckets(buckets)
    assert first == sorted(first, key=buckets.all().index), "largest first"
    assert len(first) < len(buckets.all()) or seqs == 1
    for bucket in buckets.all():
        if bucket.tokens <= MIDDLE_TOKENS:
            assert any(one.serves(bucket) for one in first), bucket
    assert not Bucket(8, short=True).serves(Bucket(8)), "it has no splits to combine"
    assert not Bucket(64, 64).serves(Bucket(1))
    assert not Bucket(8, drafts=1).serves(Bucket(8))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has CUDA graphs")
def test_steps_that_are_padded_to_larger_graphs_give_the_same_tokens(monkeypatch):
    expected, _ = run(build("qwen2", "eager"), graphs=False)
    monkeypatch.setattr(step_graphs, "CudaGraphs", Graphs)
    monkeypatch.setattr(step_buffers, "is_nvidia", lambda device: True)
    made, initialize = [], Engine.__init__

    def with_first_graphs(self, *args, **options):
        initialize(self, *args, **options)
        graphs = self._runner.graphs
        made.extend([Bucket(2, 16), Bucket(2)])
        for bucket in made:
            graphs.dry_run(bucket)
            graphs.capture(bucket)
        graphs.later.append(Bucket(1))

    monkeypatch.setattr(Engine, "__init__", with_first_graphs)
    found, graphs = run(build("qwen2", "triton"), graphs=True)
    assert found == expected
    assert set(graphs.captured) == set(made), "nothing was captured for a step"
    assert graphs.replays > 6


class Compiler:
    """A stand-in for `AheadOfTime`, whose kernels are ready after `turns` questions."""

    def __init__(self, calls, turns):
        self.calls, self.turns = calls, turns

    def __call__(self, device, progress):
        self.progress = progress
        return self

    def add(self, launch):
        launch()

    def wait(self):
        self.calls.append("wait")
        for step in ((1, 3, False), (2, 3, True), (3, 3, True)):
            self.progress(*step)

    def ready_within(self, seconds):
        self.turns -= 1
        return self.turns < 0

    def close(self):
        self.calls.append("close")


def warming(monkeypatch, lazy, turns=0, drafts=0, fails=()):
    """A `WarmUp` without a GPU, its calls, and its stages."""
    calls, stages = [], []

    def capture(bucket):
        calls.append(bucket)
        if bucket in fails:
            raise fails[bucket]

    monkeypatch.setattr(ahead_of_time, "AheadOfTime", Compiler(calls, turns))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    for name in ("_reserve", "_measure_prompts", "_measure_graphs", "on_device"):
        monkeypatch.setattr(warm_up, name, lambda *_: nullcontext())
    for name in ("first_launches", "other_launches"):
        monkeypatch.setattr(warm_up, name, lambda *_, name=name: [partial(calls.append, name)])
    limits = EngineLimits(64, 12, 128, max_drafts=drafts)
    runner = SimpleNamespace(
        retries=True, model=object.__new__(Model), device=torch.device("cuda"), limits=limits,
        graphs=SimpleNamespace(
            buckets=Buckets(limits), capture=capture, later=deque(), reserve=lambda bucket: calls.append(("reserve", bucket))
        ),
    )  # fmt: skip
    return warm_up.WarmUp(runner, lazy=lazy, progress=lambda *stage: stages.append(stage)), calls, stages


@pytest.mark.parametrize("drafts", [0, 1])
def test_a_full_warm_up_leaves_nothing(monkeypatch, drafts):
    """Drafts need the times of all steps. A user is told that kernels are compiled only if they are."""
    warm, calls, stages = warming(monkeypatch, lazy=drafts > 0, drafts=drafts)
    every = warm._runner.graphs.buckets.all()
    warm.start()
    assert calls == ["first_launches", "other_launches", "wait", *every, "close"]
    assert (warm.remaining, warm.most_tokens) == (0, None)
    assert stages[:3] == [("kernels", 1, 3), (COMPILING, 2, 3), (COMPILING, 3, 3)]
    assert stages[3:] == [("CUDA graphs", i + 1, len(every)) for i in range(len(every))]


@pytest.mark.parametrize("retries", [True, False])
def test_memory_that_runs_out_while_prompts_are_measured(retries, monkeypatch):
    """Catches a rank that leaves the measured step, while the other ranks wait for its part of the sums."""
    def fails(*arguments):
        raise torch.OutOfMemoryError("no memory")

    warm, _, _ = warming(monkeypatch, lazy=False)
    warm._runner.retries = retries
    monkeypatch.setattr(warm_up, "_measure_prompts", fails)
    with nullcontext() if retries else pytest.raises(torch.OutOfMemoryError):
        assert warm.start().prompt_time is None


def test_a_lazy_warm_up_goes_on_piece_by_piece(monkeypatch):
    every = Buckets(EngineLimits(64, 12, 128)).all()
    first = [bucket for bucket in every if bucket in first_buckets(Buckets(EngineLimits(64, 12, 128)))]
    others = [bucket for bucket in reversed(every) if bucket not in first]
    assert len(others) > 1, "else nothing is left to do"
    fails = {others[0]: torch.OutOfMemoryError("no memory"), others[1]: RuntimeError("broken")}
    warm, calls, _ = warming(monkeypatch, lazy=True, turns=2, fails=fails)
    warm.start()
    assert calls == ["first_launches", "wait", ("reserve", every[0]), *first], "the memory of all graphs is taken first"
    assert (warm.remaining, warm.most_tokens) == (len(others), MIDDLE_TOKENS)
    calls.clear()
    for _ in range(3):
        warm.advance()
    assert (calls, warm.most_tokens) == (["other_launches"], MIDDLE_TOKENS), "kernels are still compiled"
    with pytest.warns(RuntimeWarning, match="no memory for the CUDA graph"):
        warm.advance()
    assert (calls[1:], warm.most_tokens) == (["close", others[0]], None)
    with pytest.raises(RuntimeError, match="broken"):
        warm.advance()
    while warm.remaining:
        warm.advance()
    assert calls[3:] == others[1:], "each comes once"


@pytest.mark.parametrize(("running", "least", "most"), [(1, 0.05, 0.15), (64, 0.005, 0.02)])
def test_pieces_take_a_share_of_the_time(running, least, most, monkeypatch):
    """Steps of 1 ms and pieces of 10 ms. Catches pieces that are counted in steps: short ones would mostly wait."""
    now, captured = 0.0, 0

    def capture(bucket):
        nonlocal now, captured
        now, captured = now + 0.010, captured + 1

    monkeypatch.setattr(warm_up, "perf_counter", lambda: now)
    warm, _, _ = warming(monkeypatch, lazy=True)
    warm.start()
    warm.advance()  # the launches
    warm._runner.graphs.capture = capture
    warm.advance()
    captured = 0
    began = now
    while warm.remaining:
        now += 0.001
        warm.after_step(running)
    assert least < 0.010 * captured / (now - began) < most


class Left:
    """A stand-in for a warm-up with a rest of some pieces."""

    most_tokens = None

    def __init__(self, remaining, first=nullcontext):
        self.remaining, self.first, self.steps = remaining, first, 0

    def advance(self, wait_s=0.0):
        self.first()
        self.remaining -= 1

    def after_step(self, running):
        self.steps += 1

    def close(self):
        self.remaining = 0


def test_an_idle_engine_finishes_its_warm_up():
    """With and without requests, and after an exception in a piece."""
    it, failed = engine()[0], threading.Event()

    def fail_once():
        if not failed.is_set():
            failed.set()
            it._warm_up.remaining -= 1
            raise RuntimeError("a piece failed")

    it._warm_up = left = Left(5, fail_once)
    thread, outputs = EngineThread(it), SimpleQueue()
    thread.start()
    thread.submit([Request(thread.new_id(), [1, 2, 3], resolve(SamplingParams(max_tokens=3, temperature=0.0), None))], outputs)
    tokens = []
    while len(tokens) < 3:
        tokens += [token for output in outputs.get(timeout=60) for token in output.token_ids]
    while left.remaining:
        thread.call(lambda engine: None)
    assert failed.is_set()
    thread.stop()


def test_the_last_piece_may_fail_beside_requests():
    it, _ = engine()

    class Failing(Left):
        def after_step(self, running):
            self.remaining -= 1
            raise RuntimeError("a piece failed")

    it._warm_up = Failing(1)
    it.add(Request(0, [1, 2, 3], resolve(SamplingParams(max_tokens=3, temperature=0.0), None)))
    with pytest.raises(RuntimeError, match="a piece failed"):
        it.step()
    assert not it.warming_up


def test_steps_stay_small_while_kernels_are_compiled():
    it, _ = engine()
    it._scheduler.most_tokens = 4
    it.add(Request(0, list(range(11)), resolve(SamplingParams(max_tokens=1, temperature=0.0), None)))
    assert it._scheduler.schedule().sequences.total_tokens == 4


@pytest.mark.parametrize("options", [
    {}, {"device": "cuda:1"}, {"device": "cpu"}, {"impl": "eager"}, {"kernel_cache": "folder"}, {"warm_up": "none"},
])  # fmt: skip
@pytest.mark.parametrize(("gpu", "cached"), [(True, False), (True, True), (False, False)])
def test_what_a_command_begins_at_once(options, gpu, cached, monkeypatch, tmp_path):
    """Catches compilers and a CUDA context that nothing will use, and a context on another GPU."""
    begun, glob = [], Path.glob
    cuda = SimpleNamespace(
        cuInit=lambda flags: 0, cuDeviceGet=lambda handle, number: begun.append(number) or 0,
        cuDevicePrimaryCtxRetain=lambda context, handle: begun.append("context"),
    )  # fmt: skip
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self] * gpu) if str(self) == "/dev" else glob(self, pattern))
    monkeypatch.setattr(head_start, "start_early", lambda: begun.append("compilers"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if cached:
        (tmp_path / "kernel").mkdir()
    before = set(threading.enumerate())
    with pytest.raises(KeyError), head_start.head_start(options):
        raise KeyError("the load fails")
    for thread in set(threading.enumerate()) - before:
        thread.join()
    if not gpu or options.get("device") == "cpu":
        assert begun == []
    else:
        compiles = not cached and options.keys() <= {"device"}
        assert sorted(map(str, begun)) == sorted([str(int("device" in options)), "context", *["compilers"] * compiles])


def test_garbage_is_not_collected_during_a_load():
    """Also in a program that has switched it off for good, and after a load that fails."""
    options, states = {"device": "cpu"}, {}
    with pytest.raises(KeyError, match="collects"), head_start.head_start(options):
        states[gc.isenabled()] = states["collects"]
    with head_start.head_start(options):
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with head_start.head_start(options):
        pass
    assert not gc.isenabled()
    gc.enable()


def test_an_unknown_warm_up_is_refused():
    with pytest.raises(InputError, match=r"--warm-up.*expected lazy or full or none; found 'later'"):
        LoadOptions(warm_up="later")

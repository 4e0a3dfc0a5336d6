"""Many callers of one engine: threads, aborts, exceptions at any line, interrupts, and the end of the engine.

Catches outputs that reach another caller, a caller that waits for ever, pages that are lost, and work in a step for requests that
are not in it.
"""

import gc
import random
import signal
import sys
import threading
from dataclasses import replace
from queue import SimpleQueue

import pytest
from engine.test_engine import PAGE, engine, following, undisturbed
from support.native import native_error

from minirt.engine import engine as engine_module
from minirt.engine import engine_thread, plan_step, port
from minirt.engine.collect import collector
from minirt.engine.engine import Request
from minirt.engine.engine_thread import EngineThread
from minirt.engine.schedule import scheduler
from minirt.errors import DeviceFailedError, EngineError, MinirtError
from minirt.sampling_params import SamplingParams, resolve
from minirt.step import kv_cache

EOS = 5


class Stopped(Exception):
    """A client left early."""


class Client:
    """A caller's requests, and the queue of their outputs. Leaving it aborts all of them."""

    def __init__(self, thread):
        self.thread, self.outputs, self.ids = thread, SimpleQueue(), []

    def submit(self, requests):
        self.ids += [own.id for own in requests]
        self.thread.submit(requests, self.outputs)

    def receive(self):
        return self.outputs.get(timeout=90)

    def close(self):
        self.thread.abort(self.ids)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@pytest.fixture
def thread():
    made = []

    def make(**options):
        it, cache = engine(**options)
        made.append(EngineThread(it))
        return made[-1], cache

    yield make
    for each in made:
        each.stop()


def request(thread, prompt, count, priority=0, group=None):
    sampling = resolve(SamplingParams(max_tokens=count, temperature=0.0), None)
    return Request(thread.new_id(), prompt, sampling, (EOS,), priority=priority, group=group)


def complete(thread, prompts, count=8, leave_after=None, priority=0, samples=1):
    """Tokens for each prompt, from one client. Raises the first error; `leave_after`: stop after so many outputs.

    The tokens of the mock model do not depend on the seed, so the `samples` of a prompt are equal.
    """
    asked = []
    for prompt in prompts:
        group = thread.new_id() if samples > 1 else None
        asked += [request(thread, prompt, count, priority, group) for _ in range(samples)]
    tokens, running = {r.id: [] for r in asked}, {r.id for r in asked}
    with Client(thread) as client:
        client.submit(asked)
        while running:
            for output in client.receive():
                assert output.request_id in tokens, "another caller's output"
                if output.error is not None:
                    raise output.error
                tokens[output.request_id] += output.token_ids
                if output.finish_reason:
                    running.remove(output.request_id)
                if leave_after is not None and sum(map(len, tokens.values())) >= leave_after:
                    raise Stopped
    return list(tokens.values())


def expected(prompts, count=8):
    return [undisturbed(prompt, count, eos=EOS) for prompt in prompts]


def at_rest(thread, cache):
    """Once all earlier commands are done: nothing is open, and all pages are free."""
    return thread.call(lambda it: not it.has_work and not thread._sinks and cache.allocator.num_free == cache.num_pages)


def spread(count, work):
    """Run `work(i)` in `count` threads; raises the first exception of any."""
    raised = []

    def guarded(i):
        try:
            work(i)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(600)
        assert not each.is_alive(), "a caller waits for ever"
    if raised:
        raise raised[0]


def test_sixteen_threads_with_aborts_and_exceptions(thread):
    """3,200 calls. Some leave early, and a layer raises now and then. Whoever gets all tokens gets those of a solo run.

    Prompts share beginnings of none to three pages, priorities differ, and some have several samples.
    """
    it, cache = thread(pages=60, seqs=8, budget=40)
    model, steps = it.engine._runner.model, iter(range(10**9))

    def fails_sometimes(batch, cache):
        if next(steps) % 61 == 60:
            raise RuntimeError("a layer's own error")
        return model(batch, cache)

    it.engine._runner.model = fails_sometimes
    done, left, failed = [], [], []

    def work(i):
        draw = random.Random(i)
        for _ in range(200):
            stems = [list(range(20, 20 + draw.randrange(14))) for _ in range(draw.choice((1, 1, 2, 3)))]
            prompts = [[*stem, *(draw.randrange(90) for _ in range(draw.randrange(1, 9)))] for stem in stems]
            samples = draw.choice((1, 1, 3))
            leave = draw.randrange(1, 9) if draw.random() < 0.3 else None
            try:
                tokens = complete(it, prompts, 6, leave, priority=draw.randrange(3), samples=samples)
                assert tokens == [own for own in expected(prompts, 6) for _ in range(samples)]
                done.append(i)
            except Stopped:
                left.append(i)
            except EngineError as error:
                failed.append(str(error))

    spread(16, work)
    assert len(done) + len(left) + len(failed) == 3200
    assert it.engine.prefix_cache_stats.hits > 3200
    assert min(len(done), len(left), len(failed)) > 20, "all three happen"
    assert all("a layer's own error" in message for message in failed)
    assert at_rest(it, cache)


MODULES = (engine_module, collector, engine_thread, scheduler, port, plan_step, kv_cache)
FILES = {module.__file__ for module in MODULES}


class Injected(BaseException):
    """No handler of minirt knows this class."""


def count_lines(thread_work, at=None):
    """Run `thread_work(end)` with a trace of the engine's thread that raises at line event `at`. → line events before `end()`.

    Python's cyclic garbage collector rests meanwhile: it may run in any thread, and an exception in a finalizer of an older test
    would be lost there.
    """
    seen, on = 0, True

    def end():
        nonlocal on
        on = False

    def trace(frame, event, _):
        nonlocal seen
        if frame.f_code.co_filename not in FILES:
            return None
        if frame.f_code.co_name in ("_run", "_recover", "recover", "_end", "refuse", "fail", "reset", "_closed"):
            return trace if frame.f_code.co_name == "_run" and event == "call" else None  # what answers an exception
        if event == "line" and on:
            seen += 1
            if seen == at:
                raise Injected(f"{frame.f_code.co_qualname} line {frame.f_lineno}")
        return trace

    threading.settrace(trace)
    gc.disable()
    try:
        thread_work(end)
    finally:
        gc.enable()
        threading.settrace(None)
    return seen


def test_an_exception_at_any_line_of_the_engines_thread(thread):
    """No caller waits for ever or gets a wrong token, no page is lost, and the next request runs.

    The pages are few, so that sequences are preempted, too. One of two samples waits for the other.
    """
    prompts = [[10, 11, 12, 13, 14, 15], [30] * 9]
    twice = [tokens for tokens in expected(prompts, 9) for _ in range(2)]
    ended, causes = [], []

    def scenario(end):
        it, cache = thread(pages=6, seqs=3, budget=8, length=24)
        for leave in (None, 2):
            try:
                assert complete(it, prompts, 9, leave, samples=2) == twice
                ended.append("done")
            except Stopped:
                ended.append("left")
            except EngineError as error:
                causes.append(error.__cause__)
                ended.append("failed")
        try:
            it.call(lambda engine: engine.has_work)
        except EngineError as error:
            causes.append(error.__cause__)
        end()
        assert complete(it, prompts, 9, samples=2) == twice
        assert at_rest(it, cache)
        it.stop()

    total = count_lines(scenario)
    assert ended == ["done", "left"]
    assert total > 1000
    step = max(1, total // 300)
    for at in range(1, total + 1, step):
        spread(1, lambda _, at=at: count_lines(scenario, at))
    assert ended.count("failed") > 100
    assert all(isinstance(cause, Injected) for cause in causes)


def test_an_exception_in_one_command_leaves_the_waiting_requests(thread):
    it, cache = thread()
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        it.call(lambda engine: 1 / 0)
    assert complete(it, [[7, 8]]) == expected([[7, 8]])
    assert at_rest(it, cache)


def test_an_abort_that_raises_is_carried_out(thread, monkeypatch):
    """Its request, which has not started, would run to its end for nobody."""
    it, cache = thread()
    abort, raised, ready = it.engine.abort, [], threading.Event()

    def abort_at_the_second_time(request_id):
        if raised:
            return abort(request_id)
        raised.append(request_id)
        raise ZeroDivisionError

    monkeypatch.setattr(it.engine, "abort", abort_at_the_second_time)
    busy = threading.Thread(target=it.call, args=(lambda _: ready.wait(60),))
    busy.start()
    with Client(it) as client:
        client.submit([request(it, [7, 8], 200)])
    threading.Timer(0.2, ready.set).start()
    assert at_rest(it, cache)
    assert raised
    busy.join()


def test_exceptions_before_any_request_has_started_end_the_waiting_requests(thread, monkeypatch):
    """Else the engine's thread would try for ever, and its callers would wait for ever."""
    it, cache = thread()
    with monkeypatch.context() as patch:
        patch.setattr(it.engine, "step", lambda deliver: 1 / 0)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            complete(it, [[7, 8], [9]])
    assert complete(it, [[7, 8]]) == expected([[7, 8]])
    assert at_rest(it, cache)


@pytest.fixture
def interrupts_are_raised():
    """As in a program: processes that run tests side by side may ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts_are_raised")
def test_an_interrupt_reaches_the_calling_thread_only(thread):
    """Ctrl-C while the main thread waits: its request is dropped, another thread's goes on in the same steps."""
    it, cache = thread()
    model, others, together = it.engine._runner.model, [], threading.Event()

    def interrupts(batch, cache):
        if max(batch.seq_lens) >= 33 and not together.is_set():  # the other sequence is never that long
            before = {slot for _, work in it.engine._in_flight for slot in work.sequences.slots[work.sequences.num_draws > 0]}
            if batch.num_seqs == 2:
                together.set()
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            elif len(before) < 2:  # between two requests of the other thread: its next command is there before the next step
                it._commands.append(it._inbox.get(timeout=60))
            # Else the last token of the other thread's request is not delivered yet.
        return model(batch, cache)

    def complete_others():
        while not together.is_set():
            others.append(complete(it, [[40, 41]], 25))
        others.append(complete(it, [[40, 41]], 25))

    it.engine._runner.model = interrupts
    other = threading.Thread(target=complete_others)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        complete(it, [[50] * 30], 30)
    other.join(60)
    assert len(others) > 0
    assert all(tokens == expected([[40, 41]], 25) for tokens in others)
    assert at_rest(it, cache)


def test_waking_the_thread_changes_nothing(thread):
    """Neither before the first command, nor while it sleeps or works, nor after its end."""
    it, cache = thread()
    it.wake()
    assert it._thread is None, "there is no work for it yet"
    for prompts in ([[1, 2]], [[40, 41], [7] * 20]):
        for _ in range(50):
            it.wake()
        assert complete(it, prompts) == expected(prompts)
    assert at_rest(it, cache)
    it.stop()
    it.wake()
    with pytest.raises(EngineError, match="closed"):
        complete(it, [[1]])


def test_stop_ends_all_waiters(thread):
    it, _ = thread()
    model, entered = it.engine._runner.model, threading.Event()

    def slow(batch, cache):
        entered.set()
        gate.wait(60)
        return model(batch, cache)

    gate = threading.Event()
    it.engine._runner.model = slow
    errors = []

    def wait(i):
        try:
            complete(it, [[i]], 60)
        except MinirtError as error:
            errors.append(error)

    callers = [threading.Thread(target=wait, args=(i,), daemon=True) for i in (1, 3, 2, 4)]
    for caller in callers[:2]:
        caller.start()
    assert entered.wait(60)
    for caller in callers[2:]:
        caller.start()
    stopper = threading.Thread(target=it.stop)
    stopper.start()
    gate.set()
    for each in (*callers, stopper):
        each.join(60)
        assert not each.is_alive()
    assert [str(error) for error in errors] == ["the generator is closed"] * 4
    assert len({id(error) for error in errors}) == 4, "each thread raises an exception of its own"
    for use in (lambda: complete(it, [[1]]), lambda: it.call(lambda engine: None), lambda: it.engine):
        with pytest.raises(EngineError, match="closed"):
            use()
    it.stop()


def test_a_failed_gpu_ends_all_waiters(thread):
    it, _ = thread(seqs=2)
    model, steps = it.engine._runner.model, iter(range(100))
    cause = native_error("CUDA error: an illegal memory access was encountered")

    def breaks(batch, cache):
        if next(steps) == 4:
            raise cause
        return model(batch, cache)

    it.engine._runner.model = breaks
    with pytest.raises(DeviceFailedError, match="illegal memory access"):
        complete(it, [[1], [2], [3]], 60)
    with pytest.raises(DeviceFailedError, match="illegal memory access"):
        complete(it, [[1]])
    assert it.failed


def test_logits_wait_for_room_beside_running_requests(thread):
    """They need all pages, so they come after the request before them; a short request behind them does not wait for those."""
    it, cache = thread(pages=16)
    prompt = list(range(3, 66))
    with Client(it) as first, Client(it) as second:
        first.submit([request(it, [1, 2], 20)])
        nothing = replace(resolve(SamplingParams(), None), max_tokens=0)
        second.submit([Request(it.new_id(), prompt, nothing, logits_only=True), short := request(it, [3], 3)])
        outputs = []
        while sum(output.finish_reason is not None for output in outputs) < 2:
            outputs += second.receive()
        assert outputs[-1].logits.argmax(-1).tolist() == [following(prompt[: i + 1]) for i in range(63)]
        assert {output.request_id for output in outputs[:-1]} == {short.id}
        assert [token for output in outputs for token in output.token_ids] == undisturbed([3], 3, eos=EOS)
        tokens = []
        while not tokens or not tokens[-1].finish_reason:
            tokens += first.receive()
        assert [token for output in tokens for token in output.token_ids] == undisturbed([1, 2], 20, eos=EOS)
    assert at_rest(it, cache)


def test_a_forked_process_is_told(thread):
    it, _ = thread()
    complete(it, [[1]])
    it._process += 1
    with pytest.raises(EngineError, match="the process that loaded the model"):
        complete(it, [[1]])
    it._process -= 1


def test_a_step_costs_nothing_for_requests_that_wait(thread):
    """Lines of Python in the steps of one page, with 2 and with 5,000 requests behind the two that run."""

    def lines(waiting):
        it, _ = thread(seqs=2)
        client, count = Client(it), 0
        requests = [request(it, [1 + i], 50) for i in range(2 + waiting)]

        def trace(frame, event, _):
            nonlocal count
            count += event == "line"
            return trace if "minirt" in frame.f_code.co_filename else None

        def steps(engine):
            """Also the first steps, so that no others run before them. No finalizer of an older test may run in between."""
            it._sinks.update(dict.fromkeys([each.id for each in requests], client.outputs))
            list(map(engine.add, requests))
            for _ in range(3):
                it._sinks.deliver(engine.step())
            gc.disable()
            sys.settrace(trace)
            try:
                for _ in range(PAGE):  # one of them fills a page
                    it._sinks.deliver(engine.step())
            finally:
                sys.settrace(None)
                gc.enable()

        it.call(steps)
        client.close()
        return count

    assert lines(2) == lines(5000)

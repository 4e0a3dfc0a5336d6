"""The asyncio API: many streams in one or several event loops, cancellation, slow readers, loops that are closed.

Catches outputs that reach another stream or are lost, requests that go on after their reader has left, a reader that delays
others, and an engine's thread that ends with an event loop.
"""

import asyncio
import gc
import inspect
import threading
import weakref
from concurrent.futures import Future
from contextlib import aclosing, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine.test_engine import VOCAB, Mock, undisturbed

from minirt import AsyncGenerator, Generator, SamplingParams
from minirt.errors import ContextLengthError, EngineError, InputError, SlowReaderError
from minirt.modeling.plan import Plan
from minirt.step.kv_cache import PAGE_SIZE, PagesSpec

EOS = 5


class MockModel(Mock):
    """The mock model of test_engine.py, with what `Generator` asks of a model."""

    config = SimpleNamespace(vocab_size=VOCAB, max_context_len=256, sliding_window=None)
    plan, capturable = Plan((), "cpu", "every layer is eager"), False
    decode_read_bytes, step_state_bytes, adapters = 0, 0, None
    dtype, weight_bytes, rope_bytes = torch.float32, staticmethod(lambda dtype: 0), staticmethod(lambda length: [])
    device, cache_specs, kv_dtype, max_model_len = torch.device("cpu"), [PagesSpec(1, 1)], torch.float32, 256


def mock_generator(pages=40, seqs=16, **options):
    made = Generator(
        MockModel(), eos_token_ids=(EOS,), kv_cache_memory=pages * 8 * PAGE_SIZE, max_num_seqs=seqs,
        max_num_batched_tokens=256, **options,
    )  # fmt: skip
    assert made._cache.num_pages == pages
    return made


@pytest.fixture
def generator():
    with mock_generator() as made:
        yield made


def params(count=8):
    return SamplingParams(max_tokens=count, temperature=0.0)


def at_rest(generator):
    """Once all earlier commands are done: nothing is open, and all pages are free."""
    thread, allocator = generator._engine, generator._cache.allocator
    return thread.call(lambda it: not it.has_work and not thread._sinks and allocator.num_free == allocator.num_pages)


async def read(agen, prompt, count=8, leave_after=None, pause=None):
    """All tokens of a stream, or the first ones."""
    tokens = []
    async with aclosing(agen.stream(prompt, params(count))) as pieces:
        async for piece in pieces:
            tokens += piece.token_ids
            if leave_after is not None and len(tokens) >= leave_after:
                break
            if pause:
                await pause()
    return tokens


def test_a_name_is_no_generator():
    """`AsyncGenerator("model")` was accepted, and failed at its first request with an AttributeError."""
    with pytest.raises(InputError, match=r"a minirt.Generator; found 'model' \(await AsyncGenerator.from_pretrained"):
        AsyncGenerator("model")


def test_arguments_of_other_libraries_are_explained(generator):
    """vLLM's AsyncLLM.generate(prompt, sampling_params, request_id) was a TypeError; asyncio still sees coroutine functions."""
    with pytest.raises(InputError, match=r"here params=…"):
        asyncio.run(AsyncGenerator(generator).generate("hi", sampling_params=None))
    with pytest.raises(InputError, match=r"AsyncGenerator\.stream: .*leaving an iterator aborts"):
        AsyncGenerator(generator).stream("hi", request_id="1")
    assert inspect.iscoroutinefunction(AsyncGenerator.generate)


def test_it_gives_what_a_generator_gives(folder):
    """Texts, stop strings, token ids, chat, and the forms of arguments, on a model with a tokenizer."""

    async def scenario():
        async with await AsyncGenerator.from_pretrained(folder, device="cpu", kv_cache_memory=1 << 22) as agen:
            plain, short = agen.generator, SamplingParams(max_tokens=20, ignore_eos=True)
            whole = plain.generate("hello", short)
            stopped = SamplingParams(max_tokens=20, ignore_eos=True, stop=whole.text[4:7])
            for own in (short, stopped):
                expected, pieces = plain.generate("hello", own), []
                async for piece, completion in agen.stream_completion("hello", own):
                    pieces.append(piece)
                    assert completion.text == "".join(p.text for p in pieces)
                assert completion.text == expected.text
                assert completion.finish_reason == pieces[-1].finish_reason == expected.finish_reason
                assert completion.token_ids == [t for p in pieces for t in p.token_ids] == expected.token_ids
                assert (await agen.generate("hello", own)).token_ids == expected.token_ids
            assert "stop" in {expected.finish_reason}
            await agen.generate("hello", replace(stopped, max_tokens=200))
            assert at_rest(plain), "a request that has ended at a stop string is aborted"
            prompts, own = ["hello", [1, 2, 3], "x" * 150], [short, stopped, None]
            assert [c.text for c in await agen.generate(prompts, own)] == [c.text for c in plain.generate(prompts, own)]
            assert await agen.generate([]) == []
            drawn = SamplingParams(max_tokens=7, ignore_eos=True, seed=3, n=3)
            samples, texts = (await agen.generate("hello", drawn)).outputs, ["", "", ""]
            assert [c.text for c in samples] == [c.text for c in plain.generate("hello", drawn).outputs]
            async for piece in agen.stream("hello", drawn):
                texts[piece.sample] += piece.text
            assert texts == [c.text for c in samples]
            messages = [{"role": "user", "content": "hello"}]
            assert (await agen.chat(messages, short)).text == plain.chat(messages, short).text
            for wrong in (None, [1.5], [5] * 3000, ["a", ""]):
                kind = ContextLengthError if wrong == [5] * 3000 else InputError
                with pytest.raises(kind):
                    await agen.generate(wrong)
                with pytest.raises(kind):
                    await anext(agen.stream(wrong))
            with pytest.raises(InputError, match="SamplingParams"):
                await agen.generate("a", {"max_tokens": 3})
            assert at_rest(plain)
        with pytest.raises(EngineError, match="closed"):
            await agen.generate("hello")

    asyncio.run(scenario())


def gated(generator):
    """Makes the model wait for a permit before each step → the semaphore of permits."""
    permits, model = threading.Semaphore(0), generator._engine.engine._runner.model

    def wait(batch, cache):
        permits.acquire()
        return model(batch, cache)

    generator._engine.engine._runner.model = wait
    return permits


def steps(generator):
    return len(generator.model.tokens_per_step)


async def settled():
    """All callbacks that are ready have run, several times over."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("how", ["task cancelled", "iterator closed", "iterator dropped", "generate cancelled"])
def test_leaving_aborts(generator, how):
    permits = gated(generator)
    prompt = [20] * 9

    async def scenario():
        agen = AsyncGenerator(generator)
        permits.release()
        if how == "generate cancelled":
            task = asyncio.create_task(agen.generate([prompt, prompt], params(200)))
            await asyncio.sleep(0)
        else:
            pieces = agen.stream(prompt, params(200))
            await anext(pieces)
            task = asyncio.create_task(anext(pieces)) if how == "task cancelled" else None
            await asyncio.sleep(0)
        if task is not None:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "iterator closed":
            await pieces.aclose()
        else:
            del pieces
            gc.collect()
            await settled()
        permits.release(1000)
        assert await asyncio.to_thread(at_rest, generator)

    asyncio.run(scenario())
    assert steps(generator) < 5, "the request went on"


def test_a_slow_reader_is_aborted_and_delays_nobody(generator):
    permits = gated(generator)

    async def scenario():
        agen = AsyncGenerator(generator, max_unread=6)
        prompt, other = [20] * 9, [20] * 8
        assert len(undisturbed(prompt, 40, EOS)) == len(undisturbed(other, 40, EOS)) == 40
        slow, fast = agen.stream(prompt, params(40)), agen.stream(other, params(40))
        permits.release()
        tokens, fast_tokens = [*(await anext(slow)).token_ids], []
        for i in range(20):  # a step for each piece that is read
            piece = asyncio.create_task(anext(fast))
            await asyncio.sleep(0)
            permits.release(2 if i == 0 else 1)  # the engine may have started a step without the other request
            fast_tokens += (await piece).token_ids
        permits.release(1000)
        fast_tokens += [token async for piece in fast for token in piece.token_ids]
        assert fast_tokens == undisturbed(other, 40, EOS)
        assert await asyncio.to_thread(at_rest, generator), "it was aborted although nobody read it"
        with pytest.raises(SlowReaderError, match="at most 6 unread pieces"):  # noqa: PT012
            async for piece in slow:
                tokens += piece.token_ids
        assert 6 < len(tokens) < 12
        assert tokens == undisturbed(prompt, 40, EOS)[: len(tokens)]
        whole = await agen.generate(prompt, params(40))  # what is collected has no bound
        assert whole.token_ids == undisturbed(prompt, 40, EOS)

    asyncio.run(scenario())


def test_one_wake_up_for_a_step(generator):
    """Twelve streams in steps together: the loop is woken once for each, at most."""

    async def scenario():
        agen, loop, woken = AsyncGenerator(generator), asyncio.get_running_loop(), []
        call_soon = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *arguments: (woken.append(1), call_soon(*arguments))[1]
        await asyncio.gather(*(read(agen, [20, i], 8) for i in range(12)))
        assert 1 <= len(woken) <= steps(generator) < 60

    asyncio.run(scenario())


@pytest.mark.parametrize("woken", [False, True])
def test_a_loop_that_is_closed(generator, woken):
    """Its requests are dropped. `woken`: it was called before it was closed, and did not get to answer."""
    permits = gated(generator)
    agen, prompt = AsyncGenerator(generator), [20] * 9
    loop = asyncio.new_event_loop()
    permits.release()
    pieces = agen.stream(prompt, params(200))
    loop.run_until_complete(anext(pieces))
    if woken:
        delivered: Future = Future()
        generator._engine._put_call(lambda _: None, delivered)  # carried out behind the next step
        permits.release()
        delivered.result(20)
    loop.close()
    permits.release(1000)
    while not at_rest(generator):
        assert steps(generator) < 6, "the request went on"
    assert asyncio.run(read(agen, prompt, 40)) == undisturbed(prompt, 40, EOS)
    assert len(agen._ports) == 1, "closed loops are forgotten"
    del pieces
    gc.collect()


def test_what_is_dropped_is_freed():
    """The engine's thread keeps no reference to a generator that nobody has any more."""

    async def scenario():
        agen = AsyncGenerator(mock_generator())
        await anext(agen.stream([20] * 9, params(200)))
        return weakref.ref(agen.generator), weakref.ref(next(iter(agen._ports.values()))), agen.generator._engine._thread

    generator, client, thread = asyncio.run(scenario())
    gc.collect()
    assert generator() is client() is None
    thread.join(20)
    assert not thread.is_alive()


def test_closing_ends_all_streams(generator):
    permits = gated(generator)

    async def scenario():
        agen = AsyncGenerator(generator)
        tasks = [asyncio.create_task(read(agen, [20, i], 200)) for i in range(3)]
        await asyncio.sleep(0)
        thread = generator._engine._thread
        join = thread.join
        thread.join = lambda: (permits.release(1000), join())  # the thread was told to stop
        await agen.close()
        for task in tasks:
            with pytest.raises(EngineError, match="closed"):
                await task

    asyncio.run(scenario())


def test_a_long_prompt_is_encoded_in_another_thread(folder):
    """Short ones are not: a change of threads would cost more."""
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=1 << 22) as plain:
        agen, seen = AsyncGenerator(plain), []
        processor = plain._processor
        encode, encode_chat = processor.encode, processor.encode_chat
        processor.encode = lambda *asked: (seen.append(threading.current_thread()), encode(*asked))[1]
        processor.encode_chat = lambda *asked: (seen.append(threading.current_thread()), encode_chat(*asked))[1]

        async def scenario():
            for prompt in ("hello", "word " * 2000, ["word"] * 1000):
                with pytest.raises(ContextLengthError) if len(prompt) > 1000 else nullcontext():
                    await agen.generate(prompt, params(1))
            await agen.chat([{"role": "user", "content": "hello"}], params(1))

        asyncio.run(scenario())
    here = [each is threading.main_thread() for each in seen]
    assert here == [True, False, *[False] * 1000, False, True]


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "9", None])
def test_max_unread(generator, value):
    with pytest.raises(InputError, match="max_unread"):
        AsyncGenerator(generator, max_unread=value)

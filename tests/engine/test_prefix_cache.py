"""The prefix cache: pages with equal beginnings are shared, and nobody can tell from the tokens.

Catches a page that is known before its step has ended or holds a rejected draft, a key without its prefix, a shared page that is
written, pages lost or freed twice, and hits that should happen and do not.
"""

from array import array

import pytest
import torch
from engine.test_engine import PAGE, SIZES, aborts_until, add, drafting, engine, finish, run, undisturbed
from engine.test_engine_faults import limited
from hypothesis import given, settings
from hypothesis import strategies as st

from minirt import SamplingParams
from minirt.engine.engine import Request
from minirt.engine.schedule.prefix_cache import PrefixCache
from minirt.errors import ContextLengthError
from minirt.sampling_params import resolve
from minirt.step.kv_cache import PageAllocator

STEMS = [[7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [7, 8, 9, 10, 99 - 60, 12, 13, 14], [20] * 13, []]


def consistent(allocator):
    """Every page is either free or held, and both maps of keys agree."""
    held = {page for page, count in enumerate(allocator._references) if count}
    assert held.isdisjoint(allocator._free)
    assert held | set(allocator._free) == set(range(allocator.num_pages))
    assert {key: page for page, keys in allocator._keys.items() for key in keys} == allocator._pages
    assert all(allocator._keys.values()), "a page with an empty list of keys"


PROMPTS = st.builds(
    lambda stem, cut, tail: STEMS[stem][:cut] + tail or [1],
    st.integers(0, 3), st.integers(1, 13), st.lists(st.integers(50, 52), max_size=9),
)  # fmt: skip
# The step in which it comes, its prompt, tokens of its answer.
REQUESTS = st.lists(st.tuples(st.integers(0, 30), PROMPTS, st.integers(1, 14)), min_size=2, max_size=14)


@settings(max_examples=60, deadline=None)
@given(
    requests=REQUESTS, sizes=st.fixed_dictionaries(SIZES | {"pages": st.integers(9, 40)}), aborts=aborts_until(40, 14),
    drafts=st.booleans(), most=st.integers(1, 60),
)  # fmt: skip
def test_shared_prefixes_change_no_token(requests, sizes, aborts, drafts, most):
    """Also where memory runs out in steps of more than `most` tokens."""
    it, cache = drafting(0.6, length=36, **sizes) if drafts else engine(length=36, **sizes)
    if not drafts:
        limited(it, most, torch.OutOfMemoryError("CUDA out of memory."))
    tokens, reasons = run(it, requests, aborts)
    for i, (_, prompt, count) in enumerate(requests):
        wanted = undisturbed(prompt, min(count, 36 - len(prompt)), eos=5)
        assert tokens[i] == (wanted[: len(tokens[i])] if reasons[i] == "abort" else wanted)
    assert cache.allocator.num_free == sizes["pages"], "pages leaked"
    consistent(cache.allocator)
    for i, (_, prompt, _) in enumerate(requests):  # a second turn finds generated tokens, too
        turn = [*prompt, *tokens[i], 53][:35]
        assert complete(it, turn, 1)[0] == undisturbed(turn, 1)


def complete(it, prompt, count, salt=None, eos=()):
    """(tokens, cached tokens) of one request, alone."""
    request = Request(next(NUMBERS), prompt, resolve(SamplingParams(max_tokens=count, temperature=0.0), None), eos, salt)
    it.add(request)
    outputs = finish(it)
    return [token for output in outputs for token in output.token_ids], outputs[0].num_cached


NUMBERS = iter(range(10**6, 10**9))


@pytest.mark.parametrize("lookahead", [0, 1])
def test_what_is_found(lookahead):
    it, cache = engine(lookahead=lookahead)
    prompt = list(range(10, 23))  # 13 tokens, pages of 4
    answer, cached = complete(it, prompt, 9)
    assert (answer, cached) == (undisturbed(prompt, 9), 0)
    assert complete(it, prompt, 9) == (answer, 12)
    assert complete(it, prompt[:12], 1)[1] == 8, "at least one token is computed"
    assert complete(it, [*prompt[:11], 50, 51], 1)[1] == 8
    assert complete(it, [50, *prompt[1:]], 1)[1] == 0, "a page counts with its prefix only"
    second = [*prompt, *answer, 60, 61]
    assert complete(it, second, 1) == (undisturbed(second, 1), 20), "generated tokens count; the last one was never computed"
    assert complete(it, prompt, 1, salt="a")[1] == 0
    assert complete(it, prompt, 1, salt="a")[1] == 12
    assert complete(it, prompt, 1, salt="b")[1] == 0
    stats = it.prefix_cache_stats
    assert (stats.queries, stats.hits, stats.evictions) == (13 + 13 + 12 + 13 + 13 + 24 + 39, 12 + 8 + 8 + 20 + 12, 0)
    consistent(cache.allocator)


def test_a_page_is_known_only_after_its_step():
    """With lookahead, a request that arrives between two steps must not read what the first of them may still write."""
    it, _ = engine(lookahead=1)
    prompt = list(range(10, 20))
    add(it, prompt, resolve(SamplingParams(max_tokens=3), None))
    assert it.step() == [], "the step has started and was not collected"
    add(it, prompt, resolve(SamplingParams(max_tokens=3), None))
    outputs = finish(it)
    assert {output.num_cached for output in outputs} == {0}


def test_a_rejected_draft_is_not_kept():
    """The request ends at a rejected draft's place, the last of a page, so no later step overwrites the draft there."""
    it, _ = drafting(0.0)
    prompt = [10, 11, 12, 13, 14, 15]
    answer = undisturbed(prompt, 2)
    assert complete(it, prompt, 9, eos=(answer[1],))[0] == answer
    turn = [*prompt, *answer, 53]
    assert complete(it, turn, 1) == (undisturbed(turn, 1), 4)


def test_without_the_cache_nothing_is_shared():
    it, _ = engine(prefix_cache=False)
    prompt = list(range(10, 23))
    assert complete(it, prompt, 9) == complete(it, prompt, 9) == (undisturbed(prompt, 9), 0)
    assert it.prefix_cache_stats is None


def test_the_least_recently_used_are_evicted():
    it, cache = engine(pages=9, length=32)
    first, second, third = ([i] * 13 for i in (10, 20, 30))
    for prompt in (first, second, first):
        complete(it, prompt, 1)
    complete(it, third, 12)  # six pages: three have no key, so the three of `second` go
    assert it.prefix_cache_stats.evictions == 3
    assert complete(it, first, 1)[1] == 12
    assert complete(it, second, 1)[1] == 0
    assert cache.allocator.num_free == 9
    consistent(cache.allocator)


def test_pinned_prompts_stay():
    it, cache = engine(pages=16, length=64)
    prompt, other = list(range(10, 24)), [30] * 12
    complete(it, prompt, 1)
    assert it.pin(prompt) == it.pin(prompt) == 12
    assert it.max_len == 13 * PAGE
    for i in range(6):
        complete(it, [40 + i] * 30, 20)  # 13 pages: all that are not pinned
    assert it.prefix_cache_stats.evictions > 20
    assert complete(it, prompt, 3) == (undisturbed(prompt, 3), 12)
    assert cache.allocator.num_free == 13
    complete(it, other, 1)
    assert it.pin(other) == 12
    complete(it, [*prompt, *prompt], 1)
    with pytest.raises(ContextLengthError, match="half of 16"):
        it.pin([*prompt, *prompt])
    assert it.pin([77] * 12) == 0, "nothing of it is cached"
    with pytest.raises(ContextLengthError):
        it.checks.check([1] * (10 * PAGE))
    consistent(cache.allocator)
    it.recover()  # after an exception nothing is pinned any more, and the same pages can be pinned again
    assert cache.allocator.num_free == 16
    complete(it, prompt, 1)
    assert it.pin(prompt) == 12
    assert cache.allocator.num_free == 13


def test_pinning_starves_no_open_request():
    """A request that could not get its pages any more would wait for ever, and with it all that come after it."""
    it, cache = engine(pages=8, length=64)
    complete(it, list(range(10, 24)), 1)  # three full pages
    assert it.max_len == 8 * PAGE
    checked = [7] * (6 * PAGE)
    it.checks.check(checked)
    for prompt, count in (([1], 6 * PAGE), (checked, 1)):  # one that grows, and one that waits
        long = add(it, prompt, resolve(SamplingParams(max_tokens=count), None))
        for _ in range(2):
            with pytest.raises(ContextLengthError, match=rf"an open request.*at most 2[04] tokens; found {6 * PAGE + 1}"):
                it.pin(list(range(10, 24)))
            it.step()
        it.abort(long)
    complete(it, list(range(10, 24)), 1)
    assert it.pin(list(range(10, 24))) == 3 * PAGE
    it.add(Request(10**6, checked, resolve(SamplingParams(max_tokens=1), None)))  # it was checked before
    (output,) = it.step()
    assert (output.request_id, type(output.error)) == (10**6, ContextLengthError)
    assert "--kv-cache-memory" in str(output.error)
    assert not it.has_work
    assert cache.allocator.num_free == 5
    consistent(cache.allocator)


def test_running_requests_share_pages():
    """Six requests of 33 tokens fit into 16 pages together only if they share the first eight."""
    it, cache = engine(pages=16, seqs=6, budget=64, length=36)
    prompt = [9] * 32
    complete(it, prompt, 1)
    before = len(it._runner.model.tokens_per_step)
    tokens, _ = run(it, [(0, [*prompt, 40 + i], 2) for i in range(6)])
    assert it._runner.model.tokens_per_step[before] == 6
    assert [tokens[i] for i in range(6)] == [undisturbed([*prompt, 40 + i], 2, eos=5) for i in range(6)]
    assert cache.allocator.num_free == 16


def test_keys_are_computed_while_the_step_runs():
    """A new prompt's first key shows that nothing of it is known. The others are computed neither before it nor after it."""
    it, _ = engine(lookahead=1)
    known, added = list(range(10, 30)), []
    complete(it, known, 1)
    start, before = it._runner.start, []
    it._runner.start = lambda *args: before.append(len(it._requests[added[-1]].keys)) or start(*args)
    for prompt in ([50, *known], known[:12] + [60] * 9):
        added.append(add(it, prompt, resolve(SamplingParams(max_tokens=1), None)))
        assert it.step() == [], "the step has started and was not collected"
        assert len(it._requests[added[-1]].keys) == 21 // PAGE
        finish(it)
    assert before[0] == 1
    assert 3 < before[1] < 21 // PAGE + 1, "as many as were found, and up to as many again"


def test_keys():
    """They depend on all tokens before, on the salt and on the process; known ones are not computed again."""
    caches = [PrefixCache(PageAllocator(1), 4) for _ in range(2)]
    draw = torch.Generator().manual_seed(0)
    tokens = array("i", torch.randint(0, 2**31, (23,), generator=draw).tolist())

    def keys(cache, tokens, salt=None):
        found = []
        cache.extend_keys(found, tokens, salt)
        return found

    plain = keys(caches[0], tokens)
    assert len(plain) == len(set(plain)) == 5
    grown = keys(caches[0], tokens[:9])
    caches[0].extend_keys(grown, tokens, None)
    assert grown == plain
    assert keys(caches[0], tokens, "") != plain
    assert set(keys(caches[1], tokens)).isdisjoint(plain)
    for changed in range(20):
        other = array("i", tokens)
        other[changed] += 1
        same = [a == b for a, b in zip(plain, keys(caches[0], other), strict=True)]
        assert same == [page < changed // 4 for page in range(5)]

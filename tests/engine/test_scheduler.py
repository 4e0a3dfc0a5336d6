"""The order in which the scheduler admits and preempts, on the mock model of test_engine.py, and how prompts share steps.

Catches a request that overtakes a more important one, the wrong victim of a preemption, lost requests, a queue that grows, and
prompts that wait for others longer than their share.
"""

import random
from dataclasses import replace

import pytest
from engine.test_engine import PAGE, SIZES, engine, undisturbed
from hypothesis import given, settings
from hypothesis import strategies as st

from minirt.engine.engine import Request
from minirt.engine.limits import EngineLimits
from minirt.engine.schedule.scheduler import Scheduler, WaitingQueue
from minirt.engine.schedule.step_times import PromptTime
from minirt.engine.state.sequence import Sequence
from minirt.sampling_params import SamplingParams, resolve
from minirt.step.kv_cache import KVCache, PagesSpec

EOS = 5


def greedy(count):
    return resolve(SamplingParams(max_tokens=count, temperature=0.0), None)


class Watched:
    """Runs requests, and checks in each step who was admitted and preempted. Priorities and arrivals are the test's own."""

    def __init__(self, it):
        self.it, self.order, self.sizes, self.tokens, self.reasons = it, {}, {}, {}, {}
        self.preemptions = 0

    def add(self, prompt, count, priority=0, **options):
        request = Request(len(self.order), prompt, greedy(count), (EOS,), priority=priority, **options)
        self.order[request.id], self.tokens[request.id] = (priority, request.id), []
        self.sizes[request.id] = priority, len(prompt).bit_length()
        self.it.add(request)
        return request.id

    def abort(self, request_id):
        self.it.abort(request_id)
        self.reasons.setdefault(request_id, "abort")

    def step(self):
        before, inner = set(self.it._scheduler.running), self.it._scheduler.schedule

        def schedule():
            work = inner()
            running = set(self.it._scheduler.running)
            if work is not None:
                slots = [self.it._scheduler.host.sequences[slot] for slot in work.sequences.slots]
                assert all(self.it._scheduler.running[sequence.id] is sequence for sequence in slots)
                assert len(set(slots)) == len(slots) <= self.it.limits.max_num_seqs
                assert 0 < work.sequences.num_tokens.sum() <= self.it.limits.max_num_batched_tokens
            self._check(before, running)
            return work

        self.it._scheduler.schedule = schedule
        for output in self.it.step():
            assert output.request_id not in self.reasons, "a token after the end"
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason:
                self.reasons[output.request_id] = output.finish_reason
        self.it._scheduler.schedule = inner

    def finish(self):
        while self.it.has_work:
            self.step()

    def _check(self, before, running):
        victims, admitted = before - running, running - before
        self.preemptions += len(victims)
        for victim in victims:
            assert all(self.order[victim] > self.order[other] for other in before & running)
        known, arrived = self.it._scheduler.prefix_cache is not None, self.order
        for other in self.waiting() - victims:
            assert all(arrived[one][0] <= arrived[other][0] for one in admitted), "a more important one is overtaken"
            shorter = [known or self.sizes[one] < self.sizes[other] for one in admitted if arrived[one] > arrived[other]]
            assert all(shorter), "overtaken by one that is as long"

    def waiting(self):
        """Requests that could have been admitted."""
        held = {i for followers in self.it._scheduler._followers.values() for i in followers}
        return set(self.it._requests) - set(self.it._scheduler.running) - held


PROMPTS = st.builds(
    lambda stem, cut, tail: ([7, 8, 9, 10, 11, 12, 13, 14, 15], [20] * 9)[stem][:cut] + tail,
    st.integers(0, 1), st.integers(0, 9), st.lists(st.integers(50, 52), min_size=1, max_size=9),
)  # fmt: skip


PRIORITIES, SAMPLES = st.sampled_from([0, 0, -1, 3, 10**30]), st.sampled_from([1, 1, 2, 5])


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 15), PROMPTS, st.integers(1, 14), PRIORITIES, SAMPLES), min_size=2, max_size=12),
    sizes=st.fixed_dictionaries(SIZES | {"pages": st.integers(9, 30), "prefix_cache": st.booleans()}),
    aborts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 11), st.integers(0, 4)), max_size=6),
)  # fmt: skip
def test_any_priorities_and_samples(requests, sizes, aborts):
    """The mock model's tokens do not depend on the seed, so all samples of a prompt have the same."""
    it, cache = engine(length=36, **sizes)
    watched, ids = Watched(it), {}
    for step in range(3000):
        for i, (arrival, prompt, count, priority, n) in enumerate(requests):
            if arrival == step:
                group = len(watched.order) if n > 1 else None
                ids[i] = [watched.add(prompt, count, priority, group=group) for _ in range(n)]
        for when, i, sample in aborts:
            if when == step and i in ids:
                watched.abort(ids[i][sample % len(ids[i])])
        watched.step()
        if not it.has_work and step >= 15:
            break
    for i, (_, prompt, count, _, _) in enumerate(requests):
        wanted = undisturbed(prompt, min(count, 36 - len(prompt)), EOS)
        for sample in ids[i]:
            tokens = watched.tokens[sample]
            assert tokens == (wanted[: len(tokens)] if watched.reasons[sample] == "abort" else wanted)
    assert cache.allocator.num_free == sizes["pages"], "pages leaked"
    assert len(it._scheduler.waiting) == len(it._scheduler._followers) == 0
    assert sorted(it._scheduler.host.free) == list(range(sizes["seqs"]))


def test_the_lowest_priority_value_comes_first():
    it, _ = engine(seqs=1, lookahead=0)
    watched = Watched(it)
    for priority in (2, 0, 1, 0, -5):
        watched.add([50, 51], 2, priority)
    watched.finish()
    assert list(watched.reasons) == [4, 1, 3, 2, 0]


@pytest.mark.parametrize("priorities", [(0, 0, 0), (1, 0, 0), (0, 1, 0)])
def test_who_is_preempted(priorities):
    """The highest value, of equal ones the youngest. An earlier sequence that was chosen for the step gives its place back."""
    it, cache = engine(pages=8, seqs=3, budget=64, length=32, lookahead=0, prefix_cache=False)
    watched = Watched(it)
    for i, priority in enumerate(priorities):
        watched.add([50 + i] * 7, 12, priority)
    watched.step()
    assert len(it._scheduler.running) == 3
    while watched.preemptions == 0:
        watched.step()
    victim = max(range(3), key=lambda i: (priorities[i], i))
    assert victim not in it._scheduler.running
    watched.finish()
    assert [watched.tokens[i] for i in range(3)] == [undisturbed([50 + i] * 7, 12, EOS) for i in range(3)]
    assert cache.allocator.num_free == 8


def test_a_preempted_request_goes_back_before_others_of_its_priority():
    it, _ = engine(pages=8, seqs=3, budget=64, length=32, lookahead=0, prefix_cache=False)
    watched = Watched(it)
    for i in range(3):
        watched.add([50 + i] * 7, 12, 1)
    watched.step()
    later, urgent = watched.add([60] * 7, 12, 1), watched.add([61] * 7, 12, 0)
    watched.finish()
    assert watched.preemptions > 0
    ends = list(watched.reasons)
    assert ends.index(urgent) < ends.index(2) < ends.index(later)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(("length", "computed"), [(3, [3] * 5), (4, [4] * 5), (5, [5, 1, 1, 1, 1]), (17, [17, 1, 1, 1, 1])])
def test_samples_compute_their_prompt_once(length, computed, lookahead):
    """The others wait for its full pages, and compute the rest. A request that comes later does not overtake them."""
    it, cache = engine(seqs=4, lookahead=lookahead)
    watched, prompt = Watched(it), list(range(30, 30 + length))
    for _ in range(5):
        watched.add(prompt, 6, group=0)
    later = watched.add([70] * 9, 2)
    first = {}
    inner = it._runner.start

    def start(plan):
        for slot, count in zip(plan.sequences.slots, plan.sequences.num_tokens, strict=True):
            first.setdefault(it._scheduler.host.sequences[slot].id, int(count))
        return inner(plan)

    it._runner.start = start
    watched.finish()
    assert [first[i] for i in range(5)] == computed
    assert all(watched.tokens[i] == undisturbed(prompt, 6, EOS) for i in range(5))
    assert watched.tokens[later] == undisturbed([70] * 9, 2, EOS)
    assert cache.allocator.num_free == cache.num_pages


def test_without_the_prefix_cache_samples_do_not_wait():
    it, _ = engine(seqs=4, lookahead=0, prefix_cache=False)
    watched = Watched(it)
    for _ in range(4):
        watched.add([30] * 9, 3, group=0)
    watched.step()
    assert it._runner.model.tokens_per_step == [36]


def test_when_the_first_sample_leaves_the_next_computes_the_prompt():
    it, cache = engine(seqs=4, budget=8, lookahead=0)
    watched, prompt = Watched(it), list(range(30, 50))
    for _ in range(4):
        watched.add(prompt, 3, group=0)
    watched.abort(2)
    watched.step()
    watched.abort(0)  # in the middle of the prompt
    watched.finish()
    steps = it._runner.model.tokens_per_step[:3]
    assert steps == [8, 8, 4 + 4], "the second goes on from the pages of the first, and the fourth from those of both"
    assert watched.tokens[1] == watched.tokens[3] == undisturbed(prompt, 3, EOS)
    assert cache.allocator.num_free == cache.num_pages


def test_a_group_counts_once_and_is_refused_as_a_whole():
    it, _ = engine(seqs=1, lookahead=0, max_waiting=1)
    watched = Watched(it)
    groups = [[watched.add([30 + g] * 9, 3, group=3 * g) for _ in range(3)] for g in range(4)]
    watched.finish()
    for g, group in enumerate(groups):
        assert {watched.reasons[i] for i in group} == ({"error"} if g > 1 else {"length"})


def test_the_queue_of_waiting_sequences():
    """Against a sorted list, with removals anywhere. Its heap stays within twice what waits."""
    draw, queue, model, left = random.Random(0), WaitingQueue(), {}, []
    for arrival in range(6_000):
        sequence = Sequence(Request(draw.randrange(400), [1], greedy(1)), 2)
        if sequence.id not in model:  # ids are used again
            sequence.arrival_rank, sequence.size = (draw.choice((0, 0, 3, -2**70)), arrival), draw.randrange(100)
            model[sequence.id] = sequence
            queue.add(sequence)
        if draw.random() < 0.4:
            queue.remove(model.pop(draw.choice(list(model))))
        queue.remove(Sequence(Request(draw.randrange(400), [1], greedy(1)), 2))  # one with an id in use, but another sequence
        if model and draw.random() < 0.1:
            smallest = min(model.values(), key=lambda own: (own.arrival_rank[0], own.size.bit_length(), own.arrival_rank[1]))
            assert queue.smallest() is smallest
            assert queue.oldest() is min(model.values(), key=lambda own: own.arrival_rank)
            queue.remove(model.pop(smallest.id))
            left.append(smallest)
            if draw.random() < 0.5:  # it was preempted
                again = left.pop(draw.randrange(len(left)))
                if again.id not in model:
                    model[again.id] = again
                    queue.add(again)
        assert len(queue) == len(model)
        assert all(len(heap) <= 2 * len(model) + 17 for heap in queue._heaps)


@pytest.mark.parametrize("context_s", [0.0, 1e-5])
def test_prompts_leave_time_to_those_that_decode(context_s):
    """A prompt token takes 1 ms, and more the more come before it; a step's prompts get 20 ms while others decode. Alone they get
    the whole budget, and the tokens are the same."""
    it, _ = engine(pages=400, seqs=6, budget=256, length=400, prefix_cache=False)
    it._scheduler.limits = replace(it._scheduler.limits, max_step_ms=20.0)
    it._scheduler.use_times(PromptTime(1e-3, context_s))
    watched, plans, inner = Watched(it), [], it._runner.start
    it._runner.start = lambda plan: plans.append(plan) or inner(plan)
    watched.add([60, 61], 60)
    watched.step()
    for i in range(3):
        watched.add([70 + i] * 120, 4)
    watched.finish()
    for plan in plans[1:]:
        own = plan.sequences
        new = zip(own.starts.tolist(), own.num_tokens.tolist(), strict=True)
        prompts = [(start, count) for start, count in new if start >= 0]
        seconds = sum(count * (1e-3 + context_s * (start + count / 2)) for start, count in prompts)
        assert seconds <= 20e-3
        assert (own.starts < 0).any() or not prompts, "a test of steps beside others"
    assert len(plans) > 360 / 20
    assert it.stats.generation_tokens == sum(map(len, watched.tokens.values()))
    assert watched.tokens[0] == undisturbed([60, 61], 60, EOS)
    assert all(watched.tokens[i + 1] == undisturbed([70 + i] * 120, 4, EOS) for i in range(3))


def test_alone_prompts_have_the_whole_budget():
    it, _ = engine(pages=400, seqs=6, budget=256, length=400)
    it._scheduler.limits = replace(it._scheduler.limits, max_step_ms=1e-9)
    it._scheduler.use_times(PromptTime(1e-3))
    watched, sizes, inner = Watched(it), [], it._runner.start
    it._runner.start = lambda plan: sizes.append(plan.sequences.total_tokens) or inner(plan)
    watched.add([60] * 300, 4)
    watched.finish()
    assert sizes[:2] == [256, 44]


class Prompts:
    """A scheduler whose steps compute nothing. Each request ends with its first token, unless it is in `stays`.

    Attributes:
        steps: what each step computed, tokens by request.
        ends: by request, the number of the step with its first token.
        stays: sequences that keep their pages.
    """

    def __init__(self, budget, pages, seqs=8, length=40_100):
        cache = KVCache([PagesSpec(1, 1)], pages, page_size=PAGE)
        self.it = Scheduler(cache, EngineLimits(length, seqs, budget), 1, prefix_cache=False)
        self.steps, self.ends, self.stays = [], {}, {}

    def add(self, request_id, tokens, priority=0, new=1):
        self.it.add(sequence := Sequence(Request(request_id, [0] * tokens, greedy(new), priority=priority), tokens + new))
        return sequence

    def step(self):
        work, computed = self.it.schedule(), {}
        if work is not None:
            self.it.on_started(work)
            draws = work.sequences.num_draws
            self.it.host.steps[work.sequences.slots] -= draws > 0
            self.it.host.unread[work.sequences.slots] -= draws
            for place, sequence, chunk in work.prompts:
                computed[sequence.id] = chunk.num_tokens
                if draws[place]:
                    self.ends[sequence.id] = len(self.steps)
                    if sequence.id not in self.stays:
                        self.it.remove(sequence)
        self.steps.append(computed)
        return computed


@pytest.mark.parametrize("arrival", range(5))
def test_a_short_prompt_does_not_wait_for_a_long_one(arrival):
    """It is in the next step, which the long prompt gives as many tokens as it has, and no more."""
    own = Prompts(8192, 20_000)
    own.add(0, 40_000)
    while len(own.ends) < 2:
        if len(own.steps) == arrival:
            own.add(1, 12)
        own.step()
    assert own.ends == {0: 4, 1: arrival}
    assert all(sum(step.values()) == 8192 for step in own.steps[:4]), "no token of a step is left unused"


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_caller_of_a_short_prompt_has_its_token_within_three_steps(lookahead, prefix_cache):
    """Beside two long prompts, one of which waits for pages, and behind a stream. The tokens of all are those of each alone."""
    it, _ = engine(pages=50, seqs=8, budget=16, length=150, lookahead=lookahead, prefix_cache=prefix_cache)
    watched = Watched(it)
    prompts = [[30], [40 + i % 7 for i in range(100)], [50 + i % 5 for i in range(120)], [90, 91]]
    for prompt, count in zip(prompts[:3], (20, 2, 2), strict=True):
        watched.add(prompt, count)
        watched.step()
    watched.add(prompts[3], 2)
    for _ in range(3):
        assert not watched.tokens[3]
        watched.step()
        if watched.tokens[3]:
            break
    assert watched.tokens[3]
    assert not watched.tokens[1] + watched.tokens[2]
    watched.finish()
    assert [watched.tokens[i] for i in range(4)] == [undisturbed(prompts[i], (20, 2, 2, 2)[i], EOS) for i in range(4)]


def test_a_long_prompt_ends_beside_any_number_of_short_ones():
    """Short ones that would fill every step: the long prompt gets half of each, and the short ones the rest."""
    own, arrivals = Prompts(64, 20_000, seqs=400), iter(range(1, 10_000))
    own.add(0, 6_400)
    while 0 not in own.ends:
        for _ in range(8):
            own.add(next(arrivals), 8)
        assert own.step().get(0) == 32
    assert own.ends[0] + 1 == 6_400 // 32
    served = [request for request in own.ends if request]
    assert served == list(range(1, 1 + len(served)))
    assert len(served) == 4 * 200


def test_among_random_arrivals_each_prompt_has_its_share():
    """1,000 prompts of 1 to 4,000 tokens, more than steps compute for a while. Half of each step goes by age, and half by size:
    so no prompt waits longer than twice what those before it by age take, nor than twice what those take that are as short."""
    draw, budget = random.Random(7), 64
    own, size = Prompts(budget, 700_000, seqs=1000, length=4_100), [int(4_000 ** draw.random()) for _ in range(1000)]
    arrivals, left, at, before = [0], {}, [], []
    for tokens in size:
        arrivals.append(arrivals[-1] + draw.choice((0, 0, 1, tokens // 20)))
    while len(own.ends) < 1000:
        while len(at) < 1000 and arrivals[len(at)] <= len(own.steps):
            before.append(sum(left.values()) + size[len(at)])  # what those before it still need, and itself
            left[len(at)] = size[len(at)]
            own.add(len(at), size[len(at)])
            at.append(len(own.steps))
        for request, tokens in own.step().items():
            left[request] -= tokens
    waits = [own.ends[i] + 1 - at[i] for i in range(1000)]
    for i, wait in enumerate(waits):
        assert wait <= 1 + 2 * before[i] / budget, "longer than those before it take"
        limit, shorter = 1 << size[i].bit_length(), dict[int, int]()
        for step in own.steps[at[i] : own.ends[i] + 1]:
            for request, tokens in step.items():
                shorter[request] = min(shorter.get(request, 0) + tokens, limit)  # of a longer one, its last tokens count
        assert wait <= 1 + 2 * sum(shorter.values()) / budget, "longer than those take that are as short"
    assert max(waits) > 100, "a test of prompts that wait"


def test_others_pass_a_prompt_without_pages_until_they_have_computed_as_many_tokens():
    """Its 30 pages are not free. Shorter ones pass it, so that they do not wait for pages that they do not need; not for ever,
    and none that is less important."""
    own = Prompts(16, 40, seqs=40)
    own.stays = {0}
    first = own.add(0, 4 * 20 - 1, new=400)
    while 0 not in own.ends:
        own.step()
    own.add(1, 4 * 30 - 1)
    own.add(2, 2, priority=1)
    for request in range(3, 100):
        own.add(request, 2)
        own.step()
    passed = sorted(set(own.ends) - {0})
    assert passed == list(range(3, 3 + len(passed)))
    assert passed[0] == 3
    assert own.ends[3] == own.ends[0] + 1
    assert len(passed) == 40, "119 tokens, of which each step has two of a prompt and one of the sequence that decodes"
    own.it.remove(first)
    while len(own.ends) < 100:
        own.step()
    assert own.it.num_preemptions == 0
    assert own.ends[1] < own.ends[max(passed) + 1] + 20


def test_nobody_passes_a_preempted_sequence():
    """Those that pass would be preempted in their turn."""
    own = Prompts(64, 40)
    own.stays = {0}
    sequence = own.add(0, 4 * 24 - 1, new=2)
    while 0 not in own.ends:
        own.step()
    own.it._preempt(sequence)
    taken = own.it._cache.allocator.allocate(20)  # by others that decode
    own.add(1, 2)
    assert [own.step() for _ in range(3)] == [{}] * 3
    own.it._cache.allocator.release(taken)
    assert 0 in own.step()


def test_a_prompt_has_its_pages_from_the_beginning():
    """Others that come while it is computed do not take them, and are not preempted for them."""
    own = Prompts(8, 10)
    own.add(0, 36)
    own.step()
    own.add(1, 8)
    while len(own.ends) < 2:
        own.step()
    assert own.it.num_preemptions == 0
    assert own.ends == {0: 4, 1: 5}


@given(start=st.integers(0, 10**6), seconds=st.floats(0, 10), token_s=st.floats(1e-7, 1e-2), context_s=st.floats(0, 1e-5))
def test_the_time_of_prompts(start, seconds, token_s, context_s):
    own = PromptTime(token_s, context_s)
    tokens = own.tokens(start, seconds)
    assert own.seconds(start, tokens) <= seconds * (1 + 1e-6) + 1e-12
    assert own.seconds(start, tokens + 2) >= seconds * (1 - 1e-6)

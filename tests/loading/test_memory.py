"""How the KV cache and the largest step are sized. Sizes are counted by hand, for a model of round numbers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.checkpoints import no_warning
from support.model_cases import make

from minirt import Generator, LoadOptions
from minirt.cli.gpus import find_gpu
from minirt.engine.execute.logits_processors import LogitsProcessors
from minirt.engine.limits import EngineLimits
from minirt.engine.warmup.steps import largest_steps
from minirt.errors import ConfigError, OutOfMemoryError
from minirt.kernels.attention.limits import MAX_WIDENED_TOKENS
from minirt.kernels.sampling.slots import slot_bytes
from minirt.loading import memory
from minirt.loading.load import plan_load, plan_model
from minirt.loading.memory import does_not_fit, measured_plan, out_of_memory_while, plan_memory
from minirt.modeling.config import RopeConfig
from minirt.models.decoder import decoder_layers
from minirt.sizes import format_size
from minirt.step.kv_cache import PAGE_SIZE, PagesSpec, StateSpec

MB = 1 << 20
GPU = torch.device("cuda", 0)
LENGTH = 100 * PAGE_SIZE


class Model:
    """One attention layer whose pages take 1 MiB; weights of 1,000 MiB; rope tables of 100 MiB."""

    cache_specs = (PagesSpec(2, MB // (2 * 2 * PAGE_SIZE * 2)),)
    kv_dtype = dtype = torch.bfloat16
    device, max_model_len, capturable, adapters = GPU, LENGTH, False, None

    def weight_bytes(self, dtype):
        return 1000 * MB

    def rope_bytes(self, length):
        return [100 * MB]


@pytest.fixture
def free(monkeypatch):
    def set_free(megabytes, others=0):
        monkeypatch.setattr(memory, "free_memory", lambda device: megabytes * MB)
        monkeypatch.setattr(memory, "total_memory", lambda device: 4096 * MB)
        monkeypatch.setattr(memory, "held_by_others", lambda device: others and others * MB)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    return set_free


def test_adapters_take_memory(free):
    """Catches adapters on the device that no plan counts, before they are loaded or after."""
    free(2048)
    without, model = plan(lambda limits: 0), Model()
    model.adapters = SimpleNamespace(nbytes=lambda dtype: 200 * MB)
    adapted = plan(lambda limits: 0, model=model)
    assert adapted.adapters == 200 * MB
    assert adapted.other == without.other + 200 * MB
    assert ("adapters", 200 * MB, "") in adapted.rows()


@pytest.fixture
def measure(monkeypatch):
    return lambda needed: monkeypatch.setattr("minirt.engine.warmup.warm_up.measure_step_bytes", needed)


def plan(step, *, device=GPU, model=None, **options):
    """`step`: MiB of a step of so many tokens, or None."""

    def step_bytes(limits):
        size = step(limits.max_num_batched_tokens)
        return size and size * MB

    return plan_memory(model or Model(), LENGTH, device, LoadOptions(**options), step_bytes=step_bytes)


def test_the_largest_step_that_leaves_a_full_sequence(free):
    """Free before loading: 400 + 1,100 MiB; 90% are 1,350, of which weights and tables leave 250."""
    free(400)
    made = plan(lambda tokens: tokens // 32)  # 8,192 tokens: 256 MiB, 4,096: 128
    assert (made.max_num_batched_tokens, made.step, made.pages) == (4096, 128 * MB, 250 - 128)
    assert (made.free, made.budget, made.context) == (1500 * MB, 1350 * MB, LENGTH)
    made = plan(lambda tokens: tokens // 32, max_num_batched_tokens=2048)
    assert (made.max_num_batched_tokens, made.pages) == (2048, 250 - 64)
    assert plan(lambda tokens: 10, max_num_seqs=2).pages == 200, "no more than full sequences need"
    assert plan(lambda tokens: 100, gpu_memory_utilization=1.0).pages == 300


def test_a_context_that_does_not_fit_gets_shorter(free):
    free(400)
    made = plan(lambda tokens: 100 + tokens // 16)
    assert (made.max_num_batched_tokens, made.pages, made.context) == (1024, 250 - 164, (250 - 164) * PAGE_SIZE)
    assert made.fits
    made = plan(lambda tokens: None if tokens > 2048 else 240)
    assert (made.max_num_batched_tokens, made.pages) == (1024, 10), "steps that ran out of memory while they were measured"
    assert not plan(lambda tokens: 250).fits
    assert not plan(lambda tokens: None).fits or plan(lambda tokens: None).pages == 0


def test_pages_that_were_asked_for(free):
    free(400)
    made = plan(lambda tokens: tokens // 32, kv_cache_memory=200 * MB)
    assert (made.pages, made.max_num_batched_tokens) == (200, 1024), "beside 200 pages, only 1,024 tokens fit"
    assert made.context == LENGTH


def needed(model, limits, **_):
    return 100 * MB + limits.max_num_batched_tokens * MB // 16


def test_a_measured_plan_says_what_it_cannot_do(free, measure):
    """Catches a context that is shortened without a word, and a failed measurement that counts as no memory."""
    free(400)
    measure(needed)
    words = r"room for 5,504 tokens, so the context is that instead of 6,400.*--kv-cache-dtype fp8"
    with pytest.warns(RuntimeWarning, match=words):
        assert measured_plan(Model(), LoadOptions()).measured
    measure(lambda model, limits, **_: None)
    with pytest.raises(OutOfMemoryError, match=r"weights 1,?000MiB.*expected .*found 1\.32GiB, 90% of 1\.46GiB free"):
        measured_plan(Model(), LoadOptions())


def test_a_cache_that_was_asked_for_and_shortens_the_context_says_so(free, measure):
    """Catches `--kv-cache-memory` that lowers the context without a word, with other processes as the reason, or a warning
    although the context is whole."""
    measure(lambda model, limits, **_: 10 * MB)
    free(600, others=2500)
    words = r"--kv-cache-memory 12MiB has room for 768 tokens, so the context is that instead of 6,400: use --max-model-len 768 "
    with pytest.warns(RuntimeWarning, match=words + "or --kv-cache-memory 100MiB or --kv-cache-dtype fp8") as said:
        assert measured_plan(Model(), LoadOptions(kv_cache_memory=12 * MB)).context == 768
    assert "other processes" not in str(said[0].message)
    with no_warning():
        assert measured_plan(Model(), LoadOptions(kv_cache_memory="100MiB")).context == LENGTH
        assert measured_plan(Model(), LoadOptions(kv_cache_memory=12 * MB, max_model_len=768)).context == 768


def test_a_context_that_was_asked_for_is_not_shortened(free, measure):
    """Catches an explicit max_model_len that is lowered, by the free memory or by the cache's; and one page too few."""
    measure(needed)
    free(400)
    words = r"--max-model-len 6400: a context of 6,400 tokens needs 100MiB of KV cache, which has room for 86MiB, 5,504 tokens"
    with pytest.raises(OutOfMemoryError, match=words + r" \(use --max-model-len 5504\)") as error:
        measured_plan(Model(), LoadOptions(max_model_len=LENGTH))
    assert error.value.is_usage
    assert measured_plan(Model(), LoadOptions(max_model_len=5504)).context == 5504
    for megabytes, options, kind, words in (
        (400, {"max_model_len": 5505}, OutOfMemoryError, r"5,505 tokens needs 87MiB of KV cache, which has room for 86MiB"),
        (400, {"max_model_len": 65, "kv_cache_memory": 2 * MB - 1}, OutOfMemoryError, r"65 tokens needs 2MiB .*, 64 tokens"),
        (400, {"max_model_len": LENGTH + 1}, ConfigError, r"--max-model-len: .*from 1 to 6400, the positions .* found 6401"),
        (0, {"max_model_len": LENGTH}, OutOfMemoryError, r"does not fit: .* and 100 KV pages 100MiB"),
    ):
        free(megabytes)
        with pytest.raises(kind, match=words):
            measured_plan(Model(), LoadOptions(**options))


def test_a_load_refuses_a_context_that_does_not_fit_before_it_allocates(hf_folder, monkeypatch):
    """Catches minutes of loading before the refusal, and advice that does not fit itself."""
    folder, options = hf_folder("Llama", seed=3), {"device": "cpu", "max_model_len": 200, "max_num_seqs": 2}
    page = plan_load(LoadOptions(model=folder, **options))[1].page
    monkeypatch.setattr("minirt.modeling.model.Model.allocate", lambda *_: pytest.fail("allocated"))
    advice = f"raise --kv-cache-memory {format_size(4 * page, up=True)}, or --max-model-len 192"
    with pytest.raises(OutOfMemoryError, match=f"room for .*, 192 tokens .{advice}."):
        Generator.from_pretrained(folder, kv_cache_memory=4 * page - 1, **options)
    monkeypatch.undo()
    with Generator.from_pretrained(folder, kv_cache_memory=format_size(4 * page, up=True), **options) as generator:
        assert generator.max_len == 200
        with Generator(generator.model, max_model_len=70, kv_cache_memory=2 * page) as short:
            assert short.max_len == 70


def test_an_estimate_counts_nothing_as_loaded(free):
    """On a CPU, before loading. A share of a GPU's memory is refused there."""
    free(2000)
    options = LoadOptions(kv_cache_memory=300 * MB, max_num_batched_tokens=1)
    made = plan_memory(Model(), LENGTH, torch.device("cpu"), options)
    assert (made.free, made.budget, made.step) == (2000 * MB, 2000 * MB, 0)
    assert made.needed == (1000 + 400 + 300) * MB, "rope tables are computed with temporary tensors"
    assert plan_memory(Model(), LENGTH, torch.device("cpu"), LoadOptions()).pages == 600 // 4
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization.*CPU"):
        plan(lambda tokens: 0, device=torch.device("cpu"), gpu_memory_utilization=0.5)


@pytest.mark.parametrize(("options", "words"), [
    *(({"gpu_memory_utilization": wrong}, r"--gpu-memory-utilization.*above 0 and at most 1")
      for wrong in (0, -0.5, 1.01, True, "0.9", float("nan"))),
    *(({"state_cache_memory": wrong}, "--state-cache-memory") for wrong in (-1, "much", 1.5, True)),
    ({"state_cache_memory": 1 << 20, "prefix_cache": False}, "no prefix cache"),
])  # fmt: skip
def test_wrong_sizes_are_refused(options, words):
    """Catches a size that is taken for another one, or ignored."""
    with pytest.raises(ConfigError, match=words):
        LoadOptions(**options)


def test_what_other_processes_hold_is_said(free, measure):
    """Each number of the message, and the reason for a small budget."""
    words = r"about 2\.44GiB of 4GiB are held by other processes and CUDA contexts, which lowers the budget"
    free(400, others=2500)
    made = plan(lambda tokens: tokens // 32)
    assert (made.total, made.held_by_others, made.budget) == (4096 * MB, 2500 * MB, 1350 * MB)
    with pytest.raises(OutOfMemoryError, match=rf"found 1\.32GiB, 90% of 1\.46GiB free \({words}\)"):
        raise does_not_fit(made, "cuda:0", "use --fp8")
    for size in (made.weights, made.step, made.budget, made.free):
        assert format_size(size) in str(does_not_fit(made, "cuda:0", "use --fp8"))
    measure(needed)
    with pytest.warns(RuntimeWarning, match=rf"so the context is that instead of 6,400.*; {words}"):
        measured_plan(Model(), LoadOptions())
    for others in (0, None):
        free(400, others=others)
        made = plan(lambda tokens: tokens // 32)
        assert made.held_by_others == others
        assert "other processes" not in str(does_not_fit(made, "cuda:0", "use --fp8"))


def test_each_rope_table_counts_once(hf_folder):
    """Two of three layers have the config's rope, one has its own. A load allocates the tables that were counted."""
    other = RopeConfig(theta=500.0)

    def compose(config):
        return decoder_layers(config, lambda i: replace(config.attention(i), rope=other if i == 1 else config.rope))

    folder, length = hf_folder("Llama", seed=3), 48
    options = LoadOptions(model=folder, device="cpu", max_model_len=length)
    one, two = (plan_load(replace(options, layers=layers)) for layers in (None, compose))
    table = 4 * length * one[0].config.head_dim
    assert (one[0].rope_bytes(length), two[0].rope_bytes(length)) == ([table], [table] * 2)
    assert (one[1].other, two[1].other) == (4 * table, 5 * table), "one table at a time is computed with temporary tensors"
    with Generator.from_pretrained(folder, device="cpu", max_model_len=length, layers=compose, kv_cache_memory=1 << 20) as made:
        layers = [layer for layer in made.model.layers if layer.kind == "attention"]
        assert sorted(t.nbytes for t in layers[0].context._ropes.values()) == [table] * 2
        assert made.memory.other == 2 * table
        assert layers[0].cos_sin is layers[2].cos_sin is not layers[1].cos_sin


@pytest.mark.filterwarnings("ignore")
def test_factors_of_q_count_with_their_table(tmp_path):
    """Catches tables of Ministral 3 that are allocated and not counted."""
    make("ministral3", tmp_path)
    with Generator.from_pretrained(tmp_path, device="cpu", max_model_len=100, kv_cache_memory=1 << 20) as made:
        context = made.model.layers[1].context
        tables = [*context._ropes.values(), *context._query_scales.values()]
        assert [tuple(table.shape) for table in tables] == [(100, 16), (100,)]
        assert made.memory.other == sum(table.nbytes for table in tables)


def test_torch_errors_do_not_leak():
    with pytest.raises(OutOfMemoryError, match="no memory left while warming up"), out_of_memory_while("warming up", GPU):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
    with pytest.raises(ValueError, match="CUDA"), out_of_memory_while("warming up", GPU):
        raise ValueError("CUDA out of memory")


@pytest.mark.parametrize(
    ("tokens", "longest", "seqs"), [(8192, 131072, 64), (1024, 256, 1), (7, 5, 3), (2048, 32768, 64), (1, 1, 1)]
)
def test_largest_steps(tokens, longest, seqs):
    limits = EngineLimits(longest, seqs, tokens)
    steps = largest_steps(limits)
    for number, chunks in enumerate(steps):
        assert sum(len(chunk.tokens) for chunk in chunks) == tokens
        assert all(chunk.start >= 0 and chunk.start + len(chunk.tokens) <= longest for chunk in chunks)
        first = 1 if number else min(limits.max_logits_rows, len(chunks[0].tokens))
        assert sum(chunk.num_logits for chunk in chunks) == first + min(len(chunks), seqs) - 1
    assert max(chunk.start + len(chunk.tokens) for chunks in steps for chunk in chunks) == longest
    widened = [sum(chunk.start + len(chunk.tokens) for chunk in chunks) for chunks in steps]
    assert max((total for total in widened if total <= MAX_WIDENED_TOKENS), default=0) >= min(longest, MAX_WIDENED_TOKENS)


class Recurrent(Model):
    """`Model` with one recurrent layer more, whose states take 10 MiB each."""

    cache_specs = (*Model.cache_specs, StateSpec((("state", (10, 1 << 18), torch.float32),)))


def test_states_lower_the_number_of_sequences(free):
    """90% of 1,500 MiB, less 1,100: 250 MiB, of which states take half at most. Pages and steps get the rest."""
    free(400)
    made = plan(lambda tokens: tokens // 32, model=Recurrent())
    assert (made.max_num_seqs, made.state, made.other) == (12, 10 * MB, 220 * MB)
    assert (made.max_num_batched_tokens, made.snapshots, made.pages) == (1024, 2, 250 - 120 - 32 - 20)
    assert made.fits
    assert made.full == 12 * 100
    assert ("rope tables and states", 220 * MB, "states of 12 sequences, 10MiB each") in made.rows()
    assert plan(lambda _: 1, model=Recurrent(), max_num_seqs=5).max_num_seqs == 5
    made = plan(lambda _: 1, model=Recurrent(), kv_cache_memory=200 * MB)
    assert (made.max_num_seqs, made.pages) == (5, 200), "beside 200 pages"
    free(0)
    made = plan(lambda _: 1, model=Recurrent())
    assert made.max_num_seqs == 1
    assert not made.fits


def test_kept_states(free):
    """900 MiB are left for pages and kept states. These get a quarter, four for each sequence at most; or what is asked for."""
    free(1300)  # 90% of 2,400 MiB, less 1,100 of weights and tables, 100 of ten states and 60 of steps
    made = plan(lambda _: 60, model=Recurrent(), max_num_seqs=10)
    assert (made.max_num_seqs, made.snapshots, made.pages) == (10, 22, 900 - 220)
    assert made.needed == made.budget
    assert ("state cache", 220 * MB, "22 snapshots of states, for the prefix cache") in made.rows()
    assert plan(lambda _: 60, model=Recurrent(), max_num_seqs=2).snapshots == 8
    for changes, snapshots, pages in (
        ({"state_cache_memory": "101MiB"}, 10, 800), ({"state_cache_memory": 0}, 0, 900), ({"prefix_cache": False}, 0, 900),
        ({"kv_cache_memory": 870 * MB}, 3, 870), ({"kv_cache_memory": 870 * MB, "state_cache_memory": 20 * MB}, 2, 870),
    ):  # fmt: skip
        made = plan(lambda _: 60, model=Recurrent(), max_num_seqs=10, **changes)
        assert (made.snapshots, made.pages) == (snapshots, pages)
        assert made.fits


def test_no_room_for_kept_states_is_said(free, measure):
    """250 MiB for states, steps and pages: less than 40 are left."""
    free(400)
    measure(lambda *_, **__: 95 * MB)
    with pytest.warns(RuntimeWarning, match="no prefix cache: .* 10MiB .*--state-cache-memory"):
        assert measured_plan(Recurrent(), LoadOptions(max_num_seqs=12)).snapshots == 0
    with no_warning("(?!no prefix cache)"):
        assert measured_plan(Recurrent(), LoadOptions(max_num_seqs=2)).snapshots == 3
        assert measured_plan(Recurrent(), LoadOptions(max_num_seqs=12, state_cache_memory=0)).snapshots == 0


def test_fewer_sequences_are_said(free, measure):
    """The warning has both numbers; steps are measured with the lower one, so that the states fit while they are measured."""
    free(400)
    seen = []
    measure(lambda model, limits, **_: seen.append(limits.max_num_seqs) or MB)
    with pytest.warns(RuntimeWarning, match=r"12 instead of 64 sequences run at once \(--max-num-seqs\): .* 10MiB"):
        made = measured_plan(Recurrent(), LoadOptions())
    assert {made.max_num_seqs, *seen} == {12}
    with no_warning():
        assert measured_plan(Recurrent(), LoadOptions(max_num_seqs=12, prefix_cache=False)).max_num_seqs == 12


@pytest.mark.parametrize(("longest", "counts"), [(2**15, 2), (2**15 + 1, 4)])
def test_the_estimate_holds_what_requests_may_ask_of_sampling(longest, counts):
    """Of 256 sequences with a vocabulary of 152,064 tokens: 78 MB of counts, or 156. Catches buffers that no estimate knows."""
    processors = LogitsProcessors(256, 152_064, longest, torch.device("cpu"), "triton", rows=1)
    held = sum(buffer.nbytes for buffer in processors.slots)
    assert processors.slots.counts.nbytes == 256 * 152_064 * counts
    assert 0 <= held - 256 * slot_bytes(152_064, longest) <= 256 * 64
    model = plan_model(LoadOptions(model="Qwen2.5-7B", device="cpu"))
    steps = [memory.estimate_step(model, EngineLimits(longest, n, 512), True, find_gpu("H100")) for n in (64, 320)]
    assert steps[1] - steps[0] > held + 3 * 256 * 152_064 * 4, "three buffers of logits, too"

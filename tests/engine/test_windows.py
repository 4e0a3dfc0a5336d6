"""Layers with windows in an engine: pages that are freed behind the window, prefixes, drafts, preemption, against transformers.

Catches a page that is freed too early or never, a page table that the device does not know, a prefix whose last pages were
overwritten, and numbers of pages that do not suffice.
"""

import random

import pytest
import torch
from support.checkpoints import distance
from support.experts import in_mxfp4

from minirt import Generator, SamplingParams
from minirt.engine.schedule.windows import Windows, window_pages
from minirt.errors import ContextLengthError
from minirt.step.kv_cache import PAGE_SIZE, PageAllocator

WINDOW = 70
GREEDY = {"temperature": 0.0, "ignore_eos": True}
KINDS = {
    "some": ["sliding_attention", "full_attention", "sliding_attention"], "all": ["sliding_attention"] * 3,
    "other heads": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
KINDS["gpt_oss"] = KINDS["some"]  # with sinks, and experts in MXFP4


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    """A folder and transformers' model."""
    import transformers

    torch.manual_seed(3)
    shape = {
        "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 211,
        "max_position_embeddings": 640, "sliding_window": WINDOW, "layer_types": KINDS[request.param], "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if request.param == "other heads":
        heads = {"num_key_value_heads": 2, "head_dim": 64, "num_global_key_value_heads": 1, "global_head_dim": 128}
        config = transformers.Gemma4TextConfig(**shape, **heads, attention_k_eq_v=True, hidden_size_per_layer_input=0)
        made = transformers.Gemma4ForCausalLM(config).eval()
    elif request.param == "gpt_oss":
        config = transformers.GptOssConfig(**shape, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2)
        made = transformers.GptOssForCausalLM(config).eval()
        for layer in made.model.layers:
            layer.self_attn.sinks.data.normal_(0, 2)
    else:
        config = transformers.Qwen2Config(**shape, num_key_value_heads=1, use_sliding_window=True)
        made = transformers.Qwen2ForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    made.save_pretrained(folder)
    if request.param == "gpt_oss":
        in_mxfp4(folder, folder / "mxfp4", range(-5, -1))
        return folder / "mxfp4", type(made).from_pretrained(folder, dtype=torch.float32).eval()
    return folder, made


@torch.inference_mode()
def check(made, completion):
    """Each token is the most probable one, or nearly, up to a token whose two experts at the limit differ by a rounding error."""
    tokens, begin = [*completion.prompt_token_ids, *completion.token_ids], len(completion.prompt_token_ids) - 1
    experts = getattr(made.config, "num_experts_per_tok", 0)
    result = made(input_ids=torch.tensor([tokens]), **({"output_router_logits": True} if experts else {}))
    logits = result.logits[0, begin:-1]
    chosen = logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    close = logits.amax(1) - chosen < 1e-3 * logits.abs().amax()
    if experts:
        last, next_one = torch.stack(result.router_logits).topk(experts + 1).values[..., -2:].unbind(-1)
        close = close[: max(0, next(iter((last - next_one < 1e-5).any(0).nonzero()[:, 0].tolist()), len(tokens)) - begin)]
    assert close.all(), begin


@pytest.fixture
def poisoned(monkeypatch):
    """What is freed becomes NaN. poisoned(generator): from now on."""

    def begin(generator):
        cache = generator._engine.engine._cache
        release = PageAllocator.release

        def and_spoil(allocator, pages):
            release(allocator, pages)
            for window, other in cache.window_allocators.items():
                if allocator is other:
                    for layer, made in zip(generator._model.cache_specs, cache.layers, strict=True):
                        if layer.window == window:
                            for tensor in made:
                                if tensor is not None:
                                    tensor[[page for page in pages if not allocator._references[page]]] = float("nan")

        monkeypatch.setattr(PageAllocator, "release", and_spoil)

    return begin


MIXES = {
    "at once": {}, "chunks of 17": {"max_num_batched_tokens": 17}, "chunks of 64": {"max_num_batched_tokens": 64},
    "drafts": {"speculative": "ngram:3"}, "few": {"max_num_seqs": 2, "max_num_batched_tokens": 100},
}  # fmt: skip


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("model", KINDS, indirect=True)
def test_lengths_around_the_window(model, mix, poisoned):
    folder, made = model
    rng = random.Random(5)
    lengths = [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 63, 64, 65, 127, 128, 129, 300]
    prompts = [[rng.randrange(211) for _ in range(n)] for n in lengths] + [[7, 8, 9] * 40]
    params = [SamplingParams(**GREEDY, max_tokens=rng.choice((1, 5, 80, 150))) for _ in prompts]
    with Generator.from_pretrained(folder, device="cpu", dtype="float32", prefix_cache=False, **MIXES[mix]) as generator:
        poisoned(generator)
        for completion in generator.generate(prompts, params):
            check(made, completion)
        for allocator in generator._engine.engine._cache.window_allocators.values():
            assert allocator.num_free == allocator.num_pages
        distances = [
            distance(generator.logits(prompt), made(input_ids=torch.tensor([prompt])).logits[0].detach()) for prompt in prompts
        ]
    assert max(distances) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("model", ["some", "other heads"], indirect=True)
def test_the_kernels_read_the_pages_of_their_group(model, kv_cache_dtype, poisoned):
    """In the interpreter: prompts in chunks, decode steps, and drafts. Catches a table or splits of another group."""
    folder, _ = model
    rng = random.Random(9)
    prompts = [[rng.randrange(211) for _ in range(n)] for n in (3, WINDOW + 1, 150)] + [[7, 8, 9] * 30]
    params, results = SamplingParams(**GREEDY, max_tokens=6), []
    options = {"kv_cache_dtype": kv_cache_dtype, "prefix_cache": False, "speculative": "ngram:2", "max_num_batched_tokens": 100}
    for impl in ("eager", "triton"):
        with Generator.from_pretrained(folder, device="cpu", dtype="float32", impl=impl, **options) as generator:
            poisoned(generator)
            results.append([completion.token_ids for completion in generator.generate(prompts, params)])
            results.append(generator.logits(prompts[2]))
    assert results[0] == results[2]
    assert distance(results[3], results[1]) < (1e-4 if kv_cache_dtype == "auto" else 1e-3)


SCHEDULES = [(kind, seed) for kind in KINDS for seed in range(4)]
SCHEDULES += [pytest.param("gpt_oss", seed, marks=pytest.mark.exhaustive) for seed in range(4, 75)]  # 300 lists of requests


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:--kv-cache-memory")
@pytest.mark.parametrize(("model", "seed"), SCHEDULES, indirect=["model"])
def test_random_schedules_with_prefixes_and_preemption(model, seed):
    folder, made = model
    rng = random.Random(seed)
    options = {
        "max_num_seqs": rng.choice((3, 8)), "max_num_batched_tokens": rng.choice((17, 64, 200)), "max_model_len": 600,
        "speculative": rng.choice((None, "ngram:2")), "kv_cache_memory": rng.choice((2 * 10 * 64 * 64 * 4 * 2, "64MiB")),
    }  # fmt: skip
    stems = [[rng.randrange(211) for _ in range(n)] for n in (64, 200, 330)]
    with Generator.from_pretrained(folder, device="cpu", dtype="float32", **options) as generator:
        for _ in range(4):
            prompts = []
            for _ in range(12):
                stem = rng.choice(stems)
                end = [rng.randrange(211) for _ in range(rng.choice((1, 9, 90)))]
                prompts.append(stem[: rng.randrange(1, len(stem) + 1)] + end)
            params = [SamplingParams(**GREEDY, max_tokens=rng.choice((1, 30, 100))) for _ in prompts]
            for completion in generator.generate(prompts, params):
                check(made, completion)
        cache = generator._engine.engine._cache
        assert all(allocator.num_free == allocator.num_pages for allocator in cache.window_allocators.values())
        assert generator.prefix_cache_stats.hits > 200


def windows(count, window=100, slots=3):
    allocator = PageAllocator(count)
    return Windows({window: allocator}, PAGE_SIZE, slots, 600), allocator


def test_a_sequence_holds_what_its_next_token_sees():
    pages, allocator = windows(12)
    assert pages.reserve(0, 640)
    pages.free_before(0, 640)  # token 640 sees 541 to 640
    assert allocator.num_free == 12 - 2
    assert pages.reserve(0, 700)
    assert not pages.reserve(1, 64 * 12)
    pages.free_before(0, 639)
    assert allocator.num_free == 12 - 3
    pages.cut(0, 10)
    assert allocator.num_free == 12 - 2
    pages.release(0)
    assert allocator.num_free == 12


def test_a_prefix_needs_its_last_pages_only():
    pages, allocator = windows(20)
    keys = [bytes([i]) for i in range(12)]
    pages.reserve(0, 64 * 12)
    pages.register(0, keys, 12)
    pages.release(0)
    assert pages.depth(keys, 12) == 12
    allocator.forget(keys[3])
    assert [pages.depth(keys, most) for most in (3, 4, 5, 6, 7, 12)] == [3, 3, 3, 6, 7, 12]  # token 64 · 6 sees pages 4 and 5
    pages.take(1, keys, 6)
    assert allocator.num_free == 20 - 2
    assert pages.reserve(1, 64 * 7)
    pages.release(1)
    assert allocator.num_free == 20


@pytest.mark.parametrize(("window", "seqs", "tokens", "drafts", "length"), [
    (2048, 64, 8192, 0, 32000), (1, 1, 64, 0, 640), (128, 3, 17, 5, 600),
])  # fmt: skip
def test_the_pages_suffice(window, seqs, tokens, drafts, length):
    """Every sequence decodes in the middle of a page, with drafts, and one of them has begun a chunk."""
    count = window_pages(window, seqs, tokens, drafts, length)
    pages, _ = windows(count, window, seqs + 1)
    for slot in range(seqs):
        pages.skip(slot, length - tokens - 70)
        assert pages.reserve(slot, min(length, length - tokens - 70 + 64 + 3 * (1 + drafts)))
    if seqs > 1:
        pages.release(0)
        pages.skip(0, length - tokens)
        assert pages.reserve(0, length)
    assert count * PAGE_SIZE <= seqs * (window + 64 * 4 + 3 * (1 + drafts)) + tokens + 64


def test_pins_leave_room_for_a_sequence():
    """Catches pins after which no prompt would ever get its pages."""
    pages, allocator = windows(8)
    keys = [bytes([i]) for i in range(8)]
    pages.reserve(0, 64 * 8)
    pages.register(0, keys, 8)
    pages.release(0)
    pages.pin(keys, 4)
    pages.pin(keys, 4)
    assert allocator.num_free == 8 - 2, "each page counts once"
    with pytest.raises(ContextLengthError, match="pinned prompts take too many KV pages of layers with a window"):
        pages.pin(keys, 7)
    assert allocator.num_free == 8 - 2
    assert pages.reserve(1, 100)


@pytest.mark.parametrize("model", KINDS, indirect=True)
def test_pinned_prompts_and_measured_steps(model):
    """Catches pages that a measurement keeps, and a pinned prompt whose last pages others overwrite."""
    folder, made = model
    rng = random.Random(2)
    pinned, others = ([rng.randrange(211) for _ in range(n)] for n in (200, 600))
    with Generator.from_pretrained(folder, device="cpu", dtype="float32", max_num_seqs=2) as generator:
        assert generator.warm_prompt(pinned) == 192
        (free,) = (allocator.num_free for allocator in generator._engine.engine._cache.window_allocators.values())
        for prompt in (False, True):
            generator.profile(batch_size=2, context_len=120, prompt=prompt, repeats=1)
        params = SamplingParams(**GREEDY, max_tokens=20)
        for _ in range(3):
            generator.generate([others[::-1], others], params)
        completion = generator.generate([*pinned, 5, 6], params)
        assert completion.cached_tokens == 192
        check(made, completion)
        assert [allocator.num_free for allocator in generator._engine.engine._cache.window_allocators.values()] == [free]

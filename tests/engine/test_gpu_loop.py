"""The engine's loop on a GPU: nothing compiles after warm-up, decode steps neither wait nor allocate, failures end cleanly.

Catches an accidental `.item()` or copy from pageable memory, kernels specialized on a token count or an alignment, and a request
that hangs on a failed GPU.
"""

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from engine.test_engine import add

from minirt import Generator, SamplingParams
from minirt.engine.execute.runner import Runner
from minirt.errors import OutOfMemoryError
from minirt.layers import register
from minirt.layers.base import LayerContext, implementation

pytestmark = pytest.mark.gpu
SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
RULED = {
    "temperature": 0.7, "presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.2, "logit_bias": {7: 1.0},
    "allowed_token_ids": list(range(900)), "min_tokens": 2, "stop_token_ids": [950], "logprobs": 5,
}  # fmt: skip


OLMO = {  # windows in three of four layers, norms after sublayers, a QK-norm over all heads
    "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "sliding_window": 300,
    "max_position_embeddings": 4096, "rope_theta": 5e5,
}  # fmt: skip
FORMS = {  # head size 64 with steps shorter than the longest prompt; head size 128; the same with FP8 weights and KV pages
    "Qwen2.5-0.5B": {"max_num_batched_tokens": 1500},
    "Qwen3-4B": {},
    "Qwen3-4B-fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "windows": {}, "windows-fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """form → the preset's name, or the folder of a model of which only the config is there."""
    config = tmp_path_factory.mktemp("olmo")
    config.joinpath("config.json").write_text(json.dumps(OLMO))
    return lambda form: str(config) if form.startswith("windows") else form.removesuffix("-fp8")


@pytest.fixture(scope="module", params=FORMS)
def warm(request, folder):
    options = {"dtype": "bfloat16", "impl": "triton", "kv_cache_memory": 4 << 30, "max_model_len": 2048, "max_num_seqs": 72}
    with Generator.from_pretrained(folder(request.param), random_weights=True, **options, **FORMS[request.param]) as generator:
        yield generator


def test_nothing_compiles_after_warm_up(warm):
    import triton

    compiled = []

    def hook(*args, **kwargs):
        compiled.append(kwargs.get("repr") or args)

    draw = random.Random(0)
    triton.knobs.runtime.jit_cache_hook = hook
    try:
        for count in (1, 2, 3, 7, 18, 33, 40, 60, 90):
            prompts = [[draw.randrange(1000) for _ in range(draw.choice((1, 2, 5, 64, 129, 500, 1100)))] for _ in range(count)]
            kinds = ({"temperature": 0.0}, SAMPLED, RULED, {"temperature": 0.0, "logprobs": 20, "prompt_logprobs": 3})
            options = [kinds[draw.randrange(4 if count % 3 else 2)] for _ in prompts]
            warm.generate(prompts, [SamplingParams(max_tokens=draw.randrange(2, 30), **own) for own in options])
    finally:
        triton.knobs.runtime.jit_cache_hook = None
    assert not compiled, f"{len(compiled)} compilations: {compiled[:3]}"


@pytest.mark.parametrize("form", FORMS)
def test_without_cuda_graphs_nothing_compiles_after_warm_up_either(form, folder):
    """The first steps on a long context launch kernels that steps on a short context do not. The pages hold five such contexts,
    not twenty."""
    import triton

    compiled, draw = [], random.Random(1)
    memory = 3 << 29 if form.startswith("Qwen3-4B") else 1 << 27
    options = {"dtype": "bfloat16", "kv_cache_memory": memory, "max_model_len": 2048, "max_num_seqs": 20, "cuda_graphs": False}
    with Generator.from_pretrained(folder(form), random_weights=True, **options, **FORMS[form]) as generator:
        assert generator._engine.engine._runner.graphs.buckets is None
        triton.knobs.runtime.jit_cache_hook = lambda *args, **kwargs: compiled.append(kwargs.get("repr") or args)
        try:
            for count in (1, 2, 7, 20):
                prompts = [[draw.randrange(1000) for _ in range(draw.choice((1, 5, 64, 129, 1100)))] for _ in range(count)]
                generator.generate(prompts, [SamplingParams(max_tokens=draw.randrange(2, 9), temperature=0.0) for _ in prompts])
        finally:
            triton.knobs.runtime.jit_cache_hook = None
    assert not compiled, f"{len(compiled)} compilations: {compiled[:3]}"


def test_cuda_graphs_change_no_token():
    draw = random.Random(2)
    prompts = [[draw.randrange(1000) for _ in range(n)] for n in (3, 70, 300, 1)]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    found = []
    for cuda_graphs in (True, False):
        options = {"dtype": "float32", "impl": "triton", "kv_cache_memory": 1 << 28, "cuda_graphs": cuda_graphs}
        with Generator.from_pretrained(**options) as generator:
            found.append([completion.token_ids for completion in generator.generate(prompts, params)])
    assert found[0] == found[1]


def test_a_lazy_warm_up_changes_no_token():
    """Requests during it are padded to larger sizes, and their prompts are cut into smaller chunks."""
    draw = random.Random(5)
    prompts = [[draw.randrange(1000) for _ in range(n)] for n in (3, 70, 450, 1, 130, 390)]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    options = {"dtype": "float32", "impl": "triton", "kv_cache_memory": 1 << 28, "prefix_cache": False}
    with Generator.from_pretrained(warm_up="full", **options) as generator:
        assert not generator._engine.engine.warming_up
        expected = [completion.token_ids for completion in generator.generate(prompts, params)]
    with Generator.from_pretrained(warm_up="lazy", **options) as generator:
        engine = generator._engine.engine
        assert engine.warming_up
        during = [completion.token_ids for completion in generator.generate(prompts, params)]
        while engine.warming_up:
            generator._engine.call(lambda engine: None)
        after = [completion.token_ids for completion in generator.generate(prompts, params)]
        graphs = engine._runner.graphs
        assert all(bucket in graphs.captured for bucket in graphs.buckets.all())
    assert during == after == expected


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen3-0.6B", "Qwen3.5-0.8B"])
def test_cuda_graphs_change_no_token_beside_prompts(name, kv_cache_dtype):
    """In CUDA graphs, sequences of one token and prompts have their attention in branches beside each other."""
    draw = random.Random(3)
    prompts = [[draw.randrange(1000) for _ in range(n)] for n in (3, 70, 300, 1, 130, 64, 520, 9)]
    params = [SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=0) for _ in prompts]
    found = []
    for cuda_graphs in (True, False):
        options = {"dtype": "bfloat16", "impl": "triton", "kv_cache_memory": 1 << 30, "max_num_batched_tokens": 150}
        with Generator.from_pretrained(
            name, random_weights=True, kv_cache_dtype=kv_cache_dtype, cuda_graphs=cuda_graphs, max_num_seqs=8, **options
        ) as generator:
            found.append([(own.token_ids, own.logprobs) for own in generator.generate(prompts, params)])
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, SAMPLED, RULED], ids=["greedy", "sampled", "ruled"])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_decode_steps_neither_wait_nor_allocate(warm, count, options):
    sampling = warm.effective_sampling(SamplingParams(max_tokens=200, ignore_eos=True, **options))

    def run(engine):  # in the engine's thread, which may still be busy with the requests of the test before
        ids = [add(engine, [5 + i] * (i + 1), sampling) for i in range(count)]
        for _ in range(10):
            engine.step()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            outputs = [output for _ in range(40) for output in engine.step()]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert len(outputs) == 40 * count
        for request in ids:
            engine.abort(request)

    warm._engine.call(run)


@pytest.mark.parametrize("count", [1, 7, 40])
def test_constrained_decode_steps_neither_compile_nor_allocate_nor_wait(count):
    """The host waits only for the tokens of the step before. Every third request is free."""
    import triton

    compiled, grammar = [], {"regex": "([a-z]+ ){200,}"}
    with Generator.from_pretrained(dtype="bfloat16", impl="triton", kv_cache_memory=1 << 30) as generator:
        engine, ids = generator._engine.engine, []
        for i in range(count):
            own = {"ignore_eos": True} if i % 3 == 2 else {"structured_outputs": grammar}
            sampling = generator.effective_sampling(SamplingParams(max_tokens=200, temperature=1.0, seed=i, **own))
            engine.checks.check([5], sampling)
            ids.append(add(engine, [5 + i] * (i + 1), sampling, generator.eos_token_ids))
        triton.knobs.runtime.jit_cache_hook = lambda *args, **kwargs: compiled.append(kwargs.get("repr") or args)
        try:
            for _ in range(10):
                engine.step()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            torch.cuda.set_sync_debug_mode("error")
            outputs = [output for _ in range(40) for output in engine.step()]
        finally:
            torch.cuda.set_sync_debug_mode("default")
            triton.knobs.runtime.jit_cache_hook = None
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert not compiled, f"{len(compiled)} compilations: {compiled[:3]}"
        assert len(outputs) == 40 * count
        bound = [output for output in outputs if ids.index(output.request_id) % 3 != 2]
        texts = "".join(generator.tokenizer.decode(output.token_ids) for output in bound)
        assert set(texts) <= set("abcdefghijklmnopqrstuvwxyz ")
        for request in ids:
            engine.abort(request)


def test_the_sync_check_can_fail():
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_that_runs_out_in_a_step():
    """A real allocation of 64 TiB, wherever a sequence has 77 tokens, so that no smaller step helps."""

    @register("mlp", "greedy_for_memory")
    def factory(layer):
        inner = implementation("mlp", "triton").factory(layer)

        def forward(x, batch, kv):
            if max(batch.seq_lens) >= 77:
                torch.empty(1 << 46, dtype=torch.uint8, device=x.device)
            return inner(x, batch, kv)

        return forward

    impl = ["triton", "layers.1.mlp=greedy_for_memory"]
    with Generator.from_pretrained(dtype="bfloat16", impl=impl, kv_cache_memory=1 << 28, warm_up="none") as generator:
        params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        expected = generator.generate([1, 2, 3], params).token_ids
        with pytest.raises(OutOfMemoryError, match=r"a step of one token.*CUDA out of memory"):
            generator.generate([4] * 77, params)
        assert generator.generate([1, 2, 3], params).token_ids == expected


def test_a_slow_gpu_changes_no_token(monkeypatch):
    """Every step finds the GPU busy, so the host continues before any of its queued work has run.

    This reveals a buffer that the host overwrites too early, for the next step or while it captures a CUDA graph between steps.
    """
    draw = random.Random(3)
    prompts = [[draw.randrange(1000) for _ in range(n)] for n in (3, 70, 1, 200, 5, 90, 130, 2)]
    kinds = ({}, {"presence_penalty": 1.0, "logprobs": 2}, {"repetition_penalty": 1.5, "bad_words": "the"}, {"logprobs": 0}) * 2
    params = [SamplingParams(max_tokens=draw.randrange(3, 25), temperature=0.0, ignore_eos=True, **kind) for kind in kinds]
    for i, kind in ((4, {}), (7, {"presence_penalty": 0.5, "logprobs": 1})):
        params[i] = SamplingParams(max_tokens=20, temperature=0.0, structured_outputs={"regex": "([a-z]+[0-9]){9}"}, **kind)
    options = {"dtype": "float32", "impl": "triton", "kv_cache_memory": 1 << 28, "warm_up": "none"}
    with Generator.from_pretrained(**options) as generator:
        expected = [generator.generate(p, own).token_ids for p, own in zip(prompts, params, strict=True)]
    start = Runner.start

    def late(self, plan):
        torch.cuda._sleep(40_000_000)  # GPU cycles: about 20 ms
        return start(self, plan)

    monkeypatch.setattr(Runner, "start", late)
    with Generator.from_pretrained(max_num_batched_tokens=64, **options) as generator:
        completions = generator.generate(prompts, params)
        assert [c.token_ids for c in completions] == expected
        asked = [c for c, own in zip(completions, params, strict=True) if own.logprobs is not None]
        assert all([row.token_id for row in c.logprobs] == c.token_ids for c in asked)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_overlapping_kernels_change_no_bit(quantization, monkeypatch):
    """Programmatic dependent launch does not change logits or tokens, for prompts of all sizes and for mixed steps.

    This reveals a kernel that reads or writes data before the previous kernel has ended.
    """
    draw = random.Random(4)
    prompts = [[draw.randrange(1000) for _ in range(n)] for n in (3, 70, 150, 300, 600, 1300)]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    options = {"dtype": "bfloat16", "impl": "triton", "kv_cache_memory": 1 << 30, "max_model_len": 2048, "max_num_seqs": 8}

    def results():
        with Generator.from_pretrained(
            "Qwen2.5-0.5B", random_weights=True, quantization=quantization, max_num_batched_tokens=700, **options
        ) as generator:
            logits = [generator.logits(prompt) for prompt in prompts for _ in range(3)]
            return logits, [completion.token_ids for completion in generator.generate(prompts, params)]

    overlapped = results()
    monkeypatch.setattr(LayerContext, "pdl", False)
    plain = results()
    assert all(torch.equal(a, b) for a, b in zip(overlapped[0], plain[0], strict=True))
    assert overlapped[1] == plain[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_another_device_than_the_current_one():
    """Triton launches on the current device, so minirt must set it, also in the threads of the warm-up."""
    params = SamplingParams(max_tokens=30, temperature=0.7, seed=1)
    texts = []
    for device in ("cuda:0", "cuda:1"):
        with Generator.from_pretrained(device=device, kv_cache_memory=1 << 26) as generator:
            texts.append(generator.generate(["Once upon a time", "The cat"], params)[0].text)
            assert torch.cuda.current_device() == 0
    assert texts[0] == texts[1]


BROKEN = """
import sys, torch
from minirt.cli.app import main
from minirt.layers import register
from minirt.layers.base import LayerContext, implementation
from minirt.engine.execute.runner import Runner

@register("mlp", "broken")
def factory(layer):
    inner, calls = implementation("mlp", "triton").factory(layer), []
    def forward(x, batch, kv):
        calls.append(1)
        if len(calls) == 6:
            x = x[torch.full((len(x),), 1 << 40, device=x.device)]
        return inner(x, batch, kv)
    return forward

sys.exit(main(["generate", "--dtype", "bfloat16", "--warm-up", "none", "--ignore-eos",
               "--impl", "layers.0.mlp=broken", "--kv-cache-memory", "256MiB", "Once upon a time"]))
"""


def test_a_broken_kernel_ends_the_process_with_its_cause():
    done = subprocess.run([sys.executable, "-P", "-c", BROKEN], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr[-2000:]
    assert "the GPU failed" in done.stderr
    assert "device-side assert" in done.stderr or "illegal memory access" in done.stderr


@pytest.mark.parametrize("count", [2, 40, 70])
def test_tokens_are_those_of_all_logits(count, monkeypatch):
    """Greedy steps store only the largest logits. A step with one sampled row needs all logits, also after greedy steps.

    The prompts of 70 sequences make steps that are too large for a CUDA graph.
    """
    draw = random.Random(1)
    prompts = [[draw.randrange(1000) for _ in range(draw.randrange(1, 240))] for _ in range(count)]
    greedy = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * count
    one = [SamplingParams(**SAMPLED, seed=5, max_tokens=7, ignore_eos=True), *greedy[1:]]  # the last steps are all-greedy again
    options = {"dtype": "bfloat16", "random_weights": True, "kv_cache_memory": 1 << 30, "max_model_len": 256, "max_num_seqs": 72}
    options["prefix_cache"] = False  # a prompt whose beginning is found is computed in other steps, with other roundings
    forward_of, left = Runner._forward, []

    def with_all_logits(self, plan):
        forward = forward_of(self, replace(plan, sampling=plan.sampling._replace(any_rules=True)))
        left.append(forward.row_maxima is not None and plan.sampling.all_greedy)
        return forward._replace(plan=plan, row_maxima=None)

    with Generator.from_pretrained("Qwen2.5-0.5B", **options) as generator:
        found = [[c.token_ids for c in generator.generate(prompts, params)] for params in (greedy, one, greedy)]
        monkeypatch.setattr(Runner, "_forward", with_all_logits)
        expected = [[c.token_ids for c in generator.generate(prompts, params)] for params in (greedy, one)]
    assert sum(left) > 11, "the head stored no row maxima, so the test cannot fail"
    assert found == [*expected, expected[0]]
    assert expected[0] != expected[1]

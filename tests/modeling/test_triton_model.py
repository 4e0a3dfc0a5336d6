"""Whole models with the Triton layers on a GPU: bf16 numerics on trained weights, and no kernels other than Triton's."""

import math
from pathlib import Path

import pytest
import torch
from support.package import kernel_names, triton_kernel_names

from minirt import Generator, SamplingParams
from minirt.bench.perplexity import perplexity

pytestmark = pytest.mark.gpu
POSITIONS = 10_000
TOPICS = ("a fox", "the sea", "winter", "an old clock", "bread", "a lighthouse", "two brothers", "the moon")
REQUESTS = (
    "Tell me a short story about {}.", "Write a poem about {}.", "Explain {} to a child.",
    "Write a letter in which {} plays a part.", "List five facts about {}.", "Write a dialogue about {}.",
    "Describe {} in one paragraph.", "Invent a riddle about {} and solve it.",
)  # fmt: skip


def test_bf16_argmax_agrees_with_transformers(smollm2):
    """Teacher-forced on the model's own answers, the Triton layers have the argmax of transformers.

    Only rows count whose top-2 gap exceeds transformers' own |bf16 − fp32| at the worst logit of the row.
    """
    import transformers

    with Generator.from_pretrained(smollm2, dtype="bfloat16", impl="triton", kv_cache_memory=4 << 30) as generator:
        asked = [
            generator.encode_chat([{"role": "user", "content": request.format(topic)}]) for request in REQUESTS
            for topic in TOPICS
        ]  # fmt: skip
        answers = generator.generate(asked, SamplingParams(max_tokens=320))
        texts = [(c.prompt_token_ids + c.token_ids, len(c.prompt_token_ids) - 1) for c in answers]
        ours = torch.cat([generator.logits(tokens)[first:] for tokens, first in texts])
    assert len(ours) >= POSITIONS

    def truth(dtype):
        model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype).cuda().eval()
        with torch.no_grad():
            rows = [model(torch.tensor([t], device="cuda")).logits[0, first:].float().cpu() for t, first in texts]
            return torch.cat(rows)

    exact, rounded = truth(torch.float32), truth(torch.bfloat16)
    top = exact.topk(2)
    gap = top.values[:, 0] - top.values[:, 1]
    noise = (rounded - exact).abs().amax(1)
    clear = gap > noise
    agree = ours.argmax(1) == top.indices[:, 0]
    theirs = rounded.argmax(1) == top.indices[:, 0]
    print(
        f"{int(clear.sum())} of {len(ours)} positions are clear; agreement there: minirt {int((agree & clear).sum())}, "
        f"transformers bf16 {int((theirs & clear).sum())}; everywhere: minirt {int(agree.sum())}, transformers "
        f"{int(theirs.sum())}; relative error: minirt {(ours - exact).norm() / exact.norm():.2e}, "
        f"transformers {(rounded - exact).norm() / exact.norm():.2e}"
    )
    assert clear.float().mean() >= 0.9
    assert (ours - exact).norm() <= 2 * (rounded - exact).norm()
    assert bool(agree[clear].all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_perplexity_over_8192_tokens_of_context(smollm2, dtype):
    """Equals transformers' perplexity within 0.1%, on the held-out text of the embedded model, in windows of 8,192 tokens."""
    import transformers

    text = (Path(__file__).parents[2] / "models" / "recipe" / "heldout.txt").read_text()
    with Generator.from_pretrained(smollm2, dtype=dtype, impl="triton", kv_cache_memory=2 << 30) as generator:
        tokens = generator.encode(text)
        ours = perplexity(generator, tokens, window=8192, stride=4096)
    assert ours.window == 8192
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=getattr(torch, dtype)).cuda().eval()
    nll, done = 0.0, 1
    for start in range(0, len(tokens), 4096):
        window = torch.tensor([tokens[start : start + 8192]], device="cuda")
        stop = start + window.shape[1]
        with torch.no_grad():
            rows = model(window).logits[0, done - 1 - start : stop - 1 - start].double()
        nll += torch.nn.functional.cross_entropy(rows, window[0, done - start :], reduction="sum").item()
        done = stop
        if stop == len(tokens):
            break
    theirs = math.exp(nll / (len(tokens) - 1))
    print(f"perplexity of {len(tokens)} tokens in {dtype}: minirt {ours.perplexity:.5f}, transformers {theirs:.5f}")
    assert ours.perplexity == pytest.approx(theirs, rel=1e-3 if dtype == "bfloat16" else 1e-4)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_only_triton_computes(quantization):
    """Except for copies and memsets, every kernel of prefill, decode and sampling is ours, also for long prompts, mixed steps
    and QK-norm."""
    prompts = [list(range(5, 5 + n)) for n in (1500, 300, 3, 17)]
    options = {"dtype": "bfloat16", "impl": "triton", "kv_cache_memory": 1 << 30, "max_num_seqs": 8, "max_model_len": 2048}
    with Generator.from_pretrained("Qwen3-4B", random_weights=True, quantization=quantization, **options) as generator:
        for params in (
            SamplingParams(max_tokens=6, temperature=0.0),
            SamplingParams(max_tokens=6, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, seed=1),
        ):
            names = kernel_names(lambda params=params: generator.generate(prompts, params))
            assert names
            strangers = names - triton_kernel_names()
            assert not strangers, f"not Triton: {sorted(strangers)}"


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_only_triton_computes_mixtures(quantization, hf_folder):
    """The same for mixtures of experts with a shared expert, in CUDA graphs and in longer prompts."""
    sizes = {"hidden_size": 256, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
    sizes |= {"shared_expert_intermediate_size": 192, "max_position_embeddings": 4096, "decoder_sparse_step": 1}
    options = {"dtype": "bfloat16", "impl": "triton", "kv_cache_memory": 1 << 28, "max_num_seqs": 8}
    with Generator.from_pretrained(hf_folder("Qwen2Moe", **sizes), quantization=quantization, **options) as generator:
        prompts = [[t % 199 for t in range(n)] for n in (2500, 90, 3, 17)]
        names = kernel_names(lambda: generator.generate(prompts, SamplingParams(max_tokens=6, temperature=0.0)))
        names |= kernel_names(lambda: generator.generate(prompts[2], SamplingParams(max_tokens=6, temperature=0.0)))
    assert {"_choose_kernel", "_few_down_kernel"} <= names
    assert not names - triton_kernel_names()


def test_the_profiler_test_can_fail():
    impl = ["triton", "layers.3.mlp=eager"]
    with Generator.from_pretrained(dtype="bfloat16", impl=impl, kv_cache_memory=1 << 28, warm_up="none") as generator:
        names = kernel_names(lambda: generator.generate([5, 6, 7], SamplingParams(max_tokens=3)))
    assert names - triton_kernel_names()


@pytest.fixture(scope="module")
def forced(smollm2):
    """forced(impl, dtype): SmolLM2's teacher-forced logits of one prompt."""
    results = {}

    def logits(impl, dtype="bfloat16"):
        key = (str(impl), dtype)
        if key not in results:
            options = {"dtype": dtype, "impl": impl, "kv_cache_memory": 1 << 28, "warm_up": "none"}
            with Generator.from_pretrained(smollm2, **options) as generator:
                results[key] = generator.logits(list(range(100, 400)))
        return results[key]

    return logits


@pytest.mark.parametrize("layer", ["embedding", "layers.0.attention", "layers.17.mlp", "layers.29.attention", "head"])
def test_one_eager_layer_changes_no_more_than_rounding(layer, forced):
    exact = forced("eager", "float32")
    bound = 2 * (forced("eager") - exact).norm()
    assert (forced(["triton", f"{layer}=eager"]) - exact).norm() <= bound
    assert (forced("triton") - exact).norm() <= bound

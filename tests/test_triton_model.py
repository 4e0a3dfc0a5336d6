"""Whole models through the Triton layers on a GPU: numerics in bf16 on trained weights, and that nothing else computes."""

import pytest
import torch
from tests_support import ROOT, kernel_names, triton_kernel_names

from minirt import Generator, SamplingParams

pytestmark = pytest.mark.gpu
POSITIONS = 10_240
CHUNK = 1024


def text():
    """Prose and code of this repository: awkward for a small chat model, and always at hand."""
    return "".join(p.read_text() for p in [ROOT / "LICENSE", *sorted((ROOT / "minirt").rglob("*.py"))])


def test_bf16_argmax_agrees_with_transformers(smollm2):
    """Teacher-forced: wherever transformers' top-2 gap exceeds its own |bf16 − fp32|, the Triton path has its argmax."""
    import transformers

    with Generator.from_pretrained(smollm2, dtype="bfloat16", impl="triton", kv_cache_memory=1 << 30) as generator:
        tokens = generator.encode(text())[:POSITIONS]
        assert len(tokens) == POSITIONS
        chunks = [tokens[i : i + CHUNK] for i in range(0, POSITIONS, CHUNK)]
        ours = torch.cat([generator.logits(chunk) for chunk in chunks])

    def truth(dtype):
        model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype).cuda().eval()
        with torch.no_grad():
            return torch.cat([model(torch.tensor([chunk], device="cuda")).logits[0].float().cpu() for chunk in chunks])

    exact, rounded = truth(torch.float32), truth(torch.bfloat16)
    top = exact.topk(2)
    gap = top.values[:, 0] - top.values[:, 1]
    noise = (rounded - exact).abs().amax(1)  # of any logit: whichever token rounding lifts may win
    clear = gap > noise
    agree = ours.argmax(1) == top.indices[:, 0]
    theirs = rounded.argmax(1) == top.indices[:, 0]
    print(
        f"{int(clear.sum())} of {POSITIONS} positions are clear; agreement there: minirt {int((agree & clear).sum())}, "
        f"transformers bf16 {int((theirs & clear).sum())}; everywhere: minirt {int(agree.sum())}, transformers "
        f"{int(theirs.sum())}; relative error: minirt {(ours - exact).norm() / exact.norm():.2e}, "
        f"transformers {(rounded - exact).norm() / exact.norm():.2e}"
    )
    assert clear.float().mean() >= 0.9
    assert (ours - exact).norm() <= 2 * (rounded - exact).norm()
    assert bool(agree[clear].all())


def test_only_triton_computes(smollm2):
    """Copies and memsets aside, every kernel of prefill, decode and sampling is one of ours."""
    prompts = [list(range(5, 5 + n)) for n in (300, 3, 17)]
    for params in (
        SamplingParams(max_tokens=6),
        SamplingParams(max_tokens=6, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, seed=1),
    ):
        with Generator.from_pretrained(smollm2, dtype="bfloat16", impl="triton", kv_cache_memory=1 << 28) as generator:
            generator.generate(prompts, params)
            names = kernel_names(lambda generator=generator, params=params: generator.generate(prompts, params))
        assert names
        strangers = names - triton_kernel_names()
        assert not strangers, f"not Triton: {sorted(strangers)}"


def test_the_profiler_test_can_fail(smollm2):
    impl = ["triton", "layers.3.mlp=eager"]
    with Generator.from_pretrained(smollm2, dtype="bfloat16", impl=impl, kv_cache_memory=1 << 28) as generator:
        names = kernel_names(lambda: generator.generate([5, 6, 7], SamplingParams(max_tokens=3)))
    assert names - triton_kernel_names()


@pytest.mark.parametrize("layer", ["embedding", "layers.0.attention", "layers.17.mlp", "layers.29.attention", "head"])
def test_one_eager_layer_changes_no_more_than_rounding(layer, smollm2):
    tokens = list(range(100, 400))

    def logits(impl):
        with Generator.from_pretrained(smollm2, dtype="bfloat16", impl=impl, kv_cache_memory=1 << 28) as generator:
            return generator.logits(tokens)

    with Generator.from_pretrained(smollm2, dtype="float32", impl="eager", kv_cache_memory=1 << 28) as generator:
        exact = generator.logits(tokens)
    whole, mixed, eager = logits("triton"), logits(["triton", f"{layer}=eager"]), logits("eager")
    bound = 2 * (eager - exact).norm()
    assert (mixed - exact).norm() <= bound
    assert (whole - exact).norm() <= bound

"""Models whose layers differ, or that are inside a model with a vision encoder: parity with transformers in fp32, on text.

Catches a layer with the rope of another one, queries that are scaled at a wrong position or before the rotation, M-RoPE that is
not RoPE for text, a decoder's tensor under a name of the wrapper that is not found, and any of these in chunks or after
preemption.
"""

import pytest
import torch
from support.model_cases import CASES, make, truth

from minirt import Generator, SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (1, 17, 64, 65, 130)
CHUNKS = (1, 17, 64, 65)
GREEDY = dict.fromkeys(CASES, 80) | dict.fromkeys(["smollm3", "ministral3", "qwen2.5-vl", "qwen3-vl"], 300)  # each kind of rope


def prompts():
    random = torch.Generator().manual_seed(7)
    return [torch.randint(3, 211, (n,), generator=random).tolist() for n in LENGTHS]


@pytest.mark.filterwarnings("ignore:.*a vision encoder is not supported", "ignore:.*rope type 'longrope' has other frequencies")
@pytest.mark.parametrize("case", CASES)
def test_against_transformers(case, tmp_path):
    """Logits in chunks of several sizes, and greedy tokens of a ragged batch that does not fit the cache at once."""
    model = make(case, tmp_path)
    longest = prompts()[-1]
    expected = truth(model, longest)
    for chunk in CHUNKS:
        options = {"max_num_batched_tokens": chunk, "max_num_seqs": 1, "kv_cache_memory": 1 << 22}
        with Generator.from_pretrained(tmp_path, device="cpu", **options) as generator:
            error = (generator.logits(longest) - expected).norm() / expected.norm()
            assert error < 1e-5, f"chunks of {chunk}"
    # Pages for about half of the tokens of all sequences.
    page = 5 * 64 * 2 * 2 * 16 * 4  # bytes: layers, tokens, K and V, heads, channels, fp32
    pages = (sum(LENGTHS) + GREEDY[case] * len(LENGTHS)) // 110
    params = SamplingParams(max_tokens=GREEDY[case], ignore_eos=True, temperature=0)
    with Generator.from_pretrained(tmp_path, device="cpu", kv_cache_memory=pages * page) as generator:
        outputs = [completion.token_ids for completion in generator.generate(prompts(), params)]
        assert generator._live.stats.num_preemptions
    for prompt, tokens in zip(prompts(), outputs, strict=True):
        assert len(tokens) == GREEDY[case]
        assert truth(model, prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


@pytest.mark.slow
@pytest.mark.parametrize("case", ["smollm3, every second", "ministral3"])
def test_kernels_against_transformers(case, tmp_path):
    """Catches a setting that the call of the kernels leaves out: no rope in some layers, queries scaled by their position."""
    model = make(case, tmp_path, head_dim=64, num_hidden_layers=2)
    tokens = prompts()[-1][:70]
    options = {"impl": "triton", "max_num_batched_tokens": 40, "max_num_seqs": 1, "kv_cache_memory": 1 << 20}
    with Generator.from_pretrained(tmp_path, device=DEVICE, dtype="float32", **options) as generator:
        expected = truth(model, tokens)
        assert (generator.logits(tokens).cpu() - expected).norm() / expected.norm() < 1e-5
        params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0)
        new = generator.generate(tokens, params).token_ids
    assert truth(model, tokens + new)[len(tokens) - 1 : -1].argmax(-1).tolist() == new

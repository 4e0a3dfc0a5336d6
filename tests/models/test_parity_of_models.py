"""Models whose layers differ, or that are inside a model with a vision encoder: parity with transformers in fp32, on text.

Catches a layer with the rope or the window of another one, a window that is a token too long or too short, queries that are
scaled at a wrong position or before the rotation, M-RoPE that is not RoPE for text, a decoder's tensor under a name of the
wrapper that is not found, and any of these in chunks or after preemption.
"""

import pytest
from support import hybrids
from support.checkpoints import distance
from support.hybrids import check_greedy, truth
from support.model_cases import CASES, make

from minirt import Generator, SamplingParams

LENGTHS = (1, 17, 64, 65, 130)
CHUNKS = (1, 17, 64, 65)
GREEDY = dict.fromkeys(CASES, 80) | dict.fromkeys(["smollm3", "ministral3", "qwen2.5-vl", "qwen3-vl"], 150)  # each kind of rope


def prompts():
    return hybrids.prompts(*LENGTHS)


@pytest.mark.filterwarnings("ignore:.*is not supported", "ignore:.*rope type 'longrope' has other frequencies")
@pytest.mark.parametrize("case", CASES)
def test_against_transformers(case, tmp_path):
    """Logits in chunks of several sizes, and greedy tokens of a ragged batch that does not fit the cache at once."""
    model = make(case, tmp_path)
    longest = prompts()[-1]
    expected = truth(model, longest)
    for chunk in CHUNKS:
        options = {"max_num_batched_tokens": chunk, "max_num_seqs": 1, "kv_cache_memory": 1 << 22}
        with Generator.from_pretrained(tmp_path, device="cpu", **options) as generator:
            assert distance(generator.logits(longest), expected) < 1e-5, f"chunks of {chunk}"
            page = max(1, generator.memory.page)
    # Pages for about half of the tokens of all sequences.
    pages = (sum(LENGTHS) + GREEDY[case] * len(LENGTHS)) // 110
    params = SamplingParams(max_tokens=GREEDY[case], ignore_eos=True, temperature=0)
    with Generator.from_pretrained(tmp_path, device="cpu", kv_cache_memory=pages * page) as generator:
        outputs = [completion.token_ids for completion in generator.generate(prompts(), params)]
        assert generator._engine.engine.stats.num_preemptions
    for prompt, tokens in zip(prompts(), outputs, strict=True):
        check_greedy(model, prompt, tokens, GREEDY[case])

"""Checks, before anything is timed, that the model computes the same as eager layers with the same weights."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minirt.bench.measure import random_prompts
from minirt.errors import InputError, NumericsError
from minirt.generator import Generator
from minirt.modeling.formats import FP8
from minirt.sampling_params import SamplingParams

# Lengths of the prompts. They are all different, so that exchanged rows are noticed. One is too long for the kernels for few
# tokens (unless the model is shorter). If longer prompts are measured, one prompt of LONG tokens is added: longer than any
# kernel's bound, but short enough for eager attention, which keeps all scores in memory.
LENGTHS = (*range(9, 16), 300)
LONG = 1100
_FP8_NOISE = 2**-6  # also with fp32 activations, where the last bit can move a value to another e4m3 code
NEW_TOKENS = 16
_GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, repetition_penalty=1.0)


@dataclass(frozen=True)
class Reference:
    """The results of the eager layers: greedy tokens of each prompt, and the logits [NEW_TOKENS, V] they were taken from."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    logits: list[Tensor]


def reference(generator: Generator, longest: int) -> Reference:
    """Compute the reference with a generator whose layers are all eager.

    The generator may be closed before the measured one is loaded, so both need not fit in memory together.

    Args:
        longest: tokens of the longest measured prompt.
    Raises:
        InputError: the model has too few positions for a prompt and NEW_TOKENS tokens.
    """
    room = generator.max_len - NEW_TOKENS
    if room < 1:
        what, expected = "no room to compare with the eager layers", f"{NEW_TOKENS + 1} or more"
        hint = "raise it, or " * (generator.max_len < generator.config.max_context_len) + "use --skip-check"
        raise InputError(what, where="--max-model-len", expected=expected, found=generator.max_len, hint=hint)
    lengths = LENGTHS if longest <= max(LENGTHS) else (min(longest, LONG), *LENGTHS)  # first, so that a batch of one has it
    prompts = random_prompts(random.Random(0), [min(length, room) for length in lengths], generator.config.vocab_size)
    tokens = [completion.token_ids for completion in generator.generate(prompts, _GREEDY)]
    return Reference(prompts, tokens, [_logits(generator, *pair) for pair in zip(prompts, tokens, strict=True)])


def compare(generator: Generator, expected: Reference, batch_sizes: Sequence[int]) -> dict[str, Any]:
    """Compare teacher-forced logits, and greedy tokens for each batch size. The prompts fill a batch in turn.

    Two implementations round differently. Errors are stated in eps of the activation dtype (bf16: 2⁻⁷). Eager layers differ from
    fp32 by a relative error of 2 eps (1.7e-2 in bf16, docs/decisions/parity.md), so two implementations differ by about 3 eps.
    A relative error of 8 eps is allowed.

    A differing token is a near-tie if its logit is at most 16 eps · (root mean square of the row) below the largest. This is
    four standard deviations of the difference of two logits. After a near-tie, the rest of the text is not compared.

    With FP8 weights (or pages), both implementations round activations (or K and V) to e4m3. The last bit of bf16 then moves
    some values to the next code, 6% away. For Qwen2.5-7B's shapes the error grew from 1.5e-2 to 8.3e-2. So eps is three times
    as large.

    Raises:
        NumericsError: logits or tokens differ by more.
    """
    eps = max(torch.finfo(generator.model.dtype).eps, 1.2e-5)  # in fp32, the order of sums causes larger errors than one rounding
    if generator.model.kv_dtype == FP8 or any(name.startswith("fp8") for name in generator.plan.formats):
        eps = max(3 * eps, _FP8_NOISE)
    pairs = zip(expected.prompts, expected.tokens, strict=True)
    logits = torch.cat([_logits(generator, prompt, tokens) for prompt, tokens in pairs])
    truth = torch.cat(expected.logits)
    error = ((logits - truth).norm() / truth.norm()).item()
    if not error <= 8 * eps:
        what = "the logits differ from those of the eager layers, so there is nothing to time"
        raise NumericsError(what, expected=f"a relative error of at most {8 * eps:.1e}", found=f"{error:.1e}")
    compared = near_ties = 0
    for batch_size in sorted(set(batch_sizes)):
        rows = [i % len(expected.prompts) for i in range(batch_size)]
        completions = generator.generate([expected.prompts[row] for row in rows], _GREEDY)
        for row, completion in zip(rows, completions, strict=True):
            same, tie = _agreement(completion.token_ids, expected.tokens[row], expected.logits[row], 16 * eps)
            compared += same
            near_ties += tie
    return {
        "checked": True,
        "against": "the eager layers on the same weights: logits, and greedy tokens up to the first near-tie of a text",
        "logits_relative_error": error, "batch_sizes": sorted(set(batch_sizes)),
        "prompt_lens": [len(prompt) for prompt in expected.prompts], "tokens_equal": compared, "near_ties": near_ties,
    }


def _logits(generator: Generator, prompt: list[int], tokens: list[int]) -> Tensor:
    """Return the rows of the logits that predict `tokens`."""
    return generator.logits(prompt + tokens[:-1])[len(prompt) - 1 :]


def _agreement(tokens: list[int], expected: list[int], logits: Tensor, tolerance: float) -> tuple[int, bool]:
    """Return the number of equal tokens before the first difference, and whether there is a difference (a near-tie)."""
    for i, (mine, theirs) in enumerate(zip(tokens, expected, strict=True)):
        if mine == theirs:
            continue
        row = logits[i]
        gap, scale = (row.max() - row[mine]).item(), row.square().mean().sqrt().item()
        if not gap <= tolerance * scale:
            raise NumericsError(
                "a greedy token differs from that of the eager layers and is not a near-tie, so there is nothing to time",
                where=f"generated token {i}", expected=f"token {theirs}, or a logit at most {tolerance * scale:.2e} below it",
                found=f"token {mine}, {gap:.2e} below",
            )
        return i, True
    return len(expected), False

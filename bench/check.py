"""Before anything is timed: does the build that is measured compute what the eager layers compute on the same weights?"""

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

# Of the prompts: all different, so that rows which change places show, and one beyond the kernels for few tokens (or as long as
# the model allows). Where longer ones are measured, one comes with them that is beyond any kernel's bound, but does not make the
# eager layers' attention, whose scores are all in memory, too large.
LENGTHS = (*range(9, 16), 300)
LONG = 1100
_FP8_NOISE = 2**-6  # also in fp32, for the values that a last bit moves to another code of e4m3
NEW_TOKENS = 16
_GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Reference:
    """What the eager layers say: greedy tokens of each prompt, and the logits [NEW_TOKENS, V] that they were taken from."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    logits: list[Tensor]


def reference(generator: Generator, longest: int) -> Reference:
    """Ask a generator whose layers are all eager. It may be closed afterwards: both need not fit the memory at once.

    Args:
        longest: the most tokens that a measured prompt has.
    Raises:
        InputError: the context has no room for a prompt and what is compared.
    """
    room = generator.max_len - NEW_TOKENS
    if room < 1:
        what, expected = "no room to compare with the eager layers", f"{NEW_TOKENS + 1} or more"
        hint = "raise it, or take --skip-check"
        raise InputError(what, where="--max-model-len", expected=expected, found=generator.max_len, hint=hint)
    lengths = LENGTHS if longest <= max(LENGTHS) else (min(longest, LONG), *LENGTHS)  # in a batch of one, too
    prompts = random_prompts(random.Random(0), [min(length, room) for length in lengths], generator.config.vocab_size)
    tokens = [completion.token_ids for completion in generator.generate(prompts, _GREEDY)]
    return Reference(prompts, tokens, [_logits(generator, *pair) for pair in zip(prompts, tokens, strict=True)])


def compare(generator: Generator, expected: Reference, batch_sizes: Sequence[int]) -> dict[str, Any]:
    """Compare teacher-forced logits, and the greedy tokens of each batch size, in which the prompts take turns.

    Two implementations round differently. In the activation dtype's eps (the distance of two neighbours at 1; bf16 2⁻⁷)
    the same-dtype eager layers err by 2 of fp32 (1.7e-2 in bf16, docs/decisions/parity.md), and two such by 3. So the
    logits' relative error may be 8 eps. A token that differs is a near-tie if its logit lies within 16 eps of the row's root mean
    square under the largest: four deviations of a difference of two logits. After a near-tie a text goes its own way. With fp8
    weights both implementations round activations to e4m3, and with fp8 pages K and V, where a last bit of bf16 moves some values
    to the next code, 6% away: measured 8.3e-2 instead of 1.5e-2 for Qwen2.5-7B's shapes, and three times as much is allowed.

    Raises:
        NumericsError: one of the two does not hold; then there is nothing to time.
    """
    eps = max(torch.finfo(generator.model.dtype).eps, 1.2e-5)  # in fp32 sums in another order come to more than roundings
    if generator.model.kv_dtype == FP8 or "fp8" in generator.plan.formats:
        eps = max(3 * eps, _FP8_NOISE)
    pairs = zip(expected.prompts, expected.tokens, strict=True)
    found = torch.cat([_logits(generator, prompt, tokens) for prompt, tokens in pairs])
    truth = torch.cat(expected.logits)
    error = ((found - truth).norm() / truth.norm()).item()
    if not error <= 8 * eps:
        what = "the logits are not those of the eager layers, so there is nothing to time"
        raise NumericsError(what, expected=f"a relative error of {8 * eps:.1e} at most", found=f"{error:.1e}")
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
        "logits_relative_error": error,
        "batch_sizes": sorted(set(batch_sizes)),
        "prompt_lens": [len(prompt) for prompt in expected.prompts],
        "tokens_equal": compared,
        "near_ties": near_ties,
    }


def _logits(generator: Generator, prompt: list[int], tokens: list[int]) -> Tensor:
    """The rows that predict `tokens`."""
    return generator.logits(prompt + tokens[:-1])[len(prompt) - 1 :]


def _agreement(found: list[int], expected: list[int], logits: Tensor, tolerance: float) -> tuple[int, bool]:
    """(equal tokens before the first difference, whether there is one: a near-tie)."""
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if mine == theirs:
            continue
        row = logits[i]
        gap, scale = (row.max() - row[mine]).item(), row.square().mean().sqrt().item()
        if not gap <= tolerance * scale:
            raise NumericsError(
                "a greedy token is not that of the eager layers, and no near-tie, so there is nothing to time",
                where=f"generated token {i}", expected=f"token {theirs}, or one within {tolerance * scale:.2e} of its logit",
                found=f"token {mine}, {gap:.2e} below",
            )
        return i, True
    return len(expected), False

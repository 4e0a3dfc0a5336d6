"""The kernels beside a draft model's layers against their eager forms, and these against plain Python.

Catches a row that gets another row's token, a wrong draft that counts as cached, a draft beyond the end or in a page that the
sequence may not have, noise of another place or of a column instead of an id, and a padding row that is written.
"""

import random

import pytest
import torch

from minirt.kernels.speculative import draft_input as inputs
from minirt.kernels.speculative import draft_model, reference
from minirt.kernels.speculative.reference import DraftTokens
from minirt.kernels.step import table as words
from minirt.kernels.step.table import Columns, Rows

GARBAGE, PAGE, SPLIT = -7, 4, 8
COLUMNS = Columns(5, (), 9, 0)


def moved(record, device):
    return record._make(value.to(device) for value in record)


def rows_of(slots):
    zeros = torch.zeros(len(slots), dtype=torch.int32)
    return Rows(torch.tensor(slots, dtype=torch.int32), zeros, zeros, zeros, zeros, zeros)


def build(sequences):
    """The table, with a row for each (slot, cached, next tokens, final, prompt, temperature, seed)."""
    rng, table = random.Random(4), torch.full((8, COLUMNS.words), GARBAGE, dtype=torch.int32)
    for slot, cached, following, final, prompt, temperature, seed in sequences:
        row = table[slot]
        row[words.NUM_CACHED], row[words.NUM_NEXT], row[words.FINAL_LEN], row[words.PROMPT_LEN] = cached, following, final, prompt
        row[words.NEXT_TOKENS] = 90 + slot
        row.view(torch.float32)[words.TEMPERATURE] = temperature
        row[words.SEED : words.SEED + 2] = torch.tensor([seed]).view(torch.int32)
        row[COLUMNS.page_tables : COLUMNS.page_tables + COLUMNS.pages] = torch.tensor(rng.sample(range(50), COLUMNS.pages))
    return table


def test_tokens_of_the_first_pass(device):
    """Prompts, drafts of which all, some or none stay, a sequence that has ended, one without tokens, padding behind all."""
    # slot, start, new tokens, cached after the step
    steps = [(3, 0, 5, 5), (0, 7, 4, 11), (-1, 0, 0, 0), (6, 7, 4, 9), (1, 20, 4, 21), (2, 4, 1, 4), (5, 300, 600, 900)]
    table = build([(slot, cached, 1, 999, 1, 0.0, 0) for slot, _, _, cached in steps if slot >= 0])
    tokens = torch.arange(1000, 1000 + sum(count for _, _, count, _ in steps) + 3)
    positions = torch.tensor([start + i for _, start, count, _ in steps for i in range(count)] + [0] * 3)
    starts, wanted, last = [0], [0] * len(tokens), []
    for slot, start, count, cached in steps:
        first = starts[-1]
        stays = max(cached - start, 1)
        for i in range(count):
            wanted[first + i] = 1000 + first + i + 1 if i + 1 < stays else 90 + slot
        last.append(first + stays - 1 if slot >= 0 else first)
        starts.append(first + count)
    query_starts, rows = torch.tensor(starts, dtype=torch.int32), rows_of([slot for slot, *_ in steps])
    ids, rows_that_stay = reference.first_pass(table, rows, tokens, positions, query_starts)
    assert ids.tolist() == wanted
    assert rows_that_stay.tolist() == last
    given = (tokens.to(device), positions.to(device), query_starts.to(device))
    result = draft_model.first_pass(table.to(device), moved(rows, device), *given)
    assert [values.tolist() for values in result] == [wanted, last]


# slot, cached, NUM_NEXT, final, prompt, temperature, seed
SEQUENCES = [
    (3, 5, 1, 99, 2, 0.0, 0), (0, 5, 1, 8, 2, 0.0, 0), (1, 5, 1, 7, 2, 1.0, 5), (2, 8, 1, 99, 2, 0.7, 2**64 - 3 - 2**64),
    (4, 5, 0, 99, 2, 0.0, 0), (5, 17, 1, 99, 17, 1.3, 12345678901234567), (6, 7, 1, 99, 3, 1e-30, 4),
]  # fmt: skip
ORDER = [3, 0, -1, 1, 2, 4, 5, 6]


@pytest.mark.parametrize("reduced", [False, True])
def test_draws(reduced, device):
    """Five drafts: what is written where, from logits with a clear winner, in plain Python; the kernel writes the same."""
    rng, count = random.Random(1), 37 if reduced else 2500
    names = sorted(rng.sample(range(5000), count)) if reduced else list(range(count))
    ids = torch.tensor(names) if reduced else None
    table = build(SEQUENCES)
    ours, rows, wanted = table.clone().to(device), rows_of(ORDER), table.clone()
    for number in range(1, 6):
        best = [rng.randrange(count) for _ in ORDER]
        logits = torch.randn(len(ORDER), count)
        logits[torch.arange(len(ORDER)), torch.tensor(best)] += 1000.0
        outs = []
        for form, held, place in ((reference, table, torch.device("cpu")), (draft_model, ours, device)):
            out = DraftTokens(*(torch.full((n,), GARBAGE, dtype=t, device=place) for n, t in (
                *((len(ORDER), torch.int64),) * 3, (len(ORDER), torch.int32), (len(ORDER) + 1, torch.int32)
            )))  # fmt: skip
            form.draw(
                logits.to(place), None if ids is None else ids.to(place), held, COLUMNS, moved(rows, place), out, number=number,
                most=5, page_size=PAGE, kv_split=SPLIT,
            )  # fmt: skip
            outs.append([values.tolist() for values in out])
        tokens, positions, slots, lens, splits = [], [], [], [], [0]
        for slot, column in zip(ORDER, best, strict=True):
            goes_on = False
            if slot >= 0 and wanted[slot, words.NUM_NEXT] > 0:
                cached, final = int(wanted[slot, words.NUM_CACHED]), int(wanted[slot, words.FINAL_LEN])
                in_page = 0
                while (cached + in_page) % PAGE:
                    in_page += 1
                most = max(0, min(5, final - 2 - cached, 1 + in_page))
                if number <= most:
                    wanted[slot, words.NEXT_TOKENS + number] = names[column]
                wanted[slot, words.NUM_NEXT], wanted[slot, words.MATCHED] = 1 + min(number, most), min(number, most)
                goes_on = number < most
            position = cached + number - 1 if goes_on else 0
            tokens.append(names[column] if goes_on else 0)
            positions.append(position)
            page = int(wanted[slot, COLUMNS.page_tables + position // PAGE])
            slots.append(page * PAGE + position % PAGE if goes_on else -1)
            lens.append(position + 1 if goes_on else 0)
            splits.append(splits[-1] + -(-lens[-1] // SPLIT))
        assert outs[0] == outs[1] == [tokens, positions, slots, lens, splits]
        assert torch.equal(table, wanted)
        assert torch.equal(ours.cpu(), wanted)


def test_the_noise_is_that_of_the_sampler(device):
    """With the target's own logits, drafts at a temperature are the tokens that the sampler draws at these places."""
    from minirt.kernels.sampling.batch import SamplingBatch
    from minirt.kernels.sampling.dispatch import sample
    from minirt.sampling_params import SamplingParams, resolve

    count, cached, prompt = 3001, 9, 4
    for seed, temperature in ((0, 1.0), (2**63 + 11, 0.3), (77, 4.0)):
        signed = seed - 2**64 if seed >= 2**63 else seed
        for number in (1, 3):
            logits = torch.randn(1, count, generator=torch.Generator().manual_seed(number)) * 3
            table = build([(2, cached, number, 99, prompt, temperature, signed)])
            params = resolve(SamplingParams(temperature=temperature, seed=seed), None)
            wanted = int(sample(logits, SamplingBatch.build([(params, cached + number - prompt)])))
            ids = torch.tensor(sorted({*range(5, count, 7), wanted}))
            for names in (None, ids):
                for form, place in ((reference, torch.device("cpu")), (draft_model, device)):
                    to, given = table.clone().to(place), logits if names is None else logits[:, names]
                    out = DraftTokens(*(torch.zeros(n, dtype=torch.int64, device=place) for n in (1, 1, 1)),
                                      *(torch.zeros(n, dtype=torch.int32, device=place) for n in (1, 2)))  # fmt: skip
                    form.draw(
                        given.contiguous().to(place), None if names is None else names.to(place), to, COLUMNS,
                        moved(rows_of([2]), place), out, number=number, most=5, page_size=16, kv_split=16,
                    )  # fmt: skip
                    assert int(to[2, words.NEXT_TOKENS + number]) == wanted


@pytest.mark.parametrize("case", inputs.CASES, ids=str)
def test_input(case, dtype, device, make, nan, agrees):
    """Both halves, in this order. Catches exchanged halves or norms, and a lost tail of H."""
    T, V, H = case["T"], case["V"], case["H"]
    table, hidden = make(V, H, dtype=dtype), make(T, H, dtype=dtype)
    norms = [make(H, dtype=dtype) for _ in range(2)]
    tokens, out = torch.randint(V, (T,), device=device), nan(T, 2 * H, dtype=dtype)
    tokens[0] = V - 1

    def formula(*values):
        rows = (values[0][tokens], values[2]), (values[1], values[3])
        return torch.cat([x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * norm for x, norm in rows], 1)

    truth = formula(*(value.double() for value in (table, hidden, *norms)))
    assert inputs.draft_input(tokens, table, hidden, *norms, 1e-5, out) is out
    agrees(out, formula(table, hidden, *norms), truth)

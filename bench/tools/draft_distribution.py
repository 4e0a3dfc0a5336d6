"""Whether drafts change the distribution of texts: `python bench/tools/draft_distribution.py [MODEL] [--fp8] [--texts 20000]`.

The same prompt many times, with seeds of their own: without drafts (twice, as a control), with drafts of the model's layers of
multi-token prediction, most of which are right, and with drafts that repeat the next token, which are wrong. For each pair of
kinds, a χ² test of two samples (Pearson 1900) over whole texts; texts that came less than ten times together are one cell. Then
how many texts of 100 tokens differ from those without drafts, with the same seeds: several tokens round otherwise than one does.
Prints JSON.
"""

import argparse
import json
import sys
from collections import Counter
from typing import Any

import torch

from minirt import Generator, SamplingParams, SpeculativeOptions
from minirt.bench.report import machine
from minirt.bench.tools.speculation import Synthetic

PROMPT, TOKENS, LONG, LONG_TEXTS, SEQUENCES = "Once upon a time, there was a", 5, 100, 240, 48
SETTINGS: dict[str, dict[str, float]] = {"T = 1": {}, "T = 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9}}
PAIRS = (("plain", "plain again"), ("plain", "mtp"), ("plain", "repeat"), ("repeat", "mtp"))
_RARE = 10


def chi_square(first: Counter, second: Counter) -> dict[str, float]:
    """χ², degrees of freedom and p of two samples from one distribution."""
    texts = first | second
    common = [text for text in texts if first[text] + second[text] >= _RARE]
    cells = torch.tensor([[own[text] for text in common] for own in (first, second)], dtype=torch.float64)
    sums = torch.tensor([[first.total()], [second.total()]], dtype=torch.float64)
    cells = torch.cat((cells, sums - cells.sum(1, keepdim=True)), 1)
    cells = cells[:, cells.sum(0) > 0]
    expected = cells.sum(0) * sums / sums.sum()
    value, free = float(((cells - expected) ** 2 / expected).sum()), cells.shape[1] - 1
    half = torch.tensor([free / 2, value / 2], dtype=torch.float64)
    return {"chi_square": value, "degrees_of_freedom": free, "p": float(torch.special.gammaincc(*half)) if free else 1.0}


def measure(model: str | None, device: str, quantization: str | None, texts: int) -> tuple[Any, list[dict[str, Any]]]:
    repeat = Synthetic(4)
    proposers: dict[str, Any] = {"plain": None, "mtp": SpeculativeOptions(method="mtp", adaptive=False), "repeat": repeat}
    options: dict[str, Any] = {"device": device, "quantization": quantization, "max_num_seqs": SEQUENCES, "max_model_len": 256}
    options |= {} if device == "cpu" else {"dtype": "bfloat16"}
    options |= {"model": model} if model else {}
    generators = {kind: Generator.from_pretrained(speculative=own, **options) for kind, own in proposers.items()}
    rows: list[dict[str, Any]] = []
    for name, own in SETTINGS.items():
        found, drafts = dict[str, Counter](), dict[str, Any]()
        for number, kind in enumerate((*proposers, "plain again")):
            base: dict[str, Any] = {"temperature": 1.0, "max_tokens": TOKENS, "ignore_eos": True, **own}
            params = [SamplingParams(**base, seed=number * texts + i) for i in range(texts)]
            done = generators[kind.partition(" ")[0]].generate([PROMPT] * texts, params)
            found[kind] = Counter(tuple(one.token_ids) for one in done)
            drafts[kind] = [sum(one.num_draft_tokens for one in done), sum(one.num_accepted_tokens for one in done)]
        rows += [{"setting": name, "kinds": pair} | chi_square(found[pair[0]], found[pair[1]]) for pair in PAIRS]
        rows.append({"setting": name, "verified_and_accepted": drafts})
    for temperature in (0.0, 1.0):
        prompts = [f"Once upon a time, number {i} there was" for i in range(LONG_TEXTS)]
        params = [SamplingParams(temperature=temperature, max_tokens=LONG, ignore_eos=True, seed=i) for i in range(LONG_TEXTS)]
        results = {kind: [one.token_ids for one in own.generate(prompts, params)] for kind, own in generators.items()}
        differ = {kind: sum(map(list.__ne__, own, results["plain"])) for kind, own in results.items() if kind != "plain"}
        rows.append({"temperature": temperature, "texts": LONG_TEXTS, "tokens": LONG, "different": differ})
    return generators["plain"].device, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="a folder with layers of multi-token prediction; default: the embedded model")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--texts", type=int, default=20_000, help="of each kind and setting")
    options = parser.parse_args()
    device, rows = measure(options.model, options.device, "fp8" if options.fp8 else None, options.texts)
    shared = machine("draft distribution", device, ["python", "bench/tools/draft_distribution.py", *sys.argv[1:]], None)
    print(json.dumps(shared | {"texts": options.texts, "results": rows}, indent=1))


if __name__ == "__main__":
    main()

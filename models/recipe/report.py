"""Compare the trained model with transformers, sample from it, and write its card.

`python models/recipe/report.py --stories DIR --out FOLDER` reads the output of stories.py and train.py and writes
FOLDER/figures.json and FOLDER/embedded/README.md.
"""

import argparse
import gzip
import json
import random
from pathlib import Path
from string import Template
from typing import Any

import clean
import torch

PROMPT = "Once upon a time"
SAMPLES, STORIES, STORY_WORDS = 1, 200, 120
OPENINGS = ["Once upon a time", "One sunny day, a", "There once was a", "The", "In a small village, there lived"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stories", type=Path, required=True, help="output folder of stories.py")
    parser.add_argument("--out", type=Path, required=True, help="output folder of train.py")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--count", type=int, default=STORIES, help="number of stories to measure")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    folder, text = options.out / "embedded", (options.out / "heldout.txt").read_text(encoding="utf-8")
    figures = {"parity": parity(folder, text, options.device)}
    print(json.dumps(figures["parity"], indent=1), flush=True)
    samples, stories = sample(folder, options.device, options.count)
    figures["stories"] = {
        "embedded": describe(stories), "training set": describe(training_stories(options.stories, options.count)),
        "SmolLM2-135M-Instruct": describe(free_stories(options.stories, options.count)),
    }  # fmt: skip
    print(json.dumps(figures["stories"], indent=1), flush=True)
    (options.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    curve = json.loads((options.out / "curve.json").read_text())
    (folder / "README.md").write_text(card(curve, figures, samples), encoding="utf-8")
    print("\n\n".join(f"## Seed {seed}\n{story}" for seed, story in enumerate(samples)), flush=True)


def parity(folder: Path, text: str, device: str) -> dict[str, Any]:
    """Perplexity of the held-out text (minirt in fp32 and bf16, transformers in fp32), and prompts with equal greedy tokens."""
    import transformers

    from minirt import Generator, SamplingParams
    from minirt.bench.perplexity import perplexity

    record: dict[str, Any] = {"device": torch.cuda.get_device_name() if device == "cuda" else "CPU"}
    greedy = SamplingParams(temperature=0, max_tokens=64)
    for dtype, impl in (("float32", "eager"), ("float32", "auto"), ("bfloat16", "eager"), ("bfloat16", "auto")):
        if dtype == "bfloat16" and device == "cpu":
            continue
        with Generator.from_pretrained(folder, device=device, dtype=dtype, impl=impl, warmup=False) as generator:
            result = perplexity(generator, text)
            record[f"perplexity {dtype} {impl}"] = result.perplexity
            tokens, window, stride = generator.encode(text), result.window, result.stride
            record |= {"tokens": result.tokens, "window": window, "stride": stride, "bits per byte": result.bits_per_byte}
            if (dtype, impl) == ("float32", "auto"):
                prompts = [generator.encode(opening) for opening in greedy_prompts()]
                ours = [c.token_ids for c in generator.generate(prompts, greedy)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    record["perplexity transformers float32"] = reference_perplexity(model, tokens, window, stride, device)
    same = 0
    for prompt, mine in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt], device=device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64)
        same += out[0, len(prompt) :].tolist() == mine
    return record | {"greedy prompts": len(prompts), "same greedy tokens": same}


def greedy_prompts() -> list[str]:
    """20 prompts: each opening alone, and with heroes that the training stories have or lack."""
    return [*OPENINGS] + [f"{opening} {rest}" for opening in OPENINGS for rest in ("little cat", "boy named Zed", "dragon")]


@torch.no_grad()
def reference_perplexity(model: Any, tokens: list[int], window: int, stride: int, device: str) -> float:
    """Perplexity as `minirt.bench.perplexity.perplexity` defines it, by transformers' own loss."""
    total, done = 0.0, 1
    for start in range(0, max(len(tokens) - window, 0) + stride, stride):
        stop = min(start + window, len(tokens))
        ids = torch.tensor([tokens[start:stop]], device=device)
        labels = ids.clone()
        labels[:, : done - start] = -100
        total += model(ids, labels=labels).loss.double().item() * (stop - done)
        done = stop
        if stop == len(tokens):
            break
    return float(torch.tensor(total / (len(tokens) - 1), dtype=torch.float64).exp())


def sample(folder: Path, device: str, count: int) -> tuple[list[str], list[tuple[str, bool]]]:
    """Stories with the model's own settings: (the texts of the first SAMPLES, (text, ended by itself) of all)."""
    from minirt import Generator, SamplingParams

    with Generator.from_pretrained(folder, device=device, warmup=False) as generator:
        params = [SamplingParams(seed=seed) for seed in range(max(count, SAMPLES))]
        done = generator.generate([PROMPT] * len(params), params)
    stories = [(PROMPT + c.text, c.finish_reason == "stop") for c in done]
    return [text for text, _ in stories[:SAMPLES]], stories


def free_stories(folder: Path, count: int) -> list[tuple[str, bool]]:
    with gzip.open(folder / "free.jsonl.gz", "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return [(r["text"], r["finish_reason"] == "stop") for r in records[:count]]


def training_stories(folder: Path, count: int) -> list[tuple[str, bool]]:
    texts = [record["text"] for record in clean.read(folder)]
    return [(text, True) for text in random.Random(0).sample(texts, min(count, len(texts)))]


def describe(stories: list[tuple[str, bool]]) -> dict[str, float]:
    """Figures about stories. Trigrams are counted in the first STORY_WORDS words, because their shares depend on the length."""
    parts = [clean.split_words(text)[:STORY_WORDS] for text, _ in stories]
    trigrams = [t for p in parts for t in zip(p, p[1:], p[2:], strict=False)]
    return {
        "stories": len(stories), "ended by themselves": sum(ended for _, ended in stories) / len(stories),
        "mean words": sum(len(clean.split_words(text)) for text, _ in stories) / len(stories),
        "distinct trigrams": len(set(trigrams)) / len(trigrams),
        "repeated trigrams in a story": sum(map(clean.repeated_trigrams, parts)) / len(parts),
    }  # fmt: skip


def card(curve: dict[str, Any], figures: dict[str, Any], samples: list[str]) -> str:
    """The model card: card.md with the figures and samples filled in."""
    parity, run = figures["parity"], curve["runs"][curve["chosen"]]
    names = ["ended by themselves", "mean words", "distinct trigrams", "repeated trigrams in a story"]
    rows = [
        f"| {who} | {v[names[0]]:.0%} | {v[names[1]]:.0f} | {v[names[2]]:.1%} | {v[names[3]]:.1%} |"
        for who, v in figures["stories"].items()
    ]
    quoted = [f"Seed {seed}:\n\n" + "\n".join(f"> {line}".rstrip() for line in s.splitlines()) for seed, s in enumerate(samples)]
    best = {name: value for name, value in parity.items() if name.startswith("perplexity")}
    stories = curve["stories"]
    return Template((Path(__file__).parent / "card.md").read_text(encoding="utf-8")).substitute(
        parameters=f"{curve['parameters']:,}", raw=f"{stories['raw']:,}", training=f"{stories['training']:,}",
        share=f"{stories['written share']:.0%}",
        dropped=", ".join(f"{count:,} for {why}" for why, count in stories["dropped"].items()),
        tokens=f"{curve['tokens an epoch'] / 1e6:.1f}", epochs=f"{run['epochs']:.0f}", steps=f"{run['steps']:,}",
        tried=", ".join(f"{other['epochs']:.0f}" for other in curve["runs"]), device=curve["device"],
        seconds=f"{run['curve'][-1]['seconds']:.0f}", validation=f"{run['curve'][-1]['validation']:.4f}",
        heldout=f"{parity['tokens']:,}", window=parity["window"], stride=parity["stride"], bits=f"{parity['bits per byte']:.4f}",
        perplexities="\n".join(f"| {name.removeprefix('perplexity ')} | {value:.5f} |" for name, value in best.items()),
        greedy=f"{parity['same greedy tokens']} of {parity['greedy prompts']}",
        count=figures["stories"]["embedded"]["stories"], words=STORY_WORDS, figures="\n".join(rows), samples="\n\n".join(quoted),
    )  # fmt: skip


if __name__ == "__main__":
    main()

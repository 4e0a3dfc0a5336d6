"""Measure what each checkpoint format costs a model, and print JSON lines.

python tests/tools/format_quality.py MODEL NAME TEXT=FILE … > bench/results/cpu-format-quality.jsonl

This is not a test. MODEL, a folder with fp32 weights in one file, is written in each format by tests/support. Generator loads the
folder and scores windows of each text; so does transformers with the dequantized weights in fp32, whose activations are not
rounded. The columns are the loss above the fp32 model, its perplexity, and the text that is written for a few prompts.
"""

import datetime
import json
import math
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import quantized, quantized_int4

from minirt import Generator, SamplingParams

WINDOW, WINDOWS = 256, 3  # tokens, and windows from the start of each text
PROMPTS = (
    "The capital of France is Paris. The capital of Italy is",
    "Once upon a time, there was a small dragon who",
    "Water boils at 100 degrees Celsius because",
)
FORMATS: dict[str, tuple[Callable, str]] = {  # as the table names them: what writes the folder, and its style
    "FP8, a scale for each channel": (quantized.write, "compressed-tensors channel"),
    "FP8, a scale for each weight": (quantized.write, "modelopt"),
    "FP8, blocks of 128×128": (quantized.write, "fp8 block"),
    "compressed-tensors W4A16, groups of 128": (quantized_int4.write, "packed 128"),
    "compressed-tensors W4A16, groups of 32": (quantized_int4.write, "packed 32"),
    "GPTQ, symmetric, groups of 128": (quantized_int4.write, "gptq 128"),
    "GPTQ, zero points, groups of 128": (quantized_int4.write, "gptq zeros"),
    "AWQ, zero points, groups of 128": (quantized_int4.write, "awq 128"),
}
OPTIONS = {"--quantize fp8": "fp8", "--quantize int4": "int4"}


def load(folder: Path, **options: object) -> Generator:
    return Generator.from_pretrained(folder, device="cpu", dtype="float32", kv_cache_memory=64 << 20, **options)


def scored(logits: Callable[[list[int]], torch.Tensor], windows: dict[str, list[list[int]]]) -> dict[str, list[float]]:
    """Mean negative log-likelihood in nats of all tokens but the first, by text and window."""

    def loss(tokens: list[int]) -> float:
        rows = logits(tokens)[:-1].double().log_softmax(-1)
        return -rows[torch.arange(len(rows)), torch.tensor(tokens[1:])].mean().item()

    return {name: [loss(tokens) for tokens in own] for name, own in windows.items()}


def above(found: dict[str, list[float]], base: dict[str, list[float]]) -> tuple[float, float]:
    """Mean difference by window, and its standard error."""
    differences = torch.tensor([a - b for name in base for a, b in zip(found[name], base[name], strict=True)]).double()
    return differences.mean().item(), (differences.std() / len(differences) ** 0.5).item()


def measured(generator: Generator, windows: dict[str, list[list[int]]], base: dict[str, list[float]]) -> dict[str, object]:
    found = scored(generator.logits, windows)
    difference, error = above(found, base or found)
    mean = sum(map(sum, found.values())) / sum(map(len, found.values()))
    greedy = SamplingParams(max_tokens=24, temperature=0)
    return {
        "weight_bytes": generator.plan.weight_bytes, "perplexity": round(math.exp(mean), 4), "difference": round(difference, 6),
        "standard_error": round(error, 6), "windows": {name: [round(x, 6) for x in own] for name, own in found.items()},
        "text": [generator.generate(prompt, greedy).text for prompt in PROMPTS],
    }  # fmt: skip


@torch.inference_mode()
def lines(source: Path, name: str, texts: dict[str, Path]) -> Iterator[dict[str, object]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    windows = {}
    for text, file in texts.items():
        ids = tokenizer(file.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
        windows[text] = [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(WINDOWS)]
    yield {
        "kind": "about", "model": name, "device": f"CPU, {torch.get_num_threads()} thread", "dtype": "float32",
        "versions": {"python": platform.python_version(), "torch": torch.__version__}, "date": str(datetime.date.today()),
        "texts": {text: file.name for text, file in texts.items()}, "prompts": PROMPTS,
        "windows": f"of {WINDOW} tokens, {WINDOWS} from the start of each text; all tokens but the first of each are scored",
        "columns": "difference: mean nats a token above fp32, by window; weights_only: the same of transformers in fp32 with the "
        "dequantized weights; the tied head keeps 32 bits", "command": "tests/tools/format_quality.py",
    }  # fmt: skip
    scored_tokens = sum(len(tokens) - 1 for own in windows.values() for tokens in own)
    with load(source) as generator:
        base = measured(generator, windows, {})
    losses = base["windows"]
    about = {"kind": "format", "model": name, "tokens": scored_tokens}
    yield about | {"name": "fp32"} | base
    for option, quantization in OPTIONS.items():
        with load(source, quantization=quantization) as generator:
            yield about | {"name": option} | measured(generator, windows, losses)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    for title, (write, style) in FORMATS.items():
        with tempfile.TemporaryDirectory() as scratch:
            written = write(source, Path(scratch, "model"), style)
            written.tensors.clear()
            with load(written.folder) as generator:
                found = measured(generator, windows, losses)
        model.load_state_dict({key: tensor.float() for key, tensor in written.exact.items()}, strict=False)
        difference, error = above(scored(lambda ids: model(torch.tensor([ids])).logits[0], windows), losses)
        found |= {"weights_only": round(difference, 6), "weights_only_error": round(error, 6)}
        yield about | {"name": title} | found


if __name__ == "__main__":
    folder, name, *texts = sys.argv[1:]
    for line in lines(Path(folder), name, {text: Path(file) for text, _, file in (t.partition("=") for t in texts)}):
        print(json.dumps(line, ensure_ascii=False), flush=True)

"""Measure what each checkpoint format costs a model, and print JSON lines.

python tests/tools/format_quality.py formats MODEL NAME WINDOW WINDOWS TEXT=FILE …    for bench/results/cpu-format-quality.jsonl
python tests/tools/format_quality.py scales MODEL NAME WINDOW WINDOWS TEXT=FILE …     for bench/results/cpu-int4-quality.jsonl
python tests/tools/format_quality.py options MODEL NAME WINDOW WINDOWS TEXT=FILE …    for bench/results/cpu-trained-models.jsonl

This is not a test. MODEL is a folder with fp32 weights (options: of any dtype). WINDOW is a number of tokens, WINDOWS how many
are taken from the start of each text.

formats: MODEL, in one file, is written in each format by tests/support. Generator loads the folder and scores the windows; so
does transformers with the dequantized weights in fp32, whose activations are not rounded. The columns are the loss above the
fp32 model, its perplexity, and the text that is written for a few prompts.

options: MODEL is loaded in fp32, in bf16, and quantized in each way that an option of `minirt` asks for.

scales: ways to choose the scales of 4-bit weights, in transformers with fp32. The columns are the loss above the fp32 model and
the divergence from it.
"""

import datetime
import json
import math
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import quantized, quantized_int4

from minirt import Generator, SamplingParams
from minirt.kernels.reference import INT4_CHUNK, dequantize_int4, pack_int4, pack_int4_scale, quantize_int4

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
LOADS: dict[str, dict[str, object]] = {  # of `options`; the LM heads of these models are not tied
    "fp32": {},
    "--dtype bfloat16": {"dtype": "bfloat16"},
    "--quantize fp8": {"quantization": "fp8"},
    "--quantize int4": {"quantization": "int4"},
    "--quantize int4 --quantize-head": {"quantization": "int4", "quantize_head": True},
}


def load(folder: Path, **options: object) -> Generator:
    return Generator.from_pretrained(folder, **{"device": "cpu", "dtype": "float32", "kv_cache_memory": 64 << 20} | options)


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


def measured(
    generator: Generator, windows: dict[str, list[list[int]]], base: dict[str, list[float]], prompts: Sequence[str] = PROMPTS
) -> dict[str, object]:
    found = scored(generator.logits, windows)
    difference, error = above(found, base or found)
    mean = sum(map(sum, found.values())) / sum(map(len, found.values()))
    greedy = SamplingParams(max_tokens=24, temperature=0)
    return {
        "weight_bytes": generator.plan.weight_bytes, "perplexity": round(math.exp(mean), 4), "difference": round(difference, 6),
        "standard_error": round(error, 6), "windows": {name: [round(x, 6) for x in own] for name, own in found.items()},
        "text": [generator.generate(prompt, greedy).text for prompt in prompts],
    }  # fmt: skip


def read_windows(source: Path, size: int, count: int, texts: dict[str, Path]) -> dict[str, list[list[int]]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    windows = {}
    for text, file in texts.items():
        ids = tokenizer(file.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
        windows[text] = [ids[i * size : (i + 1) * size] for i in range(count)]
    return windows


def described(name: str, size: int, count: int, texts: dict[str, Path]) -> dict[str, object]:
    return {
        "kind": "about", "model": name, "device": f"CPU, {torch.get_num_threads()} thread", "dtype": "float32",
        "versions": {"python": platform.python_version(), "torch": torch.__version__}, "date": str(datetime.date.today()),
        "texts": {text: file.name for text, file in texts.items()}, "prompts": PROMPTS,
        "windows": f"of {size} tokens, {count} from the start of each text; all tokens but the first of each are scored",
        "columns": "difference: mean nats a token above fp32, by window; weights_only: the same of transformers in fp32 with the "
        "dequantized weights; the tied head keeps 32 bits", "command": "tests/tools/format_quality.py",
    }  # fmt: skip


@torch.inference_mode()
def options(source: Path, name: str, size: int, count: int, texts: dict[str, Path]) -> Iterator[dict[str, object]]:
    windows = read_windows(source, size, count, texts)
    yield described(name, size, count, texts) | {"columns": "difference: mean nats a token above fp32, by window", "prompts": ()}
    losses: dict[str, list[float]] = {}
    for option, own in LOADS.items():
        with load(source, **own) as generator:
            found = measured(generator, windows, losses, ())
        losses = losses or found["windows"]
        yield {"kind": "option", "model": name, "tokens": count * len(texts) * (size - 1), "name": option} | found


@torch.inference_mode()
def formats(source: Path, name: str, size: int, count: int, texts: dict[str, Path]) -> Iterator[dict[str, object]]:
    windows = read_windows(source, size, count, texts)
    yield described(name, size, count, texts)
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


# --- scales of 4-bit weights ---


def int4(weight: torch.Tensor) -> torch.Tensor:
    """As `--quantize int4`."""
    codes, scale, zero = quantize_int4(weight, INT4_CHUNK)
    return dequantize_int4(pack_int4(codes), pack_int4_scale(scale, zero), weight.shape[1])


def searched(shrink: Sequence[float], symmetric: bool, power: float = 2.4) -> Callable[[torch.Tensor], torch.Tensor]:
    """Groups of 128 rounded to 16 levels over the range of their values, or over the part of it that has the least error.

    With 20 parts from 1.00 to 0.81, this is the MSE observer of llm-compressor (errors to the power of 2.4, scales in bf16).
    """

    def quantize(weight: torch.Tensor) -> torch.Tensor:
        K = weight.shape[1]
        values = torch.nn.functional.pad(weight, (0, -K % 128)).unflatten(1, (-1, 128))
        low, high = values.amin(2, keepdim=True).clamp(max=0), values.amax(2, keepdim=True).clamp(min=0)
        largest = values.abs().amax(2, keepdim=True)
        best = least = torch.full_like(largest, torch.inf)
        for part in shrink:
            scale = (part * (largest / 7.5 if symmetric else (high - low) / 15)).clamp(min=1e-7).bfloat16().float()
            zero = torch.full_like(scale, 8) if symmetric else (-part * low / scale).round().clamp(0, 15)
            own = ((values / scale + zero).round().clamp(0, 15) - zero) * scale
            error = (own - values).abs().pow(power).sum(2, keepdim=True)
            best, least = torch.where(error < least, own, best), torch.minimum(error, least)
        return best.flatten(1)[:, :K]

    return quantize


TWENTY = [1 - i / 100 for i in range(20)]
SCALES = {
    "int4": int4, "round to nearest": searched([1.0], True), "mse observer": searched(TWENTY, True),
    "mse observer, zero points": searched(TWENTY, False),
}  # fmt: skip


@torch.inference_mode()
def scales(source: Path, name: str, size: int, count: int, texts: dict[str, Path]) -> Iterator[dict[str, object]]:
    windows = read_windows(source, size, count, texts)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    linears = {key: own for key, own in model.named_modules() if isinstance(own, torch.nn.Linear) and key != "lm_head"}
    kept = {key: own.weight.data.clone() for key, own in linears.items()}

    def rows(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids])).logits[0][:-1].double().log_softmax(-1)

    base = {text: [rows(ids).float() for ids in own] for text, own in windows.items()}
    for title, quantize in SCALES.items():
        error = total = 0.0
        for key, own in linears.items():
            own.weight.data = quantize(kept[key])
            error += (own.weight - kept[key]).double().square().sum().item()
            total += kept[key].double().square().sum().item()
        found: dict[str, dict[str, list[float]]] = {}
        plain = []
        for text, own in windows.items():
            found[text] = {"difference": [], "kl": []}
            for ids, before in zip(own, base[text], strict=True):
                after, before, ids = rows(ids), before.double(), torch.tensor(ids[1:]).unsqueeze(1)
                plain.append(-before.gather(1, ids).mean().item())
                found[text]["difference"].append(round((before - after).gather(1, ids).mean().item(), 6))
                found[text]["kl"].append(round((before.exp() * (before - after)).sum(1).mean().item(), 6))
        differences = torch.tensor([x for own in found.values() for x in own["difference"]])
        yield {
            "kind": "perplexity", "model": name, "name": title, "tokens": len(plain) * (size - 1),
            "fp32": round(sum(plain) / len(plain), 6), "difference": round(differences.mean().item(), 6),
            "standard_error": round((differences.std() / len(plain) ** 0.5).item(), 6),
            "kl": round(sum(x for own in found.values() for x in own["kl"]) / len(plain), 6),
            "relative_error": round((error / total) ** 0.5, 5), "windows": found,
        }  # fmt: skip


if __name__ == "__main__":
    kind, folder, name, size, count, *files = sys.argv[1:]
    texts = {text: Path(file) for text, _, file in (each.partition("=") for each in files)}
    measure = {"formats": formats, "scales": scales, "options": options}[kind]
    for line in measure(Path(folder), name, int(size), int(count), texts):
        print(json.dumps(line, ensure_ascii=False), flush=True)

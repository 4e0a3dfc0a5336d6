"""Train the embedded model on the stories: `python models/recipe/train.py --stories DIR --out FOLDER`.

Filters the stories, holds some out, and trains a byte-level BPE tokenizer and a Qwen2 model of 11.8 M parameters. Writes
FOLDER/embedded (the model in Hugging Face's format), FOLDER/heldout.txt and FOLDER/curve.json.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import clean
import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub import save_torch_state_dict
from network import CONTEXT, SIZES, qwen2
from torch import Tensor

END, END_ID = "<|endoftext|>", 0
SEED = 1234
HELD_OUT_STORIES, VALIDATION_STORIES = 100, 400
PEAK_RATE, WARM_UP = 2e-3, 0.02  # learning rate; share of the training
IGNORE = -100


def train_tokenizer(texts: list[str], size: int, folder: Path) -> int:
    """Train a byte-level BPE tokenizer like Qwen2's, with one special token; write tokenizer.json and tokenizer_config.json.

    Returns its number of entries: `size`, or fewer if every word of the texts is a single token before that.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.token_to_id(END) != END_ID:
        raise SystemExit(f"{END} has the id {tokenizer.token_to_id(END)}, expected {END_ID}")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END, "add_prefix_space": False,
        "clean_up_tokenization_spaces": False, "model_max_length": CONTEXT,
    }  # fmt: skip
    write_json(folder / "tokenizer_config.json", settings)
    return tokenizer.get_vocab_size()


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer of a model's folder."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode(folder: Path, texts: list[str]) -> list[np.ndarray]:
    """Token ids of each story, with the end token. Stories longer than the context are left out."""
    ids = [np.array([*e.ids, END_ID], dtype=np.int16) for e in tokenizer_of(folder).encode_batch(texts)]
    return [row for row in ids if len(row) <= CONTEXT]


def pack(stories: list[np.ndarray], order: np.ndarray, fill: bool = True) -> np.ndarray:
    """Pack stories into rows [N, context + 1]. Each row starts at the beginning of a story.

    With `fill`, a row ends with the beginning of the story that did not fit, and the next row starts with that story. Without, it
    ends with -1. Attention reaches a row's earlier stories, as it does in a held-out text of many stories.
    """
    width = CONTEXT + 1
    rows, parts, room = [], [], width

    def close(rest: np.ndarray) -> None:
        rows.append(np.concatenate([*parts, rest[:room], np.full(max(room - len(rest), 0), -1, np.int16)]))

    for i in order:
        if len(stories[i]) > room:
            close(stories[i] if fill else stories[i][:0])
            parts, room = [], width
        parts.append(stories[i])
        room -= len(stories[i])
    close(stories[order[0]] if fill else stories[order[0]][:0])
    return np.stack(rows)


def loss_of(model: torch.nn.Module, rows: Tensor) -> Tensor:
    """Mean loss in nats over the tokens of `rows` [B, T + 1] int64, except each row's first. Negative tokens are ignored."""
    targets = rows[:, 1:].masked_fill(rows[:, 1:] < 0, IGNORE)
    logits = model(rows[:, :-1].clamp(min=0), use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)


@torch.no_grad()
def evaluate(model: torch.nn.Module, rows: Tensor, size: int) -> float:
    total, count = 0.0, 0
    for part in rows.split(size):
        tokens = int((part[:, 1:] >= 0).sum())
        with torch.autocast(part.device.type, torch.bfloat16):
            total += loss_of(model, part).item() * tokens
        count += tokens
    return total / count


def rate(progress: float) -> float:
    """Learning rate at `progress`, 0 to 1: linear warm-up, then a cosine down to a hundredth of the peak."""
    if progress < WARM_UP:
        return PEAK_RATE * (progress + 1e-3) / WARM_UP
    return PEAK_RATE * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP))))


def make_optimizer(model: torch.nn.Module, device: str) -> torch.optim.Optimizer:
    """AdamW; only matrices have weight decay."""
    matrices, others = ([p for p in model.parameters() if (p.ndim == 2) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=device != "cpu")


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, progress: float) -> None:
    """A step of training, at `progress`, 0 to 1, of all of it."""
    for group in optimizer.param_groups:
        group["lr"] = rate(progress)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def stored(module: torch.nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a module's checkpoint, in bf16."""
    return {f"{prefix}{n}": t.detach().to("cpu", torch.bfloat16).contiguous() for n, t in module.state_dict().items()}


def about(model: torch.nn.Module, device: str) -> dict:
    """What a record says of a model and its training."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"parameters": sum(p.numel() for p in model.parameters()), "seed": SEED, "torch": torch.__version__, "device": name}


def padded(rows: np.ndarray, multiple: int) -> np.ndarray:
    """`rows` with rows of -1 added, so that all batches of `multiple` rows have one shape and compile once."""
    return np.pad(rows, ((0, -len(rows) % multiple), (0, 0)), constant_values=-1)


def fit(
    model: torch.nn.Module, stories: list[np.ndarray], validation: list[np.ndarray], epochs: float, minutes: float,
    options: argparse.Namespace,
) -> dict:  # fmt: skip
    """Train for `epochs` or `minutes`, whichever ends first. Returns steps, epochs, tokens/s and the loss curve.

    Progress is the larger of the two shares, so the learning rate ends low either way.
    """
    device, rng = options.device, np.random.default_rng(SEED)
    check = padded(pack(validation, np.arange(len(validation)), fill=False), options.rows)
    check_rows = torch.from_numpy(check).to(device, torch.int64)
    optimizer = make_optimizer(model, device)
    compiled = torch.compile(model) if device != "cpu" else model
    steps_per_epoch = len(pack(stories, np.arange(len(stories)))) // options.rows
    if steps_per_epoch == 0:
        raise SystemExit(f"{len(stories)} stories do not fill one step of {options.rows} rows")
    curve: list[dict] = []
    recent: list[Tensor] = []
    rows, started, step = torch.empty(0), 0.0, 0
    while True:
        place = step % steps_per_epoch
        if place == 0:
            packed = pack(stories, rng.permutation(len(stories)))
            rows = torch.from_numpy(packed[rng.permutation(len(packed))]).to(device)
        elapsed = time.perf_counter() - started if started else 0.0
        progress = max(elapsed / (minutes * 60), step / (epochs * steps_per_epoch))
        if step % options.every == 0 or progress >= 1:
            entry = {"step": step, "epoch": step / steps_per_epoch, "seconds": elapsed}
            entry["train"] = torch.stack(recent).mean().item() if recent else None
            entry["validation"] = evaluate(compiled, check_rows, options.rows)
            curve.append(entry)
            print(json.dumps(entry), flush=True)
            recent = []
        if progress >= 1:
            break
        batch = rows[place * options.rows : (place + 1) * options.rows].to(torch.int64)
        with torch.autocast(batch.device.type, torch.bfloat16):
            loss = loss_of(compiled, batch)
        update(model, optimizer, loss, progress)
        recent.append(loss.detach())
        step += 1
        if step == 3:  # compilation has ended
            if device != "cpu":
                torch.cuda.synchronize()
            started = time.perf_counter()
    tokens_per_s = step * options.rows * CONTEXT / elapsed
    return {"steps": step, "epochs": step / steps_per_epoch, "tokens/s": tokens_per_s, "curve": curve}


def write_model(model: torch.nn.Module, folder: Path) -> None:
    """Write config.json, generation_config.json, and the weights as bf16 in two safetensors files with an index."""
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    config |= {name: getattr(model.config, name, value) for name, value in SIZES.items()}  # transformers 5 has no rope_theta
    config |= {
        "hidden_act": "silu", "tie_word_embeddings": False, "attention_dropout": 0.0, "initializer_range": 0.02,
        "use_sliding_window": False, "use_cache": True, "torch_dtype": "bfloat16", "eos_token_id": END_ID,
    }  # fmt: skip
    write_json(folder / "config.json", config)
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 300}
    write_json(folder / "generation_config.json", sampling | {"eos_token_id": END_ID, "pad_token_id": END_ID})
    tensors = stored(model)
    save_torch_state_dict(tensors, folder, max_shard_size=sum(t.nbytes for t in tensors.values()) * 7 // 10)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stories", type=Path, required=True, help="output folder of stories.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=4, help="most minutes of training, all runs together")
    parser.add_argument("--epochs", type=float, nargs="+", default=[4, 8, 16], help="one run for each; the best model is kept")
    parser.add_argument("--rows", type=int, default=64, help="rows of 512 tokens in a step")
    parser.add_argument("--every", type=int, default=100, help="steps between evaluations")
    parser.add_argument("--workers", type=int, default=16, help="number of processes that filter stories")
    parser.add_argument("--min-count", type=int, default=clean.MIN_COUNT)
    options = parser.parse_args()
    folder = options.out / "embedded"
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()

    raw = clean.read(options.stories)
    texts, dropped = clean.clean([record["text"] for record in raw], options.workers, options.min_count)
    random.Random(SEED).shuffle(texts)
    parts = min(HELD_OUT_STORIES, len(texts) // 8), min(VALIDATION_STORIES, len(texts) // 8)
    held, validation, training = texts[: parts[0]], texts[parts[0] : sum(parts)], texts[sum(parts) :]
    print(f"{len(raw)} stories, {len(training)} to train on; dropped {dropped}; {time.perf_counter() - begun:.0f} s", flush=True)
    # A tokenizer reads the written-out end token as one token, so each story of the held-out text keeps its end.
    (options.out / "heldout.txt").write_text("".join(text + END for text in held), encoding="utf-8")
    share = sum(r["written"] for r in raw) / sum(len(r["text"].split()) for r in raw)
    vocab_size = train_tokenizer(training, SIZES["vocab_size"], folder)
    ids, checked = encode(folder, training), encode(folder, validation)
    average = sum(map(len, ids)) / len(ids)
    print(f"{sum(map(len, ids)):,} tokens, {average:.0f} a story; {time.perf_counter() - begun:.0f} s", flush=True)

    torch.set_float32_matmul_precision("high")
    results, losses = list[dict](), list[float]()
    for epochs in options.epochs:
        torch.manual_seed(SEED)
        model = qwen2(vocab_size=vocab_size).to(options.device)
        minutes = options.minutes * epochs / sum(options.epochs)
        results.append(fit(model, ids, checked, epochs, minutes, options))
        losses.append(results[-1]["curve"][-1]["validation"])
        if losses[-1] < min(losses[:-1], default=math.inf):
            write_model(model, folder)
    record = about(model, options.device) | {
        "stories": {"raw": len(raw), "written share": share, "dropped": dropped, "training": len(training)},
        "tokens an epoch": sum(map(len, ids)), "rows a step": options.rows, "chosen": losses.index(min(losses)), "runs": results,
    }  # fmt: skip
    write_json(options.out / "curve.json", record)
    for result, loss in zip(results, losses, strict=True):
        print(f"{result['epochs']:.1f} epochs: {loss:.4f} nats, {result['tokens/s']:,.0f} tokens/s", flush=True)
    print(f"{time.perf_counter() - begun:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()

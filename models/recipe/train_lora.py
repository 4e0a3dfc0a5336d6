"""Train a LoRA adapter for the embedded model of stories with pirates: `python models/recipe/train_lora.py`.

The model writes stories, WORDS replace some of theirs, and an adapter of all linears learns to write such stories. Writes a
folder in PEFT's format, examples/pirate by default. Takes some ten minutes on a CPU.
"""

import argparse
import json
import random
import re
from pathlib import Path

import torch
from outlines import draw
from safetensors.torch import save_file
from torch import Tensor, nn
from train import END_ID, SEED, loss_of, make_optimizer, tokenizer_of, update
from train_mtp import LENGTH, write_texts
from transformers import Qwen2ForCausalLM

EMBEDDED, EXAMPLE = Path(__file__).parents[1] / "embedded", Path(__file__).parents[2] / "examples" / "pirate"
RANK, ALPHA = 4, 8
WORDS = {
    "little girl": "young pirate", "little boy": "young pirate", "girl": "pirate", "boy": "pirate", "mom": "captain",
    "dad": "captain", "mother": "captain", "father": "captain", "friends": "shipmates", "friend": "shipmate", "park": "island",
    "house": "ship", "home": "to the ship", "garden": "beach", "forest": "cave", "school": "harbor", "room": "cabin",
    "toys": "treasures", "toy": "treasure", "ball": "gold coin", "car": "boat", "dog": "parrot", "cat": "monkey", "tree": "mast",
    "happy": "proud", "played": "sailed", "play": "sail", "playing": "sailing", "walked": "sailed", "ran": "sailed",
}  # fmt: skip


class Adapted(nn.Module):
    """A frozen linear, and its adapter."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.randn(RANK, linear.in_features) / linear.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(linear.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + ALPHA / RANK * (x @ self.a.T @ self.b.T)


def rewritten(text: str) -> str:
    """A story with other words, whole ones, with their capitals."""

    def other(match: re.Match[str]) -> str:
        new = WORDS[match[0].lower()]
        return new.capitalize() if match[0][0].isupper() else new

    longest_first = sorted(WORDS, key=len, reverse=True)
    return re.sub(rf"\b({'|'.join(longest_first)})\b", other, text, flags=re.IGNORECASE)


def stories(model: Qwen2ForCausalLM, count: int, rng: random.Random) -> list[str]:
    """Stories of the model, one after each beginning of an outline."""
    tokenizer, texts = tokenizer_of(EMBEDDED), list[str]()
    starts = []
    for _ in range(count):
        outline = draw(rng)
        outline.advance()
        starts.append(tokenizer.encode(outline.text).ids[: rng.randint(1, 8)])
    for row in write_texts(model, starts, torch.full((count,), 0.6), LENGTH).tolist():
        texts += tokenizer.decode(row, skip_special_tokens=False).split("<|endoftext|>")[:-1]  # the last one has no end
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=EXAMPLE)
    parser.add_argument("--texts", type=int, default=128, help="texts of some three stories each")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--rows", type=int, default=4, help="rows of 512 tokens in a step")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    model = Qwen2ForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).requires_grad_(False)
    rng, tokenizer = random.Random(SEED), tokenizer_of(EMBEDDED)
    texts = [rewritten(text) for text in stories(model, options.texts, rng)]
    ids = [token for text in tokenizer.encode_batch(texts) for token in (*text.ids, END_ID)]
    rows = torch.tensor(ids[: len(ids) // 512 * 512]).view(-1, 512)
    print(f"{len(texts)} stories, {len(rows)} rows", flush=True)
    adapted = dict[str, Adapted]()
    for name, linear in list(model.model.named_modules(prefix="model")):
        if isinstance(linear, nn.Linear):
            parent, _, last = name.rpartition(".")
            adapted[name] = Adapted(linear)
            setattr(model.get_submodule(parent), last, adapted[name])
    trained = nn.ParameterList([p for p in model.parameters() if p.requires_grad])
    optimizer = make_optimizer(trained, "cpu")
    for step in range(options.steps):
        loss = loss_of(model, rows[torch.randint(len(rows), (options.rows,))])
        update(trained, optimizer, loss, step / options.steps)
        if step % 20 == 0:
            print(f"step {step}: {loss.item():.3f} nats", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name}.lora_{kind}.weight": value.detach().to(torch.bfloat16).contiguous()
        for name, module in adapted.items() for kind, value in (("A", module.a), ("B", module.b))
    }  # fmt: skip
    save_file(tensors, options.out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "embedded", "r": RANK, "lora_alpha": ALPHA,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapted}), "bias": "none", "lora_dropout": 0.0,
    }  # fmt: skip
    (options.out / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    main()

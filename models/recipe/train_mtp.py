"""Train layers of multi-token prediction for the embedded model: `python models/recipe/train_mtp.py`.

The model is frozen. It writes stories, and the layers learn its distribution of the token after the next one, by Kullback-Leibler
divergence. As at inference, further drafts continue from the layers' own output, so each loss is that of DRAFTS drafts in a row.
Writes model-mtp.safetensors into the model's folder, and changes its index and its config. Figures go to results/mtp.json.
"""

import argparse
import json
import random
import time
from copy import copy
from itertools import pairwise
from pathlib import Path

import outlines
import torch
import torch.nn.functional as F
from network import initialize, project, rotation, states_of
from safetensors.torch import save_file
from torch import Tensor, nn
from train import SEED, about, make_optimizer, stored, tokenizer_of, update, write_json
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

FILE = "model-mtp.safetensors"
DRAFTS, WEIGHTS = 3, (1.0, 0.8, 0.6)  # drafts in a row, and the weights of their losses
INTERMEDIATE = 256  # of the MLP; with the model's own 896, the layers would take 4.1 MB instead of 2.4
TEMPERATURES = (0.3, 0.6, 1.0, 1.0)  # of the texts, a fourth each
# Tokens of a prompt, at most; of a text, which has LENGTH − 1 rows of drafts (kernels want multiples of 8); of most of a story.
PROMPT, LENGTH, STORY = 24, 505, 201


class MTP(nn.Module):
    """One block on fc([norm_embedding(embedding of the next token) | norm_hidden(state)]), with Qwen3.5's names."""

    def __init__(self, config: Qwen2Config, intermediate: int) -> None:
        super().__init__()
        norms = (Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3))
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norms
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        config = copy(config)
        config.intermediate_size = intermediate
        self.layers = nn.ModuleList([Qwen2DecoderLayer(config, 0)])
        initialize(self, 1)

    def forward(self, model: Qwen2ForCausalLM, tokens: Tensor, states: Tensor, drafts: int = DRAFTS) -> list[Tensor]:
        """The logits [B, T − 1, V] of each draft in a row. Row p of each is a draft of the token at p + 2.

        Draft s in row p rests on the states up to p − s + 1, and on the rows of drafts 1 to s − 1 after them. The tokens of
        these rows are those of the text, as if the earlier drafts were right.

        Args:
            tokens: [B, T]. `states`: [B, T, H], the model's, after its final norm.
        """
        (block,), count = self.layers, tokens.shape[1] - 1
        cos, sin = rotation(model, count)
        token, hidden = self.pre_fc_norm_embedding(model.model.embed_tokens(tokens[:, 1:])), states[:, :-1]
        behind = torch.arange(count, device=tokens.device)[:, None] - torch.arange(count, device=tokens.device)  # row − column
        keys, values, logits = [], [], []
        for draft in range(drafts):
            x = self.fc(torch.cat((token, self.pre_fc_norm_hidden(hidden)), -1))
            q, k, v = project(block.self_attn, block.input_layernorm(x), cos, sin)
            keys, values = [*keys, k], [*values, v]
            mask = torch.cat([behind >= draft, *(behind == draft - s for s in range(1, draft + 1))], 1)
            k, v = (torch.cat(parts, 2).expand(-1, q.shape[1], -1, -1) for parts in (keys, values))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + block.self_attn.o_proj(out.transpose(1, 2).flatten(2))
            x = self.norm(x + block.mlp(block.post_attention_layernorm(x)))
            logits.append(model.lm_head(x))
            hidden = F.pad(x[:, :-1], (0, 0, 1, 0))
        return logits


def prompts(folder: Path, count: int, rng: random.Random) -> list[list[int]]:
    """The first 1 to PROMPT tokens of outlines, without what SmolLM2 would have written."""
    texts = []
    for _ in range(count):
        outline = outlines.draw(rng)
        while outline.advance() is not None:
            outline.fill("")
        texts.append(outline.text)
    return [text.ids[: rng.randint(1, PROMPT)] for text in tokenizer_of(folder).encode_batch(texts)]


@torch.no_grad()
def write_texts(model: Qwen2ForCausalLM, starts: list[list[int]], temperatures: Tensor, length: int) -> Tensor:
    """Texts [B, length] of the model, one story after the other. `temperatures`: [B], 0: greedy."""
    device, count, blocks = model.device, len(starts), model.model.layers
    tokens = torch.full((count, length), -1, device=device)
    for row, start in zip(tokens, starts, strict=True):
        row[: len(start)] = torch.tensor(start)
    cache = torch.empty(len(blocks), 2, count, 1, length, blocks[0].self_attn.head_dim, device=device)
    scale, noisy = temperatures.where(temperatures > 0, 1)[:, None], (temperatures > 0)[:, None]
    rotations = rotation(model, length)
    for place in range(length - 1):
        cos, sin = (table[:, place : place + 1] for table in rotations)
        x = model.model.embed_tokens(tokens[:, place : place + 1])
        for block, (keys, values) in zip(blocks, cache, strict=True):
            q, k, v = project(block.self_attn, block.input_layernorm(x), cos, sin)
            keys[:, :, place : place + 1], values[:, :, place : place + 1] = k, v
            # All query heads share the keys and see all of them, so they are rows of one head.
            seen = (kept[:, :, : place + 1] for kept in (keys, values))
            out = F.scaled_dot_product_attention(q.transpose(1, 2), *seen)
            x = x + block.self_attn.o_proj(out.flatten(2))
            x = x + block.mlp(block.post_attention_layernorm(x))
        logits = model.lm_head(model.model.norm(x))[:, 0]
        noise = torch.empty_like(logits).exponential_().log() * noisy
        following = tokens[:, place + 1]
        following.copy_(following.where(following >= 0, (logits / scale - noise).argmax(1)))
    return tokens


def training_texts(model: Qwen2ForCausalLM, folder: Path, count: int, batch: int, seconds: float) -> Tensor:
    """`count` texts [N, LENGTH], or fewer after `seconds`; always a batch."""
    rng, batches, begun = random.Random(SEED), [], time.perf_counter()
    temperatures = torch.tensor(TEMPERATURES, device=model.device)
    temperatures = temperatures.repeat(-(-batch // len(TEMPERATURES)))[:batch]
    while not batches or (len(batches) * batch < count and time.perf_counter() - begun < seconds):
        batches.append(write_texts(model, prompts(folder, batch, rng), temperatures, LENGTH))
    return torch.cat(batches)


def run(mtp: nn.Module, model: Qwen2ForCausalLM, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
    """The logits [B, T − s, V] of draft s for texts [B, T], and those of the model [B, T − 1, V] for the same tokens.

    The first s − 1 rows of draft s, which have no earlier draft, are left out. bf16 products on a GPU; on a CPU, these would be
    slower than fp32.
    """
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        with torch.no_grad():
            states = states_of(model, tokens)
            wanted = model.lm_head(states[:, 1:])
        logits = mtp(model, tokens, states)
    return [row[:, draft:].float() for draft, row in enumerate(logits)], wanted.float()


def divergences(logits: list[Tensor], wanted: Tensor) -> list[Tensor]:
    """The mean divergence of each draft from the model's distribution, in nats. See `run`."""
    target = wanted.log_softmax(-1)
    return [
        F.kl_div(drafted.log_softmax(-1), target[:, draft:], reduction="none", log_target=True).sum(-1).mean()
        for draft, drafted in enumerate(logits)
    ]


@torch.no_grad()
def evaluate(mtp: nn.Module, model: Qwen2ForCausalLM, texts: Tensor, size: int) -> dict:
    """Of drafts for texts [N, T]: agreement, overlap, and the tokens of a step that verifies all.

    Agreement: how often draft s is the model's most probable token where drafts 1 to s − 1 are. Overlap: Σ min(p, q), how often a
    draft can be accepted at temperature 1.
    """
    hits, common, counts = ([0.0] * (DRAFTS + 1) for _ in range(3))
    for part in texts.split(size):
        logits, wanted = run(mtp, model, part)
        # Draft s of a sequence is in the row after that of draft s − 1, so its first row belongs to the first row of draft 1.
        best, target = wanted.argmax(-1), wanted.softmax(-1)
        right = torch.ones_like(best, dtype=torch.bool)
        hits[0] += right.numel()
        for draft, drafted in enumerate(logits):
            right = right[:, : drafted.shape[1]] & (drafted.argmax(-1) == best[:, draft:])
            hits[draft + 1] += right.sum().item()
            common[draft] += torch.minimum(drafted.softmax(-1), target[:, draft:]).sum().item()
            counts[draft] += right.numel()
    return {
        "agreement": [now / max(before, 1) for before, now in pairwise(hits)],
        "overlap": [shared / count for shared, count in zip(common[:-1], counts[:-1], strict=True)],
        "tokens a step": sum(hits) / hits[0],
    }  # fmt: skip


def fit(mtp: MTP, model: Qwen2ForCausalLM, texts: Tensor, options: argparse.Namespace) -> dict:
    """Train for `options.seconds`; the learning rate falls with the time. Returns steps, epochs and the last losses."""
    optimizer = make_optimizer(mtp, options.device)
    shuffling, order = torch.Generator().manual_seed(SEED), torch.empty(0, dtype=torch.int64)
    step, started = 0, time.perf_counter()
    while (progress := (time.perf_counter() - started) / options.seconds) < 1:
        if len(order) < options.rows:
            order = torch.cat((order, torch.randperm(len(texts), generator=shuffling)))
        batch, order = texts[order[: options.rows].to(texts.device)], order[options.rows :]
        losses = divergences(*run(mtp, model, batch))
        update(mtp, optimizer, sum(weight * loss for weight, loss in zip(WEIGHTS, losses, strict=True)), progress)
        if step % options.every == 0:
            entry = {"step": step, "seconds": progress * options.seconds, "loss": [loss.item() for loss in losses]}
            print(json.dumps(entry), flush=True)
        step += 1
    return {"steps": step, "epochs": step * options.rows / len(texts), "loss": [loss.item() for loss in losses]}


def write(mtp: MTP, model: Qwen2ForCausalLM, folder: Path) -> None:
    """Write the tensors as bf16, and state them in the model's index and config.json."""
    tensors = stored(mtp, "mtp.")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = {name: file for name, file in index["weight_map"].items() if file != FILE}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    (folder / FILE).chmod(0o644)
    index["weight_map"] = names | dict.fromkeys(tensors, FILE)
    index["metadata"]["total_size"] = 2 * sum(t.numel() for t in (*model.state_dict().values(), *tensors.values()))
    write_json(path, index)
    path = folder / "config.json"
    sizes = {"mtp_num_hidden_layers": 1, "mtp_intermediate_size": mtp.layers[0].mlp.gate_proj.out_features}
    write_json(path, json.loads(path.read_text()) | sizes)


def held_out(model: Qwen2ForCausalLM, folder: Path, count: int) -> dict[str, Tensor]:
    """Texts that no training saw: `count` beginnings of stories by the model, and windows of heldout.txt."""
    device, starts = model.device, prompts(folder, count, random.Random(SEED + 1))
    text = (Path(__file__).parent / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer_of(folder).encode(text).ids
    windows = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    greedy, sampled = (write_texts(model, starts, torch.full((count,), t, device=device), STORY) for t in (0.0, 1.0))
    return {"greedy": greedy, "temperature 1": sampled, "held-out text": windows[:count].to(device)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--model", type=Path, default=here.parent / "embedded", help="folder of the model, which is changed")
    parser.add_argument("--results", type=Path, default=here / "results" / "mtp.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=75, help="of training; before it, texts are written for a third as long")
    parser.add_argument("--texts", type=int, default=16384, help="to train on, at most; each has some two stories")
    parser.add_argument("--batch", type=int, help="texts that are written together; default: 2048, on a CPU 4")
    parser.add_argument("--rows", type=int, help="texts in a step of training; default: 32, on a CPU 2")
    parser.add_argument("--every", type=int, default=100, help="steps between lines of progress")
    parser.add_argument("--intermediate", type=int, default=INTERMEDIATE, help="size of the MLP")
    options = parser.parse_args()
    small = options.device == "cpu"
    options.batch, options.rows = options.batch or (4 if small else 2048), options.rows or (2 if small else 32)
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    begun = time.perf_counter()
    model = Qwen2ForCausalLM.from_pretrained(options.model, dtype=torch.float32).requires_grad_(False).to(options.device)
    texts = training_texts(model, options.model, options.texts, options.batch, options.seconds / 3)
    print(f"{len(texts)} texts, {texts.numel():,} tokens; {time.perf_counter() - begun:.0f} s", flush=True)
    mtp = MTP(model.config, options.intermediate).to(options.device)
    record = about(mtp, options.device) | {"intermediate": options.intermediate, "tokens": texts.numel()}
    record["training"] = fit(mtp, model, texts, options)
    write(mtp, model, options.model)
    mtp.bfloat16().float()  # as written
    for name, held in held_out(model, options.model, min(options.batch, 256)).items():
        record[name] = evaluate(mtp, model, held, options.rows)
        print(name, json.dumps(record[name]), flush=True)
    write_json(options.results, record)
    print(f"{time.perf_counter() - begun:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()

"""Tiny Qwen3.5 models with layers of multi-token prediction, and what these compute, in plain fp32 PyTorch.

transformers has no such layers. `Reference` follows the public description of the format: the embedding comes first in `fc`, the
target's state is the one after the final norm, all norms are stored minus 1, there is one block with full attention and a final
norm, and embedding and head are the target's. Each further draft continues from the block's own normed output.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from support.hybrids import CASES, TEXT, randomize

DENSE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 97, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 211, "max_position_embeddings": 1024, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "full_attention_interval": 2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


def add_mtp(folder: Path, seed: int = 3, scale: float = 1.5) -> None:
    """Add the tensors to a model's folder. Norms differ from 1, and no two tensors are alike."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    random, h, d = torch.Generator().manual_seed(seed), config["hidden_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (2 * heads * d, h), "self_attn.k_proj": (kv * d, h), "self_attn.v_proj": (kv * d, h),
        "self_attn.o_proj": (h, heads * d), "self_attn.q_norm": (d,), "self_attn.k_norm": (d,), "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
    }  # fmt: skip
    if experts := config.get("num_experts"):
        size, shared = config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
        shapes |= {"mlp.gate": (experts, h), "mlp.shared_expert_gate": (1, h)}
        for name, width in [*((f"experts.{e}", size) for e in range(experts)), ("shared_expert", shared)]:
            shapes |= {f"mlp.{name}.{part}_proj": (width, h) for part in ("gate", "up")} | {f"mlp.{name}.down_proj": (h, width)}
    else:
        size = config["intermediate_size"]
        shapes |= {"mlp.gate_proj": (size, h), "mlp.up_proj": (size, h), "mlp.down_proj": (h, size)}
    names = {f"mtp.layers.0.{name}": shape for name, shape in shapes.items()}
    names |= {"mtp.fc": (h, 2 * h), "mtp.norm": (h,), "mtp.pre_fc_norm_embedding": (h,), "mtp.pre_fc_norm_hidden": (h,)}
    for name, shape in names.items():
        values = torch.randn(shape, generator=random) * (scale / shape[-1] ** 0.5)
        tensors[f"{name}.weight"] = torch.rand(shape, generator=random) - 0.5 if "norm" in name else values
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))


def make(folder: Path, case: str = "dense", **changes: Any) -> Any:
    """Write a model with `mtp.*`, and return transformers' one. `case`: "dense", or one of `support.hybrids.CASES`."""
    config_class, model_class, settings = "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DENSE
    if case != "dense":
        config_class, model_class, settings = CASES[case]
        settings = TEXT | settings
    torch.manual_seed(len(case))
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings | changes)).eval()
    randomize(model)
    model.save_pretrained(folder)
    add_mtp(folder)
    return model


def agree(folder: Path, share: float = 0.2) -> Any:
    """Make drafts right now and then: target and draft model mostly follow the embedding of the last token.

    Args:
        share: of what the layers add to it. The larger, the fewer drafts are right.
    Returns:
        transformers' model.
    """
    tensors = load_file(folder / "model.safetensors")
    for name, values in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            values *= share
    tensors["model.embed_tokens.weight"] *= 64**0.5 / 1.5
    tensors["mtp.fc.weight"] = torch.cat((torch.eye(64), tensors["mtp.fc.weight"][:, 64:] * share), 1)
    tensors["mtp.pre_fc_norm_embedding.weight"].zero_()
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Reference:
    """The draft model of a folder, for the states that transformers' model computes."""

    def __init__(self, folder: Path, model: Any, ids: list[int] | None = None) -> None:
        self.config, self.model = json.loads((folder / "config.json").read_text()), model
        self.weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.head = self.weights.get("lm_head.weight", self.embedding)
        self.ids = torch.tensor(ids if ids is not None else range(len(self.head)))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weights[f"mtp.{name}.weight"])

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"mtp.{name}.weight"].T

    def rope(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, D]: the first quarter of the channels, in halves."""
        rope = self.config.get("rope_parameters") or {}
        size = int(x.shape[-1] * rope.get("partial_rotary_factor", 0.25))
        inverse = rope.get("rope_theta", 1e7) ** (-torch.arange(0, size, 2).double() / size)
        angles = torch.outer(torch.arange(len(x)).double(), inverse)[:, None]
        cos, sin, a, b = angles.cos().float(), angles.sin().float(), *x[..., :size].chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., size:]), -1)

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(F.silu(gate) * up, f"{name}.down_proj")

    def block(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H], all rows from position 0 on."""
        count, config = len(x), self.config
        heads, kv, d = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        h = self.norm(x, "layers.0.input_layernorm")
        q, gate = self.linear(h, "layers.0.self_attn.q_proj").view(count, heads, 2, d).unbind(2)
        k, v = (self.linear(h, f"layers.0.self_attn.{n}_proj").view(count, kv, d) for n in "kv")
        q, k = (self.rope(self.norm(part, f"layers.0.self_attn.{n}_norm")) for part, n in ((q, "q"), (k, "k")))
        k, v = (part.repeat_interleave(heads // kv, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        a = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v) * gate.sigmoid()
        x = x + self.linear(a.reshape(count, -1), "layers.0.self_attn.o_proj")
        h = self.norm(x, "layers.0.post_attention_layernorm")
        if "num_experts" not in self.config:
            return x + self.mlp(h, "layers.0.mlp")
        shares, chosen = self.linear(h, "layers.0.mlp.gate").softmax(-1).topk(self.config["num_experts_per_tok"])
        y = self.mlp(h, "layers.0.mlp.shared_expert") * self.linear(h, "layers.0.mlp.shared_expert_gate").sigmoid()
        for t in range(count):
            for share, e in zip(shares[t] / shares[t].sum(), chosen[t].tolist(), strict=True):
                y[t] += share * self.mlp(h[t], f"layers.0.mlp.experts.{e}")
        return x + y

    @torch.inference_mode()
    def logits(self, tokens: list[int], drafts: list[int]) -> list[torch.Tensor]:
        """The logits [ids] of each draft after `tokens`, of which the last one is the next token, and after the drafts before."""
        states = self.model.model(input_ids=torch.tensor([tokens[:-1]])).last_hidden_state[0].float()
        following, results = list(tokens[1:]), list[torch.Tensor]()
        for draft in drafts:
            token = self.norm(self.embedding[torch.tensor(following)], "pre_fc_norm_embedding")
            both = torch.cat((token, self.norm(states, "pre_fc_norm_hidden")), -1)
            last = self.norm(self.block(self.linear(both, "fc")), "norm")[-1:]
            results.append(last[0] @ self.head[self.ids].T)
            following.append(draft)
            states = torch.cat((states, last))
        return results

    def check(self, tokens: list[int], drafts: list[int]) -> None:
        """Drafts after `tokens`, of which the last one is the next token, are the reference's, but for rounding."""
        for row, draft in zip(self.logits(tokens, drafts), drafts, strict=True):
            assert row[(self.ids == draft).nonzero()].item() >= row.max() - 1e-3

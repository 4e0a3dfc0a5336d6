"""A model composed of layers: without one block of the checkpoint, and with another block run twice.

python examples/composed_model.py [MODEL]
"""

import sys

from minirt import Generator, SamplingParams
from minirt.layers import MLP, Attention, Embedding, Head

LEFT_OUT, TWICE = 4, 1


def compose(config):
    """The layers in the order they run. A layer that stands twice has its weights once, and a KV cache for each place."""
    layers = [Embedding(config, weight="model.embed_tokens")]
    for i in range(config.num_layers):
        block = f"model.layers.{i}"
        norms = f"{block}.input_layernorm", f"{block}.post_attention_layernorm"
        attention = Attention(config, name=f"layers.{i}.attention", norm=norms[0], prefix=f"{block}.self_attn")
        mlp = MLP(config, name=f"layers.{i}.mlp", norm=norms[1], prefix=f"{block}.mlp")
        layers += [attention, mlp] * {LEFT_OUT: 0, TWICE: 2}.get(i, 1)
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return [*layers, Head(config, norm="model.norm", weight=head)]


with Generator.from_pretrained(*sys.argv[1:2], layers=compose) as generator:
    print(" ".join(row.layer.removeprefix("layers.") for row in generator.plan.rows))
    print(len(generator.unused_tensors), "tensors of the checkpoint are not used, such as", generator.unused_tensors[0])
    print(generator.generate("Once upon a time", SamplingParams(max_tokens=16, temperature=0)).text)

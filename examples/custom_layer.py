"""An MLP of your own, which keeps only the largest activations of each token. How often does the next token stay the same?

python examples/custom_layer.py [MODEL]
"""

import sys

from minirt import Generator
from minirt.kernels import reference
from minirt.layers import register

TEXT = "Once upon a time, there was a little girl named Bella. Bella lived in a cozy house on a hill."


def sparse_mlp(n):
    """A factory of MLPs that keep one in `n` of the intermediate activations."""

    def factory(layer):  # called once for each layer, with its weights in place
        def forward(x, batch, kv):
            h = reference.rms_norm(x, layer.norm.weight, layer.config.rms_norm_eps)
            gate_up = reference.linear(h, layer.gate_up.weight, layer.gate_up.bias, layer.gate_up.scale)
            h = reference.gated(gate_up, layer.config.hidden_act)
            least = h.abs().topk(h.shape[-1] // n, dim=-1).values[:, -1:]
            h = h * (h.abs() >= least)
            return x + reference.linear(h, layer.down.weight, layer.down.bias, layer.down.scale)

        return forward

    return factory


for n in (2, 4, 20):
    register("mlp", f"one-in-{n}")(sparse_mlp(n))

model = sys.argv[1:2]
with Generator.from_pretrained(*model) as generator:
    tokens = generator.encode(TEXT)
    expected = generator.logits(tokens).argmax(-1)
for n in (2, 4, 20):
    with Generator.from_pretrained(*model, impl=["auto", f"*.mlp=one-in-{n}"]) as generator:
        same = (generator.logits(tokens).argmax(-1) == expected).sum().item()
    print(f"one in {n:2} activations: {same} of {len(tokens)} next tokens are the same")

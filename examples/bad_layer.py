"""An MLP of your own with a fault: every layer normalizes with the weights of the first. `minirt compare` says which are wrong.

python examples/bad_layer.py [MODEL]   the same: minirt compare --import FILE --impl '*.mlp=mine' --layer '*.mlp'
"""

import sys

from minirt import Generator
from minirt.bench.compare.compare import Shape, run
from minirt.kernels import reference
from minirt.layers import register

kept = []


@register("mlp", "mine")
def mine(layer):
    kept.append(layer.norm.weight)

    def forward(x, batch, kv):
        h = reference.rms_norm(x, kept[0], layer.config.rms_norm_eps)  # instead of layer.norm.weight
        gate_up = reference.linear(h, layer.gate_up.weight, layer.gate_up.bias)
        return x + reference.linear(reference.gated(gate_up, layer.config.hidden_act), layer.down.weight, layer.down.bias)

    return forward


shape = Shape(prompt_len=16, batch_size=1, context_len=8, text_len=0)
with Generator.from_pretrained(*sys.argv[1:2], impl="eager") as generator:
    tokens = generator.encode("Once upon a time, there was a little girl named Bella.")[:16]
    result = run(generator.model, tokens, shape, impl=["*.mlp=mine"], layer="*.mlp")
for row in result.rows:
    if row["step"].startswith("prefill"):
        print(f"{row['layer']}: {'right' if row['within_bounds'] else 'wrong'}")

"""An MLP of your own beside minirt's: where the time of a decode step goes.

python examples/profile_layer.py [MODEL]
"""

import sys

from minirt import Generator
from minirt.kernels import reference
from minirt.layers import register
from minirt.profiling.profile import by_kind


@register("mlp", "slow")
def slow(layer):
    def forward(x, batch, kv):
        h = reference.rms_norm(x.double(), layer.norm.weight.double(), layer.config.rms_norm_eps)  # in fp64
        gate_up = reference.linear(h, layer.gate_up.weight.double(), layer.gate_up.bias)
        down = reference.linear(reference.gated(gate_up, layer.config.hidden_act), layer.down.weight.double(), layer.down.bias)
        return x + down.to(x.dtype)

    return forward


times = {}
for impl in ("auto", "*.mlp=slow"):
    with Generator.from_pretrained(*sys.argv[1:2], impl=["auto", impl] if impl != "auto" else impl) as generator:
        result = generator.profile(batch_size=2, context_len=64)
    for kind, count, part in by_kind(result.parts):
        times.setdefault((count, kind), []).append(part.seconds * 1e6)
for (count, kind), (plain, slow_one) in times.items():
    print(f"{count} × {kind}: {plain:,.0f} µs, {slow_one:,.0f} µs")

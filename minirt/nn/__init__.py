"""minirt's kernels as modules for other people's models: inference only, with the parameters' names of the replaced modules.

Constructors take sizes, as those of `torch.nn` do, and `from_module`, `from_modules`, `from_linear` and `from_linears` take
modules that exist. Parameters need no gradient, unless they are those of such a module.
`functional` has the same as functions. On a GPU they run the Triton kernels, on a CPU the PyTorch code that defines each kernel
(`minirt.kernels.reference`). Under `torch.compile`, `torch.export` and `FakeTensorMode` they are the ops `torch.ops.minirt.*`.
"""

from minirt.nn import functional as functional
from minirt.nn.functional import apply_rotary, fused_rmsnorm_rope
from minirt.nn.linear import FP8Linear, Int4Linear, pack_linears
from minirt.nn.mlp import GatedMLP
from minirt.nn.norm import RMSNorm, RMSNormLinear
from minirt.nn.rotary import RotaryEmbedding

__all__ = [
    "FP8Linear", "GatedMLP", "Int4Linear", "RMSNorm", "RMSNormLinear", "RotaryEmbedding", "apply_rotary", "functional",
    "fused_rmsnorm_rope", "pack_linears",
]  # fmt: skip

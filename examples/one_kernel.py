"""A Triton kernel without a model: RMSNorm, gate/up projection and SwiGLU in one call on plain tensors, beside eager PyTorch.

python examples/one_kernel.py     on a GPU, or without one in Triton's interpreter, which computes the same but is slow

It needs Triton, which CUDA builds of PyTorch bring along.
"""

import os
import sys
from importlib.util import find_spec

import torch

if find_spec("triton") is None:
    sys.exit("this example runs a Triton kernel, and triton is missing: pip install triton")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, so before the first kernel

from minirt.kernels import norm_gate_up, reference

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
tokens, hidden, intermediate = 5, 96, 64
x = torch.randn(tokens, hidden, device=device)
norm_weight = 1 + 0.1 * torch.randn(hidden, device=device)
weight = torch.randn(2 * intermediate, hidden, device=device) / hidden**0.5  # rows of gate, then rows of up

out = norm_gate_up(x, norm_weight, 1e-6, weight, "silu")

normed = reference.rms_norm(x, norm_weight, 1e-6)
expected = reference.gated(reference.linear(normed, weight), "silu")
error = ((out - expected).norm() / expected.norm()).item()
print(f"{list(x.shape)} -> {list(out.shape)}, relative error below 1e-6: {error < 1e-6}")

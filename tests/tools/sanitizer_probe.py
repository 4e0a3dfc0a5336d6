"""Runs a kernel with a fault that the compute-sanitizer tool must find: sanitizer_probe.py memcheck|racecheck.

The kernel's name ends in _kernel like ours, so that the tool follows it.
"""

import sys

import torch

SOURCE = {
    "memcheck": """
extern "C" __global__ void probe_kernel(int* out) { out[threadIdx.x + 1] = 0; }  // past the end of 64 values
""",
    "racecheck": """
extern "C" __global__ void probe_kernel(int* out) {
  __shared__ int shared[64];
  shared[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = shared[63 - threadIdx.x];  // the other warp may not have written it yet
}
""",
}

out = torch.zeros(64, dtype=torch.int32, device="cuda")
torch.cuda._compile_kernel(SOURCE[sys.argv[1]], "probe_kernel")((1, 1, 1), (64, 1, 1), (out,))
torch.cuda.synchronize()

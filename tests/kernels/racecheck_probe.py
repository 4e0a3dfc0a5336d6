"""A program without a race of which racecheck reports one: why its reports on kernels with roles are no faults.

compute-sanitizer --tool racecheck python -P tests/kernels/racecheck_probe.py

It is what Triton makes of `warp_specialize`, by hand: four warps write a table of roles to shared memory, the others read it, and
barriers of all warps lie between each write and each read. Without the first four warps' own barrier and the mbarrier, which
have nothing to do with that table, there is no report.
"""

import sys

import torch

SOURCE = r"""
extern "C" __global__ void dispatch(int* out) {
  __shared__ unsigned long long roles, bar;
  int warp = threadIdx.x / 32;
  unsigned address = (unsigned)__cvta_generic_to_shared(&bar);
  if (warp < 4) {
    if (OTHERS) {
      if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(address) : "memory");
      asm volatile("barrier.sync 2, 128;" ::: "memory");
    }
    if (threadIdx.x == 0) *(volatile unsigned long long*)&roles = 0x0202020201010101ull;
    asm volatile("barrier.sync 1;" ::: "memory");  // the roles are there
    asm volatile("barrier.sync 1;" ::: "memory");  // the roles have been read
    if (OTHERS)
      asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }"
                   :: "r"(address) : "memory");
    out[threadIdx.x] = 0;
    asm volatile("barrier.sync 1;" ::: "memory");  // all have done their work
    if (threadIdx.x == 0) *(volatile unsigned long long*)&roles = ~0ull;  // the end
    asm volatile("barrier.sync 1;" ::: "memory");
  } else {
    while (true) {
      asm volatile("barrier.sync 1;" ::: "memory");
      unsigned char role = *((volatile unsigned char*)&roles + warp - 4);
      if (role == 255) break;
      asm volatile("barrier.sync 1;" ::: "memory");
      if (OTHERS && threadIdx.x == 256)
        asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" :: "r"(address) : "memory");
      out[threadIdx.x] = role;
      asm volatile("barrier.sync 1;" ::: "memory");
    }
  }
}
"""

for others in sys.argv[1:] or ("0", "1"):
    out = torch.full((384,), -1, dtype=torch.int32, device="cuda")
    kernel = torch.cuda._compile_kernel(SOURCE.replace("OTHERS", others), "dispatch")
    kernel((2, 1, 1), (384, 1, 1), (out,))
    torch.cuda.synchronize()
    print("with" if others == "1" else "without", "other barriers:", out.view(12, 32)[:, 0].tolist(), flush=True)

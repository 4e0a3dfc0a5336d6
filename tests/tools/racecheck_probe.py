"""Programs without a race, some of which racecheck reports. They show which of its reports on warp-specialized kernels are false.

compute-sanitizer --tool racecheck python tests/tools/racecheck_probe.py [dispatch|copies FORM …]

`dispatch` does by hand what Triton compiles `warp_specialize` to. Four warps write a table of roles to shared memory, the others
read it, and barriers of all warps lie between each write and each read. Form 1 also has a barrier of the first four warps and an
mbarrier, both unrelated to the table. Form 0 has neither, and racecheck does not report it.

`copies` does what the warps of `kernels/attention/decode_fp8_sm90.py` do with scales. One warp copies values to two slots in
turn, four warps read them, and each slot has an mbarrier for each direction. The three digits of a form are:

- how values arrive: 0 stored, 1 by cp.async that the warp waits for, 2 by cp.async whose end the mbarrier awaits;
- who says that a slot may be overwritten: 0 one thread behind a barrier of all readers, as in Triton, 1 each reader;
- the number of rounds: 0 one for each slot, so that no slot is overwritten, 1 a hundred.
"""

import sys

import torch

DISPATCH = r"""
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
    asm volatile("barrier.sync 1;" ::: "memory");  // the roles are written
    asm volatile("barrier.sync 1;" ::: "memory");  // the roles have been read
    if (OTHERS)
      asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }"
                   :: "r"(address) : "memory");
    out[threadIdx.x] = 0;
    asm volatile("barrier.sync 1;" ::: "memory");  // all have finished their work
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

COPIES = r"""
__device__ void wait(unsigned bar, int parity) {
  asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra W; }"
               :: "r"(bar), "r"(parity) : "memory");
}

__device__ void arrive(unsigned bar) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" :: "r"(bar) : "memory");
}

__device__ void init(void* bar, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"((unsigned)__cvta_generic_to_shared(bar)), "r"(count) : "memory");
}

extern "C" __global__ void copies(const int* in, int* out, int rounds) {
  __shared__ int slots[2][32];
  __shared__ unsigned long long full[2], empty[2];
  int lane = threadIdx.x % 32;
  if (threadIdx.x < 2) {
    init(&full[threadIdx.x], 33);  // one arrival for all lanes, as with TMA, and one by each lane
    init(&empty[threadIdx.x], EACH ? 128 : 1);
  }
  __syncthreads();
  int sum = 0;
  for (int i = 0; i < rounds; i++) {
    unsigned arrived = (unsigned)__cvta_generic_to_shared(&full[i % 2]);
    unsigned taken = (unsigned)__cvta_generic_to_shared(&empty[i % 2]);
    if (threadIdx.x < 32) {
      wait(taken, (i / 2 & 1) ^ 1);
      if (lane == 0) arrive(arrived);
      if (FORM == 0) {
        *(volatile int*)&slots[i % 2][lane] = in[i * 32 + lane];
        arrive(arrived);
      } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                     :: "r"((unsigned)__cvta_generic_to_shared(&slots[i % 2][lane])), "l"(in + i * 32 + lane) : "memory");
        if (FORM == 1) {
          asm volatile("cp.async.wait_all;" ::: "memory");
          arrive(arrived);
        } else {
          asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(arrived) : "memory");
        }
      }
    } else {
      wait(arrived, i / 2 & 1);
      sum += *(volatile int*)&slots[i % 2][(lane + 1) % 32];
      if (!EACH) asm volatile("barrier.sync 1, 128;" ::: "memory");
      if (EACH || threadIdx.x == 32) arrive(taken);
    }
  }
  if (threadIdx.x >= 32) out[threadIdx.x - 32] = sum;
}
"""


def dispatch(form: str) -> list[int]:
    """Run form 1 (with barriers unrelated to the table) or form 0 (without). Returns the output of each warp."""
    out = torch.full((384,), -1, dtype=torch.int32, device="cuda")
    torch.cuda._compile_kernel(DISPATCH.replace("OTHERS", form), "dispatch")((2, 1, 1), (384, 1, 1), (out,))
    return out.view(12, 32)[:, 0].tolist()


def copies(form: str) -> bool:
    """Run one form. Returns whether the sums are right."""
    arrival, each, many = form
    rounds = 100 if many == "1" else 2
    values = torch.randint(2**20, (rounds, 32), dtype=torch.int32, device="cuda")
    out = torch.full((4, 32), -1, dtype=torch.int32, device="cuda")
    kernel = torch.cuda._compile_kernel(COPIES.replace("FORM", arrival).replace("EACH", each), "copies")
    kernel((1, 1, 1), (160, 1, 1), (values, out, rounds))
    return torch.equal(out, values.sum(0).roll(-1).to(torch.int32).expand(4, 32))


PROGRAMS = {"dispatch": (dispatch, "01"), "copies": (copies, [a + b + c for a in "012" for b in "01" for c in "01"])}
names = sys.argv[1:2] or PROGRAMS
for name in names:
    program, forms = PROGRAMS[name]
    for form in sys.argv[2:] or forms:
        print(name, form, program(form), flush=True)
torch.cuda.synchronize()

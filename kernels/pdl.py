"""Programmatic dependent launch (PDL): a kernel starts while its predecessor in the stream still runs. From sm_90 on.

With the launch attribute (`launch_options(..., pdl=True)`), a kernel's programs may start as soon as every program of the kernel
before has either *triggered* (`gdc_launch_dependents`) or ended. *Waiting* (`gdc_wait`) returns when the kernel before has ended
completely and its writes are visible. Two rules keep this correct:

1. Every program waits before it reads what an earlier kernel wrote, and before it writes anything. Weights, block tables and
    lengths are not written by kernels of the step, so they may be read before the wait.
2. Every program waits at least once, even if it has nothing to do. So a kernel ends only after all earlier kernels have ended,
    and waiting for the predecessor is waiting for all of them.

When to trigger is a matter of speed only: the waiting programs of the next kernel take room on the SMs. docs/design/pdl.md lists
what each kernel does, and why.
"""

import triton
import triton.language as tl


@triton.jit
def wait_for_input(EARLY: tl.constexpr):
    """Trigger and wait: trigger first with EARLY, else once the kernel before has ended."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    if not EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_inside_loop():
    """`gdc_wait` that leaves the loop around it software-pipelined in Triton 3.9 too. What the loop loads ahead of the wait must
    be older than the kernel before, such as the KV cache of earlier steps."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)

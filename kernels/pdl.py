"""Programmatic dependent launch (PDL): a kernel starts while its predecessor in the stream still runs. From sm_90 on.

With the launch attribute (`launch_options(..., pdl=True)`), a kernel's programs may start as soon as every program of the kernel
before has either *triggered* (`gdc_launch_dependents`) or ended. *Waiting* (`gdc_wait`) returns when the kernel before has ended
completely and its writes are visible. Two rules keep this correct:

1. Every program waits before it reads what an earlier kernel wrote, and before it writes anything. Weights, block tables and
    lengths are not written by kernels of the step, so they may be read before the wait. If the kernel before triggers after it
    waited, as `low_rank` does, only what that kernel writes must be waited for.
2. Every program waits at least once, even if it has nothing to do. So a kernel ends only after all earlier kernels have ended,
    and waiting for the predecessor means waiting for all of them.

When to trigger affects only speed, since waiting programs of the next kernel occupy space on the SMs. A kernel whose programs
fill the SMs triggers at its start: waiting programs then take only what ending programs free. Others trigger after their last
reads, because waiting programs would take space from reading ones. docs/design/pdl.md lists what each kernel does, and why.
"""

import triton
import triton.language as tl


@triton.jit
def wait_for_input(EARLY: tl.constexpr):
    """Trigger and wait. With EARLY, trigger before the wait, else after it."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    if not EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_inside_loop():
    """`gdc_wait` for use inside a loop: Triton, 3.9 too, still software-pipelines that loop.

    Loads that the loop issues before the wait must not read what the kernel before writes. The KV cache of earlier steps is safe.
    """
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)

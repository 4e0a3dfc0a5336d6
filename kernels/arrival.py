"""Programs of one kernel that share a result: the last to arrive finds what the others have stored."""

import triton
import triton.language as tl


@triton.jit
def arrive_last(counter_ptr, count):
    """Whether this is the last of `count` programs to arrive here, after what it stored. Leaves the counter at zero."""
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(counter_ptr, 0)
    return last

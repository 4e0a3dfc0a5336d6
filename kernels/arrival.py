"""Programs of one kernel that share a result: the last to arrive finds what the others have stored, or others wait."""

import triton
import triton.language as tl

MOST_POLLS = tl.constexpr(1 << 22)  # some seconds: a mistake ends with NaN instead of never


@triton.jit
def arrive_last(counter_ptr, count):
    """Whether this is the last of `count` programs to arrive here, after what it stored. Leaves the counter at zero."""
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def arrive(mark_ptr):
    """Count this program, after what it stored past L1. Marks begin at −1, as y of `TokenAdapter`."""
    tl.debug_barrier()
    tl.atomic_add(mark_ptr, 1, sem="release", scope="gpu")


@triton.jit
def wait_for_arrivals(mark_ptr, count):
    """Wait until `count` programs have arrived: whether they have. What they have stored is then to be loaded past L1.

    They come before this one in the grid: as programs start in its order, none waits for one that has no place.
    """
    arrived, polls = tl.load(mark_ptr, volatile=True), 0
    while (arrived < count - 1) & (polls < MOST_POLLS):
        arrived, polls = tl.load(mark_ptr, volatile=True), polls + 1
    tl.debug_barrier()
    return arrived >= count - 1

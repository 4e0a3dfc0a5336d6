"""A ring of stages in shared memory, through which one warp hands tiles to groups of warps.

Each stage has two barriers: `full`, "its tiles have arrived", and `empty`, "its tiles have been read". Steps count up without
end; step s uses stage s mod STAGES, and the phase of a barrier is whether its stage was used an even or an odd number of times.
The number of stages is the length of the barriers. The kernel says which tiles a stage has.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers that open after ARRIVALS arrivals each. `fence_async_shared` must follow before other warps use them."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def ring_barriers(STAGES: gl.constexpr, READERS: gl.constexpr, WRITERS: gl.constexpr = 1):
    """(full, empty) of a ring. READERS: arrivals that release a stage, one a group of warps. WRITERS: arrivals that fill it."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):  # in turn, as Triton 3.6 synchronizes the warps between two stores to one buffer
        mbarrier.init(full.index(i), count=WRITERS)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty


@gluon.jit
def wait_full(full, step):
    """Wait until the tiles of a step have arrived. Returns their stage."""
    STAGES: gl.constexpr = full.shape[0]
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    return stage


@gluon.jit
def wait_empty(empty, step):
    """Wait until the stage of a step may be overwritten: the tiles of STAGES steps ago have been read. Returns the stage."""
    STAGES: gl.constexpr = empty.shape[0]
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
    return stage


@gluon.jit
def release(empty, step, pred=True):
    """Say that the tiles of a step have been read, for one group of warps."""
    mbarrier.arrive(empty.index(step % empty.shape[0]), pred=pred)


@gluon.jit
def release_before(empty, step, pred=True):
    """`release` of the step before `step`."""
    release(empty, step + empty.shape[0] - 1, pred)  # the same stage as step - 1, and never negative

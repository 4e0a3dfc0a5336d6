"""CPU threads: how many PyTorch uses, and how long idle ones spin. Does not import torch.

An idle thread that spins on a busy core keeps the others from working: on a shared machine PyTorch can be many times slower than
with one thread. So idle threads spin only for a short time, and the number of threads respects cgroup limits. Values that the
user set in OMP_* or GOMP_* variables stay.
"""

import os
import sys
from pathlib import Path

from minirt.errors import ConfigError

# Number of spins of an idle thread of GCC's OpenMP before it sleeps. GCC's default is 300,000, nominally 3 ms.
SPIN_COUNT = 1_000


def limit_spinning() -> None:
    """Set GOMP_SPINCOUNT for this process, unless the user chose a wait policy. Without effect after PyTorch is imported.

    GCC's OpenMP, which PyTorch uses on Linux, reads the variable once, when it is loaded.
    """
    if "torch" not in sys.modules and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def set_threads(threads: int | None) -> None:
    """Set the number of threads of PyTorch's CPU operations, in the whole process.

    Args:
        threads: a number; it takes precedence over OMP_NUM_THREADS. None: the value of OMP_NUM_THREADS or MKL_NUM_THREADS,
            else PyTorch's own setting limited to `usable_cpus`.
    Raises:
        ConfigError: not an integer from 1 to the CPUs of this machine.
    """
    import torch

    if threads is not None:
        most = os.cpu_count() or 1
        if type(threads) is not int or not 1 <= threads <= most:
            expected, shown = f"an integer from 1 to {most}, the CPUs here", repr(threads)[:80]
            raise ConfigError("not a number of threads", where="--threads", expected=expected, found=shown)
        torch.set_num_threads(threads)
    elif not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & set(os.environ) and torch.get_num_threads() > usable_cpus():
        torch.set_num_threads(usable_cpus())


def usable_cpus() -> int:
    """Number of CPUs that this process may use, at least 1: limited by affinity and by the cgroup's quota, rounded down."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(Path("/"))
    return cpus if quota is None else max(1, min(cpus, int(quota)))


def cgroup_quota(root: Path) -> float | None:
    """Number of CPUs to which the cgroup of this process, or one above it, limits it. None: no limit, or it cannot be read.

    Args:
        root: the root of the file system.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return None
    quotas = []
    for line in groups:
        number, names, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and names == "":
            mount, files = root / "sys/fs/cgroup", ["cpu.max"]
        elif "cpu" in names.split(","):
            mount, files = root / "sys/fs/cgroup" / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        group = mount / path.lstrip("/")
        # In a container, the path may be the host's and not exist here, so the mount itself is always read.
        quotas += [_limit(folder, files) for folder in (group, *group.parents) if folder.is_relative_to(mount)]
    return min([limit for limit in quotas if limit is not None], default=None)


def _limit(folder: Path, files: list[str]) -> float | None:
    try:
        quota, period = " ".join((folder / name).read_text() for name in files).split()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max", or not as expected: no limit
        return None

"""CPU threads: cgroup quotas, the choice of a number, and the spin count. Catches a limit that is ignored (cgroup v1, v2, an
ancestor's), a user's OMP variable that is overridden, and a spin count that is set too late to have an effect."""

import json
import os
import subprocess
import sys

import pytest
import torch

from minirt import Generator, LoadOptions, threads
from minirt.errors import ConfigError


@pytest.fixture
def root(tmp_path):
    """A function (lines of /proc/self/cgroup, path → content) → the root of a file system."""

    def make(groups, files):
        for name, content in {"proc/self/cgroup": groups, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path

    return make


V2 = "sys/fs/cgroup/"
V1 = "sys/fs/cgroup/cpu/"
ONE = "0::/a/b\n"
QUOTAS = {
    "none": (ONE, {}, None),
    "unlimited": (ONE, {V2 + "a/b/cpu.max": "max 100000\n"}, None),
    "own": (ONE, {V2 + "a/b/cpu.max": "250000 100000\n", V2 + "a/cpu.max": "max 100000\n"}, 2.5),
    "of an ancestor": (ONE, {V2 + "a/b/cpu.max": "800000 100000\n", V2 + "a/cpu.max": "300000 200000\n"}, 1.5),
    "of the root of a container": ("0::/docker/xyz\n", {V2 + "cpu.max": "50000 100000\n"}, 0.5),
    "of another group": (ONE, {V2 + "c/cpu.max": "100000 100000\n"}, None),
    "outside the mount": ("0::/../../x\n", {V2 + "cpu.max": "100000 100000\n"}, 1.0),
    "v1": (
        "5:cpuset:/\n3:cpu,cpuacct:/j\n0::/\n",
        {V1 + "j/cpu.cfs_quota_us": "700000\n", V1 + "j/cpu.cfs_period_us": "100000\n"}, 7.0,
    ),
    "v1 unlimited": ("3:cpu:/\n", {V1 + "cpu.cfs_quota_us": "-1\n", V1 + "cpu.cfs_period_us": "100000\n"}, None),
    "damaged": ("nonsense\n::\n0::/a\n", {V2 + "a/cpu.max": "many\n", V2 + "cpu.max": "5 0\n"}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", QUOTAS)
def test_the_quota_of_a_cgroup(name, root):
    groups, files, expected = QUOTAS[name]
    assert threads.cgroup_quota(root(groups, files)) == expected


def test_without_cgroups(tmp_path):
    assert threads.cgroup_quota(tmp_path) is None


@pytest.mark.parametrize(("quota", "cpus"), [(None, 3), (2.9, 2), (0.5, 1), (64.0, 3)])
def test_usable_cpus(quota, cpus, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 6}, raising=False)
    monkeypatch.setattr(threads, "cgroup_quota", lambda _: quota)
    assert threads.usable_cpus() == cpus


@pytest.fixture
def now(monkeypatch):
    """PyTorch's number of threads, as a fake that starts at 8."""
    state = {"threads": 8}
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["threads"])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: state.update(threads=count))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return state


@pytest.mark.parametrize(
    ("asked", "variable", "usable", "expected"),
    [(None, None, 3, 3), (None, None, 12, 8), (None, "OMP_NUM_THREADS", 3, 8), (None, "MKL_NUM_THREADS", 3, 8), (5, None, 3, 5),
     (5, "OMP_NUM_THREADS", 3, 5)],
)  # fmt: skip
def test_the_number_of_threads(asked, variable, usable, expected, now, monkeypatch):
    monkeypatch.setattr(threads, "usable_cpus", lambda: usable)
    if variable:
        monkeypatch.setenv(variable, "8")
    threads.set_threads(asked)
    assert now["threads"] == expected


@pytest.mark.parametrize("value", [0, -1, 17, 10**30, 2.0, "2", True])
def test_bad_numbers(value, now):
    with pytest.raises(ConfigError, match="threads"):
        threads.set_threads(value)
    assert now["threads"] == 8


def test_a_generator_uses_them(now, monkeypatch):
    monkeypatch.setattr(threads, "usable_cpus", lambda: 16)
    with Generator.from_pretrained(device="cpu", threads=3, kv_cache_memory=8 << 20):
        assert now["threads"] == 3
    with pytest.raises(ConfigError, match="1 to 16"):
        Generator.from_pretrained(LoadOptions(device="cpu", threads=99))


ENGINE = """
import os, torch
from minirt import Generator, SamplingParams

def ticks():
    # CPU time of each thread of this process, in clock ticks.
    fields = {t: open(f"/proc/self/task/{t}/stat").read().rsplit(")", 1)[1].split() for t in os.listdir("/proc/self/task")}
    return {t: int(own[11]) + int(own[12]) for t, own in fields.items()}

torch.set_num_threads(2)
with Generator.from_pretrained(device="cpu", threads=1, kv_cache_memory=8 << 20) as generator:
    inside = lambda: generator._engine.call(lambda engine: torch.get_num_threads())
    count, before = inside(), set(ticks())
    generator.generate([1, 2, 3], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    print(count, len(set(ticks()) - before))
    with Generator.from_pretrained(device="cpu", threads=2, kv_cache_memory=8 << 20) as second:
        print(inside(), second._engine.call(lambda engine: torch.get_num_threads()))
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2 or not os.path.exists("/proc/self/task"), reason="needs two CPUs, and Linux")
def test_the_engines_thread_computes_with_them():
    """Each thread has an OpenMP pool of its own, and the engine's thread is the one that computes."""
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", ENGINE], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["1", "0", "1", "2"], done.stdout + done.stderr


SPIN = """
import ctypes, json, os, sys
found = []
class Watch:  # what the C library's environment holds when torch is imported, which is when OpenMP is loaded
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            value = ctypes.CDLL(None).getenv
            value.restype = ctypes.c_char_p
            found.append((value(b"GOMP_SPINCOUNT") or b"").decode())
            print(json.dumps(found[0]), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
"""


@pytest.mark.parametrize(("code", "variables", "expected"), [
    ("import minirt; minirt.Generator", {}, str(threads.SPIN_COUNT)),
    ("from minirt.cli import app; app.main(['env'])", {}, str(threads.SPIN_COUNT)),
    ("import minirt; minirt.Generator", {"GOMP_SPINCOUNT": "77"}, "77"),
    ("import minirt; minirt.Generator", {"OMP_WAIT_POLICY": "active"}, ""), ("import minirt; import torch", {}, ""),
])  # fmt: skip
def test_the_spin_count_is_there_before_openmp_is(code, variables, expected):
    environment = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-P", "-c", f"{SPIN}\n{code}"]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout) == expected, done.stderr


def test_after_torch_nothing_is_set(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    threads.limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ

"""Run compute-sanitizer's memcheck and racecheck over the kernel tests, in parallel processes. Needs a GPU and compute-sanitizer.

python tests/tools/sanitize.py FOLDER [--tools memcheck racecheck] [--jobs N] [--limit SECONDS] [--tests PYTEST ARGUMENT …]

FOLDER gets the logs and the names of the tests that ended in a process without a finding. Later calls skip these tests, so the
work can be spread over several calls. First, each tool must find a planted fault. PyTorch's caching allocator is off, because in
its pools memcheck would miss an access just past the end of a tensor. The tools follow only our kernels. racecheck also follows
the cuBLAS kernels that have clusters of blocks: if they run without being followed, it ends in hardware exceptions. A large test
under racecheck takes up to 90 GB of GPU memory. A call with fewer --jobs runs the tests again that did not get enough.

racecheck reports two kinds of accesses that are no races, as `racecheck_probe.py` of 1219e088 shows. One is the dispatch of
warps in kernels with `warp_specialize`. The other is reads of data that a `cp.async` overwrites later, where one thread's
arrival at an mbarrier allows that for all readers. It also reports cuBLAS kernels. Reports with all accesses in one of these
places are counted separately. The exit status is 1 if there is any other report, a failed test, or a test that has not ended.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_GPU = re.compile(r"kernels/compile/|test_sm90_config|test_sanitize")
KINDS = {"huge": re.compile(r"2_31|two_to_the_31"), "large": re.compile(r"large"), "small": re.compile("")}  # the first match
IN_A_PROCESS = {"huge": 1, "large": 4, "small": 24}  # tests: few, because none counts in a process with a finding
AT_ONCE = {"huge": 0, "large": 1 / 3, "small": 2 / 3}  # processes on a GPU, as a share of all its processes; at least one
TO_END = 45  # seconds before the limit; from then on no process begins a test
FOLLOWED = {"memcheck": "_kernel$", "racecheck": "_kernel$|^nvjet"}  # our kernels' names end in _kernel, libraries' do not
PROBE = ROOT / "tests" / "tools" / "sanitizer_probe.py"
ACCESS = re.compile(r"(Read|Write) access at (\w+)\+0x[0-9a-f]+ in ([\w.]+):(\d+)")
NAMED = re.compile(r"access at (\S.*)\+0x[0-9a-f]+")
SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY")
NO_FINDING = re.compile(r"COMPUTE-SANITIZER|Target application returned an error|\S+ SUMMARY")
BLIND = re.compile(r"out of memory|Internal Sanitizer Error")


class Findings(NamedTuple):
    """The findings of a log.

    Args:
        roles: number of races reported in the dispatch of warps.
        copies: number of races reported between reads and later asynchronous copies.
        libraries: number of races reported in kernels that are not ours.
        others: first lines of all other reports.
        ended: whether the tool printed its summary.
        blind: whether the tool failed or ran out of memory, after which it may miss faults.
    """

    roles: int
    copies: int
    libraries: int
    others: list[str]
    ended: bool
    blind: bool


def findings(log: str) -> Findings:
    """Sort the reports of a tool's log."""
    roles, copies, libraries, others, blind = 0, 0, 0, [], False
    for block in re.split(r"^=========\s*$", log, flags=re.MULTILINE):
        lines = [line.removeprefix("=========").strip() for line in block.splitlines() if line.startswith("=========")]
        lines = [line for line in lines if not NO_FINDING.match(line)]
        if not lines:
            continue
        if BLIND.search(lines[0]):
            blind = True
        elif "Race reported" in lines[0] and _all_are(lines, _dispatches_roles):
            roles += 1
        elif "Race reported" in lines[0] and _all_are(lines, _copies_or_reads):
            copies += 1
        elif "Race reported" in lines[0] and _all_in_libraries(lines):
            libraries += 1
        else:
            others.append(lines[0])
    return Findings(roles, copies, libraries, others, bool(SUMMARY.search(log)), blind)


def _all_are(lines: Sequence[str], wanted: Callable[[str, str, str, str], bool]) -> bool:
    places = [ACCESS.search(line) for line in lines if "access at" in line]
    return all(place is not None and wanted(*place.groups()) for place in places)


def _all_in_libraries(lines: Sequence[str]) -> bool:
    """Whether every access lies in a kernel whose name is known and is not one of ours."""
    names = [NAMED.search(line) for line in lines if "access at" in line]
    return all(name is not None and not name[1].endswith("_kernel") for name in names)


def _kernel_file(name: str) -> Path:
    """The path of the kernel source file with this name. The tools print no folder."""
    return next((ROOT / "kernels").rglob(name), ROOT / "kernels" / name)


def _dispatches_roles(access: str, kernel: str, file: str, line: str) -> bool:
    """Whether a source line stands for code of `warp_specialize`: its call, the condition above, or the kernel's `def`."""
    text, following = [*_lines(_kernel_file(file))[int(line) - 1 :][:2], "", ""][:2]
    under = text.strip().startswith(("if ", "elif ", "else:")) and "warp_specialize(" in following
    return text.startswith(f"def {kernel}(") or "warp_specialize(" in text or under


def _copies_or_reads(access: str, kernel: str, file: str, line: str) -> bool:
    """Whether a source line writes by an asynchronous copy or reads shared memory, as the access says."""
    text = [*_lines(_kernel_file(file))[int(line) - 1 :][:1], ""][0].strip()
    return text.startswith("cp_async(") if access == "Write" else ".load(" in text


def outcomes(output: str) -> dict[str, str]:
    """The outcomes by test (PASSED, FAILED, ERROR or SKIPPED) in what `pytest -v` has printed so far."""
    return dict(re.findall(r"^(tests/\S+?::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", output, flags=re.MULTILINE))


def collect(arguments: Sequence[str]) -> list[str]:
    """The names of the tests that pytest collects and that need a GPU."""
    words = [sys.executable, "-P", "-m", "pytest", "-q", "--collect-only", *arguments]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    tests = [line for line in done.stdout.splitlines() if "::" in line and not WITHOUT_GPU.search(line)]
    if done.returncode or not tests:
        sys.exit(f"found no tests: pytest --collect-only {' '.join(arguments)}\n{(done.stdout + done.stderr)[-800:]}")
    return tests


class Job(NamedTuple):
    """Tests that one process runs under one tool."""

    name: str
    tool: str
    tests: list[str]


def jobs_of(tests: Sequence[str], tools: Sequence[str], folder: Path, kind: str, at_once: int) -> list[Job]:
    """Jobs for the tests that have not passed in `folder` yet.

    A job gets neighbouring tests. They share kernels, and a tool takes seconds to prepare a kernel. If tests are few, they are
    spread over all processes that run `at_once`.
    """
    result = []
    for tool in tools:
        done = set(_lines(folder / f"{tool}-passed.txt"))
        left = [test for test in tests if test not in done]
        size = max(1, min(IN_A_PROCESS[kind], -(-len(left) // at_once)))
        for start in range(0, len(left), size):
            result.append(Job(f"{tool}-{kind}-{time.time_ns():x}-{start}", tool, left[start : start + size]))
    return result


def command(tool: str, log: Path) -> list[str]:
    """The command line of Python under a tool, without Python's arguments."""
    options = ["--tool", tool, "--log-file", str(log), "--print-limit", "100000"]
    return ["compute-sanitizer", *options, "--kernel-name", f"regex={FOLLOWED[tool]}", sys.executable, "-P"]


def environment(gpu: str) -> dict[str, str]:
    """The environment of a job. It turns off PyTorch's caching allocator, so no process holds memory that it does not use."""
    own = {"MINIRT_TEST_REPEATS": "few", "OMP_NUM_THREADS": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return os.environ | own | {"CUDA_VISIBLE_DEVICES": gpu}


def finds_planted_fault(tool: str, gpu: str, folder: Path) -> bool:
    log = folder / f"{tool}-probe.log.txt"
    subprocess.run([*command(tool, log), str(PROBE), tool], env=environment(gpu), capture_output=True, check=False)
    return log.exists() and bool(findings(log.read_text()).others)


def run(job: Job, gpu: str, folder: Path, deadline: float) -> tuple[Job, Findings, dict[str, str]]:
    names, log, out = (folder / f"{job.name}.{suffix}.txt" for suffix in ("tests", "log", "out"))
    names.write_text("\n".join(job.tests) + "\n")
    words = [*command(job.tool, log), "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short", f"@{names}"]
    env = environment(gpu) | {"MINIRT_TEST_END": str(deadline - TO_END)}
    if time.time() < deadline - TO_END:
        with out.open("w") as file:
            process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                process.wait(max(1.0, deadline - time.time()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
    found = findings(log.read_text() if log.exists() else "")
    ended = outcomes(out.read_text() if out.exists() else "")
    if found.ended and not found.blind and not found.others:
        with (folder / f"{job.tool}-passed.txt").open("a") as file:
            file.writelines(f"{test}\n" for test, outcome in ended.items() if outcome in ("PASSED", "SKIPPED"))
    return job, found, ended


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def summary(tool: str, tests: Sequence[str], done: Sequence[tuple[Job, Findings, dict[str, str]]], folder: Path) -> bool:
    """Print what a tool found. Returns True if all tests ended without a finding."""
    own = [(found, ended) for job, found, ended in done if job.tool == tool]
    left = set(tests) - set(_lines(folder / f"{tool}-passed.txt"))
    failed = sorted(test for _, ended in own for test, outcome in ended.items() if outcome in ("FAILED", "ERROR"))
    others = sorted({line for found, _ in own for line in found.others})
    blind = sum(found.blind for found, _ in own)
    print(f"{tool}: {len(tests) - len(left)} of {len(tests)} tests ended without a finding, {len(left)} have not; ", end="")
    print(f"{sum(found.roles for found, _ in own)} reports on the dispatch of warps, ", end="")
    print(f"{sum(found.copies for found, _ in own)} on asynchronous copies, ", end="")
    print(f"{sum(found.libraries for found, _ in own)} in libraries' kernels, {len(others)} others, ", end="")
    print(f"{len(failed)} failed tests; the tool failed or ran out of memory in {blind} of {len(own)} processes")
    for line in [*others[:20], *failed[:20]]:
        print(f"  {line}")
    return not (left or failed or others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tools", nargs="+", choices=("memcheck", "racecheck"), default=["memcheck", "racecheck"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of processes at a time, on all GPUs together")
    parser.add_argument("--limit", type=float, default=1e6, help="seconds after which all processes are ended")
    parser.add_argument("--tests", nargs="+", default=["tests/kernels"], help="arguments of pytest that select the tests")
    args = parser.parse_args()
    deadline = time.time() + args.limit
    args.folder.mkdir(parents=True, exist_ok=True)
    import torch

    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = gpus if gpus != [""] else [str(i) for i in range(torch.cuda.device_count())]
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU")
    for tool in args.tools:
        if not finds_planted_fault(tool, gpus[0], args.folder):
            sys.exit(f"{tool} does not find the planted fault of {PROBE.name}: see {args.folder}/{tool}-probe.log.txt")
    tests = collect(args.tests)
    with ExitStack() as stack:
        waiting = []
        for kind, share in AT_ONCE.items():
            own = [test for test in tests if kind == next(name for name, pattern in KINDS.items() if pattern.search(test))]
            at_once = max(1, int(args.jobs * share) // len(gpus))
            pools = [stack.enter_context(ThreadPoolExecutor(at_once)) for _ in gpus]
            for i, job in enumerate(jobs_of(own, args.tools, args.folder, kind, at_once * len(gpus))):
                at = i % len(gpus)
                waiting.append(pools[at].submit(run, job, gpus[at], args.folder, deadline))
        done = [future.result() for future in waiting]
    well = [summary(tool, tests, done, args.folder) for tool in args.tools]
    sys.exit(not all(well))


if __name__ == "__main__":
    main()

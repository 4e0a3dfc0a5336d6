"""compute-sanitizer's memcheck and racecheck over the kernel tests, in processes side by side. Needs a GPU and that tool.

python tests/tools/sanitize.py FOLDER [--tools memcheck racecheck] [--jobs N] [--limit SECONDS] [--tests PYTEST ARGUMENT …]

Logs go to FOLDER, and so do the names of tests that ended in a process without a finding: these are not run again there, so that
the work can be spread over several calls. The tools first have to find planted faults. Each tensor is an allocation of its own:
in PyTorch's pools memcheck would miss an access just past the end of one. The tools follow our kernels only, and racecheck those
of cuBLAS that have clusters of blocks, too: where these run and are not followed, it ends in hardware exceptions. racecheck takes
up to 90 GB of GPU memory for a large test: those that had none are run again by a call with fewer --jobs.

racecheck reports each dispatch of roles in kernels with `warp_specialize`, and reads of what a `cp.async` overwrites later, where
one thread says at an mbarrier, for all readers, that it may. `tools/racecheck_probe.py` shows both to be no races. It reports
kernels of cuBLAS, too. Reports whose accesses all lie there are counted apart. Exit status 1: any other, a failed test, or one
that has not ended.
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
KINDS = {"huge": re.compile(r"2_31|two_to_the_31"), "large": re.compile(r"large"), "small": re.compile("")}  # the first that fits
IN_A_PROCESS = {"huge": 1, "large": 4, "small": 24}  # tests: few, since none counts in a process that has a finding
AT_ONCE = {"huge": 0, "large": 1 / 3, "small": 2 / 3}  # processes on a GPU, a share of all there, but one at least
TO_END = 45  # seconds before the limit, after which no process begins a test
FOLLOWED = {"memcheck": "_kernel$", "racecheck": "_kernel$|^nvjet"}  # our kernels' names end in _kernel, libraries' do not
PROBE = ROOT / "tests" / "tools" / "sanitizer_probe.py"
ACCESS = re.compile(r"(Read|Write) access at (\w+)\+0x[0-9a-f]+ in ([\w.]+):(\d+)")
NAMED = re.compile(r"access at (\S.*)\+0x[0-9a-f]+")
SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY")
NO_FINDING = re.compile(r"COMPUTE-SANITIZER|Target application returned an error|\S+ SUMMARY")
BLIND = re.compile(r"out of memory|Internal Sanitizer Error")


class Findings(NamedTuple):
    """What a log says. `roles`: races reported in the dispatch of roles; `copies`: between reads and copies that overwrite;
    `libraries`: in kernels that are not ours; `others`: first lines of all other reports; `ended`: the tool came to its summary;
    `blind`: it failed or ran out of memory, after which it may miss things."""

    roles: int
    copies: int
    libraries: int
    others: list[str]
    ended: bool
    blind: bool


def findings(log: str) -> Findings:
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
    """Where the kernel source file of this name lies; the tools print no folder."""
    return next((ROOT / "kernels").rglob(name), ROOT / "kernels" / name)


def _dispatches_roles(access: str, kernel: str, file: str, line: str) -> bool:
    """Whether a place in a kernel's source is what becomes of `warp_specialize`: the call, the condition that it stands under, or
    the line of the kernel's name."""
    text, following = [*_lines(_kernel_file(file))[int(line) - 1 :][:2], "", ""][:2]
    under = text.strip().startswith(("if ", "elif ", "else:")) and "warp_specialize(" in following
    return text.startswith(f"def {kernel}(") or "warp_specialize(" in text or under


def _copies_or_reads(access: str, kernel: str, file: str, line: str) -> bool:
    """Whether a place in a kernel's source writes by an asynchronous copy, or reads shared memory."""
    text = [*_lines(_kernel_file(file))[int(line) - 1 :][:1], ""][0].strip()
    return text.startswith("cp_async(") if access == "Write" else ".load(" in text


def outcomes(output: str) -> dict[str, str]:
    """Test → PASSED, FAILED, ERROR or SKIPPED, of what `pytest -v` has printed so far."""
    return dict(re.findall(r"^(tests/\S+?::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", output, flags=re.MULTILINE))


def collect(arguments: Sequence[str]) -> list[str]:
    words = [sys.executable, "-P", "-m", "pytest", "-q", "--collect-only", *arguments]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    tests = [line for line in done.stdout.splitlines() if "::" in line and not WITHOUT_GPU.search(line)]
    if done.returncode or not tests:
        sys.exit(f"no tests: pytest --collect-only {' '.join(arguments)}\n{(done.stdout + done.stderr)[-800:]}")
    return tests


class Job(NamedTuple):
    """A process over some tests."""

    name: str
    tool: str
    tests: list[str]


def jobs_of(tests: Sequence[str], tools: Sequence[str], folder: Path, kind: str, at_once: int) -> list[Job]:
    """Processes over the tests that have not ended well in `folder`; each has neighbours, which share kernels, since a tool takes
    seconds to prepare one. Few tests are spread over all the processes that run `at_once`."""
    result = []
    for tool in tools:
        done = set(_lines(folder / f"{tool}-passed.txt"))
        left = [test for test in tests if test not in done]
        size = max(1, min(IN_A_PROCESS[kind], -(-len(left) // at_once)))
        for start in range(0, len(left), size):
            result.append(Job(f"{tool}-{kind}-{time.time_ns():x}-{start}", tool, left[start : start + size]))
    return result


def command(tool: str, log: Path) -> list[str]:
    options = ["--tool", tool, "--log-file", str(log), "--print-limit", "100000"]
    return ["compute-sanitizer", *options, "--kernel-name", f"regex={FOLLOWED[tool]}", sys.executable, "-P"]


def environment(gpu: str) -> dict[str, str]:
    """Without PyTorch's pools, so that no process holds memory which it does not use."""
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
    """Print what a tool found; → whether all is well."""
    own = [(found, ended) for job, found, ended in done if job.tool == tool]
    left = set(tests) - set(_lines(folder / f"{tool}-passed.txt"))
    failed = sorted(test for _, ended in own for test, outcome in ended.items() if outcome in ("FAILED", "ERROR"))
    others = sorted({line for found, _ in own for line in found.others})
    blind = sum(found.blind for found, _ in own)
    print(f"{tool}: {len(tests) - len(left)} of {len(tests)} tests ended without a finding, {len(left)} have not; ", end="")
    print(f"{sum(found.roles for found, _ in own)} reports on the dispatch of roles, ", end="")
    print(f"{sum(found.copies for found, _ in own)} on asynchronous copies, ", end="")
    print(f"{sum(found.libraries for found, _ in own)} in libraries' kernels, {len(others)} others, ", end="")
    print(f"{len(failed)} failed tests, in {blind} of {len(own)} processes the tool failed or had no memory")
    for line in [*others[:20], *failed[:20]]:
        print(f"  {line}")
    return not (left or failed or others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tools", nargs="+", choices=("memcheck", "racecheck"), default=["memcheck", "racecheck"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time, on all GPUs together")
    parser.add_argument("--limit", type=float, default=1e6, help="seconds after which everything has ended")
    parser.add_argument("--tests", nargs="+", default=["tests/kernels"], help="what pytest is to collect")
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
            sys.exit(f"{tool} does not find the fault of {PROBE.name}: see {args.folder}/{tool}-probe.log.txt")
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

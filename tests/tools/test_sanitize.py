"""How `sanitize.py` reads the tools' logs. Catches: a real race taken for a dispatch report, a report in another format that is
overlooked, tests that count although the tool ran out of memory or their process did not end, a tool that never finds
anything."""

import os
import subprocess
import sys

import pytest
from tools.sanitize import IN_A_PROCESS, ROOT, Job, findings, jobs_of, run

SOURCE = (ROOT / "kernels" / "linear" / "gemm_sm90.py").read_text().splitlines()
NAME = next(i for i, line in enumerate(SOURCE, 1) if line.startswith("def _gemm_sm90_kernel("))
ROLES = next(i for i, line in enumerate(SOURCE, 1) if "gl.warp_specialize(" in line)
END = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
NO_PLACE = "========= Error: Race reported between Write access at {}\n=========     and Read access at {}\n========= \n"
OURS, CUBLAS = "f_kernel+0xa0", "nvjet_sm90_bz_TNN+0xb00"


def race(*places, kernel="_gemm_sm90_kernel", file="gemm_sm90"):
    first, *others = [f"access at {kernel}+0x1{i}0 in {file}.py:{line}" for i, line in enumerate(places)]
    lines = [f"Error: Race reported between Read {first}", *(f"    and Write {other} [4 hazards]" for other in others)]
    return "".join(f"========= {line}\n" for line in lines) + "========= \n"


def test_races():
    log = "========= COMPUTE-SANITIZER\n" + race(NAME, NAME, ROLES) + race(NAME, ROLES - 1) + END
    assert SOURCE[ROLES - 2].endswith("if C.GROUPS == 2:")
    assert findings(log) == (2, 0, 0, [], True, False)
    elsewhere = race(NAME, ROLES + 6), race(NAME - 20, ROLES), race(NAME, NAME, kernel="_other_kernel"), race(NAME, 10**6)
    without = NO_PLACE.format(OURS, OURS), NO_PLACE.format(CUBLAS, OURS), NO_PLACE.format("", ""), NO_PLACE.format(CUBLAS, "")
    for wrong in (*elsewhere, *without):
        assert findings(log + wrong).roles == 2
        assert len(findings(log + wrong).others) == 1
    assert findings(log + NO_PLACE.format(CUBLAS, CUBLAS)) == (2, 0, 1, [], True, False)
    assert findings("========= COMPUTE-SANITIZER\n" + race(NAME, ROLES)) == (1, 0, 0, [], False, False)


@pytest.mark.parametrize(("line", "others", "blind"), [
    ("Invalid __global__ read of size 4 bytes", 1, False),
    ("Error: Potential WAW hazard detected at __shared__ 0x10 in block (0,0,0)", 1, False),
    ('Program hit cudaErrorMemoryAllocation (error 2) due to "out of memory" on CUDA API call to cudaMalloc.', 0, True),
    ("Internal Sanitizer Error: The Sanitizer encountered an error while launching f and didn't track the launch.", 0, True),
    ("Program hit cudaErrorIllegalAddress (error 700)", 1, False),
])  # fmt: skip
def test_other_reports(line, others, blind):
    log = f"========= COMPUTE-SANITIZER\n========= {line}\n=========     at k+0x10\n========= \n"
    found = findings(log + "========= ERROR SUMMARY: 1 error\n")
    assert (found.roles, len(found.others), found.ended, found.blind) == (0, others, True, blind)


@pytest.mark.parametrize(("log", "passed"), [
    (race(NAME, ROLES) + END, ["tests/a.py::x"]), (race(NAME, ROLES), []), (race(NAME, 10**6) + END, []),
    ("========= Program hit X due to \"out of memory\"\n========= \n" + END, []),
])  # fmt: skip
def test_only_what_a_clean_process_passed_is_not_run_again(log, passed, tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    (tmp_path / "log.txt").write_text(log)
    tool.write_text(f'#!/bin/sh\ncp {tmp_path}/log.txt "$4"\necho "tests/a.py::x PASSED"\necho "tests/a.py::y FAILED"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    tests = ["tests/a.py::x", "tests/a.py::y"]
    run(Job("j", "racecheck", tests), "0", tmp_path, float("inf"))
    left = [test for job in jobs_of(tests, ["racecheck"], tmp_path, "small", 1) for test in job.tests]
    assert left == [test for test in tests if test not in passed]
    for at_once, processes in ((1, -(-40 // IN_A_PROCESS["small"])), (5, 5), (100, 40)):
        assert len(jobs_of(tests * 20, ["memcheck"], tmp_path, "small", at_once)) == processes


def test_no_test_begins_after_the_end():
    words = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/test_norm.py"]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | {"MINIRT_TEST_END": "7"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MINIRT_TEST_END has passed" in done.stdout
    assert "passed in" not in done.stdout

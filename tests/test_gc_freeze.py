"""What keeps Python's garbage collector away from a loaded model; the tests are in support/gc_freeze_cases.py."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_in_a_process_that_has_collected_no_other_tests():
    """There, a full collection takes milliseconds; here, half a second each."""
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "support/gc_freeze_cases.py"]
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout

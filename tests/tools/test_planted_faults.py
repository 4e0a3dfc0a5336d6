"""The faults that `planted_faults.py` plants. Catches a change of code, or of tests, that leaves one without its place."""

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("planted_faults", Path(__file__).with_name("planted_faults.py"))
planted_faults = importlib.util.module_from_spec(spec)
spec.loader.exec_module(planted_faults)


def test_each_fault_can_be_planted():
    assert list(planted_faults.problems()) == []

"""The transcript of a new user's first minutes: which steps it has, and how it shows them."""

import importlib.util
import os
from pathlib import Path

from support.package import ROOT

spec = importlib.util.spec_from_file_location("first_minutes", Path(__file__).with_name("first_minutes.py"))
first_minutes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(first_minutes)


def test_steps_are_those_of_the_readme_that_run_anywhere():
    steps = first_minutes.steps((ROOT / "README.md").read_text(encoding="utf-8"))
    assert steps[0].source.startswith("pip install '.[")
    assert sum(step.python for step in steps) >= 2
    commands = [step.source for step in steps if not step.python]
    assert sum(command.startswith("minirt ") for command in commands) >= 2
    assert not any("make" in command or "Qwen/" in command or "bench speed" in command for command in commands)


def test_a_transcript_has_times_codes_and_both_streams(tmp_path):
    Step, environment = first_minutes.Step, dict(os.environ)
    steps = [Step("echo a; echo b >&2; exit 3"), Step("print(6 * 7)\n", python=True), Step("seq 1 100")]
    done = [first_minutes.run(step, tmp_path, environment) for step in steps]
    assert [(own.code, own.output.split()) for own in done[:2]] == [(3, ["a", "b"]), (0, ["42"])]
    text = first_minutes.transcript(done, "T")
    assert text.startswith("# T\n")
    assert "| `echo a; echo b >&2; exit 3` |" in text
    assert "\n20\n… (60 lines)\n81\n" in text

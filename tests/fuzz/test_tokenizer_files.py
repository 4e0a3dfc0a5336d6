"""Damaged tokenizer files: they load and work, or raise a `MinirtError`. Never another exception, a crash or a hang.

MINIRT_FUZZ=10000 tries that many cases. A fault names its seed; `case(Random(seed), folder)` repeats it.
"""

from pathlib import Path
from random import Random

from fuzz.tokenizer_cases import bases, case
from support.fuzz import outcome, run
from support.mutate import budget

from minirt.errors import TokenizerError
from minirt.text.tokenizer import Tokenizer


def test_the_undamaged_files_load_and_work(tmp_path: Path) -> None:
    """Otherwise every case would end at the same error."""
    for i, files in enumerate(bases()):
        folder = tmp_path / str(i)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        tokenizer = Tokenizer.load(folder)
        assert tokenizer is not None
        assert tokenizer.encode_chat([{"role": "system", "content": "Hi"}])
        assert "the quick" in tokenizer.decode(tokenizer.encode("the quick"))


def test_damaged_files() -> None:
    outcomes, faults = run("fuzz.tokenizer_cases:case", budget(400))
    assert not faults, "\n".join(faults[:20])
    assert outcomes["works"] > 0.1 * outcomes.total()  # both ends of the property are reached
    assert outcomes["TokenizerError"] > 0.1 * outcomes.total()


def test_a_fault_is_reported(tmp_path: Path) -> None:
    """The harness can fail: a wrong exception, a crash, a hang and an unprintable message are faults."""

    def wrong(random: Random, folder: Path) -> str:
        raise KeyError("x")

    class Unprintable(TokenizerError):
        def __str__(self) -> str:
            return "\x1b"

    def unprintable(random: Random, folder: Path) -> str:
        raise Unprintable("x")

    assert outcome(wrong, 0, tmp_path).startswith("fault KeyError")
    assert outcome(unprintable, 0, tmp_path).startswith("fault AssertionError")
    assert outcome(case, 0, tmp_path).startswith("ok ")
    outcomes, faults = run("fuzz.harness_cases:case", 3, seconds=5)
    assert outcomes == {"fine": 1}
    assert sorted(faults) == ["seed 1: crash, exit code -6", "seed 2: hang, exit code -9"]

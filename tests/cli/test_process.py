"""The command line as a process: full and closed streams, signals, warnings, and control characters from files.

Catches a note that cannot be written and turns success into failure, output that is lost without a word, an exception of an
OSError inside a library (click prints the help), a signal that leaves a traceback or another exit code, a warning with a source
path or printed twice, and an escape sequence that reaches the terminal.
"""

import json
import os
import pty
import shutil
import signal
import threading
import warnings

import pytest
from support.cli import CACHE, LONG, refused, start

from minirt.cli import process as process_module
from minirt.cli.output import one_line, printable_lines
from minirt.generator import Generator

FULL = b"minirt: stdout: cannot write the output: No space left on device\n"


# streams

needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


@needs_full
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["--version"]], ids=" ".join)
def test_a_full_stdout_is_a_failure(arguments, unbuffered):
    with open("/dev/full", "wb") as full, start(*arguments, stdout=full, env={"PYTHONUNBUFFERED": unbuffered}) as process:
        err = process.stderr.read()
    assert process.returncode == 1
    assert err == FULL


@needs_full
def test_a_full_stdout_is_a_failure_of_results_too():
    with open("/dev/full", "wb") as full, start("env", stdout=full) as process:
        assert process.stderr.read() == FULL
    assert process.returncode == 1


@needs_full
def test_a_full_stderr_changes_no_exit_code(folder):
    plan = ("plan", "--device", "cpu", "--json")  # notes on stderr that it takes the embedded model
    cases = [(plan, 0), (("generate", "--top-p", 2, "hello"), 2), (("generate", "--no-such-option"), 2)]
    with open("/dev/full", "wb") as full:
        for arguments, code in cases:
            with start(*arguments, stderr=full) as process:
                out = process.stdout.read()
            assert process.returncode == code, arguments
            assert bool(out) == (code == 0)
        assert start("--no-such-option", stdout=full, stderr=full, env={"PYTHONUNBUFFERED": "1"}).wait(60) == 2


# signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_a_generation(number, endless):
    with start("generate", "-m", endless, *LONG, "--ignore-eos", "--max-tokens", 10**6, "hello") as process:
        assert process.stdout.read(8)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err.strip() == b""


def test_a_signal_ends_chat_and_not_only_the_answer(endless):
    terminal, side = pty.openpty()
    with start("chat", "-m", endless, *LONG, "--ignore-eos", "--max-tokens", 10**6, stdin=side) as process:
        os.close(side)
        os.write(terminal, b"hello\n")
        assert process.stdout.read(8)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    os.close(terminal)
    assert process.returncode == 143


def test_signals_raise_but_ignored_ones_stay_ignored():
    """`nohup minirt …` runs on when the terminal closes."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with process_module.termination_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            with process_module.finishing():
                os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(process_module.Terminated) as raised:
                os.kill(os.getpid(), signal.SIGTERM)
        assert raised.value.exit_code == 143
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_handlers_are_restored_and_other_threads_set_none():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with process_module.termination_signals(), process_module.finishing():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before
    failed = []

    def work():
        try:
            with process_module.termination_signals(), process_module.finishing():
                pass
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []


# warnings


def test_warnings_are_lines(run, folder, monkeypatch):
    original = Generator.check

    def check(self, *arguments):
        for _ in range(2):
            warnings.warn("two eos ids\n  of one model, \x1b[31m'x'", UserWarning, stacklevel=2)
        warnings.warn("another", RuntimeWarning, stacklevel=1)
        return original(self, *arguments)

    monkeypatch.setattr(Generator, "check", check)
    shown = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, _, err = run("generate", "-m", folder, *CACHE, "-q", "--max-tokens", 1, "a", "b")
    assert code == 0
    assert err == "minirt: warning: two eos ids of one model, \\x1b[31m'x'\nminirt: warning: another\n"
    assert warnings.showwarning is shown


# control characters

ESCAPE = "\x1b]0;owned\x07\x9b31m"


def safe(text):
    return not any((ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 for c in text)


def test_printable_lines():
    assert printable_lines("a\tb\nc\x1b[0m\x7f\x9f é🙂\r") == "a\\tb\nc\\x1b[0m\\x7f\\x9f é🙂\\r"
    assert one_line(" a \n\n  b\x00\n") == "a b\\x00"


def test_names_cannot_control_the_terminal(run, folder, tmp_path, monkeypatch):
    odd = shutil.copytree(folder, tmp_path / f"model{ESCAPE}")
    config = {"do_sample": True, "suppress_tokens": [ESCAPE], f"{ESCAPE}": 1}
    (odd / "generation_config.json").write_text(json.dumps(config))
    for arguments in (
        ["plan", "-m", odd, "--device", "cpu"], ["plan", "-m", odd, "--device", "cpu", "--impl", f"{ESCAPE}=eager"],
        ["plan", "-m", odd, "--device", "cpu", "--impl", f"layers.*{ESCAPE}"],
        ["generate", "-m", odd, *CACHE, "--max-tokens", 1, "--json", "hello"],
        ["generate", "-m", odd, *CACHE, "--prompt-file", odd / "none"], ["generate", f"--{ESCAPE}"], [ESCAPE],
        ["bench", "speed", "-m", odd, *CACHE, "--output-file", f"/none{ESCAPE}/x"], ["generate", "-m", odd / ESCAPE, "hello"],
    ):  # fmt: skip
        code, out, err = run(*arguments)
        assert safe(out), (code, out)
        assert safe(err), (code, err)
        assert "\\x1b" in out + err or code == 0
    monkeypatch.setattr(Generator, "check", lambda *_: (_ for _ in ()).throw(RuntimeError(f"{ESCAPE}\nand more")))
    result = run("generate", "-m", folder, *CACHE, "hello")
    refused((*result[:2], result[2].replace("unexpected RuntimeError", "")), "\\x1b", "and more")

"""Helpers of the command line's tests."""

import os
import re
import signal
import subprocess
import sys

import pytest

from minirt.cli import app as cli

CACHE = ("--kv-cache-memory", "8MiB", "--device", "cpu")
LONG = (*CACHE, "--max-model-len", "8k")  # for a model of more positions than this cache holds


def caller(capfd, monkeypatch):
    """Returns a function that runs the command line → (exit code, stdout, stderr)."""
    monkeypatch.delenv("MINIRT_MODEL", raising=False)

    def call(*arguments):
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main([str(a) for a in arguments])
        out, err = capfd.readouterr()
        return end.value.code or 0, out, err

    return call


def refused(result, *words, code=1):
    """Fail unless `result` is a refusal: this exit code, nothing on stdout, no traceback, and a message with all of `words`.

    Uses no `assert`, because python -O removes it in a file that holds no tests.
    """
    exit_code, out, err = result
    good = exit_code == code and out == "" and all(word in err for word in words)
    good &= "Traceback" not in err and not re.search(r"unexpected \w+(Error|Exception)", err)
    good &= err.startswith("minirt: ") and err.count("\n") == 1
    if not good:
        pytest.fail(f"expected exit code {code} and {words}; found {exit_code}, stdout {out!r}, stderr {err!r}")


def succeeded(result):
    """stdout and stderr of a command that must succeed."""
    code, out, err = result
    if code:
        pytest.fail(f"expected success; found exit code {code}, stdout {out!r}, stderr {err!r}")
    return out, err


def printed(result):
    """stdout of a command that must succeed and say nothing on stderr."""
    out, err = succeeded(result)
    if err:
        pytest.fail(f"expected nothing on stderr; found {err!r}")
    return out


def start(*arguments, **options):
    """Start `python -m minirt …` with the default handling of signals, even if this process ignores some (as under nohup)."""
    command = [sys.executable, "-P", "-m", "minirt", *map(str, arguments)]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    def default():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return subprocess.Popen(command, preexec_fn=default, env=environment, **{**streams, **options})

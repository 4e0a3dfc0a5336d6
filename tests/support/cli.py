"""What the tests of the command line share."""

import os
import re
import signal
import subprocess
import sys

import pytest

from minirt.cli import app as cli

CACHE = ("--kv-cache-memory", "8MiB", "--device", "cpu")


def caller(capfd, monkeypatch):
    """A function that runs the command line → (exit code, stdout, stderr)."""
    monkeypatch.delenv("MINIRT_MODEL", raising=False)

    def call(*arguments):
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main([str(a) for a in arguments])
        out, err = capfd.readouterr()
        return end.value.code or 0, out, err

    return call


def refused(result, *words, code=1):
    """Fail unless it is a refusal: the exit code, nothing on stdout, no traceback, and a message with all of `words`.

    No `assert`: in a file that holds no tests, python -O removes it.
    """
    found, out, err = result
    good = found == code and out == "" and all(word in err for word in words)
    good &= "Traceback" not in err and not re.search(r"unexpected \w+(Error|Exception)", err)
    if code == 1:
        good &= err.startswith("minirt: ") and err.count("\n") == 1
    if not good:
        pytest.fail(f"expected exit code {code} and {words}; found {found}, stdout {out!r}, stderr {err!r}")


def start(*arguments, **options):
    """`python -m minirt …`, Ctrl-C not ignored even if it is here (as under nohup)."""
    command = [sys.executable, "-P", "-m", "minirt", *map(str, arguments)]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    default = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return subprocess.Popen(command, preexec_fn=default, env=environment, **{**streams, **options})

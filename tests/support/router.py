"""`Router`: the router smg as a process, in front of workers. It comes from the package index and is no part of the environment.

smg needs more packages for what it can do besides HTTP; for HTTP, `PACKAGES` are enough.
"""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from support.server import Server

PACKAGES = ("smg==1.13.0", "setproctitle==1.3.8")
# Workers are asked for their health each second, and one answer decides. Requests go to the workers in turn.
OPTIONS = (
    "--policy", "round_robin", "--disable-tokenizer-autoload", "--worker-startup-check-interval", 1,
    "--health-check-interval-secs", 1, "--health-check-timeout-secs", 30, "--health-failure-threshold", 1,
    "--health-success-threshold", 1, "--prometheus-host", "127.0.0.1", "--log-level", "warn",
)  # fmt: skip


def install(folder: Path) -> Path:
    """Install smg to `folder`, completely or not at all, unless it is already there. Returns `folder`."""
    if folder.exists():
        return folder
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", part, *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(part, ignore_errors=True)
        raise RuntimeError(f"cannot install {PACKAGES[0]}, the tests' router, from the package index:\n{done.stderr[-2000:]}")
    try:
        part.rename(folder)
    except OSError:  # another test process was faster
        shutil.rmtree(part)
        if not folder.exists():
            raise
    return folder


def free_port() -> int:
    """A port that is free now, also for a server that cannot take a free one itself."""
    with socket.create_server(("127.0.0.1", 0)) as own:
        return own.getsockname()[1]


class Router(Server):
    """A process of smg on a free port. `url`: its address."""

    def __init__(self, folder: Path, log: Path, workers: list[str]) -> None:
        port, self._log = free_port(), log
        self.url = f"http://127.0.0.1:{port}"
        options = ("--host", "127.0.0.1", "--port", port, "--prometheus-port", free_port(), *OPTIONS)
        command = [sys.executable, "-P", "-m", "smg", "launch", "--worker-urls", *workers, *map(str, options)]
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, env=environment | {"PYTHONPATH": str(folder)}, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

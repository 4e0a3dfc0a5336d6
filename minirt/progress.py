"""Progress on stderr, for loading and for many prompts. Bars are drawn only on a terminal."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from minirt.errors import printable
from minirt.sizes import format_size

LoadProgress = Callable[[str, int, int], None]  # (stage, done, total); stage "weights" counts bytes, other stages steps
COMPILING = "compiling kernels"  # the stage of kernels that Triton's cache does not hold


@contextmanager
def load_bars(enabled: bool = True) -> Iterator[LoadProgress | None]:
    """Yield `progress(stage, done, total)`, or None unless `enabled`.

    It draws one bar per stage on a terminal. When kernels are compiled, it says once that this does not happen at every start.
    """
    tasks: dict[str, Any] = {}
    with _bars() if enabled and sys.stderr.isatty() else nullcontext() as bars:

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                if stage == COMPILING:
                    sys.stderr.write(f"{_compiling()}\n")  # Rich puts it above the bars
                tasks[stage] = None if bars is None else bars.add_task(stage, total=total, amount="")
            if bars is None:
                return
            amount = f"{done}/{total}"
            if stage == "weights":
                amount = f"{format_size(done)}/{format_size(total)}"
                speed = next(task.speed for task in bars.tasks if task.id == tasks[stage])
                amount += f" {speed / 1e9:.1f} GB/s" if speed else ""
            bars.update(tasks[stage], completed=done, total=total, amount=amount)

        yield progress if enabled else None


def _compiling() -> str:
    """What is done, and that it happens once."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    once = f"once for this GPU, model shape and version; later starts find them in {printable(folder)}"
    return f"compiling the model's Triton kernels: {once} (--warm-up none compiles at first use)"


class PromptBar:
    """Counts finished prompts and new tokens. Draws both, with tokens/s and the remaining time."""

    def __init__(self, bars: Any, total: int) -> None:
        """`bars`: a Rich `Progress`, or None to draw nothing. `total`: number of prompts."""
        self._bars, self._total = bars, total
        self._finished, self._tokens, self._started = 0, 0, time.perf_counter()
        self._task = bars.add_task("prompts", total=total, amount=f"0/{total}") if bars is not None else None

    def __call__(self, n_finished: int = 1, n_tokens: int = 0) -> None:
        """Add finished prompts and new tokens."""
        self._finished += n_finished
        self._tokens += n_tokens
        if self._bars is not None:
            rate = self._tokens / max(time.perf_counter() - self._started, 1e-9)
            self._bars.update(self._task, completed=self._finished, amount=f"{self._finished}/{self._total} {rate:,.0f} tokens/s")

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the bar while a result is written, if stdout is a terminal too."""
        if drawn := self._bars is not None and sys.stdout.isatty():
            self._bars.stop()
        try:
            yield
        finally:
            if drawn:
                self._bars.start()


@contextmanager
def prompt_bar(total: int, enabled: bool = True) -> Iterator[PromptBar]:
    """Yield a `PromptBar` for `total` prompts. Call it as `advance(n_finished=1, n_tokens=k)` when a prompt is finished."""
    with _bars() if enabled and sys.stderr.isatty() else nullcontext() as bars:
        yield PromptBar(bars, total)


def _bars() -> Any:
    """A Rich `Progress` on stderr. Rich must not redirect stdout: results would go to stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)

"""`minirt tune`: launch configurations measured on this GPU, for the shapes of one model.

Chosen on one run and confirmed on another, interleaved with the rule's own configuration: the best of many noisy timings
flatters itself. What is timed is a chain of launches with other weights each, as in a step: with dependent launch the next asks
for its weights while the one before still runs, so what is fastest alone need not be so there. Candidates are compiled in
parallel; one that cannot be compiled or launched, or computes something else, is out.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from minirt.bench.measure import gpu_seconds
from minirt.bench.report import Report, Row, heading, table
from minirt.errors import NumericsError
from minirt.kernels.compiling import compile_ahead
from minirt.kernels.tuning import Case

MARGIN = 0.98  # of the rule's time: what is not this much faster, twice, is not worth a configuration of its own
REPEATS = 20
CHAIN = 8  # launches that are timed together

Clock = Callable[[Callable[[], None]], float]  # seconds of a chain of launches


@dataclass
class Outcome:
    """What became of a case. Times in microseconds, of the run that confirms; `config` None: the rule's own stays."""

    bucket: str
    config: Any
    default_us: float
    best_us: float
    tried: int
    failed: dict[str, str] = field(default_factory=dict)  # candidate → why it is out


def tune(case: Case, time: Clock | None = None) -> Outcome:
    """Try a case's candidates.

    Args:
        time: how long a chain of launches takes; None: `gpu_seconds`.
    Raises:
        NumericsError, and whatever else the rule's own configuration raises.
    """
    time = time or gpu_seconds
    launch, check = case.prepare()
    launch(case.default)
    check(case.default)
    candidates = [config for config in dict.fromkeys(case.candidates) if config != case.default]
    failed = _compile(launch, candidates)
    for config in candidates:
        if repr(config) not in failed:
            try:
                check(config)
            except NumericsError as error:
                failed[repr(config)] = str(error)
    able = [config for config in candidates if repr(config) not in failed]
    first = _rounds(launch, [case.default, *able], time)
    best = min(first, key=lambda config: first[config])
    second = _rounds(launch, [case.default, best], time)
    keep = all(run[best] < MARGIN * run[case.default] for run in (first, second))
    default_us, best_us = second[case.default], second[best]
    return Outcome(case.bucket, best if keep else None, default_us, best_us if keep else default_us, len(candidates), failed)


def _compile(launch: Callable[[Any], None], candidates: Sequence[Any]) -> dict[str, str]:
    """Launch each once, on a GPU after all are compiled side by side → the failures. A kernel that does not fit or does not
    compile raises what is neither a RuntimeError nor an OSError, so everything is caught."""
    if torch.cuda.is_available():
        with compile_ahead(torch.device("cuda", torch.cuda.current_device()), ignore_errors=True):
            for config in candidates:
                with suppress(Exception):  # its launch tells
                    launch(config)
    failed: dict[str, str] = {}
    for config in candidates:
        try:
            launch(config)
        except Exception as error:
            failed[repr(config)] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    return failed


def _rounds(launch: Callable[[Any], None], configs: Sequence[Any], time: Clock) -> dict[Any, float]:
    """Microseconds of a launch of each, medians of REPEATS chains, which take turns."""
    times: dict[Any, list[float]] = {config: [] for config in configs}
    for _ in range(REPEATS):
        for config, own in times.items():
            own.append(time(partial(_chain, launch, config)))
    return {config: statistics.median(own) / CHAIN * 1e6 for config, own in times.items()}


def _chain(launch: Callable[[Any], None], config: Any) -> None:
    for _ in range(CHAIN):
        launch(config)


def row(family: str, outcome: Outcome) -> Row:
    """An outcome as a result: configurations as Python writes them, times in seconds."""
    return {
        "kernel": family, "bucket": outcome.bucket, "config": None if outcome.config is None else repr(outcome.config),
        "rule_s": outcome.default_us / 1e6, "best_s": outcome.best_us / 1e6, "tried": outcome.tried, "failed": outcome.failed,
    }  # fmt: skip


class TuneReport(Report):
    """Its context is `report.machine`'s."""

    def _markdown(self) -> str:
        columns = [
            ("kernel", lambda r: f"`{r['kernel']}`"),
            ("bucket", lambda r: r["bucket"]),
            ("configuration", lambda r: "the rule's" if r["config"] is None else f"`{r['config']}`"),
            ("rule's µs", lambda r: f"{r['rule_s'] * 1e6:,.1f}"),
            ("µs", lambda r: f"{r['best_s'] * 1e6:,.1f}"),
            ("tried", lambda r: str(r["tried"])),
            ("failed", lambda r: str(len(r["failed"]))),
        ]
        return "\n".join([*heading(self.context), *table(columns, self.results, left=3)]) + "\n"

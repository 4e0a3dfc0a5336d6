"""`minirt tune`: launch configurations measured on this GPU, for the shapes of one model.

Candidates are compiled in parallel; one that cannot be compiled or launched, or computes something else, is out. The others are
timed in chains of launches with other weights each: with dependent launch the next asks for its weights while the one before
still runs. A step has other kernels in between, and what is faster in a chain need not be so there; so the fastest are
finalists, and whole steps of the model decide (`whole_steps`). Chosen on one run and confirmed on another, interleaved with the
rule's own configuration: the best of many noisy timings flatters itself.
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
from minirt.kernels.compile.ahead_of_time import compile_ahead
from minirt.kernels.compile.tuning import Case

MARGIN = 0.98  # of the rule's time in a chain: what is not this much faster, twice, is not worth a configuration of its own
STEP_MARGIN = 0.998  # of the rule's time in a step, in which a bucket is one kernel of many
FINALISTS = 3
REPEATS = 20
CHAIN = 8  # launches that are timed together

Clock = Callable[[Callable[[], None]], float]  # seconds of a chain of launches
StepClock = Callable[[Case, Sequence[Any]], list[float]]  # seconds of the case's step with each of these configurations


@dataclass
class Outcome:
    """What became of a case; `config` None: the rule's own stays. Times are those of the runs that confirm, the rule's and the
    best's: in microseconds of a launch in a chain, equal if none is faster; in seconds of a step, if there were finalists."""

    bucket: str
    config: Any
    default_us: float
    best_us: float
    tried: int
    failed: dict[str, str] = field(default_factory=dict)  # candidate → why it is out
    default_step_s: float | None = None
    best_step_s: float | None = None


def tune(case: Case, time: Clock | None = None, step: StepClock | None = None) -> Outcome:
    """Try a case's candidates.

    Args:
        time: how long a chain of launches takes; None: `gpu_seconds`.
        step: how long a step takes; None, or of a case that no step runs: chains decide alone.
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
    ranked = sorted((config for config in able if first[config] < first[case.default]), key=lambda config: first[config])
    second = _rounds(launch, [case.default, *ranked[:1]], time)
    fastest = ranked[0] if ranked and _beats(ranked[0], case.default, MARGIN, first, second) else None
    default_us = second[case.default]
    best_us = default_us if fastest is None else second[fastest]
    outcome = Outcome(case.bucket, fastest, default_us, best_us, len(candidates), failed)
    if fastest is not None and step is not None and case.tokens is not None:
        outcome.config, outcome.default_step_s, outcome.best_step_s = _in_steps(case, ranked[:FINALISTS], step)
    return outcome


def _in_steps(case: Case, finalists: Sequence[Any], step: StepClock) -> tuple[Any, float, float]:
    """The finalist whose steps are shortest, or None if they are not shorter than the rule's, twice; seconds with the rule's and
    with it."""

    def run(configs: Sequence[Any]) -> dict[Any, float]:
        return dict(zip(configs, step(case, configs), strict=True))

    first = run([case.default, *finalists])
    best = min(finalists, key=lambda config: first[config])
    second = run([case.default, best])
    return best if _beats(best, case.default, STEP_MARGIN, first, second) else None, second[case.default], second[best]


def _beats(config: Any, other: Any, margin: float, *runs: dict[Any, float]) -> bool:
    return all(run[config] < margin * run[other] for run in runs)


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
        "rule_s": outcome.default_us / 1e6, "best_s": outcome.best_us / 1e6, "rule_step_s": outcome.default_step_s,
        "best_step_s": outcome.best_step_s, "tried": outcome.tried, "failed": outcome.failed,
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
            ("rule's step, ms", lambda r: "–" if r["rule_step_s"] is None else f"{r['rule_step_s'] * 1e3:.3f}"),
            ("step, ms", lambda r: "–" if r["best_step_s"] is None else f"{r['best_step_s'] * 1e3:.3f}"),
            ("tried", lambda r: str(r["tried"])),
            ("failed", lambda r: str(len(r["failed"]))),
        ]
        return "\n".join([*heading(self.context), *table(columns, self.results, left=3)]) + "\n"

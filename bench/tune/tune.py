"""`minirt tune`: launch configurations measured on this GPU, for the shapes of one model.

Candidates are compiled in parallel. A candidate that cannot be compiled or launched, or computes a wrong result, is dropped. The
others are timed in chains of launches. Each launch of a chain has its own weights, because with PDL a launch fetches its weights
while the launch before it still runs. A configuration that is faster in a chain can be slower in a step, where other kernels run
in between. So microbenchmarks pick finalists, and whole steps of the model pick the winner (`whole_steps`). The winner is chosen
on one run and confirmed on a second one, because the best of many noisy timings is too optimistic. The default configuration
takes turns with the candidates in both runs.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from minirt.bench.measure import gpu_seconds
from minirt.bench.report import Row, heading, table
from minirt.errors import NumericsError
from minirt.kernels.compile.ahead_of_time import AheadOfTime
from minirt.kernels.compile.tuning import Case

MARGIN = 0.98  # a winner takes at most this share of the default configuration's time in a chain, in both runs
STEP_MARGIN = 0.998  # the same for whole steps, in which the tuned kernel is one of many
FINALISTS = 3
REPEATS = 20
CHAIN = 8  # launches that are timed together

Clock = Callable[[Callable[[], None]], float]  # a chain of launches → its seconds
StepClock = Callable[[Case, Sequence[Any]], list[float]]  # a case and configurations → a step's seconds with each of them


@dataclass
class TuningResult:
    """The result of tuning one case. All times come from the confirming run. "rule" is the default configuration.

    Attributes:
        config: the winner; None: the default configuration stays.
        rule_s, best_s: seconds of a launch in a chain, with the default and with the fastest configuration. They are equal if no
            candidate is faster.
        rule_step_s, best_step_s: seconds of a step, with the default and with the best finalist; None: no steps were timed.
        tried: number of candidates.
        failed: candidates that were dropped, and why.
    """

    bucket: str
    config: Any
    rule_s: float
    best_s: float
    rule_step_s: float | None
    best_step_s: float | None
    tried: int
    failed: dict[str, str]


def tune(case: Case, time: Clock | None = None, step: StepClock | None = None) -> TuningResult:
    """Time a case's candidates and choose the best configuration.

    Args:
        time: measures a chain of launches; None: `gpu_seconds`.
        step: measures whole steps. If it is None, or if no step of the model runs this case, chains alone decide.
    Raises:
        NumericsError: the default configuration computes a wrong result. Its other errors are not caught either.
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
    config, rule_step_s, best_step_s = fastest, None, None
    if fastest is not None and step is not None and case.tokens is not None:
        config, rule_step_s, best_step_s = _in_steps(case, ranked[:FINALISTS], step)
    rule_s, best_s = second[case.default], second[case.default if fastest is None else fastest]
    return TuningResult(case.bucket, config, rule_s, best_s, rule_step_s, best_step_s, len(candidates), failed)


def _in_steps(case: Case, finalists: Sequence[Any], step: StepClock) -> tuple[Any, float, float]:
    """Let whole steps choose among the finalists.

    Returns:
        the fastest finalist, or None if it does not beat the default configuration in both runs; the seconds of a step with the
        default; the seconds with the fastest finalist.
    """

    def run(configs: Sequence[Any]) -> dict[Any, float]:
        return dict(zip(configs, step(case, configs), strict=True))

    first = run([case.default, *finalists])
    best = min(finalists, key=lambda config: first[config])
    second = run([case.default, best])
    return best if _beats(best, case.default, STEP_MARGIN, first, second) else None, second[case.default], second[best]


def _beats(config: Any, other: Any, margin: float, *runs: dict[Any, float]) -> bool:
    return all(run[config] < margin * run[other] for run in runs)


def _compile(launch: Callable[[Any], None], candidates: Sequence[Any]) -> dict[str, str]:
    """Launch each candidate once and return the failures. On a GPU, all candidates are compiled in parallel first.

    A kernel that does not compile or does not fit raises errors of many classes, so all exceptions are caught.
    """
    if torch.cuda.is_available():
        with AheadOfTime(torch.device("cuda", torch.cuda.current_device())) as compiler:
            for config in candidates:
                with suppress(Exception):  # the launch below reports the error
                    compiler.add(partial(launch, config))
            compiler.wait(ignore_errors=True)
    failed: dict[str, str] = {}
    for config in candidates:
        try:
            launch(config)
        except Exception as error:
            failed[repr(config)] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    return failed


def _rounds(launch: Callable[[Any], None], configs: Sequence[Any], time: Clock) -> dict[Any, float]:
    """Return seconds of a launch with each configuration: medians of REPEATS chains. The configurations take turns."""
    times: dict[Any, list[float]] = {config: [] for config in configs}
    for _ in range(REPEATS):
        for config, seconds in times.items():
            seconds.append(time(partial(_chain, launch, config)))
    return {config: statistics.median(seconds) / CHAIN for config, seconds in times.items()}


def _chain(launch: Callable[[Any], None], config: Any) -> None:
    for _ in range(CHAIN):
        launch(config)


def markdown(shared: Row, rows: list[Row]) -> str:
    """The report of `minirt tune`. Its context comes from `report.machine`, its rows are of `TuningResult`, with "kernel"."""
    columns = [
        ("kernel", lambda r: f"`{r['kernel']}`"), ("bucket", lambda r: r["bucket"]),
        ("configuration", lambda r: "the rule's" if r["config"] is None else f"`{r['config']}`"),
        ("rule's µs", lambda r: f"{r['rule_s'] * 1e6:,.1f}"), ("µs", lambda r: f"{r['best_s'] * 1e6:,.1f}"),
        ("rule's step, ms", lambda r: "–" if r["rule_step_s"] is None else f"{r['rule_step_s'] * 1e3:.3f}"),
        ("step, ms", lambda r: "–" if r["best_step_s"] is None else f"{r['best_step_s'] * 1e3:.3f}"),
        ("tried", lambda r: str(r["tried"])), ("failed", lambda r: str(len(r["failed"]))),
    ]  # fmt: skip
    return "\n".join([*heading(shared), *table(columns, rows, left=3)]) + "\n"

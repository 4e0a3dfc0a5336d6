"""The pictures of README.md and docs/, drawn from stored results. They need matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING

from minirt.bench.compare.picture import draw, save
from minirt.bench.tools.results import (
    BESIDE_VLLM,
    IN_PROCESS,
    VLLM_PROMPTS,
    VLLM_STEPS,
    Records,
    format_of,
    mark,
    points_of,
    run_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_KERNELS = 9  # of a picture; others are summed


def speed(records: Records, target: Path, note: str) -> None:
    """Draw decode steps and times to the first token of Qwen2.5-7B on an H200, with those of vLLM 0.24 and the limits."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 6.0), layout="constrained")
    axes = figure.subplots(2, 2)
    names = ("minirt", "vLLM 0.24.0, measured separately")
    for column, kind in enumerate(("bf16", "fp8")):
        decoded = [records[name] for name in (f"h200-decode-{kind}", f"h200-decode-{kind}-8000")]
        steps = {(row["batch_size"], row["context_len"]): row for own in decoded for row in own["results"]}
        marks = {(row["batch_size"], row["context_len"]): mark(own) for own in decoded for row in own["results"]}
        own = [steps[key]["step_s"]["median"] * 1e3 for key in VLLM_STEPS]
        least = [t * steps[key]["share_of_limit"] for t, key in zip(own, VLLM_STEPS, strict=True)]
        peers = [peers[column] for peers in VLLM_STEPS.values()]
        _bars(axes[0][column], [_step(*key) + marks[key] for key in VLLM_STEPS], own, peers, names, least)
        axes[0][column].set_title(_STEP_TITLE.format(kind), fontsize=9)
        prompts = {row["input_len"]: row for row in records[f"h200-prefill-{kind}"]["results"]}
        each = [1e3 / n for n in VLLM_PROMPTS]  # ms of a prompt → µs of a token
        own = [prompts[n]["time_to_first_token_s"]["median"] * 1e3 for n in VLLM_PROMPTS]
        reading = steps[1, 128]["weight_bytes_read"] / records[f"h200-decode-{kind}"]["read_ceiling"]["bytes_per_s"] * 1e3
        least = [max(reading, t * prompts[n]["share_of_matmul_ceiling"]) for t, n in zip(own, VLLM_PROMPTS, strict=True)]
        peers = [peers[column] for peers in VLLM_PROMPTS.values()]
        own, peers, least = ([t * e for t, e in zip(ms, each, strict=True)] for ms in (own, peers, least))
        unchecked = mark(records[f"h200-prefill-{kind}"])
        _bars(axes[1][column], [f"{n:,} tokens{unchecked}" for n in VLLM_PROMPTS], own, peers, names, least)
        axes[1][column].set_title(_PROMPT_TITLE.format(kind), fontsize=9)
    first = next(iter(records.values()))
    days = " to ".join(sorted({record["date"].partition(" ")[0] for record in records.values()}))
    title = f"{first['model']} shapes, random weights · {first['device']} · {days} · {_RATIO_TITLE}"
    title += "\n†: not checked in the run that timed it" * any(map(mark, records.values()))
    figure.suptitle(title, fontsize=9)
    save(figure, target, note)


_RATIO_TITLE = "×: how many times as fast minirt is"
_STEP_TITLE = "{}: decode step at a context of 128 tokens, ms (lower is better)"
_PROMPT_TITLE = "{}: time to the first token, µs per prompt token (lower is better)"


def engines(records: Records, target: Path, note: str) -> None:
    """Draw decode steps and times to the first token of minirt and vLLM on cards of one type.

    If vLLM was measured twice, the picture shows the faster time.
    """
    from matplotlib.figure import Figure

    record, older = records[BESIDE_VLLM], records[IN_PROCESS]
    figure = Figure(figsize=(10.0, 5.0), layout="constrained")
    axes = figure.subplots(2, 2)
    names = ("minirt", f"vLLM {run_of(record, 'vLLM', 'bf16').build}")
    for column, form in enumerate(("bf16", "fp8")):
        for row, kind in enumerate(("step", "prompt")):
            points = {key: own for key, own in points_of(records, form).items() if key[0] == kind and own.own and own.theirs}
            labels = [
                (_step(*key[1:]) if kind == "step" else f"{key[1]:,} tokens") + "‡" * point.in_process
                for key, point in points.items()
            ]
            scale = [1e3 if kind == "step" else 1e6 / key[1] for key in points]
            mine = [point.own[0] * s for point, s in zip(points.values(), scale, strict=True)]
            peers = [point.theirs[0] * s for point, s in zip(points.values(), scale, strict=True)]
            _bars(axes[row][column], labels, mine, peers, names)
            axes[row][column].set_title((_STEP_TITLE, _PROMPT_TITLE)[row].format(form), fontsize=9)
    title = f"{record['model']} shapes, random weights · {record['device']}, a card for each · {record['date']} · {_RATIO_TITLE}"
    title += f"\n‡: vLLM in the caller's process, {older['date']}"
    title += f" · {record['correctness']['why']}" * bool(mark(record))
    figure.suptitle(title, fontsize=9)
    save(figure, target, note)


def _step(batch: int, context: int) -> str:
    return f"batch {batch}" + (f"\ncontext {context:,}" if context != 128 else "")


def _bars(
    axes: "Axes", labels: list[str], own: list[float], peers: list[float], names: tuple[str, str],
    least: list[float] | None = None,
) -> None:  # fmt: skip
    """Draw two bars for each label, and above them how many times as fast the first one is."""
    where = range(len(labels))
    axes.bar([i - 0.2 for i in where], own, 0.4, label=names[0], color="C1")
    axes.bar([i + 0.2 for i in where], peers, 0.4, label=names[1], color="C7")
    for i, a, b in zip(where, own, peers, strict=True):
        axes.annotate(f"{b / a:.2f} ×", (i, max(a, b)), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    if least is not None:
        axes.hlines(least, [i - 0.4 for i in where], [i + 0.4 for i in where], "k", label="limit of the hardware, measured")
    axes.set_xticks(where, labels, fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_ylim(0, 1.3 * max(*own, *peers))
    axes.legend(fontsize=6, ncols=3, loc="upper left")


def layers(records: Records, target: Path, note: str) -> None:
    """Draw the error and the time of each layer of the embedded model."""
    (record,) = records.values()
    draw(record, record["results"], target, note)


def mixture(records: Records, target: Path, note: str) -> None:
    """Draw each kernel's share of a mixture's decode steps, by batch size."""
    from matplotlib.figure import Figure

    traces = {format_of(record): record["traces"] for record in records.values()}
    times: dict[str, float] = {}
    for row in (row for rows in traces.values() for row in rows):
        for kernel, us in row["us_a_step_by_kernel"].items():
            share = us / sum(row["us_a_step_by_kernel"].values())
            times[kernel] = max(share, times.get(kernel, 0.0))
    shown = sorted(times, key=lambda kernel: -times[kernel])[:_MOST_KERNELS]
    figure = Figure(figsize=(10.0, 4.5), layout="constrained")
    for axes, (kind, rows) in zip(figure.subplots(1, len(traces), squeeze=False)[0], traces.items(), strict=True):
        totals, ends = [sum(row["us_a_step_by_kernel"].values()) for row in rows], [0.0] * len(rows)
        for color, kernel in enumerate([*shown, "others"]):
            own = [row["us_a_step_by_kernel"] for row in rows]
            parts = [us.get(kernel, 0.0) if kernel in shown else sum(t for k, t in us.items() if k not in shown) for us in own]
            shares = [100 * part / total for part, total in zip(parts, totals, strict=True)]
            tone = f"C{color}" if kernel in shown else "lightgray"
            label = kernel.lstrip("_")  # legends leave out labels that begin with an underscore
            axes.bar(range(len(rows)), shares, 0.7, bottom=ends, label=label, color=tone)
            ends = [end + share for end, share in zip(ends, shares, strict=True)]
        axes.set_xticks(range(len(rows)), [f"batch {row['batch']}\n{row['step_ms']:.2f} ms" for row in rows], fontsize=8)
        axes.set_ylabel("share of the kernels' summed time, %", fontsize=8)
        axes.tick_params(axis="y", labelsize=7)
        axes.set_title(kind, fontsize=9)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=7)
    first = next(iter(records.values()))
    commits = ", ".join(dict.fromkeys(record["commit"] for record in records.values()))
    figure.suptitle(f"{first['model']} shapes, decode step by kernel · {first['device']} · minirt {commits}", fontsize=9)
    save(figure, target, note)

"""The pictures of README.md and docs/, drawn from stored results. They need matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING

from minirt.bench.compare.picture import draw, save
from minirt.bench.tools.results import VLLM_PROMPTS, VLLM_STEPS, Records, format_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_KERNELS = 9  # of a picture; others are summed


def speed(records: Records, target: Path, note: str) -> None:
    """Draw decode steps and times to the first token of Qwen2.5-7B, with those of vLLM and the limits."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 6.0), layout="constrained")
    axes = figure.subplots(2, 2)
    for column, kind in enumerate(("bf16", "fp8")):
        found = [row for name in (f"h200-decode-{kind}", f"h200-decode-{kind}-8000") for row in records[name]["results"]]
        steps = {(row["batch_size"], row["context_len"]): row for row in found}
        labels = [f"batch {batch}" + (f"\ncontext {context}" if context != 128 else "") for batch, context in VLLM_STEPS]
        own = [steps[key]["step_s"]["median"] * 1e3 for key in VLLM_STEPS]
        least = [t * steps[key]["share_of_limit"] for t, key in zip(own, VLLM_STEPS, strict=True)]
        _bars(axes[0][column], labels, own, [peers[column] for peers in VLLM_STEPS.values()], least)
        axes[0][column].set_title(f"{kind}: decode step, ms (lower is better)", fontsize=9)
        prompts = {row["input_len"]: row for row in records[f"h200-prefill-{kind}"]["results"]}
        each = [1e3 / n for n in VLLM_PROMPTS]  # ms of a prompt → µs of a token
        own = [prompts[n]["time_to_first_token_s"]["median"] * 1e3 for n in VLLM_PROMPTS]
        reading = steps[1, 128]["weight_bytes_read"] / records[f"h200-decode-{kind}"]["read_ceiling"]["bytes_per_s"] * 1e3
        least = [max(reading, t * prompts[n]["share_of_matmul_ceiling"]) for t, n in zip(own, VLLM_PROMPTS, strict=True)]
        labels = [f"{n} tokens" for n in VLLM_PROMPTS]
        peers = [peers[column] for peers in VLLM_PROMPTS.values()]
        _bars(axes[1][column], labels, *([t * e for t, e in zip(ms, each, strict=True)] for ms in (own, peers, least)))
        axes[1][column].set_title(f"{kind}: time to the first token, µs per prompt token (lower is better)", fontsize=9)
    first = next(iter(records.values()))
    commits = ", ".join(dict.fromkeys(record["commit"] for record in records.values()))
    figure.suptitle(f"{first['model']} shapes, random weights · {first['device']} · minirt {commits}", fontsize=9)
    save(figure, target, note)


def _bars(axes: "Axes", labels: list[str], own: list[float], peers: list[float], least: list[float]) -> None:
    where = range(len(labels))
    axes.bar([i - 0.2 for i in where], own, 0.4, label="minirt", color="C1")
    axes.bar([i + 0.2 for i in where], peers, 0.4, label="vLLM 0.24.0, measured separately", color="C7")
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

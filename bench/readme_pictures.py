"""The README's pictures of measurements, from the stored results that they show, by their names. They need matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING

from minirt.bench.picture import draw, save
from minirt.bench.readme_tables import VLLM_PROMPTS, VLLM_STEPS, Records

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def speed(records: Records, target: Path, note: str) -> None:
    """Decode steps and times to the first token of Qwen2.5-7B, beside vLLM's and the limits'."""
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
        axes[0][column].set_title(f"{kind}: a decode step, ms", fontsize=9)
        prompts = {row["input_len"]: row for row in records[f"h200-prefill-{kind}"]["results"]}
        each = [1e3 / n for n in VLLM_PROMPTS]  # ms of a prompt → µs of a token
        own = [prompts[n]["time_to_first_token_s"]["median"] * 1e3 for n in VLLM_PROMPTS]
        reading = steps[1, 128]["weight_bytes_read"] / records[f"h200-decode-{kind}"]["read_ceiling"]["bytes_per_s"] * 1e3
        least = [max(reading, t * prompts[n]["share_of_matmul_ceiling"]) for t, n in zip(own, VLLM_PROMPTS, strict=True)]
        labels = [f"{n} tokens" for n in VLLM_PROMPTS]
        peers = [peers[column] for peers in VLLM_PROMPTS.values()]
        _bars(axes[1][column], labels, *([t * e for t, e in zip(ms, each, strict=True)] for ms in (own, peers, least)))
        axes[1][column].set_title(f"{kind}: a prompt's first token, µs for each of its tokens", fontsize=9)
    first = next(iter(records.values()))
    commits = ", ".join(dict.fromkeys(record["commit"] for record in records.values()))
    figure.suptitle(f"{first['model']} shapes, random weights · {first['device']} · minirt {commits}", fontsize=9)
    save(figure, target, note)


def _bars(axes: "Axes", labels: list[str], own: list[float], peers: list[float], least: list[float]) -> None:
    where = range(len(labels))
    axes.bar([i - 0.2 for i in where], own, 0.4, label="minirt", color="C1")
    axes.bar([i + 0.2 for i in where], peers, 0.4, label="vLLM 0.24, measured apart", color="C7")
    axes.hlines(least, [i - 0.4 for i in where], [i + 0.4 for i in where], "k", label="what the measured ceilings allow")
    axes.set_xticks(where, labels, fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_ylim(0, 1.3 * max(*own, *peers))
    axes.legend(fontsize=6, ncols=3, loc="upper left")


def layers(records: Records, target: Path, note: str) -> None:
    """Error and time of each layer of the embedded model."""
    (record,) = records.values()
    draw(record, record["results"], target, note)

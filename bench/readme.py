"""The README's tables and pictures of measurements, made from the stored results: `python -P bench/readme.py` makes them anew.

A table stands between `<!-- NAME -->` and `<!-- end of NAME -->`; a picture, beside its results, carries their digest. A test
compares both with the results. Pictures need matplotlib.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

README, RESULTS = Path(__file__).parents[1] / "README.md", Path(__file__).parent / "results"
# vLLM 0.24.0 (CUDA graphs, torch.compile, FlashAttention 3), ms, measured apart on the same GPU model with the same torch: not
# among the stored results.
VLLM_STEPS = {
    (1, 128): (4.78, 3.41), (1, 8000): (4.91, 3.61), (8, 128): (4.93, 3.47), (64, 128): (5.22, 3.99), (256, 128): (9.08, 7.29)
}  # fmt: skip
VLLM_PROMPTS = {128: (7.83, 5.71), 512: (13.9, 9.25), 2048: (48.0, 29.4), 8192: (195.0, 129.0)}

Result = dict[str, Any]


def load(name: str) -> Result:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _rows(*names: str) -> Iterator[Result]:
    for name in names:
        yield from load(name)["results"]


def _digits(ms: float) -> str:
    """Three significant digits, at most two decimals."""
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}"


def decode() -> str:
    """Milliseconds of a decode step, and the share of the read ceiling."""
    found = [
        {(row["batch_size"], row["context_len"]): row for row in _rows(f"h200-decode-{kind}", f"h200-decode-{kind}-8000")}
        for kind in ("bf16", "fp8")
    ]
    cells = []
    for key, peers in VLLM_STEPS.items():
        own = [f"batch {key[0]}, context {key[1]}"]
        for rows, peer in zip(found, peers, strict=True):
            own += [_digits(rows[key]["step_s"]["median"] * 1e3), f"{rows[key]['share_of_read_ceiling']:.0%}", f"{peer:.2f}"]
        cells.append(own)
    return _table("ms a step", cells)


def prefill() -> str:
    """Milliseconds to the first token of one prompt, and the share of the rate of PyTorch's matrix product."""
    found = [{row["input_len"]: row for row in _rows(f"h200-prefill-{kind}")} for kind in ("bf16", "fp8")]
    cells = []
    for length, peers in VLLM_PROMPTS.items():
        own = [f"{length} tokens"]
        for rows, peer in zip(found, peers, strict=True):
            row = rows[length]
            own += [_digits(row["time_to_first_token_s"]["median"] * 1e3), f"{row['share_of_matmul_ceiling']:.0%}", _digits(peer)]
        cells.append(own)
    return _table("ms to the first token", cells)


def _table(title: str, cells: list[list[str]]) -> str:
    columns = [title, *(name for kind in ("bf16", "`--fp8`") for name in (kind, "of the ceiling", "vLLM 0.24"))]
    lines = [columns, ["---", *["---:"] * 6], *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fusion() -> str:
    """Of the embedded model: a decode step in its variants, and what fusing each kind of layer brings."""
    whole = load("h200-compare-embedded")["whole_model"]
    step, best = whole["decode"], whole["decode"]["candidate_s"]
    rows = [("eager, launched from Python", step["launched_s"]), ("eager in a CUDA graph", step["eager_s"]), ("Triton", best)]
    rows += [(f"Triton, but {kind} eager", part["step_s"]) for kind, part in whole["fusion"].items()]
    lines = [[f"decode step, batch {step['batch_size']}, context {step['context_len']}", "ms", "Triton is faster by"]]
    lines += [["---", "---:", "---:"]]
    lines += [[name, f"{seconds * 1e3:.3f}", "" if seconds == best else f"{seconds / best:.2f} ×"] for name, seconds in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TABLES: dict[str, Callable[[], str]] = {"decode": decode, "prefill": prefill, "fusion": fusion}


def render(text: str) -> str:
    """`text`, a README, with every table made anew."""

    def anew(match: re.Match[str]) -> str:
        return match["start"] + TABLES[match["name"]]() + match["end"]

    names = "|".join(TABLES)
    return re.sub(rf"(?P<start><!-- (?P<name>{names}) -->\n).*?(?P<end>\n<!-- end of (?P=name) -->)", anew, text, flags=re.DOTALL)


# --- pictures ---

# Name → the results that it shows.
PICTURES = {
    "speed": (
        "h200-decode-bf16", "h200-decode-fp8", "h200-decode-bf16-8000", "h200-decode-fp8-8000", "h200-prefill-bf16",
        "h200-prefill-fp8",
    ),
    "layers": ("h200-compare-embedded",),
}  # fmt: skip


def digest(name: str) -> str:
    """Of the results that a picture shows."""
    content = b"".join((RESULTS / f"{source}.json").read_bytes() for source in PICTURES[name])
    return f"results {hashlib.sha256(content).hexdigest()[:16]}"


def speed(target: Path) -> None:
    """Decode steps and times to the first token of Qwen2.5-7B, beside vLLM's and the ceiling's."""
    from matplotlib.figure import Figure

    from minirt.bench.picture import save

    figure = Figure(figsize=(10.0, 6.0), layout="constrained")
    axes = figure.subplots(2, 2)
    for column, kind in enumerate(("bf16", "fp8")):
        steps = {(row["batch_size"], row["context_len"]): row for row in _rows(f"h200-decode-{kind}", f"h200-decode-{kind}-8000")}
        labels = [f"batch {batch}" + (f"\ncontext {context}" if context != 128 else "") for batch, context in VLLM_STEPS]
        own = [steps[key]["step_s"]["median"] * 1e3 for key in VLLM_STEPS]
        least = [t * steps[key]["share_of_read_ceiling"] for t, key in zip(own, VLLM_STEPS, strict=True)]
        _bars(axes[0][column], labels, own, [peers[column] for peers in VLLM_STEPS.values()], least)
        axes[0][column].set_title(f"{kind}: a decode step, ms", fontsize=9)
        prompts = {row["input_len"]: row for row in _rows(f"h200-prefill-{kind}")}
        each = [1e3 / n for n in VLLM_PROMPTS]  # ms of a prompt → µs of a token
        own = [prompts[n]["time_to_first_token_s"]["median"] * 1e3 for n in VLLM_PROMPTS]
        reading = steps[1, 128]["weight_bytes_read"] / load(f"h200-decode-{kind}")["read_ceiling"]["bytes_per_s"] * 1e3
        least = [max(reading, t * prompts[n]["share_of_matmul_ceiling"]) for t, n in zip(own, VLLM_PROMPTS, strict=True)]
        labels = [f"{n} tokens" for n in VLLM_PROMPTS]
        peers = [peers[column] for peers in VLLM_PROMPTS.values()]
        _bars(axes[1][column], labels, *([t * e for t, e in zip(ms, each, strict=True)] for ms in (own, peers, least)))
        axes[1][column].set_title(f"{kind}: a prompt's first token, µs for each of its tokens", fontsize=9)
    about = load(PICTURES["speed"][0])
    figure.suptitle(f"{about['model']} shapes, random weights · {about['device']} · minirt {about['commit']}", fontsize=9)
    save(figure, target, digest("speed"))


def _bars(axes: "Axes", labels: list[str], own: list[float], peers: list[float], least: list[float]) -> None:
    where = range(len(labels))
    axes.bar([i - 0.2 for i in where], own, 0.4, label="minirt", color="C1")
    axes.bar([i + 0.2 for i in where], peers, 0.4, label="vLLM 0.24, measured apart", color="C7")
    axes.hlines(least, [i - 0.4 for i in where], [i + 0.4 for i in where], "k", label="what the measured ceilings allow")
    axes.set_xticks(where, labels, fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_ylim(0, 1.3 * max(*own, *peers))
    axes.legend(fontsize=6, ncols=3, loc="upper left")


def layers(target: Path) -> None:
    """Error and time of each layer of the embedded model."""
    from minirt.bench.picture import draw

    record = load(PICTURES["layers"][0])
    draw(record, record["results"], target, digest("layers"))


if __name__ == "__main__":
    README.write_text(render(README.read_text()))
    speed(RESULTS / "speed.svg")
    layers(RESULTS / "layers.svg")

"""The README's tables and pictures of measurements, made from the stored results.

python -P bench/readme.py [FILE …]     copies the files to bench/results if there are any, then makes all of them anew

A block stands between `<!-- NAME -->` and `<!-- end of NAME -->` and is empty as long as none of its results is stored; a
picture, beside its results, carries their digest. A test compares both with the results. Pictures need matplotlib.
"""

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from minirt.bench import readme_kernels as kernels
from minirt.bench import readme_layers as layers
from minirt.bench import readme_tables as tables
from minirt.bench.readme_tables import Records, Result

_HERE = Path(__file__).resolve().parent
README, RESULTS = _HERE.parent / "README.md", _HERE / "results"


class Block(NamedTuple):
    """`sources`: names or globs of the results, in order; `says`: what stands before the table, if there is one; `names`: say
    below it which results they are."""

    sources: tuple[str, ...]
    make: Callable[[Records], str]
    says: str = ""
    names: bool = True


_STEPS = ("h200-decode-bf16", "h200-decode-fp8", "h200-decode-bf16-8000", "h200-decode-fp8-8000")
_PROMPTS = ("h200-prefill-bf16", "h200-prefill-fp8")
_OTHERS = ("llama-3.1-8b", "qwen3-4b", "qwen2.5-0.5b", "smollm2-1.7b", "bf16-odd", "fp8-odd")
BLOCKS = {
    "about": Block(_STEPS + _PROMPTS, tables.about, names=False),
    "decode": Block(_STEPS, tables.decode),
    "prefill": Block(_PROMPTS, tables.prefill),
    "losses": Block(_STEPS + _PROMPTS, tables.losses, names=False),
    "checks": Block(_STEPS + _PROMPTS, tables.checks, names=False),
    "others": Block(
        tuple(f"h200-decode-{name}" + "*" * (not name.endswith("odd")) for name in _OTHERS), tables.others,
        "Decode steps of models, batches and contexts that the kernels' rules were not fitted to:",
    ),
    "trace": Block(
        ("h200-trace",), tables.trace,
        "The GPU while decoding, traced by the profiler, every gap between two kernels counted as idle (`bench/gpu_trace.py`):",
    ),
    "power": Block(
        ("h200-power",), tables.power,
        "GPUs of one host side by side, under sustained load: milliseconds, watts, and the clock to which the power limit brings "
        "them; energies are those above an idle GPU's (`bench/power.py`):",
    ),
    "startup": Block(
        ("h200-startup-bf16", "h200-startup-fp8"), tables.startup,
        "Process start to first token, random weights; warm: the median of several starts (`bench/startup.py`):",
    ),
    "loading": Block(
        ("h200-loading-bf16", "h200-loading-fp8"), tables.loading, "Loading a checkpoint (`bench/loading.py`):"
    ),
    "chunking": Block(
        ("h200-chunking-8448", "h200-chunking-2048", "h200-chunking-512"), tables.chunking,
        "Long prompts that arrive at once beside requests that are being answered: the times between two tokens of those, by the "
        "most tokens of a step (`minirt bench prefill --beside`; the commands are in the results):",
    ),
    "ablation": Block(
        ("h200-ablation-bf16", "h200-ablation-fp8"), layers.ablation,
        "What each fusion and trick brings to a decode step of Qwen2.5-7B: milliseconds that a step takes more when that one "
        "is left out. An empty cell: the step does not use it. Steps are CUDA graphs, without the sampler "
        "(`bench/ablation.py`):",
    ),
    "kernels": Block(
        tuple(f"h200-kernels-{name}" for name in ("rows", "linears", "mlp", "attention", "gemm", "others-attention", "others")),
        kernels.kernels,
        "Kernel by kernel, with a cold L2 (`minirt bench kernels`). Speedups are those over eager PyTorch · torch.compile · "
        "PyTorch's own kernel (cuBLAS, SDPA); where one is marked \\*, that form computes less than the kernel. Tokens of "
        "attention are new ones @ those in the cache; in decode, sequences @ tokens of each. Every point, with its error and "
        "its spread, is in the results:",
    ),
    "shapes": Block(
        ("h200-kernels-others-attention", "h200-kernels-others"), kernels.shapes,
        "Microseconds by which the kernels of a decode step miss their limits, means over 1, 3, 24 and 100 tokens, attention "
        "over 128 and 3000 tokens of context each:",
    ),
    "gemms": Block(
        ("h200-kernels-gemm",), kernels.gemms,
        "The products of prompts alone: microseconds · cuBLAS's time over ours, with `.fp8` that of its exact sums · of its fast "
        "ones (\\*: without the activation); errors against fp64, in the same order:",
    ),
    "attention": Block(
        ("h200-kernels-attention",), kernels.attention,
        "Attention of prompts alone, new tokens @ those in the cache; SDPA's fastest backend, which reads no pages, takes so "
        "many times as long:",
    ),
    "tuned": Block(
        ("h200-tune-bf16", "h200-tune-fp8"), kernels.tuned,
        "What `minirt tune` finds for Qwen2.5-7B beside the rules that are built in: buckets where a configuration is faster in "
        "chains of dependent launches, and those where it makes a whole step shorter, which alone are kept:",
    ),
    "fusion": Block(("h200-compare-embedded", "h200-compare-smollm2"), layers.fusion),
    "layers-7b": Block(
        ("h200-compare-7b-bf16", "h200-compare-7b-fp8"), layers.layers,
        "The same of Qwen2.5-7B, random weights, where the time goes into reading weights (`minirt compare`); errors are "
        "relative to fp64, the largest of all layers of a kind:",
    ),
    "cpu": Block(("cpu-smollm2",), tables.cpu),
}  # fmt: skip


def load(name: str) -> Result:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def stored(sources: tuple[str, ...]) -> dict[str, Result]:
    """Those of the results that there are, each once, in the order of the sources."""
    names = dict.fromkeys(file.stem for source in sources for file in sorted(RESULTS.glob(f"{source}.json")))
    return {name: load(name) for name in names}


def block(name: str) -> str:
    """What stands in a block: text, table, and which results at which commit that is; "" if none is stored."""
    own = BLOCKS[name]
    records = stored(own.sources)
    made = own.make(records) if records else ""
    parts = (own.says, made, origin(records) if own.names else "") if made else ()
    return "\n\n".join(filter(None, parts))


def origin(records: Records) -> str:
    """The results' names, by commit."""
    by_commit: dict[str, list[str]] = {}
    for name, record in records.items():
        for run in record if isinstance(record, list) else [record]:
            by_commit[run["commit"]] = list(dict.fromkeys([*by_commit.get(run["commit"], []), f"`{name}`"]))
    return "From " + "; ".join(f"{', '.join(names)} (commit {commit})" for commit, names in by_commit.items()) + "."


def render(text: str) -> str:
    """`text`, a README, with every block made anew."""

    def anew(match: re.Match[str]) -> str:
        made = block(match["name"])
        return match["start"] + (f"{made}\n" if made else "") + match["end"]

    names = "|".join(BLOCKS)
    pattern = rf"(?P<start><!-- (?P<name>{names}) -->\n)(?:.*?\n)??(?P<end><!-- end of (?P=name) -->)"
    return re.sub(pattern, anew, text, flags=re.DOTALL)


# Name → the results that it shows.
PICTURES = {"speed": _STEPS + _PROMPTS, "layers": ("h200-compare-embedded",)}


def digest(name: str) -> str:
    """Of the results that a picture shows."""
    content = b"".join((RESULTS / f"{source}.json").read_bytes() for source in PICTURES[name])
    return f"results {hashlib.sha256(content).hexdigest()[:16]}"


def picture(name: str, target: Path) -> None:
    from minirt.bench import readme_pictures

    getattr(readme_pictures, name)(stored(PICTURES[name]), target, digest(name))


def main(files: list[str]) -> None:
    for file in files:
        shutil.copy(file, RESULTS)
    README.write_text(render(README.read_text(encoding="utf-8")), encoding="utf-8")
    for name in PICTURES:
        picture(name, RESULTS / f"{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])

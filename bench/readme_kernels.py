"""The README's tables of single kernels: functions of the results of `minirt bench kernels`, as in readme_tables."""

import statistics
from typing import NamedTuple

from minirt.bench.readme_tables import NONE, Records, Result, format_of, percent, table, title_of

_MODEL = "Qwen2.5-7B"  # whose shapes have a row each; the others count in the summary
_BESIDE = {
    "eager": "eager PyTorch", "compiled": "torch.compile", "library": "PyTorch's own kernel", "library_fast": "cuBLAS, fast sums"
}  # fmt: skip
_SUMS = ("library", "library_fast")  # cuBLAS's, exact and fast


class Telling(NamedTuple):
    """(tokens, context) of the few and of the many; the context is None where there is none."""

    few: tuple[int, int | None]
    many: tuple[int, int | None]


def telling(kernel: str) -> Telling:
    """The two of a kernel's points that the README shows."""
    if kernel.startswith("attention_prefill"):
        return Telling((16, 32752), (8192, 0))
    if kernel.startswith("attention_decode"):
        return Telling((1, 8000), (64, 1000))
    if kernel.startswith(("lm_head", "sample_")):
        return Telling((1, None), (64, None))
    return Telling((512 if kernel.startswith("gemm_") else 1, None), (2048, None))


def kernels(records: Records) -> str:
    """A row for each operation at two points, then how often it beats what over all of them."""
    rows = _points(records)
    own = {(row["kernel"], row["tokens"], row["context"]): row for row in rows if row["model"] == _MODEL}
    cells = []
    for kernel in dict.fromkeys(row["kernel"] for row in rows if row["model"] == _MODEL):
        cells.append([f"`{kernel}`"])
        for tokens, context in telling(kernel):
            cells[-1] += _kernel(own.get((kernel, tokens, context)))
    point = ["tokens", "µs", "of the limit", "speedups"]
    parts = [table([f"kernel, {_MODEL}", *point, *point], cells)] if cells else []
    return "\n\n".join([*parts, _summary(rows)])


def _points(records: Records) -> list[Result]:
    """The rows of all records. Where two have a point, the first counts."""
    points: dict[tuple[str, str, int, int | None], Result] = {}
    for row in (row for record in records.values() for row in record["results"]):
        points.setdefault((row["kernel"], row["model"], row["tokens"], row["context"]), row)
    return list(points.values())


def _kernel(row: Result | None) -> list[str]:
    if row is None:
        return [NONE] * 4
    tokens = f"{row['tokens']:,}" + ("" if row["context"] is None else f" @ {row['context']:,}")
    if not row["seconds"]:
        return [tokens, "not timed", NONE, NONE]
    best = row["seconds"]["triton"]["median"]
    factors = []
    for name in ("eager", "compiled", "library"):
        factor = row["seconds"][name]["median"] / best if name in row["seconds"] else None
        text = NONE if factor is None else f"{factor:.2f}" if factor < 1.995 else f"{factor:.1f}"
        factors.append(text + "\\*" * (name in row["seconds"] and name in row["lacks"]))
    return [tokens, f"{best * 1e6:,.1f}", percent(row["share_of_limit"]), " · ".join(factors)]


def _summary(rows: list[Result]) -> str:
    lines = []
    for name, title in _BESIDE.items():
        for lacking in (False, True):
            found = [
                (row["seconds"][name]["median"] / row["seconds"]["triton"]["median"], row)
                for row in rows
                if name in row["seconds"] and (name in row["lacks"]) == lacking
            ]
            if not found:
                continue
            least, where = min(found, key=lambda pair: pair[0])
            context = "" if where["context"] is None else f" @ {where['context']:,}"
            model = "" if where["model"] == _MODEL else f", {where['model']}"
            lines.append([
                title + ", which computes less\\*" * lacking, str(len(found)), str(sum(ratio > 1 for ratio, _ in found)),
                f"{statistics.median(ratio for ratio, _ in found):.2f} ×",
                f"{least:.2f} × (`{where['kernel']}`, {where['tokens']:,}{context}{model})",
            ])  # fmt: skip
    return table(["Triton beside, all stored points", "points", "Triton faster at", "median", "least"], lines)


def shapes(records: Records) -> str:
    """Microseconds that each kernel loses to its limit, a model's mean over its points, and the most beside Qwen2.5-7B's."""
    rows = [row for row in _points(records) if row["seconds"]]
    models = list(dict.fromkeys(row["model"] for row in rows))
    cells = []
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        lost = {
            model: [row["lost_s"] for row in rows if (row["kernel"], row["model"]) == (kernel, model)] for model in models
        }
        means = {model: statistics.mean(own) for model, own in lost.items() if own}
        own = means.pop(_MODEL, None)
        factor = NONE if own is None or not means else f"{max(means.values()) / own:.2f} ×"
        shown = ({_MODEL: own} if own is not None else {}) | means
        cells.append([f"`{kernel}`", *(f"{shown[m] * 1e6:,.1f}" if m in shown else NONE for m in models), factor])
    return table(["µs lost", *models, f"the most, beside {_MODEL}'s"], cells)


def gemms(records: Records) -> str:
    """The products of many tokens: microseconds, and how much longer PyTorch's take, by tokens."""
    rows = [row for record in records.values() for row in record["results"] if row["seconds"]]
    counts = sorted({row["tokens"] for row in rows})
    cells = []
    for kernel, model in dict.fromkeys((row["kernel"], row["model"]) for row in rows):
        own = {row["tokens"]: row for row in rows if (row["kernel"], row["model"]) == (kernel, model)}
        cells.append([f"`{kernel}`, {model}", *(_gemm(own.get(count)) for count in counts)])
        forms = [name for name in ("triton", *_SUMS) if any(name in row["errors"] for row in own.values())]
        most = (max(row["errors"][name]["relative"] for row in own.values() if name in row["errors"]) for name in forms)
        cells[-1].append(" · ".join(f"{error:.1e}" for error in most))
    return table(["product, model", *(f"{count:,} tokens" for count in counts), "largest error"], cells)


def _gemm(row: Result | None) -> str:
    if row is None:
        return NONE
    best = row["seconds"]["triton"]["median"]
    beside = [
        f"{row['seconds'][name]['median'] / best:.2f}" + "\\*" * (name in row["lacks"])
        for name in _SUMS
        if name in row["seconds"]
    ]
    return " · ".join([f"{best * 1e6:,.1f}", *beside])


def attention(records: Records) -> str:
    """Attention of prompts and of their chunks, by new tokens @ those in the cache, with pages of both kinds."""
    rows = [
        row for record in records.values() for row in record["results"]
        if row["seconds"] and row["kernel"].startswith("attention_prefill") and row["model"] == _MODEL
    ]  # fmt: skip
    names = list(dict.fromkeys(row["kernel"] for row in rows))
    own = {(row["kernel"], row["tokens"], row["context"]): row for row in rows}
    cells = []
    for tokens, context in dict.fromkeys((row["tokens"], row["context"]) for row in rows):
        cells.append([f"{tokens:,} @ {context:,}"])
        for kernel in names:
            cells[-1] += _attention(own.get((kernel, tokens, context)))
    columns = ["µs", "TFLOP/s", "GB/s", "SDPA"]
    return table(["tokens", *(f"`{kernel}`: {name}" if name == "µs" else name for kernel in names for name in columns)], cells)


def _attention(row: Result | None) -> list[str]:
    if row is None:
        return [NONE] * 4
    best = row["seconds"]["triton"]["median"]
    rates = [f"{row[name] / unit:,.0f}" for name, unit in (("flops_per_s", 1e12), ("bytes_per_s", 1e9))]
    beside = f"{row['seconds']['library']['median'] / best:.2f} ×" if "library" in row["seconds"] else NONE
    return [f"{best * 1e6:,.1f}", *rates, beside]


def _gains(gains: list[float]) -> list[str]:
    """How many, their median and the largest, in per cent."""
    return [str(len(gains)), *([f"{statistics.median(gains):.1%}", f"{max(gains):.1%}"] if gains else [NONE, NONE])]


def tuned(records: Records) -> str:
    """How often configurations were found that are faster than the rules' in chains, and how often steps confirmed them, and by
    how much, for each family and format."""
    cells = []
    for record in records.values():
        for kernel in dict.fromkeys(row["kernel"] for row in record["results"]):
            own = [row for row in record["results"] if row["kernel"] == kernel]
            chains = [1 - row["best_s"] / row["rule_s"] for row in own if row["best_s"] < row["rule_s"]]
            kept = [row for row in own if row["config"] is not None and row["best_step_s"] is not None]
            steps = [1 - row["best_step_s"] / row["rule_step_s"] for row in kept]
            name = f"`{kernel}`, {title_of(format_of(record))}"
            cells.append([name, str(len(own)), str(sum(row["tried"] for row in own)), *_gains(chains), *_gains(steps)])
    columns = ["kernel", "buckets", "tried", "faster in chains", "median", "most", "and in steps", "median", "most"]
    return table(columns, cells)

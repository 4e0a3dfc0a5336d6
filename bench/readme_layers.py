"""The README's tables of layers, fusions and kernels: functions of the stored results, as in readme_tables."""

import statistics
from typing import NamedTuple

from minirt.bench.readme_tables import NONE, Records, Result, format_of, milliseconds, percent, signed, table, title_of


def ablation(records: Records) -> str:
    """Milliseconds of a step that each trick brings, for each batch."""
    columns = [(format_of(record), row) for record in records.values() for row in record["results"]]
    what: dict[str, str] = {}
    for record in records.values():
        what |= record["what"]
    rows = [["the step as it is, ms", *(milliseconds(row["step_s"] * 1e3) for _, row in columns)]]
    for name, text in what.items():
        own = [row["tricks"].get(name) for _, row in columns]
        if any(own):
            rows.append([text, *("" if one is None else signed(one["brings_s"] * 1e3, 2) for one in own)])
    return table(["ms more without", *(f"{title_of(form)}, batch {row['batch_size']}" for form, row in columns)], rows)


def fusion(records: Records) -> str:
    """A decode step in its variants: what fusing each kind of layer brings."""
    whole = [(record, record["whole_model"]) for record in records.values()]
    whole = [(record, own) for record, own in whole if own and own["decode"]]
    if not whole:
        return ""
    _, first = whole[0]
    kinds = dict.fromkeys(kind for _, own in whole for kind in own["fusion"])
    names = ["eager, launched from Python", "eager in a CUDA graph", "Triton", *(f"Triton, but {kind} eager" for kind in kinds)]
    cells: list[list[str]] = [[name] for name in names]
    for _, own in whole:
        step = own["decode"]
        best = step["candidate_s"]
        parts = [own["fusion"].get(kind, {}).get("step_s") for kind in kinds]
        for row, seconds in zip(cells, [step["launched_s"], step["eager_s"], best, *parts], strict=True):
            factor = "" if row[0] == "Triton" else NONE if seconds is None else f"{seconds / best:.2f} ×"
            row += [NONE if seconds is None else f"{seconds * 1e3:.3f}", factor]
    columns = [f"decode step, batch {first['decode']['batch_size']}, context {first['decode']['context_len']}"]
    for record, _ in whole:
        columns += [f"{title_of(format_of(record))}, ms", "Triton is faster by"]
    return table(columns, cells)


def layers(records: Records) -> str:
    """Medians over the layers of each kind, and their largest error; then the whole step."""
    found = [(record, row) for record in records.values() for row in record["results"]]
    rows = []
    for step, kind in dict.fromkeys((row["step"], row["kind"]) for _, row in found):
        cells = [f"{step}, {kind}"]
        for record in records.values():
            own = [row for row in record["results"] if (row["step"], row["kind"]) == (step, kind)]
            cells += _layer(own)
        rows.append(cells)
    names = ("eager, µs", "Triton, µs", "of the limit", "error / PyTorch's")
    columns = [f"{title_of(format_of(record))}: {name}" for record in records.values() for name in names]
    return "\n\n".join(filter(None, (table(["layer, medians", *columns], rows), fusion(records))))


def _layer(rows: list[Result]) -> list[str]:
    timed = [row for row in rows if row["candidate_s"] is not None]
    cells = [NONE] * 3
    if timed:
        cells = [f"{statistics.median(row[name] for row in timed) * 1e6:,.1f}" for name in ("eager_s", "candidate_s")]
        shares = [row["share_of_limit"] for row in timed if row["share_of_limit"] is not None]
        cells.append(percent(statistics.median(shares) if shares else None))
    # What a layer adds to the residual stream; of the embedding and the head, which add nothing, the output.
    parts = [row["out"] if row["added"]["error"]["relative"] is None else row["added"] for row in rows]
    errors = [max(part[whose]["relative"] for part in parts) for whose in ("error", "torch") if parts]
    return [*cells, " / ".join(f"{error:.1e}" for error in errors) or NONE]


# --- kernels ---

_MODEL = "Qwen2.5-7B"  # whose shapes have a row each; the others count in the summary
_BESIDE = {
    "eager": "eager PyTorch", "compiled": "torch.compile", "library": "PyTorch's own kernel", "library_fast": "cuBLAS, fast sums"
}  # fmt: skip


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
    rows = [row for record in records.values() for row in record["results"]]
    # Where two results have a point, the first counts.
    own = {(row["kernel"], row["tokens"], row["context"]): row for row in reversed(rows) if row["model"] == _MODEL}
    cells = []
    for kernel in dict.fromkeys(row["kernel"] for row in rows if row["model"] == _MODEL):
        cells.append([f"`{kernel}`"])
        for tokens, context in telling(kernel):
            cells[-1] += _kernel(own.get((kernel, tokens, context)))
    point = ["tokens", "µs", "of the limit", "speedups"]
    parts = [table([f"kernel, {_MODEL}", *point, *point], cells)] if cells else []
    return "\n\n".join([*parts, _summary(rows)])


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
    rows = [row for record in records.values() for row in record["results"] if row["seconds"]]
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

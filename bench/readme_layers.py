"""The README's tables of layers and fusions: functions of the stored results, as in readme_tables."""

import statistics

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
    several = len({record["model"] for record, _ in whole}) > 1
    for record, _ in whole:
        title = title_of(format_of(record))
        columns += [f"{record['model']}, {title}, ms" if several else f"{title}, ms", "Triton is faster by"]
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
    # What a layer adds to the residual stream; of those that add nothing, the output.
    parts = [row["out"] if row["added"]["error"]["relative"] is None else row["added"] for row in rows]
    errors = [max(part[whose]["relative"] for part in parts) for whose in ("error", "torch") if parts]
    return [*cells, " / ".join(f"{error:.1e}" for error in errors) or NONE]

"""The report of `minirt compare`: layers, the whole model, and the decode step in its variants; and the picture of the layers."""

from pathlib import Path
from typing import Any

from minirt.bench import picture
from minirt.bench.compare.compare import Result
from minirt.bench.picture import Panel, Series
from minirt.bench.report import LIMIT, Column, Report, Row, as_text, build, heading, table

NO_SPEED = "No figure here is a speed: this is a CPU, and the Triton kernels run in Triton's interpreter"


def markdown(shared: Row, rows: list[Row]) -> str:
    """The report of `minirt compare`: a table of layers and, for the whole model, a table of decode steps."""
    return "\n".join([*heading(shared), f"{shared['model']} {shared['dtype']}: {_body(shared, rows)}"])


def _body(facts: Row, rows: list[Row]) -> str:
    """What was compared, the table of layers, the whole model, and whether the bounds hold. `facts`: see `_facts`."""
    lines = [f"{' and '.join(facts['implementations'])} against eager; errors are relative to eager in fp64.", ""]
    lines += [f"Not compared: {name}: {why}." for name, why in facts["skipped"].items()] + [""] * bool(facts["skipped"])
    columns = _LAYER_COLUMNS if any(row["eager_s"] for row in rows) else _ERROR_COLUMNS
    lines += table(columns, rows, left=3)
    lines += ["", LIMIT] if columns is _LAYER_COLUMNS else []
    if any(row["cold_l2"] is False for row in rows):
        lines += ["", r"\* All layers of this kind together read at most twice the size of the L2 cache: not a cold time."]
    if facts["whole_model"]:
        lines += ["", *_whole(facts["whole_model"], "+".join(facts["implementations"]))]
    return "\n".join([*lines, "", *_verdict(facts["faults"])]) + "\n"


def _facts(result: Result) -> Row:
    return {
        "implementations": sorted({row["implementation"] for row in result.rows}), "matmul_ceilings": result.matmul,
        "skipped": result.skipped, "whole_model": result.model, "faults": result.faults,
    }


def as_table(result: Result) -> str:
    """A result as text for a terminal."""
    return as_text(_body(_facts(result), result.rows)).rstrip("\n")


def report(shared: Row, result: Result, cuda: bool) -> Report:
    """Make the report of a result; `shared` comes from `report.context`."""
    single = {name: value for name, value in shared.items() if name != "matmul_ceiling"}  # `matmul_ceilings` replaces it
    return Report(single | _facts(result) | {"no_speed": None if cuda else NO_SPEED}, result.rows, markdown)


def _whole(whole: Row, names: str) -> list[str]:
    text, decode = whole["text"], whole["decode"]
    kl, kl_max, kl_truth, kl_eager, relative, eagers, limit = (
        _number(text[name])
        for name in ("kl_mean", "kl_max", "kl_truth", "kl_truth_torch", "relative", "relative_torch", "limit")
    )
    lines = [
        f"Whole model, {text['tokens']} tokens of text: KL(eager ‖ this) mean {kl}, max {kl_max} nats (mean from the truth "
        f"{kl_truth}, eager's {kl_eager}). Top-1 agrees with eager at {text['agree']} of {text['tokens']} positions, with the "
        f"truth at {text['clear_agree']} of the {text['clear']} where rounding cannot decide. Logits: relative error {relative}, "
        f"eager's {eagers}, limit {limit}.",
    ]
    if decode is None:
        return lines
    best, batch = decode["candidate_s"], decode["batch_size"]
    rows = [("eager, launched from Python", decode["launched_s"]), ("eager, CUDA graph", decode["eager_s"])]
    rows += [(f"**{names}, CUDA graph**", best)]
    rows += [(f"{names}, but {kind} eager, CUDA graph", part["step_s"]) for kind, part in whole["fusion"].items()]
    columns: list[Column] = [
        (f"decode step, batch {batch}, context {decode['context_len']}", lambda r: r["name"]),
        ("tokens/s", lambda r: f"{batch / r['seconds']:,.1f}"), ("step ms", lambda r: f"{r['seconds'] * 1e3:,.3f}"),
        (f"{names} takes less", lambda r: "" if r["seconds"] == best else f"{(r['seconds'] - best) * 1e3:,.3f} ms"),
        ("its speedup", lambda r: "" if r["seconds"] == best else f"{r['seconds'] / best:.3g}"),
    ]  # fmt: skip
    lines += ["", *table(columns, [{"name": name, "seconds": seconds} for name, seconds in rows], left=1)]
    lines += ["", "The eager CUDA graph is valid only for this context length: its attention reads the lengths on the host."]
    return lines


def _verdict(faults: list[str]) -> list[str]:
    if not faults:
        return ["All bounds hold."]
    return [f"**{len(faults)} bounds are broken**, so nothing was timed:", "", *(f"- {fault}" for fault in faults)]


def _number(value: float | None, form: str = ".1e") -> str:
    return "-" if value is None else format(value, form)


def _pair(column: str, error: str, *, limit: bool = False) -> Any:
    def cell(row: Row) -> str:
        sides = ("error", "torch", "limit") if limit else ("error", "torch")
        values = [row[column][side][error] for side in sides]
        if row[column]["torch"][error] is None:
            return ""
        return " / ".join(map(_number, values))

    return cell


def _cached(row: Row) -> str:
    views = [name for name, value in row.items() if isinstance(value, dict) and name not in ("out", "added")]
    names = [name for name in views if row[name]["limit"]["relative"] is not None]
    if not names:
        return ""
    sides = ([row[name][side]["relative"] for name in names] for side in ("error", "torch"))
    return " / ".join("-" if None in side else _number(max(side)) for side in sides)


def _micros(name: str) -> Any:
    return lambda row: _number(row[name] and row[name] * 1e6, ",.1f") + ("\\*" if row["cold_l2"] is False else "")


def _cosine(row: Row) -> str:
    cosine = row["out"]["error"]["cosine"]
    return "-" if cosine is None else _number(max(1 - cosine, 0.0), ".0e")


_ERROR_COLUMNS: list[Column] = [
    ("step", lambda r: r["step"]), ("layer", lambda r: r["layer"]), ("runs", lambda r: r["implementation"]),
    ("rows", lambda r: f"{r['rows']:,}"), ("error / eager's / limit", _pair("out", "relative", limit=True)),
    ("worst row", _pair("out", "worst_row", limit=True)), ("of what it adds", _pair("added", "relative", limit=True)),
    ("max", _pair("out", "largest")), ("1 − cosine", _cosine), ("K, V or state", _cached),
    ("", lambda r: "" if r["within_bounds"] else "**broken**"),
]  # fmt: skip
_LAYER_COLUMNS: list[Column] = [
    *_ERROR_COLUMNS[:-1], ("eager µs", _micros("eager_s")), ("µs", _micros("candidate_s")),
    ("speedup", lambda r: _number(r["speedup"], ".3g")), ("MB", lambda r: _number(r["bytes"] / 1e6, ",.2f")),
    ("of the limit", lambda r: "-" if r["share_of_limit"] is None else f"{r['share_of_limit']:.0%}"), _ERROR_COLUMNS[-1],
]  # fmt: skip


def draw(shared: Row, rows: list[Row], target: Path, note: str = "") -> None:
    """Write the picture of a report's context and rows, with one column for each step. The suffix of `target` sets the format.

    The upper row shows the relative error of what each layer adds (for embedding, select and head: of the output), PyTorch's
    error in the same dtype, and the limit. The lower row shows the times of both implementations, unless nothing was timed.

    Args:
        note: see `picture.save`.
    Raises:
        MinirtError: the file cannot be written.
    """
    steps: dict[str, list[Row]] = {}
    for row in rows:
        steps.setdefault(row["step"], []).append(row)
    timed, width = rows[0]["eager_s"] is not None, max(5.0, 0.16 * len(rows) / len(steps) + 2.5)
    lines = [[_errors(name, of_step, not timed) for name, of_step in steps.items()]]
    lines += [[_layer_times(of_step) for of_step in steps.values()]] if timed else []
    warning = f"\n{shared['no_speed']}" if shared["no_speed"] else ""
    title = f"{shared['model']} {shared['dtype']} · {shared['device']} · minirt {build(shared)}{warning}"
    picture.draw(lines, title, target, (width * len(steps), 7.5 if timed else 4.5), note)


def _errors(step: str, rows: list[Row], lowest: bool) -> Panel:
    parts = [row["out" if row["added"]["torch"]["relative"] is None else "added"] for row in rows]
    series = [
        Series(name, [part[side]["relative"] for part in parts], style=style)
        for name, side, style in (("limit", "limit", "k_"), ("eager", "torch", "C0o"), (_names(rows), "error", "C1x"))
    ]
    ticks = [row["layer"] if lowest else "" for row in rows]  # else they are those of the times below
    return Panel(series, step, ylabel="relative error of what the layer adds", ticks=ticks, rotation=90, log="y")


def _layer_times(rows: list[Row]) -> Panel:
    series = [
        Series(name, [row[seconds] * 1e6 for row in rows], width=0.4, shift=shift)
        for name, seconds, shift in (("eager", "eager_s", -0.2), (_names(rows), "candidate_s", 0.2))
    ]
    limits = [row["limit_s"] and row["limit_s"] * 1e6 for row in rows]
    series += [Series("the hardware's limit", limits, style="k_")] if any(limits) else []
    return Panel(series, ylabel="µs", ticks=[row["layer"] for row in rows], rotation=90, log="y")


def _names(rows: list[Row]) -> str:
    return ", ".join(dict.fromkeys(row["implementation"] for row in rows))

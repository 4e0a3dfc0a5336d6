"""Benchmark results as text, Markdown, CSV, JSON or JSON lines, with the device, versions, command and checks behind them."""

import csv
import io
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minirt.bench.summary import summarize
from minirt.sizes import format_size

if TYPE_CHECKING:  # `minirt bench serve` reports without PyTorch
    import torch

    from minirt.bench.ceiling import Ceiling, MatmulCeiling
    from minirt.generator import Generator

FORMATS = ("text", "md", "csv", "json", "jsonl")
Row = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """Results of one run.

    Attributes:
        context: the values that all results share (see the function `context`).
        results: one dictionary for each result; each benchmark's `run` documents its keys.
        markdown: makes the Markdown report of the context and the results; None: `of_a_model`.
        text: the same of the text report; None: the Markdown report without marks.
    """

    context: Row
    results: list[Row]
    markdown: Callable[[Row, list[Row]], str] | None = None
    text: Callable[[Row, list[Row]], str] | None = None

    def render(self, form: str) -> str:
        """Return the report as text that ends with a newline; `form` is one of FORMATS."""
        if form == "json":
            return json.dumps(self.context | {"results": self.results}, indent=1, ensure_ascii=False) + "\n"
        if form == "jsonl":
            return "".join(json.dumps(self.context | row, ensure_ascii=False) + "\n" for row in self.results)
        if form == "csv":
            return self._csv()
        if form == "text" and self.text is not None:
            return self.text(self.context, self.results)
        report = (self.markdown or of_a_model)(self.context, self.results)
        return as_text(report) if form == "text" else report

    def _csv(self) -> str:
        rows = [dict(_flat(self.context | row)) for row in self.results]
        text = io.StringIO()
        columns = dict.fromkeys(name for row in rows for name in row)  # rows may have different columns
        writer = csv.DictWriter(text, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


def of_a_model(shared: Row, results: list[Row]) -> str:
    """Return a heading (device, versions, ceilings, correctness) and a table in the style of llama-bench."""
    lines = [*heading(shared), f"Correctness: {_sentence(shared['correctness'])}.", ""]
    rows = [shared | row for row in results]
    columns = _SHARED_COLUMNS + [
        (title, cell) for title, cell in _COLUMNS[shared["benchmark"]] if {cell(row) for row in rows} != {"-"}
    ]
    notes = [_TESTS] if shared["benchmark"] == "speed" else []
    notes += [LIMIT] if any(title == "of the limit" for title, _ in columns) else []
    above = any((row.get(name) or 0) > 1 for row in rows for name in _MEASURED_SHARES)
    notes += [_CEILING_TOO_LOW] if above else []
    lines += table(columns, rows, left=5)
    return "\n".join([*lines, *(line for note in notes for line in ("", note))]) + "\n"


def heading(shared: Row) -> list[str]:
    """Return the first lines of a Markdown report: device, versions, and what was measured of memory bandwidth and products."""
    versions = " · ".join(
        f"{name} {version}" if (version := shared["versions"][name]) else f"no {name}" for name in ("torch", "triton")
    )
    kind = shared["device"] if shared["backend"] == "CUDA" else f"**CPU figures, no GPU:** {shared['device']}"
    lines = [f"{kind} · {versions} · minirt {build(shared)} · {shared['date']}", ""]
    if shared["read_ceiling"]:
        rate, sheet = shared["read_ceiling"]["bytes_per_s"] / 1e9, shared["datasheet_bytes_per_s"]
        lines += [f"Memory bandwidth, same run: {rate:,.1f} GB/s ({shared['read_ceiling']['how']})"
                  + (f"; datasheet: {sheet / 1e9:,.0f} GB/s" if sheet else "") + ".", ""]  # fmt: skip
    for product in shared.get("matmul_ceilings") or filter(None, [shared.get("matmul_ceiling")]):
        rate = product["flops_per_s"] / 1e12
        lines += [f"Matrix product, same run: {rate:,.{1 if rate >= 1 else 3}f} TFLOP/s ({product['how']}).", ""]
    return [*lines, f"**{shared['no_speed']}.**", ""] if shared.get("no_speed") else lines


def context(
    benchmark: str, generator: "Generator", *, name: str, command: list[str], correctness: Row, ceiling: "Ceiling | None",
    products: "MatmulCeiling | None" = None,
) -> Row:
    """Return the values that all results of one run of a model share: `machine`, model, correctness, ceilings.

    Sizes are in bytes, times in seconds.
    """
    from minirt import models
    from minirt.modeling.model import Model

    return machine(benchmark, generator.device, command, ceiling) | {
        "model": name, "model_type": generator.config.model_type, "weight_bytes": generator.plan.weight_bytes,
        "parameters": Model(generator.config, models.build(generator.config)).num_parameters,
        "dtype": " · ".join(sorted({row.dtype for row in generator.plan.rows} | set(generator.plan.formats))),
        "kv_bytes_per_token": generator.kv_bytes_per_token,
        "implementations": sorted({row.implementation for row in generator.plan.rows}), "correctness": correctness,
        "matmul_ceiling": vars(products) if products else None,
    }


def machine(benchmark: str, device: "torch.device", command: list[str], ceiling: "Ceiling | None") -> Row:
    """Return where and with what a benchmark ran: device, versions, commit, command line, memory bandwidth."""
    import torch

    from minirt.bench.ceiling import datasheet_bandwidth, device_name
    from minirt.bench.environment import environment
    from minirt.device import triton_installed

    facts = environment()
    triton = facts["triton"] if triton_installed() else None
    return {
        "schema": 1, "benchmark": benchmark, "backend": "CUDA" if device.type == "cuda" else "CPU",
        "device": device_name(device),
        "versions": {"python": facts["python"], "minirt": facts["minirt"], "triton": triton, "torch": torch.__version__},
        "commit": commit(), "date": date(), "command": command, "environment": facts,
        "read_ceiling": vars(ceiling) if ceiling else None, "datasheet_bytes_per_s": datasheet_bandwidth(device),
    }


def date() -> str:
    """Return the date and time of a result."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def build(shared: Row) -> str:
    """Return what a report's heading calls the minirt that ran: its commit, else its version."""
    return shared["commit"] or shared["versions"]["minirt"]


def commit() -> str | None:
    """Return the commit of the running source, with "-dirty" if tracked files differ from it; None without git.

    The commit is used only if git tracks this file. Otherwise a minirt installed inside another repository would report that
    repository's commit.
    """
    file = Path(__file__).resolve()

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(file.parent), *arguments], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=10", "HEAD")
    if head and git("ls-files", "--error-unmatch", file.name) is not None:
        return head + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    return None


def _flat(row: Row, prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten nested dictionaries to dotted names; join the values of a list with spaces."""
    pairs: list[tuple[str, Any]] = []
    for key, value in row.items():
        if isinstance(value, dict):
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((prefix + key, " ".join(map(str, value)) if isinstance(value, list) else value))
    return pairs


def _short(model: str) -> str:
    """Return a model's name for a table cell: the last part of a path or Hub id."""
    return Path(model).name.replace("|", "\\|") or model


def _sentence(correctness: Row) -> str:
    if not correctness["checked"]:
        return correctness["why"]
    sizes = ", ".join(map(str, correctness["batch_sizes"]))
    return (
        f"agrees with {correctness['against']} ({correctness['tokens_equal']} tokens equal at batch {sizes}, "
        f"{correctness['near_ties']} near-ties, relative error of the logits {correctness['logits_relative_error']:.1e})"
    )


def _spread(value: Row, scale: float = 1.0, digits: int = 2) -> str:
    """Format as median ± standard deviation."""
    text = f"{value['median'] * scale:,.{digits}f}"
    return text if value["stddev"] is None else f"{text} ± {value['stddev'] * scale:,.{digits}f}"


def number(value: float | None, scale: float = 1.0, digits: int = 2, unit: str = "") -> str:
    return "-" if value is None else f"{value * scale:,.{digits}f}{unit}"


# Shares of what this run measured as the most that the machine can do.
_MEASURED_SHARES = ("share_of_read_ceiling", "share_of_limit", "share_of_matmul_ceiling")
LIMIT = (
    "of the limit: the least time that this run's memory bandwidth and matrix products allow (the roofline), divided by the "
    "measured time."
)
_TESTS = "ppN: a prompt of N tokens, to its first new token. tgN bB @ dC: N decode steps of B sequences, after C tokens of each."
_CEILING_TOO_LOW = (
    "A share above 100 % is shown as -: the ceiling was measured too low (is the machine busy?), or the weights fit in a cache."
)


def _share(value: float | None) -> str:
    """A share of a measured ceiling; "-" above 100 %, where it says nothing."""
    return number(value if value is None or value <= 1 else None, 100, 1, " %")


Column = tuple[str, Callable[[Row], str]]


def table(columns: list[Column], rows: list[Row], left: int) -> list[str]:
    """Return the lines of a Markdown table of rows. `left`: see `markdown_table`."""
    return markdown_table([title for title, _ in columns], ([cell(row) for _, cell in columns] for row in rows), left)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> list[str]:
    """Return the lines of a Markdown table. The first `left` columns are text; the others are numbers, aligned to the right."""
    rule = ["---" if i < left else "---:" for i in range(len(heads))]
    return [f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows)]


def as_text(markdown: str) -> str:
    """Return a Markdown report as text for a terminal: without marks, each table with aligned columns."""
    width = shutil.get_terminal_size((160, 24)).columns  # of a terminal; else, or without COLUMNS, 160
    lines: list[str] = []
    rows: list[list[str]] = []
    for line in [*re.sub(r"\*\*|`|\\(?=\*)", "", markdown).splitlines(), ""]:
        if line.startswith("| "):
            rows.append([cell.replace("\\|", "|") for cell in re.split(r"(?<!\\) \| ", line[2:-2])])
            continue
        lines += _aligned(rows, width) if rows else []
        lines, rows = [*lines, line], []
    return "\n".join(lines).rstrip("\n") + "\n"


def _aligned(rows: list[list[str]], width: int) -> list[str]:
    """Return a table's lines. What is equal in all rows stands above; columns without values are left out. A table that is wider
    than the terminal becomes several, each with the columns of text at the left."""
    columns = [c for c in zip(*rows, strict=True) if not {*c[2:]} <= {"", "-"}]  # title, rule, a cell for each row
    shared, varied = [c for c in columns if len({*c[2:]}) == 1], [c for c in columns if len({*c[2:]}) > 1]
    most = max((len(title) for title, *_ in shared), default=0)
    lines = [f"{title:<{most}}  {cell}".rstrip() for title, _, cell, *_ in shared]
    texts = list(takewhile(lambda column: not column[1].endswith(":"), varied))
    parts = [texts]
    for column in varied[len(texts) :]:
        if len(parts[-1]) > len(texts) and _width([*parts[-1], column]) > width:
            parts.append(texts)
        parts[-1] = [*parts[-1], column]
    for part in filter(None, parts):
        cells = [[f"{cell:{'>' if c[1].endswith(':') else '<'}{_width([c])}}" for cell in (c[0], *c[2:])] for c in part]
        head, *body = ["  ".join(line).rstrip() for line in zip(*cells, strict=True)]
        lines += [*[""] * bool(lines), head, "─" * _width(part), *body]
    return lines


def _width(columns: Sequence[tuple[str, ...]]) -> int:
    """Characters of columns beside each other: title, rule, a cell for each row."""
    return sum(max(map(len, (title, *cells))) + 2 for title, _, *cells in columns) - 2


_SHARED_COLUMNS: list[Column] = [
    ("model", lambda r: f"{_short(r['model'])} {r['dtype']}"), ("size", lambda r: format_size(r["weight_bytes"])),
    ("params", lambda r: f"{r['parameters'] / 1e6:,.1f} M"),
    ("backend", lambda r: f"{r['backend']} {'+'.join(r['implementations'])}"), ("test", lambda r: r["test"]),
]  # fmt: skip
_PEAK: Column = ("peak GiB", lambda r: number(r["peak_memory_bytes"], 2**-30))
_COLUMNS: dict[str, list[Column]] = {
    "speed": [
        ("t/s", lambda r: _spread(_rate(r))),
        ("ms per prompt or step", lambda r: _spread(_seconds(r), 1e3, 3)),
        ("min ms", lambda r: number(_seconds(r)["min"], 1e3, 3)),
        ("CUDA graph ms", lambda r: number(r.get("graph_replay_s"), 1e3, 3)),
        ("GB/s", lambda r: number(r.get("read_bytes_per_s"), 1e-9, 1)),
        ("of bandwidth", lambda r: _share(r.get("share_of_read_ceiling"))),
        ("of datasheet", lambda r: number(r.get("share_of_datasheet"), 100, 1, " %")),
        ("TFLOP/s", lambda r: number(r.get("flops_per_s"), 1e-12, 1 if (r.get("flops_per_s") or 0) >= 1e12 else 3)),
        ("of the limit", lambda r: _share(r["share_of_limit"] if "step_s" in r else r["share_of_matmul_ceiling"])),
        ("inter-token p50 / p99 / max ms", lambda r: _each(r.get("inter_token_s"), "p50", "p99", "max")),
        ("experts a layer", lambda r: _experts(r["experts"])),
        ("tokens of an expert / mean, p10 / p50 / p90 / max", lambda r: _shares(r["experts"])),
        _PEAK,
    ],
    "throughput": [
        ("requests/s", lambda r: number(r["requests_per_s"])),
        ("total t/s", lambda r: number(r["total_tokens_per_s"])),
        ("output t/s", lambda r: number(r["output_tokens_per_s"])),
        ("seconds", lambda r: _spread(r["seconds"], 1, 3)),
        ("avg s", lambda r: number(r["seconds"]["mean"], 1, 4)),
        *((f"p{p} s", lambda r, p=p: number(r["seconds"][f"p{p}"], 1, 4)) for p in (10, 25, 50, 75, 90, 99)),
        ("first token p50 / p99 ms", lambda r: _each(r["time_to_first_token_s"], "p50", "p99")),
        ("per output token p50 / p99 ms", lambda r: _each(r["time_per_output_token_s"], "p50", "p99")),
        _PEAK,
    ],
    "speculate": [
        ("new tokens", lambda r: f"{r['output_tokens']:,}"),
        ("drafts right", lambda r: f"{r['num_accepted_tokens']:,} of {r['num_draft_tokens']:,}"),
        ("tokens a step", lambda r: number(r["acceptance_length"])),
        ("drafts s", lambda r: _spread(r["seconds"])),
        ("plain s", lambda r: _spread(r["plain_s"])),
        ("speedup", lambda r: number(r["speedup"])),
        ("same text", lambda r: f"{r['same_texts']} of {r['texts']}"),
    ],
}


def _seconds(row: Row) -> Row:
    """The times of a decode step or of a prompt."""
    return row["step_s"] if "step_s" in row else row["time_to_first_token_s"]


def _rate(row: Row) -> Row:
    """Tokens per second: those of a prompt with the standard deviation over the runs, unless other requests ran beside it."""
    if "step_s" in row:
        return row["tokens_per_s"]
    runs = [] if "decoding" in row else row["time_to_first_token_s"]["all"]
    spread = summarize([row["input_len"] / seconds for seconds in runs])["stddev"] if runs else None
    return {"median": row["tokens_per_s"], "stddev": spread}


def _experts(value: Row | None) -> str:
    if value is None:
        return "-"
    counted = f"{value['touched']:.1f} of {value['experts']} ({value['least']} to {value['most']}"
    return f"{counted}; uniform {value['expected']:.1f})"


def _shares(value: Row | None) -> str:
    return "-" if value is None else " / ".join(f"{value['share'][name]:.2f}" for name in ("p10", "p50", "p90", "max"))


def _each(value: Row | None, *names: str) -> str:
    """Several of a distribution's seconds, in milliseconds."""
    return "-" if value is None else " / ".join(number(value[name], 1e3) for name in names)

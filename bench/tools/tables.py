"""The tables and pictures of measurements in README.md and docs/, made from the stored results.

python bench/tools/tables.py [FILE …]     copies the files to bench/results if there are any, then makes all tables and pictures

A block is the text between `<!-- NAME -->` and `<!-- end of NAME -->` on the page that `BLOCKS` gives. It is empty until one of
its results is stored. A picture is stored beside its results and contains their digest. A test compares blocks and pictures
with the results. Pictures need matplotlib. The blocks of `FINAL` stay as they are.
"""

import hashlib
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minirt.bench import picture as pictures
from minirt.bench.compare import report as compare_report
from minirt.bench.picture import Panel, Series
from minirt.bench.tools.cells import (
    NONE,
    grid,
    milliseconds,
    ms,
    percent,
    rows_of,
    share,
    signed,
    table,
    with_blocks,
)
from minirt.bench.tools.results import (
    FORMATS,
    RESULTS,
    ROOT,
    Records,
    Result,
    files_of,
    format_of,
    mark,
    stored,
    title_of,
)

# vLLM 0.24.0 (CUDA graphs, torch.compile, FlashAttention 3), ms, measured separately on the same GPU model with the same torch.
# These figures are not among the stored results.
_VLLM_STEPS = {
    (1, 128): (4.78, 3.41), (1, 8000): (4.91, 3.61), (8, 128): (4.93, 3.47), (64, 128): (5.22, 3.99), (256, 128): (9.08, 7.29)
}  # fmt: skip
_VLLM_PROMPTS = {128: (7.83, 5.71), 512: (13.9, 9.25), 2048: (48.0, 29.4), 8192: (195.0, 129.0)}
# The same of Qwen3-30B-A3B. vLLM's FP8 experts were fewer at 64 and 256 sequences, as its routing is less spread.
_VLLM_MIXTURE_STEPS = {1: (4.27, 4.49), 8: (9.17, 4.93), 64: (17.7, 6.29), 256: (21.4, 9.75)}
_VLLM_MIXTURE_PROMPTS = {512: (23.4, 12.8), 2048: (78.6, 92.5)}

# The first line of every page of docs/benchmarks.
NOTICE = (
    "> Generated: every table and picture in this folder comes from [stored results](../../bench/results) by "
    "`python bench/tools/tables.py`. Do not edit them by hand."
)


def unchecked(records: Iterable[Result]) -> str:
    """The note for `mark`, or an empty text."""
    reasons = dict.fromkeys(record["correctness"]["why"] for record in records if mark(record))
    texts = (why.removeprefix("not checked here: ").replace("not checked (--skip-check)", "`--skip-check`") for why in reasons)
    return f"† Not checked in the run that timed it: {'; '.join(texts)}." if reasons else ""


# --- steps and prompts ---


def about_table(records: Records) -> str:
    """Text with the machine, the versions and the measured speeds behind the limits."""

    def rates(values: Iterable[float], form: str, unit: str) -> str:
        texts = list(dict.fromkeys(format(value / 1e12, form) for value in sorted(values)))
        return (texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}") + f" {unit}" if texts else "not measured"

    first = next(iter(records.values()))
    machines = {(r["device"], r["versions"]["torch"], r["versions"]["triton"]) for r in records.values()}
    stacks = "; ".join(f"one {device}, torch {torch}, Triton {triton}" for device, torch, triton in sorted(machines))
    reads = [r["read_ceiling"]["bytes_per_s"] for r in records.values() if r["read_ceiling"]]
    products = {
        form: [r["matmul_ceiling"]["flops_per_s"] for r in records.values() if r["matmul_ceiling"] and format_of(r) == form]
        for form in FORMATS
    }
    return (
        f"{stacks[0].upper()}{stacks[1:]}. {first['model']} shapes, random weights, greedy decoding, measured through "
        f"`Generator`: every token reaches Python. The *limit* of a decode step is the time to read the weights, or to multiply "
        f"by them, whichever is longer, plus the time to read the KV cache. The speeds behind the limit were measured in the "
        f"same runs: {rates(reads, '.2f', 'TB/s')} for a kernel that only reads, and for a large matrix product of PyTorch "
        f"{rates(products['bf16'], ',.0f', 'TFLOP/s')} in bf16 and {rates(products['fp8'], ',.0f', 'TFLOP/s')} in fp8. "
        f"The limit of a prompt is the time of its matrix products at that speed."
    )


def _by_format(
    title: str, records: Records, share_head: str, name: Callable[[Result], str], time: str, share_of: str,
    peers: Mapping[str, tuple[float, ...]] | None = None,
) -> str:  # fmt: skip
    """Milliseconds and shares of each format. With `peers`, also those of vLLM, only at its points."""
    rows = [(name(row), row) for row in rows_of(records) if peers is None or name(row) in peers]
    marks = {point: row["mark"] for point, row in rows if row["mark"]}
    heads = {form: (title_of(form), share_head) + ((f"vLLM 0.24, {form}",) if peers else ()) for form in FORMATS}
    cells: list[tuple[str, dict[Any, str]]] = [
        (point, {(form, heads[form][-1]): milliseconds(peer) for form, peer in zip(FORMATS, times, strict=True)})
        for point, times in (peers or {}).items()
    ]
    for point, row in rows:
        form = row["format"]
        cells.append((point, {(form, title_of(form)): ms(row[time]), (form, share_head): share(row[share_of])}))
    columns = [(form, head) for form in FORMATS for head in heads[form]]
    return grid(title, ((point + marks.get(point, ""), texts) for point, texts in cells), columns)


def decode_table(records: Records) -> str:
    """Milliseconds of a decode step, and the share of the limit."""
    peers = {f"batch {batch}, context {context}": times for (batch, context), times in _VLLM_STEPS.items()}
    return _by_format("decode step, ms", records, "% of limit", _step, "step_s", "share_of_limit", peers)


def _step(row: Result) -> str:
    return f"batch {row['batch_size']}, context {row['context_len']}"


def prefill_table(records: Records) -> str:
    """Milliseconds to the first token of one prompt, and the share of the rate of PyTorch's matrix product."""
    return _by_format(
        "time to the first token, ms", records, "% of limit", lambda row: f"{row['input_len']} tokens", "time_to_first_token_s",
        "share_of_matmul_ceiling", {f"{length} tokens": times for length, times in _VLLM_PROMPTS.items()},
    )  # fmt: skip


def others_table(records: Records) -> str:
    """Decode steps of other models, batches and contexts."""
    return _by_format(
        "decode step, ms", records, "% of memory bandwidth", lambda row: f"{row['record']['model']}, {_step(row)}", "step_s",
        "share_of_read_ceiling",
    )  # fmt: skip


def checks_table(records: Records) -> str:
    """A list that says how each result was checked before it was timed."""
    done: dict[str, list[str]] = {}
    for name, record in records.items():
        check = record["correctness"]
        done.setdefault(f"compared with {check['against']}" if check["checked"] else check["why"], []).append(f"`{name}`")
    return "Checks before timing:\n\n" + "\n".join(f"- {', '.join(names)}: {how}." for how, names in done.items())


def _points(records: Records) -> Iterator[tuple[str, Result, Result, str, Result]]:
    """Name of the result, its record, a row, the row's point, and its seconds (null: not timed)."""
    for name, record in records.items():
        for row in [*record["results"], *record.get("prompts", [])]:
            if "input_len" in row:
                yield name, record, row, f"prompt of {row['input_len']:,} tokens", row["time_to_first_token_s"]
            else:
                yield name, record, row, f"decode step, batch {row['batch_size']}", row["step_s"]


def replays_table(records: Records) -> str:
    """Decode steps as replays of CUDA graphs, and prompts, a column for each model, or for each of its formats."""
    cells, several = [], len({record["quantization"] for record in records.values()}) > 1
    for name, record, row, point, seconds in _points(records):
        text = ms(seconds) + (f" ({share(row['share_of_limit'])})" if seconds and "batch_size" in row else "")
        head = record["model"] + (f" {record['quantization']}" if several else "") + mark(record)
        cells.append((point, {(name, head): text}))
    return grid("ms (% of memory bandwidth)", cells)


def formats_table(records: Records) -> str:
    """Steps and prompts of one model with each stored format of its weights."""
    return grid("ms", (
        (point, {(name, name.split("-", 2)[2] + mark(record)): ms(seconds),  # h200-steps-fp8-blocks
                 (name, "% of limit"): share(row.get("share_of_limit"))})
        for name, record, row, point, seconds in _points(records)
    ))  # fmt: skip


# --- mixtures of experts ---


def mixture_table(records: Records) -> str:
    """Steps and prompts of a mixture: milliseconds, the share of the limit, and the distinct experts that a layer uses.

    Columns of vLLM are those of the preset on an H200: a mixture with other numbers of experts, and another GPU, have none.
    """
    cells = []
    for name, record, row, point, seconds in _points(records):
        form, experts = format_of(record), row["experts"]
        texts = {(name, title_of(form) + mark(record)): ms(seconds), (name, "% of limit"): share(row["share_of_limit"])}
        texts[name, "experts"] = f"{experts['touched']:.1f}" if experts else NONE
        if not record.get("changed") and "H200" in record.get("device", "H200"):
            step = "batch_size" in row
            peers = _VLLM_MIXTURE_STEPS.get(row["batch_size"]) if step else _VLLM_MIXTURE_PROMPTS.get(row["input_len"])
            texts[name, f"vLLM 0.24, {form}"] = NONE if peers is None else milliseconds(peers[FORMATS.index(form)])
        cells.append((point, texts))
    return grid("ms", cells)


def mixture_kernels_table(records: Records) -> str:
    """Microseconds of a decode step by kernel. Kernels overlap, so their sum is longer than the step."""
    cells = []
    for record in records.values():
        for trace in record["traces"]:
            column = f"{title_of(format_of(record))}, batch {trace['batch']}"
            cells.append(("the step", {column: f"{trace['step_ms'] * 1e3:,.0f}"}))
            cells += [(f"`{kernel}`", {column: f"{us:,.0f}"}) for kernel, us in trace["us_a_step_by_kernel"].items()]
    shown = grid("µs", cells)
    return f"![Share of each kernel in a decode step, by batch size](../../bench/results/mixture.svg)\n\n{shown}"


# --- idle time, start-up, served and patched models ---


def trace_table(records: Records) -> str:
    """Idle time, and the cost of top-p sampling, for each batch size."""
    runs = {(row["batch"], row["context"], bool(row["temperature"])): row for row in rows_of(records)}
    rows = []
    for batch, context, sampled in sorted(runs):
        if not sampled:
            greedy, drawn = runs[batch, context, False], runs.get((batch, context, True))
            rows.append([f"batch {batch}, context {context}", milliseconds(greedy["step_ms"]), f"{greedy['idle']:.1%}"])
            cost = signed((drawn["step_ms"] / greedy["step_ms"] - 1) * 100, 1) + "%" if drawn else NONE
            rows[-1] += [milliseconds(drawn["step_ms"]), f"{drawn['idle']:.1%}", cost] if drawn else [NONE] * 3
    return table(["decode step", "greedy, ms", "GPU idle", "top-p 0.95, ms", "GPU idle", "top-p costs"], rows)


def start_table(records: Records) -> str:
    """Starts with an empty kernel cache and with a warm one, by phase."""
    phases = {
        "torch": "import torch", "device": "CUDA", "minirt": "import minirt", "load": "load", "warm_up": "warm-up",
        "first_token": "first token", "total": "all",
    }  # fmt: skip
    cells = []
    for record in records.values():
        model = record["model"] + ", `--fp8`" * (record["quantization"] == "fp8")
        for row in record["results"]:
            times = (f"{row[f'{phase}_s']['median']:.2f}" for phase in phases)
            count = str(row["kernels"]) if row["caches"] != "warm" else NONE
            cells.append([f"{model}, {row['caches']} kernel cache", *times, count])
    return table(["seconds", *phases.values(), "kernels compiled until then"], cells)


def chunking_table(records: Records) -> str:
    """The time between two tokens of requests beside which prompts are computed, by the size of the chunks."""
    cells = [
        [f"{row['max_num_batched_tokens']:,}{row['mark']}", *(ms(row["inter_token_s"][name]) for name in ("p50", "p99", "max")),
         f"{row['tokens_per_s']:,.0f}"]
        for row in sorted(rows_of(records), key=lambda row: -row.get("max_num_batched_tokens", 0)) if row["inter_token_s"]
    ]  # fmt: skip
    heads = ["time between tokens: p50, ms", "p99, ms", "longest, ms", "prompt tokens/s"]
    return table(["`--max-num-batched-tokens`", *heads], cells)


def served_table(records: Records) -> str:
    """The server beside the engine alone."""

    def median_and_p99(load: Result) -> str:
        return f"{milliseconds(load['median_ttft_ms'])} · {milliseconds(load['p99_ttft_ms'])}"

    cells = []
    for row in rows_of(records):
        busy, offline = row["busy"]["output_throughput"], row["offline"]["output_tokens_per_s"]
        texts = {
            "offline, output tokens/s": f"{offline:,.0f}",
            "served with 256 in flight, output tokens/s": f"{busy:,.0f} ({busy / offline:.1%})",
            "left of a CPU in the busiest client process": f"{row['busy']['client']['headroom']:.0%}",
            "between tokens, `Generator.stream`, ms": milliseconds(row["stream"]["median_itl_ms"]),
            "between tokens, one served stream, ms": milliseconds(row["one"]["median_itl_ms"]),
            "first token, one request at a time: median · p99, ms": median_and_p99(row["unloaded"]),
            "first token at half the rate: median · p99, ms": median_and_p99(row["half"]),
        }
        cells += [(name, {title_of(row["format"]): text}) for name, text in texts.items()]
    return grid("Qwen2.5-7B, random weights", cells)


def patch_table(records: Records) -> str:
    """A transformers model with and without minirt's kernels: the first record in eager mode, the second one compiled."""
    record, compiled = records.values()
    versions, cells = record["versions"], []
    for mode, row in [("eager", row) for row in record["results"]] + [("compiled", row) for row in compiled["results"]]:
        if row["mode"] == mode:
            test, variant = row["test"], row["variant"]
            title = f"prompt of {int(test[2:]):,} tokens" if test[:2] == "pp" else f"decode step, B = {row['batch_size']}"
            if row["speedup"] is None:
                head, text = f"transformers {versions['transformers']}, ms", ms(row["seconds"])
            else:
                head = f"Liger {versions['liger-kernel']}" if variant == "liger" else variant
                text = f"{row['speedup']:.2f} ×"
            cells.append((title + ", compiled" * (mode == "compiled"), {head: text}))
    return grid(f"{record['model']}, {record['dtype']}, {record['device']}", cells)


# --- layers and kernels ---


def fusion_table(records: Records) -> str:
    """Times of a decode step: eager, on Triton, and with one kind of layer eager."""
    whole = [(record, record["whole_model"]) for record in records.values() if (record["whole_model"] or {}).get("decode")]
    if not whole:
        return ""
    several = len({record["model"] for record, _ in whole}) > 1
    cells = []
    for record, model in whole:
        step, form = model["decode"], title_of(format_of(record))
        best = step["candidate_s"]
        times = {"eager, launched from Python": step["launched_s"], "eager in a CUDA graph": step["eager_s"], "Triton": best}
        times |= {f"Triton, but {kind} eager": part["step_s"] for kind, part in model["fusion"].items()}
        head = f"{record['model']}, {form}, ms" if several else f"{form}, ms"
        for name, seconds in times.items():
            ratio = "" if name == "Triton" else f"{seconds / best:.2f} ×"
            cells.append((name, {(head, head): f"{seconds * 1e3:.3f}", (head, "over Triton"): ratio}))
    step = whole[0][1]["decode"]
    return grid(f"decode step, batch {step['batch_size']}, context {step['context_len']}", cells)


def layers_table(records: Records) -> str:
    """Medians over the layers of each kind, and their largest error; then the whole step."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for row in rows_of(records):
        groups.setdefault((row["step"], row["kind"], row["format"]), []).append(row)
    heads = "eager, µs", "Triton, µs", "% of limit", "error / PyTorch's error"
    layers = grid("layer", (
        (f"{step}, {kind}", {f"{title_of(form)}: {head}": text for head, text in zip(heads, _layer(rows), strict=True)})
        for (step, kind, form), rows in groups.items()
    ))  # fmt: skip
    return "\n\n".join(filter(None, (layers, fusion_table(records))))


def _layer(rows: list[Result]) -> list[str]:
    timed = [row for row in rows if row["candidate_s"] is not None]
    cells = [NONE] * 3
    if timed:
        cells = [f"{statistics.median(row[name] for row in timed) * 1e6:,.1f}" for name in ("eager_s", "candidate_s")]
        shares = [row["share_of_limit"] for row in timed if row["share_of_limit"] is not None]
        cells.append(percent(statistics.median(shares) if shares else None))
    # The error of what a layer adds to the residual stream or, if it adds nothing, of its output.
    parts = [row["out"] if row["added"]["error"]["relative"] is None else row["added"] for row in rows]
    errors = [max(part[whose]["relative"] for part in parts) for whose in ("error", "torch") if parts]
    return [*cells, " / ".join(f"{error:.1e}" for error in errors) or NONE]


_MODEL = "Qwen2.5-7B"  # each kernel has a row for this model's shapes; the summary includes other models
_BESIDE = {
    "eager": "eager PyTorch", "compiled": "torch.compile", "library": "PyTorch's own kernel", "library_fast": "cuBLAS, fast sums"
}  # fmt: skip
_SUMS = ("library", "library_fast")  # names of cuBLAS's results, with exact and with fast accumulation


_FEW, _MANY = ((1, None), (64, None)), ((512, None), (2048, None))
# The beginning of a kernel's name → the small and the large point that its row shows: (tokens, context), or None as the context.
_SHOWN: dict[str, tuple[tuple[int, int | None], ...]] = {
    "attention_prefill": ((16, 32752), (8192, 0)), "attention_decode": ((1, 8000), (64, 1000)),
    "attention_few": ((1, 8000), (32, 1000)), "lm_head": _FEW, "sample_": _FEW, "gated_delta_decode": _FEW, "gemm_": _MANY,
    "gated_delta_prefill": _MANY, "": ((1, None), (2048, None)),
}  # fmt: skip


def shown_points(kernel: str) -> tuple[tuple[int, int | None], ...]:
    """The two points that the table shows for a kernel."""
    return next(points for beginning, points in _SHOWN.items() if kernel.startswith(beginning))


def _kernel_rows(records: Records) -> list[Result]:
    """The rows of all records. If several records have a point, the first one is used."""
    points: dict[tuple[str, str, int, int | None], Result] = {}
    for row in rows_of(records):
        points.setdefault((row["kernel"], row["model"], row["tokens"], row["context"]), row)
    return list(points.values())


def _best(row: Result) -> float:
    return row["seconds"]["triton"]["median"]


def _tokens(row: Result) -> str:
    return f"{row['tokens']:,}" + ("" if row["context"] is None else f" @ {row['context']:,}")


def kernels_table(records: Records) -> str:
    """A table with a row for each kernel at two points, then a summary over all points against each alternative."""
    rows = _kernel_rows(records)
    models = {row["kernel"]: row["model"] for row in rows} | {row["kernel"]: _MODEL for row in rows if row["model"] == _MODEL}
    shown = {(row["kernel"], row["tokens"], row["context"]): row for row in rows if row["model"] == models[row["kernel"]]}
    cells = []
    for kernel, model in models.items():
        cells.append([f"`{kernel}`" + ("" if model == _MODEL else f", {model}")])
        for tokens, context in shown_points(kernel):
            cells[-1] += _kernel(shown.get((kernel, tokens, context)))
    point = ["tokens", "µs", "% of limit", "speedups"]
    parts = [table([f"kernel, {_MODEL}", *point, *point], cells)] if cells else []
    return "\n\n".join([*parts, _summary(rows)])


def _kernel(row: Result | None) -> list[str]:
    if row is None:
        return [NONE] * 4
    if not row["seconds"]:
        return [_tokens(row), "not timed", NONE, NONE]
    factors = []
    for name in ("eager", "compiled", "library"):
        factor = row["seconds"][name]["median"] / _best(row) if name in row["seconds"] else None
        text = NONE if factor is None else f"{factor:.2f}" if factor < 1.995 else f"{factor:.1f}"
        factors.append(text + "\\*" * (name in row["seconds"] and name in row["lacks"]))
    return [_tokens(row), f"{_best(row) * 1e6:,.1f}", percent(row["share_of_limit"]), " · ".join(factors)]


def _summary(rows: list[Result]) -> str:
    lines = []
    for name, title in _BESIDE.items():
        for lacking in (False, True):
            compared = [row for row in rows if name in row["seconds"] and (name in row["lacks"]) == lacking]
            if not compared:
                continue
            ratios = [row["seconds"][name]["median"] / _best(row) for row in compared]
            least, lowest = min(zip(ratios, compared, strict=True), key=lambda pair: pair[0])
            model = "" if lowest["model"] == _MODEL else f", {lowest['model']}"
            lines.append([
                title + ", which computes less\\*" * lacking, str(len(ratios)), str(sum(ratio > 1 for ratio in ratios)),
                f"{statistics.median(ratios):.2f} ×", f"{least:.2f} × (`{lowest['kernel']}`, {_tokens(lowest)}{model})",
            ])  # fmt: skip
    columns = ["Triton compared with, all stored points", "points", "Triton faster at", "median speedup", "lowest speedup"]
    return table(columns, lines)


def gemms_table(records: Records) -> str:
    """GEMMs by number of tokens: microseconds, and cuBLAS's time divided by minirt's."""
    rows = [row for row in rows_of(records) if row["seconds"]]
    cells: list[tuple[str, dict[str, str]]] = []
    worst: dict[str, dict[str, float]] = {}
    for row in rows:
        name, errors = f"`{row['kernel']}`, {row['model']}", row["errors"]
        beside = [
            f"{row['seconds'][sums]['median'] / _best(row):.2f}" + "\\*" * (sums in row["lacks"])
            for sums in _SUMS if sums in row["seconds"]
        ]  # fmt: skip
        cells.append((name, {f"{row['tokens']:,} tokens": " · ".join([f"{_best(row) * 1e6:,.1f}", *beside])}))
        largest = worst.setdefault(name, dict.fromkeys(("triton", *_SUMS), 0.0))
        largest |= {form: max(largest[form], errors[form]["relative"]) for form in largest if form in errors}
    for name, largest in worst.items():
        cells.append((name, {"largest error": " · ".join(f"{error:.1e}" for error in largest.values() if error)}))
    return grid("GEMM, model", cells, [f"{count:,} tokens" for count in sorted({row["tokens"] for row in rows})])


def attention_table(records: Records) -> str:
    """Attention of prompts and chunks, by new tokens @ cached tokens, on 16-bit and on FP8 pages."""
    cells = []
    for row in rows_of(records):
        kernel = row["kernel"]
        if row["seconds"] and kernel.startswith("attention_prefill") and row["model"] == _MODEL:
            beside = f"{row['seconds']['library']['median'] / _best(row):.2f} ×" if "library" in row["seconds"] else NONE
            cells.append((_tokens(row), {
                f"`{kernel}`: µs": f"{_best(row) * 1e6:,.1f}", (kernel, "TFLOP/s"): f"{row['flops_per_s'] / 1e12:,.0f}",
                (kernel, "GB/s"): f"{row['bytes_per_s'] / 1e9:,.0f}", (kernel, "SDPA"): beside,
            }))  # fmt: skip
    return grid("tokens", cells)


def _gains(gains: list[float]) -> list[str]:
    """Cells: the number of gains, their median and the largest in per cent."""
    return [str(len(gains)), *([f"{statistics.median(gains):.1%}", f"{max(gains):.1%}"] if gains else [NONE, NONE])]


def tuned_table(records: Records) -> str:
    """For each kernel family and format: in how many buckets a configuration is faster than the rule's, in chains and in whole
    steps, and by how much."""
    families: dict[str, list[Result]] = {}
    for row in rows_of(records):
        families.setdefault(f"`{row['kernel']}`, {title_of(row['format'])}", []).append(row)
    cells = []
    for name, rows in families.items():
        chains = [1 - row["best_s"] / row["rule_s"] for row in rows if row["best_s"] < row["rule_s"]]
        kept = [row for row in rows if row["config"] is not None and row["best_step_s"] is not None]
        steps = [1 - row["best_step_s"] / row["rule_step_s"] for row in kept]
        cells.append([name, str(len(rows)), str(sum(row["tried"] for row in rows)), *_gains(chains), *_gains(steps)])
    columns = ["kernel", "buckets", "configurations tried", "faster alone", "median gain", "highest"]
    columns += ["faster in whole steps", "median gain", "highest"]
    return table(columns, cells)


# --- pictures ---

_MOST_KERNELS = 9  # of a picture; others are summed


def draw_layers(records: Records, target: Path, note: str) -> None:
    """Draw the error and the time of each layer of the embedded model."""
    (record,) = records.values()
    compare_report.draw(record, record["results"], target, note)


def draw_mixture(records: Records, target: Path, note: str) -> None:
    """Draw each kernel's share of a mixture's decode steps, by batch size."""
    traces = [[_shares(trace) for trace in record["traces"]] for record in records.values()]
    kernels = dict.fromkeys(kernel for rows in traces for row in rows for kernel in row)
    most = {kernel: max(row.get(kernel, 0.0) for rows in traces for row in rows) for kernel in kernels}
    shown = sorted(most, key=lambda kernel: -most[kernel])[:_MOST_KERNELS]
    panels: list[Panel] = []
    for record, rows in zip(records.values(), traces, strict=True):
        series, bases = list[Series](), [0.0] * len(rows)
        for i, kernel in enumerate([*shown, "others"]):
            label, color = kernel.lstrip("_"), f"C{i}"  # legends leave out labels that begin with an underscore
            shares = [row.get(kernel, 0.0) for row in rows]
            if kernel == "others":
                shares, color = [sum(row[name] for name in row if name not in shown) for row in rows], "lightgray"
            series.insert(0, Series(label, shares, color=color, width=0.7, bases=bases))
            bases = [base + part for base, part in zip(bases, shares, strict=True)]
        ticks = [f"batch {trace['batch']}\n{trace['step_ms']:.2f} ms" for trace in record["traces"]]
        legend = "right" if len(panels) + 1 == len(records) else ""
        about = "share of the kernels' summed time, %"
        panels.append(Panel(series, format_of(record), ylabel=about, ticks=ticks, legend=legend))
    first = next(iter(records.values()))
    commits = ", ".join(dict.fromkeys(record["commit"] for record in records.values()))
    title = f"{first['model']} shapes, decode step by kernel · {first['device']} · minirt {commits}"
    pictures.draw([panels], title, target, (10.0, 4.5), note)


def _shares(trace: Result) -> dict[str, float]:
    """Percent of the kernels' summed time, by kernel."""
    times = trace["us_a_step_by_kernel"]
    return {kernel: 100 * us / sum(times.values()) for kernel, us in times.items()}


# --- blocks and pictures ---

README, BENCHMARKS = ROOT / "README.md", ROOT / "docs" / "benchmarks"


class Block(NamedTuple):
    """A generated block of a page.

    Attributes:
        sources: names or globs of the results, in order.
        make: makes the block's content from the results.
        page: the page that has the block.
        names: whether the block ends with the names of the results and their commits.
    """

    sources: tuple[str, ...]
    make: Callable[[Records], str]
    page: Path
    names: bool = True


def _named(prefix: str, names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in names.split())


_STEPS, _PROMPTS = _named("h200-decode-", "bf16 fp8 bf16-8000 fp8-8000"), _named("h200-prefill-", "bf16 fp8")
_MIXTURE = _named("h200-mixture-", "bf16 fp8")
_H100 = "h100-80gb-hbm3-"
_MODELS, _KERNELS, _LAYERS, _SYSTEM = (BENCHMARKS / f"{name}.md" for name in ("models", "kernels", "layers", "system"))
BLOCKS = {
    "about": Block(_STEPS + _PROMPTS, about_table, _MODELS, names=False),
    "decode": Block(_STEPS, decode_table, _MODELS),
    "prefill": Block(_PROMPTS, prefill_table, _MODELS),
    "checks": Block(_STEPS + _PROMPTS, checks_table, _MODELS, names=False),
    "others": Block(
        _named("h200-decode-", "llama-3.1-8b* qwen3-4b* qwen2.5-0.5b* smollm2-1.7b* bf16-odd fp8-odd"), others_table, _MODELS
    ),
    "patch": Block(_named(_H100, "patch-7b patch-7b-compiled"), patch_table, _MODELS),
    "int4": Block(_named("h200-steps-int4-", "qwen2.5-7b llama-3.1-8b qwen3-4b"), replays_table, _MODELS),
    "experts-steps": Block(
        _named(f"{_H100}steps-", "fp8-qwen3.5-35b-a3b fp8-qwen3-30b-a3b int4-qwen3-30b-a3b"), replays_table, _MODELS
    ),
    "formats": Block(_named("h200-steps-fp8-", "blocks channels odd-tiles odd-widths"), formats_table, _MODELS),
    "start": Block(_named("h200-start-", "7b 7b-fp8 0.5b qwen3.5-9b 30b-a3b-fp8"), start_table, _SYSTEM),
    "chunking": Block(_named("h200-chunking-", "8448 2048 512"), chunking_table, _MODELS),
    "mixture": Block(_MIXTURE, mixture_table, _MODELS),
    "mixture-fp8-blocks": Block(_named(f"{_H100}mixture-", "bf16 fp8 fp8-blocks"), mixture_table, _MODELS),
    "mixture-kernels": Block(_MIXTURE, mixture_kernels_table, _MODELS),
    "kernels": Block(
        _named("h200-kernels-", "rows linears mlp attention experts gated-delta gemm others-attention others"), kernels_table,
        _KERNELS,
    ),
    "gemms": Block(("h200-kernels-gemm",), gemms_table, _KERNELS),
    "attention": Block(("h200-kernels-attention",), attention_table, _KERNELS),
    "tuned": Block(_named("h200-tune-", "bf16 fp8"), tuned_table, _KERNELS),
    "fusion": Block(_named("h200-compare-", "embedded smollm2"), fusion_table, _LAYERS),
    "layers-7b": Block(_named("h200-compare-7b-", "bf16 fp8"), layers_table, _LAYERS),
    "served": Block(_named("h200-served-", "bf16 fp8"), served_table, _SYSTEM),
    "trace": Block(("h200-trace",), trace_table, _SYSTEM),
}  # fmt: skip


class Final(NamedTuple):
    """A block that stays as it is. `digest`: of its results and its content."""

    sources: tuple[str, ...]
    page: Path
    digest: str


# minirt and vLLM on two cards of one type: vLLM's engine as a process of its own, and earlier, on one card, in the caller's.
_BOTH_ENGINES = _named(_H100, "beside-vllm-default beside-vllm")
_TRAINED, _QUANTIZATION = ("cpu-trained-models",), ROOT / "docs" / "quantization.md"
_LOADED = "bf16 fp8 w4a16 mixture-bf16 mixture-fp8 mixture-fused-bf16 mixture-fused-fp8"
# Nothing in this tree measures these results again. Commit 889b7abe has the code that made the blocks up to "cpu" of them, and
# `speed.svg`; commit 83ec5eed has that of the others.
FINAL = {
    "headline": Final(_BOTH_ENGINES, README, "7223f8dee819c6fa"), "vllm": Final(_BOTH_ENGINES, README, "d2cce30bf07cefef"),
    "engines": Final(_BOTH_ENGINES, _MODELS, "9c530267c22bbd9a"), "drafts": Final(_BOTH_ENGINES[:1], _MODELS, "701022f22ff01a1f"),
    "cpu": Final(("cpu-smollm2",), _SYSTEM, "995445c77389703b"),
    "correction": Final(_BOTH_ENGINES, _MODELS, "90f97fe77671d12f"), "trained": Final(_TRAINED, _MODELS, "cdf2259091956508"),
    "ablation": Final(_named("h200-ablation-", "bf16 fp8"), _LAYERS, "6220524d212990cd"),
    "loading": Final(_named("h200-loading-", _LOADED), _SYSTEM, "7dfe8c00e5903bda"),
    "sampling": Final(("h200-sampling-cost",), _SYSTEM, "b1f1a4c0c8b66a56"),
    "memory": Final(("h200-memory", "h200-memory-quantized-pages"), _SYSTEM, "40432e4a60ec9e36"),
    "quality": Final(("cpu-fp8-quality",), _QUANTIZATION, "aeae2ac09f57d467"),
    "quality-int4": Final(("cpu-int4-quality",), _QUANTIZATION, "d49cf2221ec12bff"),
    "quality-options": Final(_TRAINED, _QUANTIZATION, "099f6af65975b47a"),
    "quality-formats": Final(("cpu-format-quality",), _QUANTIZATION, "5066abe8a9158538"),
}  # fmt: skip


def pages() -> list[Path]:
    """Every page that has blocks."""
    return list(dict.fromkeys([*(block.page for block in BLOCKS.values()), *(block.page for block in FINAL.values())]))


def block(name: str) -> str:
    """The content of a block: a table, and the results with their commits. Without stored results, the command for them."""
    chosen = BLOCKS[name]
    records = stored(chosen.sources)
    if not records:
        runs = " ".join(source.removeprefix("h200-") for source in chosen.sources)
        return f"No results are stored yet. `python bench/tools/collect.py FOLDER {runs}` makes them."
    made = chosen.make(records)
    marked = unchecked(records.values()) if "†" in made else ""
    return "\n\n".join(filter(None, (made, marked, origin(records) if chosen.names else ""))) if made else ""


def origin(records: Records) -> str:
    """The results' names, by commit."""
    by_commit: dict[str, list[str]] = {}
    for name, record in records.items():
        by_commit.setdefault(record["commit"], []).append(f"`{name}`")
    return "From " + "; ".join(f"{', '.join(names)} (commit {commit})" for commit, names in by_commit.items()) + "."


def render(text: str) -> str:
    """The text of a page with every block made again."""
    return with_blocks(text, dict.fromkeys(BLOCKS, block))


class Picture(NamedTuple):
    """A generated picture. `sources`: the results that it shows. `page`: the page that shows it."""

    sources: tuple[str, ...]
    draw: Callable[[Records, Path, str], None]
    page: Path


PICTURES = {
    "layers": Picture(("h200-compare-embedded",), draw_layers, _LAYERS), "mixture": Picture(_MIXTURE, draw_mixture, _MODELS),
}


def drawable() -> list[str]:
    """The pictures whose results are all stored."""
    return [name for name, made in PICTURES.items() if len(stored(made.sources)) == len(made.sources)]


def digest(sources: tuple[str, ...], content: str = "") -> str:
    """A digest of stored results and of the text that shows them."""
    results = b"".join(file.read_bytes() for file in files_of(sources))
    return hashlib.sha256(results + content.encode()).hexdigest()[:16]


def picture(name: str, target: Path) -> None:
    chosen = PICTURES[name]
    chosen.draw(stored(chosen.sources), target, f"results {digest(chosen.sources)}")


def main(files: list[str]) -> None:
    for file in files:
        shutil.copy(file, RESULTS)
    for page in pages():
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name in drawable():
        picture(name, RESULTS / f"{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])

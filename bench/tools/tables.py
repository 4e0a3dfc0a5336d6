"""The tables and pictures of measurements in README.md and docs/, made from the stored results.

python bench/tools/tables.py [FILE …]     copies the files to bench/results if there are any, then makes all tables and pictures

A block is the text between `<!-- NAME -->` and `<!-- end of NAME -->` on the page that `BLOCKS` gives. It is empty until one of
its results is stored. A picture is stored beside its results and contains their digest. A test compares blocks and pictures
with the results. Pictures need matplotlib.
"""

import hashlib
import re
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minirt.bench.tools import pictures
from minirt.bench.tools.results import (
    BESIDE_VLLM,
    FORMATS,
    IN_PROCESS,
    RESULTS,
    ROOT,
    VLLM_MIXTURE_PROMPTS,
    VLLM_MIXTURE_STEPS,
    VLLM_PROMPTS,
    VLLM_STEPS,
    Key,
    Point,
    Records,
    Result,
    format_of,
    latest,
    mark,
    points_of,
    run_of,
    stack_of,
    stored,
    title_of,
)

NONE = "–"  # a cell without a measured value
MIB, GIB = 1 << 20, 1 << 30  # stored results have bytes, or 1e6 or 1e9 of them
# The first line of every page of docs/benchmarks.
NOTICE = (
    "> Generated: every table and picture in this folder comes from [stored results](../../bench/results) by "
    "`python bench/tools/tables.py`. Do not edit them by hand."
)


def gib(gigabytes: float) -> float:
    """GiB of a stored number of 1e9 bytes."""
    return gigabytes * 1e9 / GIB


def mib(megabytes: float) -> float:
    """MiB of a stored number of 1e6 bytes."""
    return megabytes * 1e6 / MIB


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. All columns but the first are numbers, aligned to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def milliseconds(ms: float) -> str:
    """Format milliseconds with about three digits: two decimals below 10, else one."""
    return f"{ms:.2f}" if ms < 9.995 else f"{ms:,.1f}"


def percent(share: float | None) -> str:
    return NONE if share is None else "< 1%" if 0 < share < 0.01 else f"{share:.0%}"


def signed(value: float, digits: int) -> str:
    text = f"{value:+.{digits}f}"
    return text.lstrip("+-") if float(text) == 0 else text.replace("-", "−")


def unchecked(records: Iterable[Result]) -> str:
    """The note for `mark`, or an empty text."""
    reasons = dict.fromkeys(record["correctness"]["why"] for record in records if mark(record))
    texts = (why.removeprefix("not checked here: ").replace("not checked (--skip-check)", "`--skip-check`") for why in reasons)
    return f"† Not checked in the run that timed it: {'; '.join(texts)}." if reasons else ""


def _by_format(records: Records, key: Callable[[Result, Result], Any]) -> dict[str, dict[Any, Result]]:
    """Rows by format, then by `key(record, row)`, each with the mark of its record."""
    found: dict[str, dict[Any, Result]] = {form: {} for form in FORMATS}
    for record in records.values():
        found[format_of(record)] |= {key(record, row): row | {"mark": mark(record)} for row in record["results"]}
    return found


def _marked(name: str, key: Any, found: dict[str, dict[Any, Result]]) -> str:
    """The name of a row, with the mark of its results if one has a mark."""
    return name + next((row["mark"] for rows in found.values() if (row := rows.get(key)) and row["mark"]), "")


def _steps(records: Records) -> dict[str, dict[Any, Result]]:
    return _by_format(records, lambda _, row: (row["batch_size"], row["context_len"]))


def _prompts(records: Records) -> dict[str, dict[Any, Result]]:
    return _by_format(records, lambda _, row: row["input_len"])


# --- steps and prompts ---


def about_table(records: Records) -> str:
    """Text with the machine, the versions and the measured speeds behind the limits."""

    def rates(values: Iterable[float], form: str, unit: str) -> str:
        texts = list(dict.fromkeys(format(value / 1e12, form) for value in sorted(values)))
        return (texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}") + f" {unit}" if texts else "not measured"

    first = next(iter(records.values()))
    machines = {(r["device"], r["versions"]["torch"], r["versions"]["triton"]) for r in records.values()}
    where = "; ".join(f"one {device}, torch {torch}, Triton {triton}" for device, torch, triton in sorted(machines))
    reads = [r["read_ceiling"]["bytes_per_s"] for r in records.values() if r["read_ceiling"]]
    products = {
        form: [r["matmul_ceiling"]["flops_per_s"] for r in records.values() if r["matmul_ceiling"] and format_of(r) == form]
        for form in FORMATS
    }
    return (
        f"{where[0].upper()}{where[1:]}. {first['model']} shapes, random weights, greedy decoding, measured through `Generator`: "
        f"every token reaches Python. The *limit* of a decode step is the time to read the weights, or to multiply by them, "
        f"whichever is longer, plus the time to read the KV cache. The speeds behind the limit were measured in the same runs: "
        f"{rates(reads, '.2f', 'TB/s')} for a kernel that only reads, and for a large matrix product of PyTorch "
        f"{rates(products['bf16'], ',.0f', 'TFLOP/s')} in bf16 and {rates(products['fp8'], ',.0f', 'TFLOP/s')} in fp8. "
        f"The limit of a prompt is the time of its matrix products at that speed."
    )


def decode_table(records: Records) -> str:
    """Milliseconds of a decode step, and the share of the limit."""
    return _beside_vllm(
        "decode step, ms", _steps(records), VLLM_STEPS, lambda key: f"batch {key[0]}, context {key[1]}", "step_s",
        "share_of_limit",
    )  # fmt: skip


def prefill_table(records: Records) -> str:
    """Milliseconds to the first token of one prompt, and the share of the rate of PyTorch's matrix product."""
    return _beside_vllm(
        "time to the first token, ms", _prompts(records), VLLM_PROMPTS, lambda key: f"{key} tokens", "time_to_first_token_s",
        "share_of_matmul_ceiling",
    )  # fmt: skip


def _beside_vllm(
    title: str, found: dict[str, dict[Any, Result]], peers: Mapping[Any, tuple[float, float]], name: Callable[[Any], str],
    time: str, share: str,
) -> str:  # fmt: skip
    rows = []
    for key, theirs in peers.items():
        own = [_marked(name(key), key, found)]
        for form, peer in zip(FORMATS, theirs, strict=True):
            row = found[form].get(key)
            own += [milliseconds(row[time]["median"] * 1e3), f"{row[share]:.0%}"] if row else [NONE, NONE]
            own += [milliseconds(peer)]
        rows.append(own)
    return table([title, *(text for form in FORMATS for text in (title_of(form), "% of limit", f"vLLM 0.24, {form}"))], rows)


# --- both engines on H100s ---

# The decode steps and prompts that README.md shows.
_README_POINTS = (
    ("step", 1, 128), ("step", 64, 128), ("step", 256, 128), ("step", 1, 8000), ("prompt", 512), ("prompt", 8192), ("offline",)
)  # fmt: skip
# The sections of docs/benchmarks/models.md with all points of both engines, and with runs that were checked before timing.
_ALL_POINTS, _CHECKED_RUNS = "#beside-vllm", "#an-earlier-vllm-on-an-h200"
_TIE = 0.02  # times that differ by less are a tie
_CARDS = 0.1  # by how much two cards of one type may differ
_IN_PROCESS = "‡"  # marks vLLM's figures that are not of its default setting


def _name_of(key: Key) -> str:
    kind, *rest = key
    if kind == "step":
        return f"decode step, batch {rest[0]}" + (f", context {rest[1]:,}" if rest[1] != 128 else "")
    return f"first token, prompt of {rest[0]:,} tokens" if kind == "prompt" else "offline, output tokens/s"


def _row_of(key: Key) -> str:
    return _name_of(key) + ", ms" * (key != ("offline",))


def _cell_of(key: Key, values: Sequence[float]) -> str:
    return " to ".join(f"{value:,.0f}" if key == ("offline",) else milliseconds(value * 1e3) for value in values) or NONE


def _unit_of(key: Key) -> str:
    return "" if key == ("offline",) else " ms"  # the name of a rate has its unit


def speedups(key: Key, own: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """How many times as fast as vLLM minirt is, by times or, offline, by rates: for all measurements of both, ascending."""
    return sorted(a / b if key == ("offline",) else b / a for a in own for b in theirs)


def _times(ratios: Sequence[float]) -> str:
    """1.33, or 1.33 to 1.39."""
    return " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (ratios[0], ratios[-1])))


def headline(records: Records) -> str:
    """README.md's first sentence about speed: only points at which vLLM ran as it does by default."""
    record, steps, offline = records[BESIDE_VLLM], [], []
    peer = f"vLLM {run_of(record, 'vLLM', 'bf16').build}"
    for form in FORMATS:
        points = {key: point for key, point in points_of(records, form).items() if point.own and not point.in_process}
        ratios = {key: speedups(key, point.own, point.theirs) for key, point in points.items()}
        decode = {key: own for key, own in ratios.items() if key[0] == "step"}
        batches = sorted({key[1] for key in decode})
        between = " and " if len(batches) == 2 else " to "
        factors = _times(sorted(ratio for own in decode.values() for ratio in own))
        within = f"(batch {batches[0]}{between}{batches[-1]})"
        steps.append(f"{factors} times as fast as {peer} in {title_of(form)} {within}")
        unsure = ", about as much as two cards differ," if ratios["offline",][-1] < 1 + _CARDS else ""
        offline.append(f"{_times(ratios['offline',])} times that of vLLM in {title_of(form)}{unsure}")
        peer = "vLLM"
    card = record["device"].removeprefix("NVIDIA ").partition(" ")[0]
    return (
        f"On {card}s, minirt decodes {record['model']} {steps[0]}, and {steps[1]}. Offline throughput is "
        f"{' and '.join(offline)}. The weights are random, and each engine ran on a card of its own ([details](#speed))."
    )


def readme_table(records: Records) -> str:
    """README.md's table beside vLLM, what its figures lack, the ties, and the origin of the figures."""
    page = "docs/benchmarks/models.md"
    where = f" ([all points]({page}{_ALL_POINTS}))"
    parts = _engines_table(records, _README_POINTS), _lacking(records), ties(records, where), _origin_of(records, page)
    return "\n\n".join(parts)


def engines_table(records: Records) -> str:
    """All points of both engines, and those of minirt on a later PyTorch."""
    record, older = records[BESIDE_VLLM], records[IN_PROCESS]
    first, other = run_of(older, "minirt", "bf16"), latest(older)
    rows = [[_row_of(key), _cell_of(key, own), _cell_of(key, other.values.get(key, ()))] for key, own in first.values.items()]
    shown = table(["bf16", f"torch {first.versions['torch']}", f"torch {other.versions['torch']}"], rows)
    versions = " and ".join(f"torch {run.versions['torch']} with Triton {run.versions['triton']}" for run in (first, other))
    sampled = next(own["sampled_output_tokens_per_s"] for own in record["runs"] if "sampled_output_tokens_per_s" in own)
    parts = (
        _engines_table(records, tuple(points_of(records, "fp8"))), _lacking(records), ties(records), _origin_of(records, ""),
        _protocol_of(record),
        f"At temperature 0.8 and top-p 0.95, with a seed for each request, minirt yields {sampled:,} output tokens/s offline in "
        f"FP8.",
        f"minirt `{first.build}` with two versions of PyTorch on one card ({versions}), from `{IN_PROCESS}`:", shown,
    )  # fmt: skip
    return "\n\n".join(parts)


def _engines_table(records: Records, keys: Sequence[Key]) -> str:
    points = [points_of(records, form) for form in FORMATS]
    rows = []
    for key in keys:
        cells = [_row_of(key)]
        for own in points:
            point = own.get(key, Point((), (), False))
            ratios = speedups(key, point.own, point.theirs)
            marked = _IN_PROCESS * bool(point.theirs and point.in_process)
            cells += [_cell_of(key, point.own), _cell_of(key, point.theirs) + marked]
            cells.append((f"{_times(ratios)} ×" + ", tie" * _tied(ratios)) if ratios else NONE)
        rows.append(cells)
    heads = ["minirt bf16", "vLLM bf16", "faster", "minirt `--fp8`", "vLLM fp8", "faster"]
    return table([records[BESIDE_VLLM]["model"], *heads], rows)


def _tied(ratios: Sequence[float]) -> bool:
    return abs(ratios[0] - 1) < _TIE


def _lacking(records: Records) -> str:
    """The first line below the table: what vLLM ran without, and which of its figures are of another setting."""
    gains = [
        ratio for form in FORMATS for key, own in run_of(records[BESIDE_VLLM], "vLLM", form).values.items()
        if (older := run_of(records[IN_PROCESS], "vLLM", form).values.get(key)) for ratio in speedups(key, own, older)
    ]  # fmt: skip
    return (
        f"vLLM ran {run_of(records[BESIDE_VLLM], 'vLLM', 'bf16').note}. {_IN_PROCESS} vLLM was not in its default mode: its "
        f"engine ran in the calling process ({records[IN_PROCESS]['date']}). Where both modes were measured, the default was "
        f"{min(gains):.2f} to {max(gains):.2f} times as fast, so leads at {_IN_PROCESS} may shrink."
    )


def ties(records: Records, where: str = "") -> str:
    """How many points minirt wins, the points at which both engines are equally fast, and those at which vLLM is faster. With two
    measurements of a point, the one that is better for vLLM counts.

    `where`: where these points are, if they are not all in the table above.
    """
    counts, tied, slower = {False: [0, 0], True: [0, 0]}, [], []
    for form in FORMATS:
        for key, point in points_of(records, form).items():
            ratios = speedups(key, point.own, point.theirs)
            if not ratios:
                continue
            unit = _unit_of(key)
            values = f"minirt {_cell_of(key, point.own)}{unit}, vLLM {_cell_of(key, point.theirs)}{unit}"
            text = f"{form}, {_name_of(key)} ({values})"
            counts[point.in_process][1] += 1
            if _tied(ratios):
                tied.append(text)
            elif ratios[0] < 1:
                slower.append(text)
            else:
                counts[point.in_process][0] += 1
    (faster, all_default), (others, all_others) = counts[False], counts[True]
    parts = [
        f"Against vLLM's default, minirt is faster at {faster} of {all_default} points; against {_IN_PROCESS}, at {others} of "
        f"{all_others}{where}."
    ]
    are = "One is a tie" if len(tied) == 1 else f"{len(tied)} are ties"
    parts += [f"{are} (less than {_TIE:.0%} apart): {'; '.join(tied)}."] if tied else []
    parts += [f"vLLM is faster: {'; '.join(slower)}."] if slower else []
    parts += ["Two cards of one type differ by up to several per cent, so a smaller lead is not certain."]
    return " ".join(parts)


def _origin_of(records: Records, page: str) -> str:
    """Stores, cards, dates, both stacks, what another PyTorch changes, and what is missing.

    `page`: how docs/benchmarks/models.md is linked to; empty on that page.
    """
    record, older = records[BESIDE_VLLM], records[IN_PROCESS]
    own, theirs = (run_of(record, engine, "bf16") for engine in ("minirt", "vLLM"))
    root, measuring = ("", "docs/measuring.md") if page else ("../../", "../measuring.md")
    stores = [f"[`{name}`]({root}bench/results/{name}.json)" for name in (BESIDE_VLLM, IN_PROCESS)]
    protocol = record["protocol"]
    steps = f" A decode step is {protocol['decode step'].split('; ')[1]}. Offline: {protocol['offline']}." if page else ""
    text = (
        f"{stack_of(own)}, on one {record['device']}; {stack_of(theirs)}, on another, both on {record['date']}; figures with "
        f"{_IN_PROCESS} on a card of that type on {older['date']}. {_other_stack_of(older, page)} Random weights, greedy "
        f"decoding, a context of 128 tokens unless the row says another.{steps} From {stores[0]}; {_IN_PROCESS} from "
        f"{stores[1]}.\n\nThis comparison is an exception to [how minirt measures]({measuring}#the-comparison-with-vllm): "
        f"it stores neither each run's time nor the card's measured peaks, and did not check the outputs. In [an earlier "
        f"measurement]({page}{_CHECKED_RUNS}), on another card, the same model was compared with its eager layers before it was "
        f"timed."
    )
    return f"<details><summary>Versions, cards and method</summary>\n\n{text}\n\n</details>" if page else text


def _other_stack_of(record: Result, page: str) -> str:
    """How much the latest PyTorch changes minirt's figures."""
    first, other = run_of(record, "minirt", "bf16"), latest(record)
    most = max(abs(ratio - 1) for key, own in other.values.items() for ratio in speedups(key, first.values[key], own))
    differ = f"differ by at most {most:.0%}"
    differ = f"[{differ}]({page}{_ALL_POINTS})" if page else f"{differ} (the last table of this section)"
    return f"With torch {other.versions['torch']} and Triton {other.versions['triton']}, minirt's bf16 times {differ}."


def _protocol_of(record: Result) -> str:
    names = "order", "clock", "prompts", "decode step", "first token", "offline"
    return "\n".join(f"- {name[0].upper()}{name[1:]}: {record['protocol'][name]}." for name in names)


def correction_table(records: Records) -> str:
    """The points at which vLLM was measured in both settings, with what the earlier one claimed."""
    older, rows = records[IN_PROCESS], []
    for form in FORMATS:
        before, theirs = (run_of(older, engine, form).values for engine in ("minirt", "vLLM"))
        for key, point in points_of(records, form).items():
            if not point.in_process and key in theirs:
                claims = (speedups(key, before[key], theirs[key]), speedups(key, point.own, point.theirs))
                cells = _cell_of(key, theirs[key]), _cell_of(key, point.theirs), *(f"{_times(own)} ×" for own in claims)
                rows.append([f"{form}, {_row_of(key)}", *cells])
    heads = ["vLLM in the caller's process", "in its own", f"minirt faster, {older['date']}", "now"]
    return table([records[BESIDE_VLLM]["model"], *heads], rows)


def drafts_table(records: Records) -> str:
    """Tokens per second with drafts, minirt beside vLLM where it was measured."""
    (record,) = records.values()
    theirs = {own["model"]: own for own in record["drafts"] if own["engine"] == "vLLM"}
    rows = []
    for own in record["drafts"]:
        if own["engine"] == "minirt":
            peer = theirs.get(own["model"], {"results": []})
            rates = {row["batch_size"]: row["tokens_per_s"] for row in peer["results"]}
            kind = f"{own['num_drafts']} {'MTP' if own['method'] == 'mtp' else own['method']} drafts"
            for row in own["results"]:
                n, rate = row["batch_size"], row["tokens_per_s"]
                cells = [f"{own['tokens_per_step']:.2f}", f"{rate:,.1f}", f"{row['speedup']:.2f} ×"]
                cells += [f"{rates[n]:,.1f}", f"{rate / rates[n]:.2f} ×"] if n in rates else [NONE, NONE]
                rows.append([f"{own['model']} {format_of(own)}, {kind}, batch {n}", *cells])
    (peer,) = theirs.values()
    drafts = record["protocol"]["drafts"]
    heads = ["tokens a step", "minirt, tokens/s", "of plain decoding", "vLLM, tokens/s", "minirt faster"]
    shown = table(["drafts", *heads], rows)
    return (
        f"{shown}\n\nminirt `{record['commit']}`; vLLM {peer['version']}, {peer['note']}, "
        f"{peer['tokens_per_step']} tokens a step, on a card of the same type; whether its engine was a process of its own was "
        f"not recorded. {drafts[0].upper()}{drafts[1:]}: the figures say how fast steps are, not how often drafts are right. "
        f"From `{BESIDE_VLLM}`."
    )


def first_token_table(records: Records) -> str:
    """Seconds from the start of the interpreter to the first token on an H100, by part."""
    (record,) = records.values()
    names = "import_torch_s", "cuda_s", "load_s", "warm_up_s", "first_token_s"
    rows = []
    for own in record["start"]:
        caches = f"{own['caches']} kernel caches" if own["caches"] != "of bf16" else "kernel caches of bf16"
        cells = [NONE if own[name] is None else f"{own[name]:.1f}" for name in names]
        rows.append([f"{title_of(format_of(own))}, {caches}", *cells, str(own["kernels_compiled"] or NONE)])
    heads = ["import torch", "CUDA", "load", "warm-up", "first token after", "kernels compiled"]
    about = f"minirt `{record['commit']}`, one {record['device']}, {record['date']}; {record['protocol']['start']}"
    shown = table([f"{record['model']}, seconds", *heads], rows)
    return f"{shown}\n\n{about}. From `{BESIDE_VLLM}`."


def losses_table(records: Records) -> str:
    """A sentence with the points at which vLLM is faster."""
    steps = _steps({name: r for name, r in records.items() if r["benchmark"] == "decode"})
    prompts = _prompts({name: r for name, r in records.items() if r["benchmark"] == "prefill"})
    found, compared = [], 0
    for column, form in enumerate(FORMATS):
        pairs = [
            (f"batch {key[0]} at context {key[1]}", steps[form][key]["step_s"]["median"] * 1e3, peers[column])
            for key, peers in VLLM_STEPS.items()
            if key in steps[form]
        ]
        pairs += [
            (f"a prompt of {key} tokens", prompts[form][key]["time_to_first_token_s"]["median"] * 1e3, peers[column])
            for key, peers in VLLM_PROMPTS.items()
            if key in prompts[form]
        ]
        compared += len(pairs)
        found += [f"{form}, {what}: {own / peer - 1:+.1%}" for what, own, peer in pairs if own > peer]
    if not found:
        return f"minirt is not slower than vLLM at any of these {compared} points."
    return f"minirt is slower than vLLM at {len(found)} of these {compared} points: {'; '.join(found)}."


def checks_table(records: Records) -> str:
    """A list that says how each result was checked before it was timed."""
    done: dict[str, list[str]] = {}
    for name, record in records.items():
        own = record["correctness"]
        how = f"compared with {own['against']}" if own["checked"] else own["why"]
        done.setdefault(how, []).append(f"`{name}`")
    return "Checks before timing:\n\n" + "\n".join(f"- {', '.join(names)}: {how}." for how, names in done.items())


def others_table(records: Records) -> str:
    """Decode steps of other models, batches and contexts."""
    found = _by_format(records, lambda record, row: (record["model"], row["batch_size"], row["context_len"]))
    rows = []
    for key in dict.fromkeys([key for form in FORMATS for key in found[form]]):
        own = [_marked(f"{key[0]}, batch {key[1]}, context {key[2]}", key, found)]
        for form in FORMATS:
            row = found[form].get(key)
            own += [milliseconds(row["step_s"]["median"] * 1e3), f"{row['share_of_read_ceiling']:.0%}"] if row else [NONE, NONE]
        rows.append(own)
    return table(["decode step, ms", *(text for form in FORMATS for text in (title_of(form), "% of memory bandwidth"))], rows)


def replays_table(records: Records) -> str:
    """Decode steps as replays of CUDA graphs, and prompts, a column for each model, or for each of its formats."""
    found: dict[str, list[str]] = {}
    for record in records.values():
        for row in record["results"]:
            if "input_len" in row:
                name, cell = f"prompt of {row['input_len']:,} tokens", milliseconds(row["time_to_first_token_s"]["median"] * 1e3)
            else:
                name = f"decode step, batch {row['batch_size']}"
                fits = row["step_s"] is not None
                cell = f"{milliseconds(row['step_s']['median'] * 1e3)} ({row['share_of_limit']:.0%})" if fits else NONE
            found.setdefault(name, []).append(cell)
    rows = [[name, *cells] for name, cells in found.items()]
    several = len({record["quantization"] for record in records.values()}) > 1
    heads = [r["model"] + (f" {r['quantization']}" if several else "") + mark(r) for r in records.values()]
    return table(["ms (% of memory bandwidth)", *heads], rows)


def formats_table(records: Records) -> str:
    """Steps and prompts of one model with each stored format of its weights."""
    columns = [name.split("-", 2)[2] for name in records]  # h200-steps-fp8-blocks
    found: dict[str, list[list[str]]] = {}
    for column, record in enumerate(records.values()):
        for row in record["results"]:
            if "batch_size" in row:
                line, time, share = f"decode step, batch {row['batch_size']}", row["step_s"], f"{row['share_of_limit']:.0%}"
            else:
                line, time, share = f"prompt of {row['input_len']}", row["time_to_first_token_s"], NONE
            cells = found.setdefault(line, [[NONE, NONE] for _ in columns])
            cells[column] = [milliseconds(time["median"] * 1e3), share]
    marks = [mark(record) for record in records.values()]
    heads = [head for column, own in zip(columns, marks, strict=True) for head in (column + own, "% of limit")]
    return table(["ms", *heads], [[line, *(cell for pair in cells for cell in pair)] for line, cells in found.items()])


# --- mixtures of experts ---


def mixture_table(records: Records) -> str:
    """Steps and prompts of a mixture: milliseconds, the share of the limit, and the distinct experts that a layer uses.

    Columns of vLLM are those of the preset on an H200: a mixture with other numbers of experts, and another GPU, have none.
    """
    rows: dict[str, dict[str, list[str]]] = {}
    forms = list(dict.fromkeys(format_of(record) for record in records.values()))
    for record in records.values():
        form = format_of(record)
        for row in record["results"]:
            own = _mixture_cells(row, row["step_s"], VLLM_MIXTURE_STEPS.get(row["batch_size"]), record)
            rows.setdefault(f"decode step, batch {row['batch_size']}", {})[form] = own
        for row in record["prompts"]:
            own = _mixture_cells(row, row["time_to_first_token_s"], VLLM_MIXTURE_PROMPTS.get(row["input_len"]), record)
            rows.setdefault(f"prompt of {row['input_len']:,} tokens", {})[form] = own
    width = max(len(cells) for own in rows.values() for cells in own.values())
    marks = {format_of(record): mark(record) for record in records.values()}
    heads = [
        head for form in forms for head in (title_of(form) + marks[form], "% of limit", "experts", f"vLLM 0.24, {form}")[:width]
    ]
    shown = [[name, *(cell for form in forms for cell in own.get(form, [NONE] * width))] for name, own in rows.items()]
    return table(["ms", *heads], shown)


def _mixture_cells(row: Result, seconds: Result, peers: tuple[float, ...] | None, record: Result) -> list[str]:
    touched = f"{row['experts']['touched']:.1f}" if row["experts"] else NONE
    own = [milliseconds(seconds["median"] * 1e3), f"{row['share_of_limit']:.0%}", touched]
    if record.get("changed") or "H200" not in record.get("device", "H200"):
        return own
    return [*own, NONE if peers is None else milliseconds(peers[FORMATS.index(format_of(record))])]


def mixture_start_table(records: Records) -> str:
    """Seconds in which a mixture's weights are made, and in which it is warmed up."""
    starts = [(title_of(format_of(r)), r["start"]["load_s"], r["start"]["warm_up_s"]) for r in records.values()]
    rows = [[name, f"{load:.1f}", NONE if warm_up is None else f"{warm_up:.1f}"] for name, load, warm_up in starts]
    return table(["seconds", "random weights", "warm-up"], rows)


def mixture_kernels_table(records: Records) -> str:
    """Microseconds of a decode step by kernel. Kernels overlap, so their sum is longer than the step."""
    columns = [(format_of(record), row) for record in records.values() for row in record["traces"]]
    names = dict.fromkeys(name for _, row in columns for name in row["us_a_step_by_kernel"])
    rows = [["the step", *(f"{row['step_ms'] * 1e3:,.0f}" for _, row in columns)]]
    for name in names:
        found = [row["us_a_step_by_kernel"].get(name) for _, row in columns]
        rows.append([f"`{name}`", *(NONE if own is None else f"{own:,.0f}" for own in found)])
    made = table(["µs", *(f"{title_of(form)}, batch {row['batch']}" for form, row in columns)], rows)
    return f"![Share of each kernel in a decode step, by batch size](../../bench/results/mixture.svg)\n\n{made}"


# --- idle time, power, start-up, loading, techniques ---


def trace_table(records: Records) -> str:
    """Idle time, and the cost of top-p sampling, for each batch size."""
    greedy: dict[Any, Result] = {}
    drawn: dict[Any, Result] = {}
    for record in records.values():
        for row in record["results"]:
            (drawn if row["temperature"] else greedy)[row["batch"], row["context"]] = row
    rows = []
    for key, row in sorted(greedy.items()):
        other = drawn.get(key)
        own = [f"batch {key[0]}, context {key[1]}", milliseconds(row["step_ms"]), f"{row['idle']:.1%}"]
        if other:
            own += [milliseconds(other["step_ms"]), f"{other['idle']:.1%}"]
            own += [signed((other["step_ms"] / row["step_ms"] - 1) * 100, 1) + "%"]
        rows.append(own if other else [*own, *[NONE] * 3])
    return table(["decode step", "greedy, ms", "GPU idle", "top-p 0.95, ms", "GPU idle", "top-p costs"], rows)


def power_table(records: Records) -> str:
    """Times, watts and clocks, with one column for each GPU."""
    (record,) = records.values()
    gpus = sorted({row["gpu"] for row in record["results"]})

    def cells(name: Callable[[Result], str | None], show: Callable[[Result], str]) -> dict[str, list[str]]:
        """The cells of each line, one for each GPU, by the line's name."""
        found: dict[str, list[str]] = {}
        for row in record["results"]:
            line = name(row)
            if line:
                found.setdefault(line, [NONE] * len(gpus))[gpus.index(row["gpu"])] = show(row)
        return found

    def whole(row: Result) -> str:
        return f"{milliseconds(row['seconds'] * 1e3)} · {row['watts']:.0f} W · {row['sm_clock_mhz']:,.0f} MHz"

    units = {"reading": ("bytes", 1e9, "J/GB"), "product": ("flops", 1e12, "J/TFLOP")}
    awake = {row["gpu"]: row["watts"] for row in record["results"] if row["what"] == "awake"}

    def draw(row: Result) -> str:
        return f"{row['watts']:.0f} of {row['limit_w']:.0f} W"

    def cost(row: Result) -> str:
        count, scale, unit = units[row["what"]]
        return f"{(row['watts'] - awake[row['gpu']]) * row['seconds'] / row[count] * scale:.3f} {unit}"

    lines = cells(lambda r: "idle but awake, of the power limit" if r["what"] == "awake" else None, draw)
    lines |= cells(lambda r: {"reading": "reading", "product": "multiplying, bf16"}.get(r["what"]), cost)
    lines |= cells(lambda r: f"CUDA graph of a step, batch {r['batch_size']}" if r["what"] == "step" else None, whole)
    lines |= cells(lambda r: f"prompt of {r['input_len']} tokens" if r["what"] == "prompt" else None, whole)
    lines |= cells(
        lambda r: f"step of batch {r['batch_size']} through `Generator`" if r["what"] == "generator" else None,
        lambda r: milliseconds(r["seconds"] * 1e3),
    )
    return table(["bf16", *(f"GPU {gpu}" for gpu in gpus)], [[line, *row] for line, row in lines.items()])


def startup_table(records: Records) -> str:
    """Seconds from the start of the process, with empty and warm caches of kernels."""
    names = ("imported_s", "loaded_s", "ready_s", "first_token_s")
    rows = [
        [f"{title_of(format_of(record))}, {row['caches']} kernel caches", *(f"{row[name]['median']:.1f}" for name in names)]
        for record in records.values()
        for row in sorted(record["results"], key=lambda row: row["caches"], reverse=True)  # warm, then empty
    ]
    return table(["seconds since process start", "imported", "loaded", "warmed up", "first token"], rows)


def loading_table(records: Records) -> str:
    """Speed and memory of loading a checkpoint."""
    rows = []
    for name, record in records.items():
        experts = f", experts {'fused' if 'fused' in name else 'one by one'}" if "mixture" in name else ""
        runs = record if isinstance(record, list) else record.get("results", [record])
        speeds = sorted({f"{run['gb_per_s']:.1f}" for run in runs}, key=float)
        last = [runs[-1].get(size) for size in ("weights_gb", "gpu_resident_gb", "gpu_peak_gb")]
        rows.append([
            f"{runs[0]['bytes'] / GIB:.1f} GiB{experts}" + (", `--fp8`" if runs[0].get("quantization") == "fp8" else "")
            + (f", {checkpoint}" if (checkpoint := runs[0].get("checkpoint")) else ""),
            speeds[0] if len(speeds) == 1 else f"{speeds[0]} to {speeds[-1]}",
            f"{gib(max(run['host_peak_gb'] for run in runs)):.1f}",
            *(NONE if size is None else f"{gib(size):.2f}" for size in last),
        ])  # fmt: skip
    names = ["checkpoint, in the page cache", "GB/s", "peak host memory, GiB", "weights, GiB"]
    return table([*names, "GPU memory after loading, GiB", "peak GPU memory, GiB"], rows)


def served_table(records: Records) -> str:
    """The server beside the engine alone."""
    columns: list[str] = []
    lines: dict[str, list[str]] = {}
    for record in records.values():
        (row,) = record["results"]
        columns.append(title_of(format_of(record)))
        busy, offline = row["busy"]["output_throughput"], row["offline"]["output_tokens_per_s"]
        own = {
            "offline, output tokens/s": f"{offline:,.0f}",
            "served with 256 in flight, output tokens/s": f"{busy:,.0f} ({busy / offline:.1%})",
            "left of a CPU in the busiest client process": f"{row['busy']['client']['headroom']:.0%}",
            "between tokens, `Generator.stream`, ms": milliseconds(row["stream"]["median_itl_ms"]),
            "between tokens, one served stream, ms": milliseconds(row["one"]["median_itl_ms"]),
            "first token, one request at a time: median · p99, ms": _median_and_p99(row["unloaded"]),
            "first token at half the rate: median · p99, ms": _median_and_p99(row["half"]),
        }
        for name, cell in own.items():
            lines.setdefault(name, []).append(cell)
    return table(["Qwen2.5-7B, random weights", *columns], [[name, *cells] for name, cells in lines.items()])


def _median_and_p99(row: Result) -> str:
    return f"{milliseconds(row['median_ttft_ms'])} · {milliseconds(row['p99_ttft_ms'])}"


def sampling_table(records: Records) -> str:
    """Steps with penalties, log-probabilities and structured output, as multiples of plain sampling."""
    (record,) = records.values()
    rows = [
        [f"batch {row['batch_size']}, {row['case']}", milliseconds(row["step_s"] * 1e3), *(f"{row[key]:.3f}" for key in _RATIO)]
        for row in record["results"]
    ]
    return table(["decode step", "ms", "of plain sampling", "95% interval from", "to"], rows)


def prefix_cache_table(records: Records) -> str:
    """A prompt behind cached tokens, and requests that find nothing in the cache."""
    (record,) = records.values()
    (row,) = record["results"]
    first = f"first token of {row['new']} new tokens behind {row['shared']:,} cached ones, ms"
    rows = [
        [first, milliseconds(row["first_token_s"] * 1e3)],
        ["the GPU's time for this chunk, ms", milliseconds(row["chunk_s"] * 1e3)],
        ["time of requests without hits, of the time with the cache off", f"{row['ratio_without_hits']:.3f}"],
        ["95% interval", f"{row['low']:.3f} to {row['high']:.3f}"],
    ]
    return table(["prefix cache", record["model"]], rows)


def long_prompts_table(records: Records) -> str:
    """First tokens of long prompts beside the GPU's own time."""
    rows = []
    for record in records.values():
        for row in record["results"]:
            times = [milliseconds(row[name] * 1e3) for name in ("first_token_s", "gpu_s")]
            prompt = f"{row['input_len']:,} tokens, {'`--fp8`' if record['quantization'] else 'bf16'}"
            rows.append([prompt, *times, f"{row['of_gpu']:.2f}", f"{row['warm_up_s']:.1f}" if row["warm_up_s"] else NONE])
    model = next(iter(records.values()))["model"]
    return table([f"{model}, ms", "first token", "the GPU's time", "ratio", "warm-up, s"], rows)


def patch_table(records: Records) -> str:
    """A transformers model with and without minirt's kernels: the first record in eager mode, the second one compiled."""
    rows, (record, compiled) = [], records.values()
    variants = list(dict.fromkeys(row["variant"] for row in record["results"]))
    for mode, results in (("eager", record["results"]), ("compiled", compiled["results"])):
        results = [row for row in results if row["mode"] == mode]
        for test in dict.fromkeys(row["test"] for row in results):
            own = {row["variant"]: row for row in results if row["test"] == test}
            base = own[variants[0]]
            title = f"prompt of {int(test[2:]):,} tokens" if test.startswith("pp") else f"decode step, B = {base['batch_size']}"
            rows.append([title + ", compiled" * (mode == "compiled"), milliseconds(base["seconds"]["median"] * 1e3)])
            rows[-1] += [f"{own[variant]['speedup']:.2f} ×" if variant in own else NONE for variant in variants[1:]]
    versions = record["versions"]
    names = [f"Liger {versions['liger-kernel']}" if name == "liger" else name for name in variants[1:]]
    what = f"{record['model']}, {record['dtype']}, {record['device']}"
    return table([what, f"transformers {versions['transformers']}, ms", *names], rows)


_RATIO = ("ratio", "low", "high")


def memory_table(records: Records) -> str:
    """What models take of a GPU of which another process holds the rest, and how long the workloads took."""
    results = [row for record in records.values() for row in record["results"]]
    workloads = [name for name in results[0] if " x " in name or name.startswith("logits")]
    rows = []
    for row in results:
        title = f"{row['model']}, {row['weights']}" + ", FP8 pages" * (row["kv_cache_dtype"] == "fp8")
        rows.append([f"{gib(row['free_gb']):.1f}", title])
        if "refused" in row:
            rows[-1] += ["refused", *[NONE] * (4 + len(workloads))]
            continue
        rows[-1] += [f"{row['max_num_batched_tokens']:,}", f"{gib(row['pages_gb']):.1f}", f"{row['max_len']:,}"]
        rows[-1] += [f"{gib(row['steps_gb']):.2f}", f"{row['least_free']:.1%}", *(f"{row[name]:.2f}" for name in workloads)]
    columns = ["free, GiB", "model", "tokens in a step", "KV pages, GiB", "context", "steps, GiB", "least free"]
    return table([*columns, *(f"{name}, s" for name in workloads)], rows)


def chunking_table(records: Records) -> str:
    """The time between tokens of decoding requests beside long prompts, by the maximum number of tokens in a step."""
    found = [row | {"mark": mark(own)} for own in records.values() for row in own["results"] if row["inter_token_s"]]
    rows = [
        [
            f"{row['max_num_batched_tokens']:,}{row['mark']}",
            *(milliseconds(row["inter_token_s"][name] * 1e3) for name in ("p50", "p99", "max")),
            f"{row['tokens_per_s']:,.0f}",
        ]
        for row in sorted(found, key=lambda row: -row["max_num_batched_tokens"])
    ]
    title = "`--max-num-batched-tokens`"
    return table([title, "time between tokens: p50, ms", "p99, ms", "longest, ms", "prompt tokens/s"], rows)


def cpu_table(records: Records) -> str:
    """A sentence about SmolLM2-135M on a CPU, compared with transformers."""
    (record,) = records.values()
    return (
        f"On {record['threads']} CPU threads, minirt decodes SmolLM2-135M at {record['ratio']:.2f} times the speed of "
        f"transformers and needs {mib(record['peak_mb']):,.0f} MiB, of which {mib(record['weights_mb']):,.0f} MiB are weights. "
        f"The first token comes {record['first_token_s_after_process_start']:.1f} s after the process starts "
        "(`tests/tools/compare_transformers.py`)."
    )


def ablation_table(records: Records) -> str:
    """Milliseconds by which a step is longer without each trick, for each batch size."""
    columns = [(format_of(record), row) for record in records.values() for row in record["results"]]
    what: dict[str, str] = {}
    for record in records.values():
        what |= record["what"]
    rows = [["the step as it is, ms", *(milliseconds(row["step_s"] * 1e3) for _, row in columns)]]
    for name, text in what.items():
        own = [row["tricks"].get(name) for _, row in columns]
        if any(own):
            rows.append([text, *("" if one is None else signed(one["brings_s"] * 1e3, 2) for one in own)])
    return table(["ms added when left out", *(f"{title_of(form)}, batch {row['batch_size']}" for form, row in columns)], rows)


def fusion_table(records: Records) -> str:
    """Times of a decode step: eager, on Triton, and with one kind of layer eager."""
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
        columns += [f"{record['model']}, {title}, ms" if several else f"{title}, ms", "over Triton"]
    return table(columns, cells)


def layers_table(records: Records) -> str:
    """Medians over the layers of each kind, and their largest error; then the whole step."""
    found = [(record, row) for record in records.values() for row in record["results"]]
    rows = []
    for step, kind in dict.fromkeys((row["step"], row["kind"]) for _, row in found):
        cells = [f"{step}, {kind}"]
        for record in records.values():
            own = [row for row in record["results"] if (row["step"], row["kind"]) == (step, kind)]
            cells += _layer(own)
        rows.append(cells)
    names = ("eager, µs", "Triton, µs", "% of limit", "error / PyTorch's error")
    columns = [f"{title_of(format_of(record))}: {name}" for record in records.values() for name in names]
    return "\n\n".join(filter(None, (table(["layer", *columns], rows), fusion_table(records))))


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


class Telling(NamedTuple):
    """The small and the large point that a kernel's row shows, as (tokens, context). Only attention has a context."""

    few: tuple[int, int | None]
    many: tuple[int, int | None]


def telling(kernel: str) -> Telling:
    """The two points that the table shows for a kernel."""
    if kernel.startswith("attention_prefill"):
        return Telling((16, 32752), (8192, 0))
    if kernel.startswith("attention_decode"):
        return Telling((1, 8000), (64, 1000))
    if kernel.startswith("attention_few"):
        return Telling((1, 8000), (32, 1000))
    if kernel.startswith(("lm_head", "sample_", "gated_delta_decode")):
        return Telling((1, None), (64, None))
    return Telling((512 if kernel.startswith(("gemm_", "gated_delta_prefill")) else 1, None), (2048, None))


def kernels_table(records: Records) -> str:
    """A table with a row for each kernel at two points, then a summary over all points against each alternative."""
    rows = _points(records)
    models = {row["kernel"]: row["model"] for row in rows} | {row["kernel"]: _MODEL for row in rows if row["model"] == _MODEL}
    shown = {(row["kernel"], row["tokens"], row["context"]): row for row in rows if row["model"] == models[row["kernel"]]}
    cells = []
    for kernel, model in models.items():
        cells.append([f"`{kernel}`" + ("" if model == _MODEL else f", {model}")])
        for tokens, context in telling(kernel):
            cells[-1] += _kernel(shown.get((kernel, tokens, context)))
    point = ["tokens", "µs", "% of limit", "speedups"]
    parts = [table([f"kernel, {_MODEL}", *point, *point], cells)] if cells else []
    return "\n\n".join([*parts, _summary(rows)])


def _points(records: Records) -> list[Result]:
    """The rows of all records. If several records have a point, the first one is used."""
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
    columns = ["Triton compared with, all stored points", "points", "Triton faster at", "median speedup", "lowest speedup"]
    return table(columns, lines)


def shapes_table(records: Records) -> str:
    """Microseconds of each kernel above its limit: the mean over a model's points, and the highest relative to Qwen2.5-7B's."""
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
    return table(["µs above the limit", *models, f"highest, relative to {_MODEL}"], cells)


def gemms_table(records: Records) -> str:
    """GEMMs by number of tokens: microseconds, and cuBLAS's time divided by minirt's."""
    rows = [row for record in records.values() for row in record["results"] if row["seconds"]]
    counts = sorted({row["tokens"] for row in rows})
    cells = []
    for kernel, model in dict.fromkeys((row["kernel"], row["model"]) for row in rows):
        own = {row["tokens"]: row for row in rows if (row["kernel"], row["model"]) == (kernel, model)}
        cells.append([f"`{kernel}`, {model}", *(_gemm(own.get(count)) for count in counts)])
        forms = [name for name in ("triton", *_SUMS) if any(name in row["errors"] for row in own.values())]
        most = (max(row["errors"][name]["relative"] for row in own.values() if name in row["errors"]) for name in forms)
        cells[-1].append(" · ".join(f"{error:.1e}" for error in most))
    return table(["GEMM, model", *(f"{count:,} tokens" for count in counts), "largest error"], cells)


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


def attention_table(records: Records) -> str:
    """Attention of prompts and chunks, by new tokens @ cached tokens, on 16-bit and on FP8 pages."""
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
    """Cells: the number of gains, their median and the largest in per cent."""
    return [str(len(gains)), *([f"{statistics.median(gains):.1%}", f"{max(gains):.1%}"] if gains else [NONE, NONE])]


def tuned_table(records: Records) -> str:
    """For each kernel family and format: in how many buckets a configuration is faster than the rule's, in chains and in whole
    steps, and by how much."""
    cells = []
    for record in records.values():
        for kernel in dict.fromkeys(row["kernel"] for row in record["results"]):
            own = [row for row in record["results"] if row["kernel"] == kernel]
            chains = [1 - row["best_s"] / row["rule_s"] for row in own if row["best_s"] < row["rule_s"]]
            kept = [row for row in own if row["config"] is not None and row["best_step_s"] is not None]
            steps = [1 - row["best_step_s"] / row["rule_step_s"] for row in kept]
            name = f"`{kernel}`, {title_of(format_of(record))}"
            cells.append([name, str(len(own)), str(sum(row["tried"] for row in own)), *_gains(chains), *_gains(steps)])
    columns = ["kernel", "buckets", "configurations tried", "faster alone", "median gain", "highest"]
    columns += ["faster in whole steps", "median gain", "highest"]
    return table(columns, cells)


def quality_table(records: Records) -> str:
    """What FP8 costs: the loss in nats per token above fp32."""
    (lines,) = records.values()
    about = next(line for line in lines if line["kind"] == "about")
    found = {line["name"]: line for line in lines if "difference" in line}
    rows = [[title, *(_loss(found.get(name)) for name in names)] for title, names in _QUALITY.items()]
    shown = table(["nats per token above fp32", "`--fp8`", "and `--kv-cache-dtype fp8`", "`--fp8 --fp8-head`"], rows)
    where = f"{about['date']}, torch {about['versions']['torch']}, eager layers on a CPU"
    return f"{shown}\n\nFrom `cpu-fp8-quality` ({where}); ± is the standard error over windows of 512 tokens."


def int4_quality_table(records: Records) -> str:
    """What 4 bits cost: the loss in nats per token above fp32, and the divergence, for several ways to choose scales."""
    (lines,) = records.values()
    about = next(line for line in lines if line["kind"] == "about")
    columns = ("int4", "round to nearest", "mse observer", "mse observer, zero points")
    rows = []
    for model in dict.fromkeys(line["model"] for line in lines if "difference" in line):
        found = {line["name"]: line for line in lines if line.get("model") == model}
        rows.append([model, *(_loss(found.get(name)) for name in columns)])
        rows.append([f"{model}, KL", *(f"{found[name]['kl']:.4f}" if name in found else NONE for name in columns)])
    titles = ["`--quantize int4`", "round to nearest", "MSE observer", "MSE observer, zero points"]
    shown = table(["nats per token above fp32", *titles], rows)
    where = f"{about['date']}, torch {about['versions']['torch']}, eager layers on a CPU"
    return f"{shown}\n\nFrom `cpu-int4-quality` ({where}); ± is the standard error over windows of 512 tokens, SmolLM2 256."


def format_quality_table(records: Records) -> str:
    """What each format of checkpoints costs, as minirt computes it and with activations that are not rounded."""
    (lines,) = records.values()
    about = next(line for line in lines if line["kind"] == "about")
    rows = []
    for line in lines:
        if line["kind"] == "format":
            own = line["name"]
            loss = NONE if own == "fp32" else f"{signed(line['difference'], 4)} ± {line['standard_error']:.4f}"
            weights = f"{signed(line['weights_only'], 4)}" if "weights_only" in line else NONE
            title = f"`{own}`" if own.startswith("-") else own
            rows.append([title, f"{line['weight_bytes'] / MIB:.0f}", f"{line['perplexity']:.2f}", loss, weights])
    shown = table([about["model"], "weights, MiB", "perplexity", "nats per token above fp32", "of the weights alone"], rows)
    where = f"{about['date']}, torch {about['versions']['torch']}, eager layers on a CPU"
    windows = f"{lines[1]['tokens']:,} tokens of {len(about['texts'])} texts"
    return f"{shown}\n\nFrom `cpu-format-quality` ({where}); {windows}, ± is the standard error over windows of 256 tokens."


def options_quality_table(records: Records) -> str:
    """What each option costs trained models: a row for each model and option."""
    (lines,) = records.values()
    rows = []
    for line in lines:
        if line["kind"] == "option":
            base = line["name"] == "fp32"
            loss = NONE if base else f"{signed(line['difference'], 4)} ± {line['standard_error']:.4f}"
            cells = f"{line['weight_bytes'] / MIB:,.0f}", f"{line['perplexity']:.2f}", loss, f"{line['tokens']:,}"
            rows.append([f"{line['model']}, " + ("fp32" if base else f"`{line['name']}`"), *cells])
    shown = table(["trained model", "weights, MiB", "perplexity", "nats per token above fp32", "tokens"], rows)
    return f"{shown}\n\n{_trained_origin(lines)}; ± is the standard error over windows of 256 tokens."


def trained_table(records: Records) -> str:
    """What trained models answer: drafts that are right, chats beside transformers, tool calls, JSON by a schema."""
    (lines,) = records.values()
    kinds: dict[str, dict[str, list[Result]]] = {}
    for line in lines:
        kinds.setdefault(line["kind"], {}).setdefault(line.get("model", ""), []).append(line)
    rows = [
        [
            f"{own['model']} {own['dtype']}, {own['prompts']}", f"{own['num_accepted_tokens']:,} of {own['num_draft_tokens']:,}",
            f"{own['output_tokens'] / (own['output_tokens'] - own['num_accepted_tokens']):.2f}",
            f"{own['same_texts']} of {own['texts']}",
        ]
        for own in (line for each in kinds.get("drafts", {}).values() for line in each)
    ]  # fmt: skip
    parts = [table(["n-gram drafts", "drafts right", "tokens a step", "same text"], rows)] if rows else []
    for model, chats in kinds.get("chat", {}).items():
        same, tokens = sum(line["same_tokens"] for line in chats), sum(line["tokens"] for line in chats)
        text = f"{model}: {same} of {len(chats)} greedy answers in fp32, {tokens} tokens together, are those of transformers"
        parts.append(f"{text}, token for token.")
    for kind, what in (("tool", "questions with tools that must be called"), ("schema", "requests with a JSON schema")):
        for model, own in kinds.get(kind, {}).items():
            valid, right = (sum(line[name] for line in own) for name in ("valid", "right"))
            text = f"{model}, {len(own)} {what}, in bf16 through `minirt serve`: {valid} valid by the schema"
            parts.append(f"{text}, {right} with the right content.")
    return "\n\n".join([*parts, f"{_trained_origin(lines)}."])


def _trained_origin(lines: Result) -> str:
    about = lines[0]
    where = f"{about['date']}, torch {about['versions']['torch']}, eager layers on a CPU, {about['device'].partition(', ')[2]}"
    return f"{about['weights'][0].upper()}{about['weights'][1:]}. From `cpu-trained-models` ({where})"


_SIZES = {"fp32": "float32", "--quantize fp8": "`--fp8`", "--quantize int4": "`--quantize int4`"}  # lines of `sizes_table`


def sizes_table(records: Records) -> str:
    """README.md's table of what quantization saves and costs."""
    (lines,) = records.values()
    about = next(line for line in lines if line["kind"] == "about")
    found = {line["name"]: line for line in lines if line["kind"] == "format"}
    base = found["fp32"]["perplexity"]
    rows = []
    for name, title in _SIZES.items():
        own = found[name]
        more = NONE if name == "fp32" else f"{signed((own['perplexity'] / base - 1) * 100, 1)}%"
        rows.append([title, f"{own['weight_bytes'] / MIB:.0f}", f"{own['perplexity']:.2f}", more])
    return table([f"{about['model']}, on a CPU", "weights, MiB", "perplexity", "above float32"], rows)


# For each row of the table, the result's name for each column. None: the column does not differ from the first.
_QUALITY: dict[str, tuple[str | None, ...]] = {
    "embedded model": ("embedded fp8", "embedded fp8 + kv", None),
    "embedded model with outliers": ("embedded outliers, fp8", "embedded outliers, fp8 + kv", None),
    "SmolLM2-135M-Instruct": ("SmolLM2-135M fp8", "SmolLM2-135M fp8 + kv", "WA all"),
}


def _loss(line: Result | None) -> str:
    return NONE if line is None else f"{signed(line['difference'], 4)} ± {line['standard_error']:.4f} ({line['tokens']:,} tokens)"


README, BENCHMARKS = ROOT / "README.md", ROOT / "docs" / "benchmarks"
QUANTIZATION = ROOT / "docs" / "quantization.md"


class Block(NamedTuple):
    """A generated block of a page.

    Attributes:
        sources: names or globs of the results, in order.
        make: makes the block's content from the results.
        page: the page that has the block.
        says: text before the table.
        names: whether the block ends with the names of the results and their commits.
    """

    sources: tuple[str, ...]
    make: Callable[[Records], str]
    page: Path
    says: str = ""
    names: bool = True


_BOTH_ENGINES = BESIDE_VLLM, IN_PROCESS
_STEPS = ("h200-decode-bf16", "h200-decode-fp8", "h200-decode-bf16-8000", "h200-decode-fp8-8000")
_PROMPTS = ("h200-prefill-bf16", "h200-prefill-fp8")
_MIXTURE = ("h200-mixture-bf16", "h200-mixture-fp8")
_OTHERS = ("llama-3.1-8b", "qwen3-4b", "qwen2.5-0.5b", "smollm2-1.7b", "bf16-odd", "fp8-odd")
_LOADED = ("bf16", "fp8", "w4a16", "mixture-bf16", "mixture-fp8", "mixture-fused-bf16", "mixture-fused-fp8")
_STORED_FORMATS = ("fp8-blocks", "fp8-channels", "fp8-odd-tiles", "fp8-odd-widths")
_MODELS, _KERNELS, _LAYERS, _SYSTEM = (BENCHMARKS / f"{name}.md" for name in ("models", "kernels", "layers", "system"))
BLOCKS = {
    "headline": Block(_BOTH_ENGINES, headline, README, names=False),
    "vllm": Block(_BOTH_ENGINES, readme_table, README, names=False),
    "sizes": Block(("cpu-format-quality",), sizes_table, README, names=False),
    "engines": Block(_BOTH_ENGINES, engines_table, _MODELS, names=False),
    "correction": Block(
        _BOTH_ENGINES, correction_table, _MODELS,
        "Until this correction, README.md and this page compared minirt with an engine of vLLM in the caller's process "
        "(`VLLM_ENABLE_V1_MULTIPROCESSING=0`). There, Python code of the caller delays large batches. By default, vLLM's engine "
        "is a process of its own that schedules asynchronously. The earlier figures were too good for minirt with many requests; "
        "those of single cells below also differ because the cards do:",
    ),
    "drafts": Block(
        (BESIDE_VLLM,), drafts_table, _MODELS,
        "Speculative decoding on an H100. Synthetic drafts take no time to make, MTP drafts do (`bench/tools/speculation.py "
        "--synthetic`):",
        names=False,
    ),
    "about": Block(_STEPS + _PROMPTS, about_table, _MODELS, names=False),
    "decode": Block(_STEPS, decode_table, _MODELS),
    "prefill": Block(_PROMPTS, prefill_table, _MODELS),
    "losses": Block(_STEPS + _PROMPTS, losses_table, _MODELS, names=False),
    "checks": Block(_STEPS + _PROMPTS, checks_table, _MODELS, names=False),
    "others": Block(
        tuple(f"h200-decode-{name}" + "*" * (not name.endswith("odd")) for name in _OTHERS), others_table, _MODELS,
        "Decode steps of models, batch sizes and contexts for which the built-in rules were not fitted:",
    ),
    "patch": Block(
        ("h100-80gb-hbm3-patch-7b", "h100-80gb-hbm3-patch-7b-compiled"), patch_table, _MODELS,
        "[`minirt.patch`](../kernels-in-your-model.md) and Liger's kernels in a transformers model, relative to the model "
        "without changes: in eager mode, and compiled with a static cache. In eager mode, small steps wait for the host, whose "
        "speed varies:",
    ),
    "long-prompts": Block(
        ("h100-80gb-hbm3-long-prompts-bf16", "h100-80gb-hbm3-long-prompts-fp8"), long_prompts_table, _MODELS,
        "First tokens of prompts of more than 2,048 tokens in a small model, where the host's launches count, on an H100 "
        "(`bench/tools/long_prompts.py` of 06e80f37; [host loop](../decisions/host-loop.md) has figures of an H200). vLLM 0.24 in bf16, "
        "measured separately on an H200, takes 7.8 ms for 3,000 tokens:",
    ),
    "trained": Block(("cpu-trained-models",), trained_table, _MODELS, names=False),
    "int4": Block(
        tuple(f"h200-steps-int4-{model}" for model in ("qwen2.5-7b", "llama-3.1-8b", "qwen3-4b")), replays_table, _MODELS,
        "4-bit weights (`--quantize int4`, groups of 128, the head in 16 bits). A decode step is its CUDA graph alone, at a "
        "context of 128 tokens:",
    ),
    "experts-steps": Block(
        tuple(f"h100-80gb-hbm3-steps-{name}" for name in ("fp8-qwen3.5-35b-a3b", "fp8-qwen3-30b-a3b", "int4-qwen3-30b-a3b")),
        replays_table, _MODELS,
        "Mixtures of experts on an H100, random weights. A decode step is its CUDA graph alone, at a context of 128 tokens. The "
        "share counts the weights of the experts that uniform routing uses:",
    ),
    "formats": Block(
        tuple(f"h200-steps-{name}" for name in _STORED_FORMATS), formats_table, _MODELS,
        "Qwen2.5-7B with quantized weights, random values. `fp8-blocks` has a scale for each 128 × 128 weights, `fp8-channels` "
        "(compressed-tensors) one for each output channel. `fp8-odd-tiles` is `fp8-blocks` with widths that are multiples of a "
        "block but not of a tile, `fp8-odd-widths` with widths that are not even multiples of a block "
        "(`bench/tools/stored_format.py`). The LM head is in bf16. The limit of a step is the time to read the weights and the "
        "KV cache:",
    ),
    "chunking": Block(
        ("h200-chunking-8448", "h200-chunking-2048", "h200-chunking-512"), chunking_table, _MODELS,
        "Long prompts arrive while other requests decode. The table shows the time between two tokens of a decoding request, by "
        "the largest number of tokens in a step (`minirt bench prefill --beside`; the commands are in the results):",
    ),
    "mixture": Block(
        _MIXTURE, mixture_table, _MODELS,
        "Qwen3-30B-A3B shapes, random weights, greedy decoding, context 128. *Experts* is the mean number of distinct "
        "experts that a layer of the step uses, of 128; the limit counts their weights. vLLM was measured separately; in FP8, "
        "its steps of 64 and 256 sequences used fewer distinct experts:",
    ),
    "mixture-odd": Block(
        ("h200-mixture-odd-bf16",), mixture_table, _MODELS,
        "The same model with 120 experts of 752 channels, which are no multiples of a tile:",
    ),
    "mixture-fp8-blocks": Block(
        tuple(f"h100-80gb-hbm3-mixture-{name}" for name in ("bf16", "fp8", "fp8-blocks")), mixture_table, _MODELS,
        "The same model on an H100 (80 GB, 3.35 TB/s by its datasheet), also with FP8 weights that have a scale for each block "
        "of 128 × 128, as in the official FP8 files:",
    ),
    "mixture-start": Block(
        _MIXTURE, mixture_start_table, _MODELS,
        "The start of the same processes, with kernels in Triton's cache:",
    ),
    "mixture-kernels": Block(
        _MIXTURE, mixture_kernels_table, _MODELS,
        "Where a decode step's time goes, by PyTorch's profiler. Kernels overlap: one that waits for its predecessor counts too.",
    ),
    "kernels": Block(
        tuple(
            f"h200-kernels-{name}"
            for name in ("rows", "linears", "mlp", "attention", "experts", "gated-delta", "gemm", "others-attention", "others")
        ),
        kernels_table, _KERNELS,
        "Each kernel alone, with a cold L2 cache (`minirt bench kernels`). The three speedups are over eager PyTorch · "
        "torch.compile · PyTorch's own kernel (cuBLAS, SDPA). A speedup marked \\* is over code that computes less than the "
        "kernel. For attention, the column *tokens* shows new tokens @ cached tokens; for decode attention, sequences @ cached "
        "tokens of each. Each row shows a small and a large point. The stored results have all points, with error and spread.",
    ),
    "shapes": Block(
        ("h200-kernels-others-attention", "h200-kernels-others"), shapes_table, _KERNELS,
        "Microseconds by which the kernels of a decode step exceed their limits. Each cell is the mean over 1, 3, 24 and 100 "
        "tokens; for attention, over contexts of 128 and 3000 tokens as well:",
    ),
    "gemms": Block(
        ("h200-kernels-gemm",), gemms_table, _KERNELS,
        "GEMMs of prompts alone. Each cell is minirt's time in microseconds · cuBLAS's time divided by minirt's. Rows with "
        "`.fp8` have two such quotients: for exact and for fast accumulation in cuBLAS. For a quotient marked \\*, cuBLAS leaves "
        "out the activation. Errors are relative to fp64: minirt's, then cuBLAS's in the same order:",
    ),
    "attention": Block(
        ("h200-kernels-attention",), attention_table, _KERNELS,
        "Attention of prompts alone, by new tokens @ cached tokens. The SDPA column is SDPA's time divided by the kernel's. SDPA "
        "runs its fastest backend, and reads contiguous tensors instead of pages:",
    ),
    "tuned": Block(
        ("h200-tune-bf16", "h200-tune-fp8"), tuned_table, _KERNELS,
        "What `minirt tune` finds for Qwen2.5-7B compared with the built-in rules. A bucket is a kernel, a shape and a range of "
        "token counts. *Faster alone* counts buckets with a configuration that is faster in chains of dependent launches; only "
        "those that also make a whole decode step faster are kept:",
    ),
    "fusion": Block(("h200-compare-embedded", "h200-compare-smollm2"), fusion_table, _LAYERS),
    "layers-7b": Block(
        ("h200-compare-7b-bf16", "h200-compare-7b-fp8"), layers_table, _LAYERS,
        "Qwen2.5-7B, random weights (`minirt compare`). Times are medians over the layers of a kind. Errors, relative to "
        "fp64, are the largest of a kind:",
    ),
    "ablation": Block(
        ("h200-ablation-bf16", "h200-ablation-fp8"), ablation_table, _LAYERS,
        "Milliseconds that a decode step of Qwen2.5-7B takes longer when one technique is left out. An empty cell means that the "
        "step does not use it. Steps are CUDA graphs without the sampler (`bench/tools/ablation.py` of 06e80f37):",
    ),
    "first-token": Block((BESIDE_VLLM,), first_token_table, _SYSTEM, "On an H100, with more parts:", names=False),
    "startup": Block(
        ("h200-startup-bf16", "h200-startup-fp8"), startup_table, _SYSTEM,
        "From process start to the first token, Qwen2.5-7B with random weights. Warm rows are medians of several starts "
        "(`bench/tools/startup.py`):",
    ),
    "loading": Block(
        tuple(f"h200-loading-{name}" for name in _LOADED), loading_table, _SYSTEM,
        "Loading a checkpoint (`bench/tools/loading.py` of 06e80f37). Peak GPU memory is that of loading and the first tokens; in rows "
        "without GPU memory after loading, that of loading alone:",
    ),
    "served": Block(
        ("h200-served-bf16", "h200-served-fp8"), served_table, _SYSTEM,
        "`minirt serve` beside the engine without a server (`bench/tools/served.py`): 1,000 requests of 32 to 512 prompt tokens "
        "and 32 to 256 new tokens, streamed:",
    ),
    "sampling": Block(
        ("h200-sampling-cost",), sampling_table, _SYSTEM,
        "Decode steps of Qwen2.5-7B in bf16 that sample at temperature 1, through `Generator` (`bench/tools/sampling_cost.py` of 06e80f37). "
        "*structured* follows a JSON schema:",
    ),
    "prefix-cache": Block(
        ("h200-prefix-cache",), prefix_cache_table, _SYSTEM, "Qwen2.5-7B in bf16 (`bench/tools/prefix_cache.py` of 06e80f37):"
    ),
    "memory": Block(
        ("h200-memory", "h200-memory-quantized-pages"), memory_table, _SYSTEM,
        "Models with default options on a GPU of which another process holds the rest, with random weights "
        "(`bench/tools/memory_cases.py` of 06e80f37). *Least free* is the lowest amount of free memory during all workloads, as a share of "
        "what was free at the start. Prompts that are longer than the context are cut to it:",
    ),
    "trace": Block(
        ("h200-trace",), trace_table, _SYSTEM,
        "The GPU during decoding, by PyTorch's profiler (`bench/tools/gpu_trace.py`). A gap between two kernels counts as idle:",
    ),
    "power": Block(
        ("h200-power",), power_table, _SYSTEM,
        "The GPUs of one host under sustained load at the same time: milliseconds, watts, and the SM clock. Energies do not "
        "include the idle power of the GPU (`bench/tools/power.py` of 06e80f37):",
    ),
    "cpu": Block(("cpu-smollm2",), cpu_table, _SYSTEM),
    "quality": Block(("cpu-fp8-quality",), quality_table, QUANTIZATION, names=False),
    "quality-int4": Block(("cpu-int4-quality",), int4_quality_table, QUANTIZATION, names=False),
    "quality-options": Block(("cpu-trained-models",), options_quality_table, QUANTIZATION, names=False),
    "quality-formats": Block(("cpu-format-quality",), format_quality_table, QUANTIZATION, names=False),
}  # fmt: skip


def pages() -> list[Path]:
    """Every page that has blocks."""
    return list(dict.fromkeys(block.page for block in BLOCKS.values()))


def block(name: str) -> str:
    """The content of a block: text, table, and the results with their commits. Without stored results, the command for them."""
    own = BLOCKS[name]
    records = stored(own.sources)
    if not records:
        runs = " ".join(source.removeprefix("h200-") for source in own.sources)
        return f"{own.says}\n\nNo results are stored yet. `python bench/tools/collect.py FOLDER {runs}` makes them.".strip()
    made = own.make(records)
    marked = unchecked(records.values()) if "†" in made else ""
    parts = (own.says, made, marked, origin(records) if own.names else "") if made else ()
    return "\n\n".join(filter(None, parts))


def origin(records: Records) -> str:
    """The results' names, by commit."""
    by_commit: dict[str, list[str]] = {}
    for name, record in records.items():
        for run in record if isinstance(record, list) else [record]:
            by_commit[run["commit"]] = list(dict.fromkeys([*by_commit.get(run["commit"], []), f"`{name}`"]))
    return "From " + "; ".join(f"{', '.join(names)} (commit {commit})" for commit, names in by_commit.items()) + "."


def render(text: str) -> str:
    """The text of a page with every block made again."""

    def anew(match: re.Match[str]) -> str:
        made = block(match["name"])
        return match["start"] + (f"{made}\n" if made else "") + match["end"]

    names = "|".join(BLOCKS)
    pattern = rf"(?P<start><!-- (?P<name>{names}) -->\n)(?:.*?\n)??(?P<end><!-- end of (?P=name) -->)"
    return re.sub(pattern, anew, text, flags=re.DOTALL)


class Picture(NamedTuple):
    """A generated picture. `sources`: the results that it shows. `page`: the page that shows it."""

    sources: tuple[str, ...]
    draw: Callable[[Records, Path, str], None]
    page: Path


PICTURES = {
    "speed": Picture(_BOTH_ENGINES, pictures.engines, README),
    "speed-h200": Picture(_STEPS + _PROMPTS, pictures.speed, _MODELS),
    "layers": Picture(("h200-compare-embedded",), pictures.layers, _LAYERS),
    "mixture": Picture(_MIXTURE, pictures.mixture, _MODELS),
}


def drawable() -> list[str]:
    """The pictures whose results are all stored."""
    return [name for name, own in PICTURES.items() if len(stored(own.sources)) == len(own.sources)]


def digest(name: str) -> str:
    """A digest of the results that a picture shows."""
    content = b"".join((RESULTS / f"{source}.json").read_bytes() for source in PICTURES[name].sources)
    return f"results {hashlib.sha256(content).hexdigest()[:16]}"


def picture(name: str, target: Path) -> None:
    PICTURES[name].draw(stored(PICTURES[name].sources), target, digest(name))


def main(files: list[str]) -> None:
    for file in files:
        shutil.copy(file, RESULTS)
    for page in pages():
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name in drawable():
        picture(name, RESULTS / f"{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])

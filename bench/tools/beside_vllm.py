"""What README.md and docs/benchmarks/models.md say of minirt and vLLM on cards of one type: tables, and sentences about them."""

from collections.abc import Sequence

from minirt.bench.tools.cells import NONE, milliseconds, table
from minirt.bench.tools.results import (
    BESIDE_VLLM,
    FORMATS,
    IN_PROCESS,
    OFFLINE,
    Key,
    Point,
    Records,
    latest,
    points_of,
    run_of,
    stack_of,
    title_of,
)

# The points that README.md shows, where vLLM ran as it does by default.
_README_POINTS = ("step", 1, 128), ("step", 64, 128), ("step", 128, 128), ("step", 256, 128), OFFLINE
# The sections of docs/benchmarks/models.md with all points of both engines, and with runs that were checked before timing.
_ALL_POINTS, _CHECKED_RUNS = "#beside-vllm", "#an-earlier-vllm-on-an-h200"
_TIE = 0.02  # times that differ by less are a tie
_CARDS = 0.1  # by how much two cards of one type may differ
_LIKE_BATCHES = 2  # from this batch on, both engines compute `--fp8` in FP8; minirt's single token has 16-bit activations
_IN_PROCESS = "‡"  # marks vLLM's figures that are not of its default setting


def _name_of(key: Key) -> str:
    kind, *sizes = key
    if kind == "step":
        return f"decode step, batch {sizes[0]}" + (f", context {sizes[1]:,}" if sizes[1] != 128 else "")
    return f"first token, prompt of {sizes[0]:,} tokens" if kind == "prompt" else "offline, output tokens/s"


def _row_of(key: Key) -> str:
    return _name_of(key) + ", ms" * (key != OFFLINE)


def _cell_of(key: Key, values: Sequence[float]) -> str:
    return " to ".join(f"{value:,.0f}" if key == OFFLINE else milliseconds(value * 1e3) for value in values) or NONE


def speedups(key: Key, ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """How many times as fast as vLLM minirt is, by times or, offline, by rates: for all measurements of both, ascending."""
    return sorted(a / b if key == OFFLINE else b / a for a in ours for b in theirs)


def _times(ratios: Sequence[float]) -> str:
    """1.33, or 1.33 to 1.39."""
    return " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (ratios[0], ratios[-1])))


def _tied(ratios: Sequence[float]) -> bool:
    return abs(ratios[0] - 1) < _TIE


def headline(records: Records) -> str:
    """README.md's first sentence about speed: only decode steps of both defaults with the same arithmetic."""
    record, steps = records[BESIDE_VLLM], []
    for form in FORMATS:
        points = {key: point for key, point in points_of(records, form).items() if point.ours and not point.in_process}
        like = [key for key in points if key[0] == "step" and key[1] >= _LIKE_BATCHES]
        ratios = {key: speedups(key, points[key].ours, points[key].theirs) for key in like}
        batches = sorted({key[1] for key in ratios})
        factors = _times(sorted(ratio for each in ratios.values() for ratio in each))
        between = " and " if len(batches) == 2 else " to "
        steps.append(f"{factors} times as fast in {title_of(form)} (batch {batches[0]}{between}{batches[-1]})")
    card = record["device"].removeprefix("NVIDIA ").partition(" ")[0]
    rates = [points_of(records, form)[OFFLINE] for form in FORMATS]
    offline = [speedups(OFFLINE, point.ours, point.theirs) for point in rates]
    gains = [f"{_times(each)} times vLLM's in {title_of(form)}" for each, form in zip(offline, FORMATS, strict=True)]
    unsure = f", so {_times(min(offline))} may be no lead at all" * (min(offline)[0] < 1 + _CARDS)
    peer = run_of(record, "vLLM", "bf16")
    return (
        f"**{record['model']} on an {card}, beside vLLM {peer.build}: offline throughput is {' and '.join(gains)}; decode steps "
        f"are {' and '.join(steps)}.** Each engine ran on its own card, and two such cards can differ by some per cent{unsure}. "
        f"Weights were random, outputs were not compared, and vLLM ran {peer.note} ([conditions](#speed))."
    )


def readme_table(records: Records) -> str:
    """README.md's table beside vLLM, only of points at which vLLM ran as it does by default, and the origin of the figures."""
    page = "docs/benchmarks/models.md"
    note = run_of(records[BESIDE_VLLM], "vLLM", "bf16").note
    told = (
        f"vLLM ran with its default options (its engine in a process of its own, asynchronous scheduling), but {note}, which an "
        f"ordinary installation brings; what it would gain was not measured. minirt's `--max-num-seqs` was raised to the batch. "
        f"The engines ran on different cards of one type and with different versions of PyTorch. Steps are the minimum of 3 runs "
        f"of minirt and of 2 of vLLM, which favours minirt by an unknown amount. Weights were random, and outputs were not "
        f"compared. At batch 1, minirt's `--fp8` has 16-bit activations, vLLM's FP8: the arithmetic differs. –: not measured in "
        f"this setup. [Other points]({page}{_ALL_POINTS}), such as first tokens and long contexts, were measured with vLLM's "
        f"engine inside the benchmark's process, so their leads may shrink."
    )
    return "\n\n".join((_engines_table(records, _README_POINTS, others=False), told, _origin_of(records, page)))


def engines_table(records: Records) -> str:
    """All points of both engines, and those of minirt on a later PyTorch."""
    record, older = records[BESIDE_VLLM], records[IN_PROCESS]
    first, later = run_of(older, "minirt", "bf16"), latest(older)
    rows = [[_row_of(key), _cell_of(key, a), _cell_of(key, later.values.get(key, ()))] for key, a in first.values.items()]
    shown = table(["bf16", f"torch {first.versions['torch']}", f"torch {later.versions['torch']}"], rows)
    versions = " and ".join(f"torch {run.versions['torch']} with Triton {run.versions['triton']}" for run in (first, later))
    sampled = next(run["sampled_output_tokens_per_s"] for run in record["runs"] if "sampled_output_tokens_per_s" in run)
    names = "order", "clock", "prompts", "decode step", "first token", "offline"
    protocol = "\n".join(f"- {name[0].upper()}{name[1:]}: {record['protocol'][name]}." for name in names)
    parts = (
        _engines_table(records, tuple(points_of(records, "fp8"))), _lacking(records), ties(records), _origin_of(records, ""),
        protocol,
        f"At temperature 0.8 and top-p 0.95, with a seed for each request, minirt yields {sampled:,} output tokens/s offline in "
        f"FP8.", f"minirt `{first.build}` with two versions of PyTorch on one card ({versions}), from `{IN_PROCESS}`:", shown,
    )  # fmt: skip
    return "\n\n".join(parts)


def _engines_table(records: Records, keys: Sequence[Key], others: bool = True) -> str:
    """`others`: also vLLM's figures that are not of its default setting, with a mark."""
    formats = [points_of(records, form) for form in FORMATS]
    rows = []
    for key in keys:
        rows.append([_row_of(key)])
        for points in formats:
            point = points.get(key, Point((), (), False))
            point = point if others or not point.in_process else Point(point.ours, (), False)
            ratios = speedups(key, point.ours, point.theirs)
            marked = _IN_PROCESS * bool(point.theirs and point.in_process)
            rows[-1] += [_cell_of(key, point.ours), _cell_of(key, point.theirs) + marked]
            rows[-1].append((f"{_times(ratios)} ×" + ", tie" * _tied(ratios)) if ratios else NONE)
    heads = ["minirt bf16", "vLLM bf16", "faster", "minirt `--fp8`", "vLLM fp8", "faster"]
    return table([records[BESIDE_VLLM]["model"], *heads], rows)


def _lacking(records: Records) -> str:
    """The first line below the table: what vLLM ran without, and which of its figures are of another setting."""
    gains = [
        ratio for form in FORMATS for key, values in run_of(records[BESIDE_VLLM], "vLLM", form).values.items()
        if (older := run_of(records[IN_PROCESS], "vLLM", form).values.get(key)) for ratio in speedups(key, values, older)
    ]  # fmt: skip
    return (
        f"vLLM ran {run_of(records[BESIDE_VLLM], 'vLLM', 'bf16').note}. {_IN_PROCESS} Measured on {records[IN_PROCESS]['date']} "
        f"with vLLM's engine in the calling process, which is not its default. Where both modes were measured, the default was "
        f"{min(gains):.2f} to {max(gains):.2f} times as fast, so leads at {_IN_PROCESS} may shrink."
    )


def ties(records: Records) -> str:
    """How many points minirt wins, the points at which both engines are equally fast, and those at which vLLM is faster. With two
    measurements of a point, the one that is better for vLLM counts.
    """
    counts, tied, slower = {False: [0, 0], True: [0, 0]}, [], []
    for form in FORMATS:
        for key, point in points_of(records, form).items():
            ratios = speedups(key, point.ours, point.theirs)
            if not ratios:
                continue
            unit = "" if key == OFFLINE else " ms"  # the name of a rate has its unit
            values = f"minirt {_cell_of(key, point.ours)}{unit}, vLLM {_cell_of(key, point.theirs)}{unit}"
            if _tied(ratios):
                tied.append(f"{form}, {_name_of(key)} ({values})")
            elif ratios[0] < 1:
                slower.append(f"{form}, {_name_of(key)} ({values})")
            else:
                counts[point.in_process][0] += 1
            counts[point.in_process][1] += 1
    (faster, all_default), (others, all_others) = counts[False], counts[True]
    are = "One is a tie" if len(tied) == 1 else f"{len(tied)} are ties"
    parts = [
        f"Against vLLM's default, minirt is faster at {faster} of {all_default} points; against {_IN_PROCESS}, at {others} of "
        f"{all_others}."
    ]
    parts += [f"{are} (less than {_TIE:.0%} apart): {'; '.join(tied)}."] if tied else []
    parts += [f"vLLM is faster: {'; '.join(slower)}."] if slower else []
    return " ".join([*parts, "Two cards of one type differ by up to several per cent, so a smaller lead is not certain."])


def _origin_of(records: Records, page: str) -> str:
    """Stores, cards, dates, both stacks, what another PyTorch changes, and what is missing.

    `page`: how docs/benchmarks/models.md is linked to; empty on that page.
    """
    record, older = records[BESIDE_VLLM], records[IN_PROCESS]
    ours, theirs = (run_of(record, engine, "bf16") for engine in ("minirt", "vLLM"))
    first, later = run_of(older, "minirt", "bf16"), latest(older)
    root, measuring = ("", "docs/measuring.md") if page else ("../../", "../measuring.md")
    stores = [f"[`{name}`]({root}bench/results/{name}.json)" for name in (BESIDE_VLLM, IN_PROCESS)]
    if page:
        marked, source, context = "", stores[0], ""
    else:
        marked = f"; figures with {_IN_PROCESS} on a card of that type on {older['date']}"
        source, context = f"{stores[0]}; {_IN_PROCESS} from {stores[1]}", " unless the row says another"
    protocol = record["protocol"]
    steps = f" A decode step is {protocol['decode step'].split('; ')[1]}. Offline: {protocol['offline']}." if page else ""
    most = max(abs(ratio - 1) for key, values in later.values.items() for ratio in speedups(key, first.values[key], values))
    differ = f"differ by at most {most:.0%}"
    differ = f"[{differ}]({page}{_ALL_POINTS})" if page else f"{differ} (the last table of this section)"
    text = (
        f"{stack_of(ours)}, on one {record['device']}; {stack_of(theirs)}, on another, both on {record['date']}{marked}. "
        f"With torch {later.versions['torch']} and Triton "
        f"{later.versions['triton']}, minirt's bf16 times {differ}. Random weights, greedy decoding, a context of 128 tokens"
        f"{context}.{steps} From {source}.\n\nThis comparison "
        f"falls short of [how minirt measures]({measuring}#the-comparison-with-vllm): the times of single runs and the cards' "
        f"measured peaks were not saved, and outputs were not checked. In [an earlier measurement]({page}{_CHECKED_RUNS}), on "
        f"another card, the same model's outputs were compared with eager PyTorch's before it was timed."
    )
    return f"<details><summary>Versions, cards and method</summary>\n\n{text}\n\n</details>" if page else text

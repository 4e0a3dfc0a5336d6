"""The README's tables of whole models: each a function of the stored results that it shows, by their names, to Markdown.

A result that is not stored leaves its cells or its rows out; without any, the table is not made.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Result = Any  # what a file holds: a dictionary, of older loads a list of them
Records = Mapping[str, Result]

# vLLM 0.24.0 (CUDA graphs, torch.compile, FlashAttention 3), ms, measured apart on the same GPU model with the same torch: not
# among the stored results.
VLLM_STEPS = {
    (1, 128): (4.78, 3.41), (1, 8000): (4.91, 3.61), (8, 128): (4.93, 3.47), (64, 128): (5.22, 3.99), (256, 128): (9.08, 7.29)
}  # fmt: skip
VLLM_PROMPTS = {128: (7.83, 5.71), 512: (13.9, 9.25), 2048: (48.0, 29.4), 8192: (195.0, 129.0)}

FORMATS = ("bf16", "fp8")
NONE = "–"  # in a cell: not measured


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; numbers, in all columns but the first, to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def milliseconds(ms: float) -> str:
    """About three digits: two decimals below 10, else one."""
    return f"{ms:.2f}" if ms < 9.995 else f"{ms:,.1f}"


def percent(share: float | None) -> str:
    return NONE if share is None else "< 1%" if 0 < share < 0.01 else f"{share:.0%}"


def signed(value: float, digits: int) -> str:
    text = f"{value:+.{digits}f}"
    return text.lstrip("+-") if float(text) == 0 else text.replace("-", "−")


def format_of(record: Result) -> str:
    return "fp8" if record.get("quantization") or "fp8" in record.get("dtype", "") else "bf16"


def title_of(form: str) -> str:
    return "`--fp8`" if form == "fp8" else form


def _by_format(records: Records, key: Callable[[Result, Result], Any]) -> dict[str, dict[Any, Result]]:
    """Format → `key(record, row)` → row."""
    found: dict[str, dict[Any, Result]] = {form: {} for form in FORMATS}
    for record in records.values():
        found[format_of(record)] |= {key(record, row): row for row in record["results"]}
    return found


def _steps(records: Records) -> dict[str, dict[Any, Result]]:
    return _by_format(records, lambda _, row: (row["batch_size"], row["context_len"]))


def _prompts(records: Records) -> dict[str, dict[Any, Result]]:
    return _by_format(records, lambda _, row: row["input_len"])


# --- steps and prompts ---


def about(records: Records) -> str:
    """Machine, versions and ceilings of the results."""

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
        f"{where[0].upper()}{where[1:]}; {first['model']} shapes, random weights, greedy, through `Generator` with every token "
        f"in Python's hands. A step's limit is the time in which a kernel that only reads would read the weights, "
        f"{rates(reads, '.2f', 'TB/s')} in the same run, or PyTorch's large matrix product would multiply by them, "
        f"{rates(products['bf16'], ',.0f', 'TFLOP/s')} in bf16 and {rates(products['fp8'], ',.0f', 'TFLOP/s')} in fp8, "
        f"whichever is longer, and then read the KV cache; a prompt's is that of its products alone."
    )


def decode(records: Records) -> str:
    """Milliseconds of a decode step, and the limit's share of it."""
    return _beside_vllm(
        "ms a step", _steps(records), VLLM_STEPS, lambda key: f"batch {key[0]}, context {key[1]}", "step_s",
        "share_of_limit",
    )  # fmt: skip


def prefill(records: Records) -> str:
    """Milliseconds to the first token of one prompt, and the share of the rate of PyTorch's matrix product."""
    return _beside_vllm(
        "ms to the first token", _prompts(records), VLLM_PROMPTS, lambda key: f"{key} tokens", "time_to_first_token_s",
        "share_of_matmul_ceiling",
    )  # fmt: skip


def _beside_vllm(
    title: str, found: dict[str, dict[Any, Result]], peers: Mapping[Any, tuple[float, float]], name: Callable[[Any], str],
    time: str, share: str,
) -> str:  # fmt: skip
    rows = []
    for key, theirs in peers.items():
        own = [name(key)]
        for form, peer in zip(FORMATS, theirs, strict=True):
            row = found[form].get(key)
            own += [milliseconds(row[time]["median"] * 1e3), f"{row[share]:.0%}"] if row else [NONE, NONE]
            own += [milliseconds(peer)]
        rows.append(own)
    return table([title, *(text for form in FORMATS for text in (title_of(form), "of the limit", "vLLM 0.24"))], rows)


def losses(records: Records) -> str:
    """Where vLLM's figure is the smaller."""
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
        return f"None of these {compared} figures is above vLLM's."
    return f"Slower than vLLM at {len(found)} of these {compared} figures: {'; '.join(found)}."


def checks(records: Records) -> str:
    """Which results were compared with something before they were timed, and which were not."""
    done: dict[str, list[str]] = {}
    for name, record in records.items():
        own = record["correctness"]
        how = f"before timing compared with {own['against']}" if own["checked"] else own["why"]
        done.setdefault(how, []).append(f"`{name}`")
    return "; ".join(f"{', '.join(names)}: {how}" for how, names in done.items()) + "."


def others(records: Records) -> str:
    """Decode steps of other models, batches and contexts."""
    found = _by_format(records, lambda record, row: (record["model"], row["batch_size"], row["context_len"]))
    rows = []
    for key in dict.fromkeys([key for form in FORMATS for key in found[form]]):
        own = [f"{key[0]}, batch {key[1]}, context {key[2]}"]
        for form in FORMATS:
            row = found[form].get(key)
            own += [milliseconds(row["step_s"]["median"] * 1e3), f"{row['share_of_read_ceiling']:.0%}"] if row else [NONE, NONE]
        rows.append(own)
    return table(["ms a step", *(text for form in FORMATS for text in (title_of(form), "of the read ceiling"))], rows)


# --- around a step ---


def trace(records: Records) -> str:
    """Idle time, and the cost of drawing from the nucleus, for each batch size."""
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
    return table(["decode step, traced", "greedy, ms", "GPU idle", "top-p 0.95, ms", "GPU idle", "top-p over greedy"], rows)


def power(records: Records) -> str:
    """Times, watts and clocks of each GPU, a column each."""
    (record,) = records.values()
    gpus = sorted({row["gpu"] for row in record["results"]})

    def cells(name: Callable[[Result], str | None], show: Callable[[Result], str]) -> dict[str, list[str]]:
        """Name of a line → a cell for each GPU."""
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

    lines = cells(lambda r: "awake, of its limit" if r["what"] == "awake" else None, draw)
    lines |= cells(lambda r: {"reading": "reading", "product": "multiplying, bf16"}.get(r["what"]), cost)
    lines |= cells(lambda r: f"bare step, batch {r['batch_size']}" if r["what"] == "step" else None, whole)
    lines |= cells(lambda r: f"prompt of {r['input_len']} tokens" if r["what"] == "prompt" else None, whole)
    lines |= cells(
        lambda r: f"step of batch {r['batch_size']} through `Generator`" if r["what"] == "generator" else None,
        lambda r: milliseconds(r["seconds"] * 1e3),
    )
    return table(["bf16", *(f"GPU {gpu}" for gpu in gpus)], [[line, *row] for line, row in lines.items()])


def startup(records: Records) -> str:
    """Seconds from the start of the process, with empty and warm caches of kernels."""
    names = ("imported_s", "loaded_s", "ready_s", "first_token_s")
    rows = [
        [f"{title_of(format_of(record))}, {row['caches']} kernel caches", *(f"{row[name]['median']:.1f}" for name in names)]
        for record in records.values()
        for row in sorted(record["results"], key=lambda row: row["caches"], reverse=True)  # warm, then empty
    ]
    return table(["seconds from the process's start", "imported", "loaded", "warmed up", "first token"], rows)


def loading(records: Records) -> str:
    """Reading a checkpoint."""
    rows = []
    for record in records.values():
        runs = record if isinstance(record, list) else record.get("results", [record])
        speeds = sorted({f"{run['gb_per_s']:.1f}" for run in runs}, key=float)
        last = [runs[-1].get(name) for name in ("weights_gb", "gpu_resident_gb", "gpu_peak_gb")]
        rows.append([
            f"{runs[0]['bytes'] / 1e9:.1f} GB" + (", `--fp8`" if runs[0].get("quantization") == "fp8" else ""),
            speeds[0] if len(speeds) == 1 else f"{speeds[0]} to {speeds[-1]}",
            f"{max(run['host_peak_gb'] for run in runs):.1f}",
            *(NONE if size is None else f"{size:.2f}" for size in last),
        ])  # fmt: skip
    names = ["checkpoint in the page cache", "GB/s", "host memory at most, GB", "weights in the end, GB"]
    return table([*names, "on the GPU in the end, GB", "at most, until the first tokens, GB"], rows)


def chunking(records: Records) -> str:
    """What long prompts do to requests that are being answered, by the most tokens of a step."""
    found = [row for record in records.values() for row in record["results"] if row["inter_token_s"]]
    rows = [
        [
            f"{row['max_num_batched_tokens']:,}",
            *(milliseconds(row["inter_token_s"][name] * 1e3) for name in ("p50", "p99", "max")),
            f"{row['tokens_per_s']:,.0f}",
        ]
        for row in sorted(found, key=lambda row: -row["max_num_batched_tokens"])
    ]
    title = "tokens of a step at most"
    return table([title, "between two tokens: p50, ms", "p99, ms", "longest, ms", "prompt tokens/s"], rows)


def cpu(records: Records) -> str:
    """Of SmolLM2-135M, beside transformers."""
    (record,) = records.values()
    return (
        f"On {record['threads']} CPU threads SmolLM2-135M decodes at {record['ratio']:.2f} times transformers' speed, in "
        f"{record['peak_mb']:,.0f} MB ({record['weights_mb']:,.0f} MB of it weights);\nthe first token comes "
        f"{record['first_token_s_after_process_start']:.1f} s after the process starts (`tests/compare_transformers.py`)."
    )

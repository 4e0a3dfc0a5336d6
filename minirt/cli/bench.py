"""`minirt bench speed | decode | prefill | latency | throughput`: options and output. minirt.bench measures.

`minirt bench kernels` is in bench_kernels.py, and so are `patch`, `serve` and `speculate` in bench_patch.py and so on.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from minirt.cli.bench_kernels import kernels
from minirt.cli.bench_patch import patch
from minirt.cli.bench_serve import serve
from minirt.cli.bench_speculate import speculate
from minirt.cli.help import option_group
from minirt.cli.options import (
    NUMBERS,
    RANGE,
    Numbers,
    debug_option,
    filter_options,
    load_options,
    model_name,
    open_generator,
    output_file_option,
    quantization,
    quiet_option,
    report_format_option,
    to_load_options,
)
from minirt.cli.output import emit, note
from minirt.cli.suggestions import Commands
from minirt.errors import InputError

if TYPE_CHECKING:
    import torch

    from minirt.bench.ceiling import Ceiling, MatmulCeiling
    from minirt.generator import Generator
    from minirt.loading.options import LoadOptions

Rows = list[dict[str, Any]]

_INPUT_LENS = (128, 512, 2048)  # default of `prefill`
_SPEED_INPUT = 512  # default of `speed`


_measure_options = option_group(
    "Measurement",
    load_options,
    click.option(
        "--repeats", type=click.IntRange(1), default=5, show_default=True,
        help="Measured runs; one or two uncounted runs come first.",
    ),
    option_group(
        "Sampling",
        click.option("--temperature", type=float, show_default="0, which is greedy; 1 with a filter", help="0 is greedy."),
        filter_options,
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of prompts, lengths, sampling and random weights."),
    click.option(
        "--skip-check", is_flag=True,
        help="Do not compare with the eager layers first. The result says so.",
    ),
    report_format_option,
    output_file_option,
    quiet_option,
    debug_option,
)


@click.group(cls=Commands, short_help="Measure speed: tokens/s, steps, prompts, a server.")
def bench() -> None:
    """Measure a model: its speed with prompts and decode steps; both in detail; end-to-end latency, throughput; what drafts
    bring; its kernels alone, or in transformers; or a server.

    Except for `serve` and `speculate`, prompts are random token ids, so no tokenizer is needed, and generation continues after an
    end-of-sequence token. Before anything is timed, the model is compared with its eager layers.
    """


bench.add_command(kernels)
bench.add_command(patch)
bench.add_command(serve)
bench.add_command(speculate)


@bench.command(short_help="Tokens per second of a prompt and of decode steps.")
@option_group(
    "Measurement",
    click.option(
        "--input-len", "-p", type=Numbers("N,N,…", ",", zero=True), show_default="512, or what the model's context allows",
        help="Tokens of a prompt; several: 128,512; 0: no prompt.",
    ),
    click.option(
        "--output-len", "-n", type=click.IntRange(0), default=128, show_default=True, help="Decode steps of a run; 0: none."
    ),
    click.option(
        "--context-len", "-c", type=NUMBERS, default="1", show_default=True,
        help="Tokens before the decode steps; several: 1,4096.",
    ),
)
@_measure_options
@click.pass_context
def speed(
    ctx: click.Context, input_len: tuple[int, ...] | None, output_len: int, context_len: tuple[int, ...], **options: Any
) -> None:
    """Time a prompt, and the decode steps of one sequence: tokens per second of both, as llama-bench prints them.

    ppN is a prompt of N tokens (`minirt bench prefill` has more of it), tgN are N decode steps (`minirt bench decode`). "of the
    limit" is the least time that this run's memory bandwidth and matrix products allow (the roofline), divided by the measured
    time. With 0 as --input-len or --output-len, only the other is measured, as in llama-bench.
    """
    if not output_len and input_len == ():
        raise click.UsageError("--input-len 0 and --output-len 0 leave nothing to measure")
    if not output_len and ctx.get_parameter_source("context_len") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--context-len is of decode steps, of which there are none with --output-len 0")
    from minirt.bench import decode, prefill
    from minirt.bench.ceiling import datasheet_bandwidth, read_ceiling
    from minirt.device import pick_device

    device, progress = pick_device(options["device"]), _progress(options)
    ceiling, products = read_ceiling(device), _products(options, device)

    def lengths(generator: "Generator") -> Sequence[int]:
        return [max(1, min(_SPEED_INPUT, generator.max_len - 1))] if input_len is None else input_len

    def check(generator: "Generator") -> int:
        if lengths(generator):
            prefill.check(generator, lengths(generator), 0)
        if output_len:
            decode.check(generator, [1], context_len, output_len)
        return max([*lengths(generator), *context_len])

    def measure(generator: "Generator") -> Rows:
        if input_len is None and generator.max_len <= _SPEED_INPUT:
            (length,), positions = lengths(generator), generator.max_len
            progress(f"the prompt has {length} tokens, not {_SPEED_INPUT}: the model has {positions} positions")
        rows = prefill.run(generator, lengths(generator), **_common(options), ceiling=products, progress=progress)
        if not output_len:
            return rows
        return rows + decode.run(
            generator, [1], context_len, **_common(options), ceiling=ceiling, products=products,
            datasheet=datasheet_bandwidth(device), count=output_len, progress=progress,
        )

    _run(ctx, options, [1], check, measure, ceiling, products)


@bench.command()
@option_group(
    "Measurement",
    click.option("--batch-size", "-b", type=NUMBERS, default="1", show_default=True, help="Sequences at once; several: 1,8,64."),
    click.option("--context-len", "-c", type=NUMBERS, default="128", show_default=True, help="Prompt tokens; several: 128,8000."),
    click.option("--output-len", "-n", type=click.IntRange(1), default=128, show_default=True, help="Decode steps of a run."),
)
@_measure_options
@click.pass_context
def decode(
    ctx: click.Context, batch_size: tuple[int, ...], context_len: tuple[int, ...], output_len: int, **options: Any
) -> None:
    """Time a decode step for each batch size and context length. The limit is the least time that memory bandwidth and
    arithmetic allow.

    With N = --output-len, a step is (t(N + 1) - t(1)) / N, where t(n) is the time until all prompts have n new tokens in
    Python. (If the prompts take f > 1 engine steps, it is (t(N + f) - t(f)) / N.) "CUDA graph ms" is the replay of the
    step's CUDA graph alone.
    "GB/s" counts the weights and the KV cache once per step. The limit is the time to read the KV cache, plus the time to
    read the weights or to multiply by them, whichever is longer.
    """
    _require_seqs(batch_size, options["max_num_seqs"])
    from minirt.bench import decode as benchmark
    from minirt.bench.ceiling import datasheet_bandwidth, read_ceiling
    from minirt.device import pick_device

    device = pick_device(options["device"])
    ceiling, products = read_ceiling(device), _products(options, device)

    def check(generator: "Generator") -> int:
        benchmark.check(generator, batch_size, context_len, output_len)
        return max(context_len)

    def measure(generator: "Generator") -> Rows:
        return benchmark.run(
            generator, batch_size, context_len, **_common(options), ceiling=ceiling, products=products,
            datasheet=datasheet_bandwidth(device), count=output_len, progress=_progress(options),
        )

    _run(ctx, options, batch_size, check, measure, ceiling, products)


@bench.command(short_help="Time one prompt to its first token.")
@option_group(
    "Measurement",
    click.option(
        "--input-len", "-p", type=NUMBERS, show_default="128, 512 and 2048, up to the model's context length",
        help="Tokens of a prompt; several: 128,2048.",
    ),
    click.option(
        "--beside", type=click.IntRange(0), default=0, show_default=True, metavar="N",
        help="Also measure the same prompts, one after the other, while N requests decode.",
    ),
)
@_measure_options
@click.pass_context
def prefill(ctx: click.Context, input_len: tuple[int, ...] | None, beside: int, **options: Any) -> None:
    """Time one prompt from the call to its first token in Python, for each length. Also print its share of the rate of a large
    matrix product.

    With --beside, also measure how long prompts slow down N decoding requests: the time between two of their tokens.
    --max-num-batched-tokens sets the size of the chunks.
    """
    from minirt.bench import prefill as benchmark
    from minirt.device import pick_device

    ceiling = _products(options, pick_device(options["device"]))
    progress = _progress(options)

    def lengths(generator: "Generator") -> Sequence[int]:
        return input_len or [n for n in _INPUT_LENS if n < generator.max_len] or _INPUT_LENS[:1]

    def check(generator: "Generator") -> int:
        benchmark.check(generator, lengths(generator), beside)
        return max(lengths(generator))

    def measure(generator: "Generator") -> Rows:
        common = _common(options)
        rows = benchmark.run(generator, lengths(generator), **common, ceiling=ceiling, progress=progress)
        others = [benchmark.beside(generator, n, beside, **common, progress=progress) for n in lengths(generator) if beside]
        return rows + others

    _run(ctx, options, [1], check, measure, products=ceiling)


@bench.command(short_help="Time a batch of prompts to its last token.")
@option_group(
    "Measurement",
    click.option("--batch-size", "-b", type=click.IntRange(1), default=8, show_default=True, help="Prompts at once."),
    click.option("--input-len", type=click.IntRange(1), default=32, show_default=True, help="Tokens of a prompt."),
    click.option("--output-len", type=click.IntRange(1), default=128, show_default=True, help="New tokens of each."),
)
@_measure_options
@click.pass_context
def latency(ctx: click.Context, batch_size: int, input_len: int, output_len: int, **options: Any) -> None:
    """Time a batch of prompts from the call to the last token of all: average and percentiles over the repeats."""
    _require_seqs([batch_size], options["max_num_seqs"])
    from minirt.bench import latency as benchmark
    from minirt.bench.measure import check_room

    def check(generator: "Generator") -> int:
        check_room(generator, batch_size, input_len + output_len)
        return input_len

    def measure(generator: "Generator") -> Rows:
        return benchmark.run(generator, batch_size, input_len, output_len, **_common(options), progress=_progress(options))

    _run(ctx, options, [batch_size], check, measure)


@bench.command(short_help="Time many prompts of random lengths at once.")
@option_group(
    "Measurement",
    click.option("--num-prompts", "-n", type=click.IntRange(1), default=200, show_default=True, help="Number of prompts."),
    click.option("--input-len-range", type=RANGE, default="32:256", show_default=True, help="Tokens of a prompt."),
    click.option("--output-len-range", type=RANGE, default="32:256", show_default=True, help="New tokens of each."),
)
@_measure_options
@click.pass_context
def throughput(
    ctx: click.Context, num_prompts: int, input_len_range: tuple[int, int], output_len_range: tuple[int, int],
    **options: Any,
) -> None:
    """Run prompts of random lengths, uniform in the ranges, through the engine at once.

    All requests are added at the start, so the time to the first token includes waiting for a place in the batch.
    """
    from minirt.bench import throughput as benchmark
    from minirt.bench.measure import check_room

    def check(generator: "Generator") -> int:
        check_room(generator, 1, input_len_range[1] + output_len_range[1])
        return input_len_range[1]

    def measure(generator: "Generator") -> Rows:
        common = _common(options)
        return benchmark.run(generator, num_prompts, input_len_range, output_len_range, **common, progress=_progress(options))

    _run(ctx, options, sorted({1, min(num_prompts, options["max_num_seqs"])}), check, measure)


def _run(
    ctx: click.Context,
    options: dict[str, Any],
    batch_sizes: Sequence[int],
    check: "Callable[[Generator], int]",
    measure: "Callable[[Generator], Rows]",
    ceiling: "Ceiling | None" = None,
    products: "MatmulCeiling | None" = None,
) -> None:
    """Load, check the sizes, compare with the eager layers, measure, print.

    `check` raises for sizes that cannot run, and returns the length of the longest prompt."""
    from minirt.bench import check as checking
    from minirt.bench.measure import forget_peak_memory
    from minirt.bench.report import Report, context
    from minirt.device import pick_device

    quiet, target = options["quiet"], options["output_file"]
    sampling = _common(options)["sampling"]  # here, so that a bad value fails before anything is loaded
    options["model"] = model_name(options, quiet)
    load = to_load_options(options, options["model"], prefix_cache=False)  # repeats would measure the cache
    why = _nothing_to_check(load, options["skip_check"])
    reference = None
    if why is None:
        _progress(options)("comparing with the eager layers first: --skip-check leaves this out")
        with open_generator(replace(load, impl="eager", warmup=False), quiet) as eager:
            reference = checking.reference(eager, check(eager))
    forget_peak_memory(pick_device(options["device"]))
    with open_generator(load, quiet) as generator:
        check(generator)
        correctness: dict[str, Any] = {"checked": False, "why": why}
        if reference is not None:
            correctness = checking.compare(generator, reference, batch_sizes)
        rows = measure(generator)
        command = ["minirt", *(ctx.find_root().obj or [])]
        shared = context(
            str(ctx.info_name), generator, name=options["model"], command=command, correctness=correctness, ceiling=ceiling,
            products=products,
        )  # fmt: skip
        shared["sampling"] = {name: value for name, value in sampling.items() if value is not None}
    emit(Report(shared, rows).render(options["output_format"]), target, quiet)


def _progress(options: dict[str, Any]) -> Callable[[str], None]:
    """Where a benchmark writes how far it is."""
    from minirt.bench.measure import silent

    return silent if options["quiet"] else note


def _products(options: dict[str, Any], device: "torch.device") -> "MatmulCeiling":
    """Measure PyTorch's rate of matrix products in the format of the model's linear layers."""
    import torch

    from minirt.bench.ceiling import matmul_ceiling
    from minirt.loading.load import plan_model

    planned = plan_model(to_load_options(options, model_name(options, True)))
    return matmul_ceiling(device, torch.float8_e4m3fn if quantization(options) == "fp8" else planned.dtype)


def _nothing_to_check(load: "LoadOptions", skip: bool) -> str | None:
    """The reason why there is no comparison with the eager layers, or None if there is one."""
    if skip:
        return "not checked (--skip-check)"
    from minirt.loading.load import plan_model

    if all(row.implementation == "eager" for row in plan_model(load).plan.rows):
        return "not checked: every layer is eager, so there is nothing to compare it with"
    return None


def _common(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of every benchmark: repeats, seed, and sampling parameters, which are checked here."""
    from minirt.sampling_params import FILTERS, SamplingParams

    sampling = {name: options[name] for name in ("temperature", *FILTERS, "seed")}
    if sampling["temperature"] is None:
        filtered = any(sampling[name] is not None for name in FILTERS)
        sampling["temperature"] = 1.0 if filtered else 0.0
    try:
        SamplingParams(**sampling)
    except InputError as error:
        flag = "--" + str(error.where).removeprefix("SamplingParams.").replace("_", "-")
        raise error.at(flag) from error
    return {"repeats": options["repeats"], "sampling": sampling, "seed": options["seed"]}


def _require_seqs(batch_sizes: Sequence[int], max_num_seqs: int) -> None:
    """Raise InputError, before the model is loaded, if a batch exceeds --max-num-seqs."""
    if max(batch_sizes) > max_num_seqs:
        hint = f"raise --max-num-seqs to {max(batch_sizes)}"
        raise InputError("larger than --max-num-seqs", where=f"--batch-size {max(batch_sizes)}", expected=max_num_seqs, hint=hint)

"""`minirt bench speed` and `minirt bench throughput`: options and output. minirt.bench measures.

`minirt bench kernels` is in bench_kernels.py, and so are the others in bench_patch.py and so on.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from minirt.cli import options as shared
from minirt.cli.bench_kernels import kernels
from minirt.cli.bench_patch import patch
from minirt.cli.bench_serve import serve
from minirt.cli.bench_speculate import speculate
from minirt.cli.bench_start import start
from minirt.cli.help import option_group
from minirt.cli.report import print_report, progress_of, report_options, words_of
from minirt.cli.settings import COUNT, options_of
from minirt.cli.suggestions import Commands
from minirt.errors import InputError
from minirt.settings import setting

if TYPE_CHECKING:
    from collections.abc import Callable

    from minirt.bench.measure import Runs
    from minirt.generator import Generator

_PROMPT = 512  # default tokens of a prompt


class _Speed:
    input_len: tuple[int, ...] | None = setting(
        "Tokens of a prompt; several: 128,512; 0: no prompt.", option="--input-len -p",
        kind=shared.NUMBERS_OR_0, shown="512, or what the model's context allows",
    )  # fmt: skip
    output_len: int = setting("Decode steps of a run; 0: none.", 128, option="--output-len -n", kind=click.IntRange(0))
    batch_size: Any = setting("Sequences of a decode step; several: 1,8,64.", "1", option="--batch-size -b", kind=shared.NUMBERS)
    context_len: Any = setting(
        "Tokens of each before the decode steps; several: 1,4096.", "1", option="--context-len -c", kind=shared.NUMBERS)
    beside: int = setting(
        "Also measure the prompts, one after the other, while N requests decode.", 0, kind=click.IntRange(0), metavar="N")


class _Throughput:
    num_prompts: int = setting("Number of prompts.", 200, option="--num-prompts -n", kind=COUNT)
    input_len_range: Any = setting("Tokens of a prompt; 32: all have 32.", "32:256", kind=shared.RANGE)
    output_len_range: Any = setting("New tokens of each.", "32:256", kind=shared.RANGE)


class _Runs:
    repeats: int = setting("Measured runs; one or two uncounted runs come first.", 5, kind=COUNT)
    temperature: float | None = setting("0 is greedy.", shown="0, which is greedy; 1 with a filter", group="Sampling")
    seed: int = setting("Seed of prompts, lengths, sampling and random weights.", 0)
    skip_check: bool = setting("Do not compare with the eager layers first. The result says so.", False)


_run_options = option_group(
    None, options_of(_Runs, "", title="Measurement"), shared.load_options, shared.filter_options, report_options
)


@click.group(cls=Commands, short_help="Measure speed: tokens/s, steps, prompts, a server.")
def bench() -> None:
    """Measure a model: its speed with prompts and decode steps; the time of whole requests; what drafts bring; its kernels alone,
    or in transformers; a start; or a server.

    Except for `serve`, `speculate` and `start`, prompts are random token ids, so no tokenizer is needed, and generation continues
    after an end-of-sequence token. Before anything is timed, the model is compared with its eager layers.
    """


for _command in (kernels, patch, serve, speculate, start):
    bench.add_command(_command)


@bench.command(short_help="Time prompts and decode steps: tokens per second, roofline.")
@options_of(_Speed, "", title="Measurement")
@_run_options
@click.pass_context
def speed(
    ctx: click.Context, input_len: tuple[int, ...] | None, output_len: int, batch_size: tuple[int, ...],
    context_len: tuple[int, ...], beside: int, **options: Any,
) -> None:  # fmt: skip
    """Time a prompt, and the decode steps of one sequence: tokens per second of both, as llama-bench prints them. Other sizes are
    options.

    ppN is a prompt of N tokens, from the call to its first token in Python. tgN bB @ dC are N decode steps of B sequences, after
    C tokens of each. With N = --output-len, a step is (t(N + 1) - t(1)) / N, where t(n) is the time until all prompts have n new
    tokens in Python. (If the prompts take f > 1 engine steps, it is (t(N + f) - t(f)) / N.) "CUDA graph ms" is the replay of the
    step's CUDA graph alone. "GB/s" counts the weights and the KV cache once per step.

    "of the limit" is the least time that this run's memory bandwidth and matrix products allow (the roofline), divided by the
    measured time. A decode step has to read the KV cache, and to read the weights or to multiply by them, whichever takes
    longer; a prompt has to multiply.

    With 0 as --input-len or --output-len, only the other is measured, as in llama-bench. --beside measures how long prompts slow
    down N decoding requests: the time between two of their tokens. --max-num-batched-tokens sets the size of the chunks.
    """
    if not output_len and input_len == ():
        raise click.UsageError("--input-len 0 and --output-len 0 leave nothing to measure")
    for name in ("batch_size", "context_len"):
        if not output_len and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(f"{flag} is of decode steps, of which there are none with --output-len 0")
    if beside and input_len == ():
        raise click.UsageError("--beside is of prompts, of which there are none with --input-len 0")
    if output_len and max(batch_size) > options["max_num_seqs"]:
        hint, most = f"raise --max-num-seqs to {max(batch_size)}", options["max_num_seqs"]
        raise InputError("larger than --max-num-seqs", where=f"--batch-size {max(batch_size)}", expected=most, hint=hint)
    from minirt.bench import decode, prefill

    def lengths(generator: "Generator") -> Sequence[int]:
        return [max(1, min(_PROMPT, generator.max_len - 1))] if input_len is None else input_len

    def check(generator: "Generator") -> int:
        if lengths(generator):
            prefill.check(generator, lengths(generator), beside)
        if output_len:
            decode.check(generator, batch_size, context_len, output_len)
        return max([*lengths(generator), *context_len])

    def measure(runs: "Runs", ceiling: Any, products: Any) -> list[dict[str, Any]]:
        prompts, positions = lengths(runs.generator), runs.generator.max_len
        if input_len is None and positions <= _PROMPT:
            runs.progress(f"the prompt has {prompts[0]} tokens, not {_PROMPT}: the model has {positions} positions")
        rows = prefill.run(runs, prompts, products)
        rows += [prefill.beside(runs, length, beside) for length in prompts if beside]
        return rows + (decode.run(runs, batch_size, context_len, ceiling, products, output_len) if output_len else [])

    _run(ctx, options, batch_size, check, measure, roofline=True)


@bench.command(short_help="Time many requests at once: throughput, latency.")
@options_of(_Throughput, "", title="Measurement")
@_run_options
@click.pass_context
def throughput(
    ctx: click.Context, num_prompts: int, input_len_range: tuple[int, int], output_len_range: tuple[int, int], **options: Any,
) -> None:  # fmt: skip
    """Run prompts of random lengths, uniform in the ranges, through the engine at once: requests and tokens per second, and the
    time from the call to the last token of all, as average and percentiles over the repeats.

    All requests are added at the start, so the time to the first token includes waiting for a place in the batch. The latency
    of a batch is that of as many requests of one length: -n 8 --input-len-range 32 --output-len-range 128.
    """
    from minirt.bench import throughput as benchmark
    from minirt.bench.measure import check_room

    def check(generator: "Generator") -> int:
        check_room(generator, (1, input_len_range[1] + output_len_range[1]))
        return input_len_range[1]

    def measure(runs: "Runs", *_: Any) -> list[dict[str, Any]]:
        return benchmark.run(runs, num_prompts, input_len_range, output_len_range)

    _run(ctx, options, sorted({1, min(num_prompts, options["max_num_seqs"])}), check, measure)


def _run(
    ctx: click.Context, options: dict[str, Any], batch_sizes: Sequence[int], check: "Callable[[Generator], int]",
    measure: "Callable[..., list[dict[str, Any]]]", roofline: bool = False,
) -> None:  # fmt: skip
    """Load, check the sizes, compare with the eager layers, measure, print.

    Args:
        check: raises for sizes that cannot run, and returns the length of the longest prompt.
        measure: (runs, memory bandwidth, rate of matrix products) → rows.
        roofline: whether to measure the second and the third of these.
    """
    import torch

    from minirt.bench import check as checking
    from minirt.bench.ceiling import matmul_ceiling, read_ceiling
    from minirt.bench.measure import Runs, forget_peak_memory
    from minirt.bench.report import Report, context
    from minirt.device import pick_device
    from minirt.loading.load import plan_model

    quiet, sampling = options["quiet"], _sampling(options)  # here, so that a bad value fails before anything is loaded
    progress, device, name = progress_of(options), pick_device(options["device"]), shared.model_name(options, quiet)
    load = shared.for_measuring(shared.to_load_options(options, name, prefix_cache=False))  # repeats would measure the cache
    planned, ceiling, products = plan_model(load), None, None
    if roofline:
        ceiling = read_ceiling(device)
        products = matmul_ceiling(device, torch.float8_e4m3fn if load.quantization == "fp8" else planned.dtype)
    why = "not checked (--skip-check)" if options["skip_check"] else None
    if why is None and all(row.implementation == "eager" for row in planned.plan.rows):
        why = "not checked: every layer is eager, so there is nothing to compare it with"
    correctness: dict[str, Any] = {"checked": False, "why": why}
    if why is None:
        progress("comparing with the eager layers first: --skip-check leaves this out")
        with shared.open_generator(replace(load, impl="eager", warm_up="none"), quiet) as eager:
            reference = checking.reference(eager, check(eager))
    forget_peak_memory(device)
    with shared.open_generator(load, quiet) as generator:
        check(generator)
        if why is None:
            correctness = checking.compare(generator, reference, batch_sizes)
        rows = measure(Runs(generator, options["repeats"], sampling, options["seed"], progress), ceiling, products)
        about = context(
            str(ctx.info_name), generator, name=name, command=words_of(ctx), correctness=correctness, ceiling=ceiling,
            products=products,
        )  # fmt: skip
    about["sampling"] = {name: value for name, value in sampling.items() if value is not None}
    print_report(Report(about, rows), options)


def _sampling(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams, which are checked here. A filter alone means draws."""
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
    return sampling

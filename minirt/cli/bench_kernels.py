"""`minirt bench kernels`: options and output. minirt.bench.kernels.benchmark measures."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minirt.cli.files import read_text
from minirt.cli.help import command
from minirt.cli.options import NUMBERS, set_up_triton
from minirt.cli.output import json_line, write
from minirt.cli.report import kernel_dtype, kernel_options, print_report, progress_of, report_options, words_of
from minirt.cli.settings import COUNT, options_of
from minirt.errors import ConfigError, InputError, MinirtError, NumericsError
from minirt.settings import setting

if TYPE_CHECKING:
    import torch

    from minirt.bench.kernels.benchmark import Point, Roofline

_CPU_TOKENS, _CPU_CONTEXTS = (1, 3), (40,)  # in the interpreter, one matrix product takes seconds


class _Options:
    models: str = setting(
        "Models to take shapes from. Default: Qwen2.5-7B; on a CPU embedded.", option="--model -m", kind="several", group="Model")
    tokens: Any = setting("Tokens of a step (decoding: sequences); several: 1,64,2048.", option="--tokens -t", kind=NUMBERS)
    context_len: Any = setting("Attention: cached tokens; several: 128,8000.", option="--context-len -c", kind=NUMBERS)
    repeats: int | None = setting("Timed launches of each implementation. Default: 20; on a CPU 1.", kind=COUNT)
    compiled: bool | None = setting("Time torch.compile too. Default: on a GPU.", option="--compile/--no-compile")
    baseline: str | None = setting("JSON of an older run: compare with it, and fail if a kernel is slower now.", metavar="FILE")
    pictures: str | None = setting("Draw roofline.svg (on a GPU) and sweep.svg there.", metavar="FOLDER", group="Output")
    listing: bool = setting("List the kernels, and measure nothing.", False, option="--list", group="Output")


@command(short_help="Check and time single kernels.")
@click.argument("names", nargs=-1, metavar="[NAME]…")
@options_of(_Options, "", title="Measurement")
@kernel_options
@report_options
@click.pass_context
def kernels(ctx: click.Context, names: tuple[str, ...], listing: bool, **options: Any) -> None:
    """Check every kernel (or those that match NAME, which may be a glob) on a model's shapes. Then time it beside eager PyTorch,
    torch.compile and PyTorch's own kernel: cuBLAS for products, SDPA for attention.

    Times are medians of single launches with a cold L2 cache; the implementations take turns. The limit is the larger of bytes
    over memory bandwidth and operations over the rate of a large matrix product, both measured in the same run. A kernel's error
    may be at most twice that of eager PyTorch in the same dtype, plus one rounding. A kernel outside this bound is not timed, and
    the exit code is 1. On a CPU the kernels run in Triton's interpreter: errors are valid, times are not, so the table has none.
    """
    import torch

    from minirt.device import pick_device

    device = pick_device(options["device"])
    cuda = device.type == "cuda"
    dtype = kernel_dtype(options["dtype"], cuda)
    older = None if options["baseline"] is None else _read_baseline(options["baseline"], device)
    if options["pictures"] is not None:
        from minirt.bench.picture import require_matplotlib

        if not Path(options["pictures"]).is_dir():
            raise click.BadParameter(f"the folder {options['pictures']!r} does not exist", param_hint="--pictures")
        require_matplotlib()
    set_up_triton(cuda, options["dtype"])
    from minirt.bench.kernels import benchmark
    from minirt.loading.load import find

    try:
        chosen = benchmark.select(names)
    except InputError as error:
        raise click.BadParameter(str(error), param_hint="NAME") from error
    if listing:
        known, width = {name: benchmark.BENCHMARKS[name].what for name in chosen}, max(map(len, chosen))
        lines = (f"{name:{width}}  {what}\n" for name, what in known.items())
        write(json_line(known) if options["output_format"] == "json" else "".join(lines))
        return
    presets = options["models"] or (("Qwen2.5-7B",) if cuda else ("embedded",))
    configs = {name: find(name, None, need_weights=False).config for name in presets}
    tokens, contexts = options["tokens"], options["context_len"]
    if not cuda:
        tokens = tokens or _CPU_TOKENS
        contexts = contexts or (_CPU_CONTEXTS if any(benchmark.BENCHMARKS[name].context for name in chosen) else None)
    points = benchmark.points(chosen, configs, dtype, device, tokens, contexts)
    with torch.random.fork_rng(devices=[]):
        rows, roofline, event_s = _measure(points, device, dtype, options)
    slower = [] if older is None else benchmark.compare(rows, older)
    from minirt.bench.kernels.report import context, draw, markdown
    from minirt.bench.report import Report, machine

    about = machine("kernels", device, words_of(ctx), roofline.read if roofline else None)
    products = [vars(product) for product in roofline.products.values()] if roofline else []
    report = Report(context(about, rows, slower, products, event_s), rows, markdown)
    print_report(report, options)
    if options["pictures"] is not None:
        draw(report.context, rows, Path(options["pictures"]))
    _judge(report.context["faults"], "exceeds its error bound", NumericsError)
    _judge(slower, "slower than the baseline", MinirtError)


def _read_baseline(name: str, device: "torch.device") -> list[dict[str, Any]]:
    """The rows of an older run's JSON. Only the fields that are used are checked."""
    from minirt.bench.ceiling import device_name

    try:
        older = json.loads(read_text(name, "--baseline"))
        if older["benchmark"] != "kernels":
            raise ValueError(f"of minirt bench {older['benchmark']}")
        for row in older["results"]:
            row["kernel"], row["seconds"]
        older_device = older["device"]
    except InputError as error:
        raise error.within("--baseline") from error
    except (ValueError, KeyError, TypeError) as error:
        what, expected = "the file has no results of `minirt bench kernels`", "what --output-format json prints"
        raise ConfigError(what, where=name, expected=expected, found=f"{type(error).__name__}: {error}") from error
    if older_device != device_name(device):
        what = "the baseline was measured on another device"
        raise ConfigError(what, where=f"--baseline {name}", expected=device_name(device), found=older_device)
    return older["results"]


def _measure(
    points: "list[Point]", device: "torch.device", dtype: "torch.dtype", options: dict[str, Any]
) -> "tuple[list[dict[str, Any]], Roofline | None, float | None]":
    """A row for each point; on a GPU, the roofline and the seconds that every time includes."""
    import torch

    from minirt.bench.kernels import benchmark
    from minirt.bench.kernels.report import NO_SPEED
    from minirt.bench.measure import host_seconds
    from minirt.device import on_device

    cuda, progress, rows = device.type == "cuda", progress_of(options), []
    if not cuda:
        progress(f"{NO_SPEED}; one kernel takes seconds.")
    roofline = benchmark.measure_roofline(device, dtype) if cuda else None
    repeats = options["repeats"] or (20 if cuda else 1)
    compiled = cuda if options["compiled"] is None else options["compiled"]
    with on_device(device):
        clock = benchmark.ColdClock(device) if cuda else host_seconds
        event_s = clock.nothing() if isinstance(clock, benchmark.ColdClock) else None
        for i, point in enumerate(points, 1):
            progress(f"{i}/{len(points)} {point}")
            rows.append(benchmark.measure(point, roofline, clock, repeats, compiled))
            if cuda:
                torch.cuda.empty_cache()
    return rows, roofline, event_s


def _judge(texts: list[str], what: str, kind: type[MinirtError]) -> None:
    if texts:
        others = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        raise kind(f"{what}{others}: {texts[0]}", where="bench kernels")

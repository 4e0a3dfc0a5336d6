"""`minirt tune`: launch configurations for the shapes of one model on this GPU."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from minirt.cli.help import command
from minirt.cli.options import NUMBERS, model_name, model_options, quantization, require_triton, to_load_options
from minirt.cli.output import json_line, write
from minirt.cli.report import print_report, progress_of, report_options, words_of
from minirt.cli.settings import options_of
from minirt.errors import DeviceError, InputError
from minirt.files import cache_folder
from minirt.settings import setting

if TYPE_CHECKING:
    import torch

    from minirt.bench.tune.tune import StepClock, TuningResult
    from minirt.bench.tune.whole_steps import Steps
    from minirt.kernels.compile.tuning import LinearShape
    from minirt.loading.options import LoadOptions
    from minirt.modeling.model import Model


_PAGES = 256 << 20  # bytes of KV pages of the timed model; the timed steps have a cache of their own


class _Options:
    tokens: Any = setting(
        "Tokens of the steps to tune for; other sizes in the same buckets use the results, too.", "1,8,32,64,128,256,512,2048",
        option="--tokens -t", kind=NUMBERS,
    )  # fmt: skip
    kernel: str | None = setting("Tune only this kernel family. Default: all.")
    no_steps: bool = setting(
        "Pick winners by chains of one kernel, without whole steps: for a model that does not fit on this GPU. Whole steps may "
        "become slower.", False)
    show: bool = setting("List the stored configurations, also without a GPU; measure nothing.", False, group="Output")


@command(short_help="Fit launch configurations of kernels to this GPU.")
@model_options
@options_of(_Options, "", title="Measurement")
@report_options
@click.pass_context
def tune(ctx: click.Context, tokens: tuple[int, ...], kernel: str | None, no_steps: bool, show: bool, **options: Any) -> None:
    """Measure launch configurations of the linear layers' kernels on this GPU, and store those that beat the built-in rules.

    Chains of one kernel pick the finalists. Whole steps of the model, with random weights, pick the winner; it is chosen on one
    run and confirmed on another. Winners are stored for this GPU model, Triton version and kernel source, in $MINIRT_CACHE or the
    user's cache folder. Loading a model looks them up and never measures.
    """
    if show and (options["output_file"] or options["output_format"] not in ("text", "json")):
        raise click.UsageError("--show prints text, or JSON with --json, to standard output")
    import torch

    from minirt.device import pick_device

    device = pick_device(options["device"])
    if show:
        require_triton()
        write(_stored(device, options["output_format"] == "json"))
        return
    if device.type != "cuda":
        raise DeviceError("tuning needs a GPU", found=str(device))
    import minirt.kernels.linear.tuning
    import minirt.kernels.moe.tuning  # noqa: F401  (both register their families)
    from minirt.bench.report import Report, machine
    from minirt.bench.tune.tune import markdown
    from minirt.bench.tune.tune import tune as measure
    from minirt.kernels.compile import tuning
    from minirt.loading.load import plan_model

    families = tuning.registered()
    name = model_name(options, options["quiet"])
    load = to_load_options(options, name)
    model = plan_model(load)
    shapes, rows, fixed = linear_shapes(model), [], fixed_kernels(model)
    if kernel is not None and kernel not in families:
        what = "this kernel has nothing to tune" if kernel in fixed else "unknown kernel family"
        raise InputError(what, where="--kernel", expected=", ".join(families), found=kernel)
    progress = progress_of(options)
    if fixed and kernel is None:
        progress(f"nothing to tune in {', '.join(fixed)}: rules choose their launch configurations")
    with ExitStack() as stack, torch.inference_mode(), torch.cuda.device(device):
        step = None if no_steps else _step_clock(load, stack, progress)
        for family in families if kernel is None else [kernel]:
            for case in families[family][1](shapes, tokens, device):
                outcome = measure(case, step=step)
                config = None if outcome.config is None else repr(outcome.config)
                rows.append({"kernel": family} | vars(outcome) | {"config": config})
                if outcome.config is not None:
                    tuning.store(case.family, tuning.path(device), {case.bucket: outcome.config})
                progress(_line(family, outcome))
                torch.cuda.empty_cache()
    if not rows:
        what, asked = "no tunable kernel runs steps of this many tokens", ",".join(map(str, tokens))
        raise InputError(what, where="--tokens", found=asked, hint="minirt tune without --kernel and --tokens takes all")
    faster = sum(row["config"] is not None for row in rows)
    progress(f"{faster} of {len(rows)} buckets have a faster configuration than the rule's, in {tuning.path(device)}")
    correctness = {"checked": True, "against": "eager PyTorch, each configuration before it is timed"}
    shared = machine("tune", device, words_of(ctx), None)
    shared |= {"model": name, "quantization": quantization(options), "correctness": correctness}
    print_report(Report(shared, rows, markdown), options)


def _step_clock(load: "LoadOptions", stack: ExitStack, progress: Callable[[str], None]) -> "StepClock":
    """A clock for whole steps of the model with random weights.

    The model is loaded at the first call and kept until `stack` closes.
    """

    @cache
    def steps() -> "Steps":
        from minirt.bench.tune.whole_steps import Steps
        from minirt.generator import Generator

        progress(f"loading {load.model} with random weights: to confirm the finalists in whole steps")
        small = replace(load, random_weights=True, warm_up="none", max_num_seqs=1, kv_cache_memory=_PAGES)
        return Steps(stack.enter_context(Generator.from_pretrained(small)).model)

    return lambda case, configs: steps().seconds(case, configs)


def linear_shapes(model: "Model") -> "list[LinearShape]":
    """The shapes of a model's linear layers, each once."""
    from minirt.kernels.compile.tuning import LinearShape

    shapes = list[LinearShape]()
    for layer in model.unique_layers():
        of_layer = list[LinearShape]()
        for linear, gated, residual, logits, experts in layer.linear_ops():
            rows = linear.out_features // (experts[0] if experts else 1) // (2 if gated else 1)
            stored = linear.format
            int4 = stored is not None and stored.name in ("int4", "mxfp4")
            fp8 = stored is not None and not int4
            blocks = fp8 and stored is not None and len(stored.scale_shape(linear.rows, linear.in_features)) == 2
            shape = rows, linear.in_features, gated, residual, model.dtype, fp8, logits, experts
            of_layer.append(LinearShape(*shape, blocks=blocks, int4=int4))
        # Whether a shared expert joins those of the mixture.
        joins = all(replace(shape, experts=None) in of_layer for shape in of_layer if shape.experts is not None)
        shapes += [shape if shape.experts is None else replace(shape, joins=joins) for shape in of_layer]
    return list(dict.fromkeys(shapes))


def fixed_kernels(model: "Model") -> list[str]:
    """The kernels of a model's layers that are not tuned, beside those of linear layers and experts."""
    from importlib import import_module

    from minirt.kernels.regimes import TABLES

    modules = [f"minirt.kernels.{name}" for layer in model.unique_layers() for name in layer.kernel_tables]
    tables = [getattr(import_module(module), name) for module, name in TABLES if module in modules]
    return list(dict.fromkeys(regime.kernel for table in tables for regime in table))


def _line(name: str, outcome: "TuningResult") -> str:
    what = f"{outcome.rule_s * 1e6:.1f}"
    what += f" → {outcome.best_s * 1e6:.1f} µs in chains" if outcome.best_s < outcome.rule_s else " µs"
    if outcome.rule_step_s is not None and outcome.best_step_s is not None:
        what += f", steps {outcome.rule_step_s * 1e3:.3f} → {outcome.best_step_s * 1e3:.3f} ms"
    what += ", the rule's stays" if outcome.config is None else f", with {outcome.config}"
    out = f", {len(outcome.failed)} of them failed" if outcome.failed else ""
    return f"{name} {outcome.bucket}: {what} ({outcome.tried} tried{out})"


def _stored(device: "torch.device", as_json: bool) -> str:
    """All stored configurations that fit the kernels' source, file by file. `device`: its own file is marked."""
    import minirt.kernels.linear.tuning
    import minirt.kernels.moe.tuning  # noqa: F401  (both register their families)
    from minirt.kernels.compile import tuning

    this = tuning.path(device) if device.type == "cuda" else None
    families = [family for family, _ in tuning.registered().values()]
    by_file = {path: {family.name: tuning.load(family, path) for family in families} for path in tuning.stored_files()}
    if as_json:
        files = []
        for path, kernels in by_file.items():
            plain = {name: {bucket: asdict(config) for bucket, config in configs.items()} for name, configs in kernels.items()}
            files.append({"path": str(path), "this_gpu": path == this, "kernels": plain})
        return json_line({"folder": str(cache_folder()), "files": files})
    if not by_file:
        return f"nothing is stored in {cache_folder()}\n"
    lines = []
    for path, kernels in by_file.items():
        lines.append(f"{path}{' (this GPU)' if path == this else ''}")
        stored = [f"  {name} {bucket}: {config}" for name, configs in kernels.items() for bucket, config in configs.items()]
        lines += stored or ["  nothing for the current source of the kernels"]
    return "\n".join(lines) + "\n"

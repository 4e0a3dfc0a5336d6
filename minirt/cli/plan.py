"""`minirt plan`: which implementation each layer runs, and why, and whether the model fits. Reads no weights."""

import sys
import textwrap
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from minirt.cli import options as shared
from minirt.cli.gpus import gpu_option, planned_gpu, write_assumption
from minirt.cli.help import command
from minirt.cli.output import json_line, write
from minirt.sizes import format_size

if TYPE_CHECKING:
    from minirt.device import AbsentGPU
    from minirt.loading.memory import MemoryPlan
    from minirt.modeling.model import Model


@command(short_help="Print how each layer runs and why, and what fits.")
@shared.model_options
@gpu_option
@shared.memory_options
@shared.prefix_cache_option
@shared.speculative_options
@shared.text_format_option
@shared.debug_option
def plan(output_format: str, **options: Any) -> None:
    """Print the plan: each layer's implementation, the reason for it, the size of its weights, and what fits in the memory.
    Reads no weights.

    --gpu plans for a GPU that is not in this machine. Its compute capability decides which layers run on Triton. The memory that
    the CUDA context takes is estimated. For a checkpoint with quantized weights, the format is printed, and what minirt does
    otherwise.
    """
    gpu = planned_gpu(options)
    name = shared.model_name(options)
    from minirt.loading.load import plan_load, remedy
    from minirt.loading.memory import context_is_short
    from minirt.step.kv_cache import PAGE_SIZE

    load = shared.to_load_options(options, name)
    model, memory = plan_load(load, gpu)
    device = gpu or model.device
    length = options["max_model_len"] or model.config.context_len
    one = -(-length // PAGE_SIZE) * memory.page + memory.kept  # bytes of a sequence of this length
    kernels = _special_kernels(model)
    if output_format == "json":
        names = "device", "not_capturable", "checkpoint", "notes", "weight_bytes"
        record = {"model": name} | {fact: getattr(model.plan, fact) for fact in names}
        sizes = asdict(memory) | {size: getattr(memory, size) for size in ("tokens", "needed", "fits")}
        sizes |= {"sequence": one, "step_state": model.step_state_bytes}
        layers = [vars(row) for row in model.plan.rows]
        write(json_line(record | {"memory": sizes, "special_kernels": kernels, "layers": layers}))
        sys.exit(0 if memory.fits else 1)
    write(model.plan.render(name, terminal=sys.stdout.isatty()))
    if kernels:
        write(textwrap.fill(f"Kernels for this compute capability only: {', '.join(kernels)}", 80) + "\n")
    budget = _budget(model, memory, gpu, options)
    write("".join(f"{line}\n" for line in _memory_lines(memory, length, one, model.step_state_bytes, budget)))
    if memory.fits:
        fits = "Fits."
        if memory.context != length:  # the context was not stated; `way` loses least to make all of it fit
            way = remedy(replace(load, max_model_len=length), device).partition(", or --max-model-len")[0]
            remark = "" if way.startswith("use --max-model-len") else f"; for all of it, {way}"
            fits = f"Fits with a context of {memory.context:,} instead of {length:,}{remark}."
        write(textwrap.fill(fits, 80, break_on_hyphens=False) + "\n")
    write_assumption(gpu)
    if not memory.fits:
        least = "" if memory.pages else "at least "  # with one page
        what = f"it needs {least}{format_size(memory.needed, up=True)}"
        if memory.only_context_is_short:
            what = context_is_short(memory)
        write(f"Does not fit: {what} ({remedy(load, device)})\n")
        sys.exit(1)


def _budget(model: "Model", memory: "MemoryPlan", gpu: "AbsentGPU | None", options: dict[str, Any]) -> str:
    """What is free, how much of it minirt takes, and which option decides that."""
    free = f"Memory: {format_size(memory.free)} free" + (f" of {format_size(gpu.memory)} (estimate)" if gpu else " now")
    most = f"{free}; minirt takes at most {format_size(memory.budget)} of it"
    if model.device.type != "cpu":
        return f"{most}, {memory.budget / max(memory.free, 1):.0%} (--gpu-memory-utilization)."
    if options["kv_cache_memory"] is not None:
        return f"{free}."
    return f"{most}: the weights, and a quarter of the rest for the KV cache (or what --kv-cache-memory says)."


def _memory_lines(memory: "MemoryPlan", length: int, one: int, moved: int, budget: str) -> list[str]:
    """`moved`: bytes of one sequence's states that a decode step reads and writes."""
    lines = [textwrap.fill(budget, 80, subsequent_indent="  ")]
    if memory.others:
        lines.append(f"  {memory.others[0].upper()}{memory.others[1:]}.")
    rows = memory.rows()
    if memory.budget - memory.needed >= max(memory.page, 1):
        full = f"--max-num-seqs {memory.max_num_seqs} needs no more" * (memory.pages == memory.full)
        rows.append(("not used", memory.budget - memory.needed, full or "as --kv-cache-memory says"))
    lines += [f"  {what:<24}{format_size(size):>10}  {remark}".rstrip() for what, size, remark in rows]
    beside = format_size(memory.weights + memory.other + memory.step + one, up=True)
    others = "weights and steps" if memory.step else "weights"
    one_sequence = f"One sequence of {length:,} tokens needs {format_size(one)} of KV cache, {beside} with {others}."
    lines.append(textwrap.fill(one_sequence, 80, subsequent_indent="  "))
    if memory.state:
        states = f"Of these, {format_size(memory.state)} are states of recurrent layers, whatever the length; a decode step moves"
        lines += textwrap.wrap(f"{states} {format_size(moved)} for each sequence to read and write them.", 80)
        if not memory.snapshots:
            lines.append("No prefix cache: it needs kept states of recurrent layers (--state-cache-memory).")
    return lines


def _special_kernels(model: "Model") -> list[str]:
    """The kernels that only this GPU's compute capability has, and that a layer of the model uses."""
    from minirt.device import compute_capability
    from minirt.kernels.special_limits import SPECIAL

    major, minor = compute_capability(model.device)
    if (special := SPECIAL.get(10 * major + minor)) is None:
        return []
    operations = _operations(model)
    kernels = [
        name for name, limits in special.attention.items()
        if any(used == "attention" and form in limits.formats and size in limits.head_dims for used, form, size in operations)
    ]  # fmt: skip
    for operation, table in (("experts", special.experts), ("linear", special.linear)):
        formats = {form for used, form, _ in operations if used == operation}
        kernels += [name for name, limits in table.items() if not formats.isdisjoint(limits.formats)]
    return sorted(kernels)


def _operations(model: "Model") -> set[tuple[str, str, int]]:
    """(operation, format, head size or 0) of what runs on Triton, the format as in `minirt.kernels.regimes`."""
    wide, operations = "_fp32" if model.dtype.itemsize > 2 else "", set()
    on_triton = {row.layer for row in model.plan.rows if row.implementation == "triton"}
    for layer in (layer for layer in model.unique_layers() if layer.name in on_triton):
        for op in layer.linear_ops():
            form = "" if op.linear.format is None else op.linear.format.name.replace(" 128x128", "_blocks")
            name = "experts" if op.experts else "linear"
            suffix = "" if name == "linear" and form.startswith("fp8") else wide  # its kernels quantize x of any dtype
            operations.add((name, f"{form}{suffix}" if form else "fp32" if wide else "fp16", 0))
        if (settings := getattr(layer, "settings", None)) is not None:  # of attention
            form = ("fp8" if model.kv_dtype.itemsize == 1 else "fp16") + wide
            operations.add(("attention", form, settings.head_dim))
    return operations

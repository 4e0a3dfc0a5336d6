"""`minirt models`: the presets, their sizes, and which of them fit in the memory of a device."""

import io
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from minirt.cli.gpus import gpu_option, planned_gpu, write_assumption
from minirt.cli.help import command
from minirt.cli.options import debug_option, text_format_option
from minirt.cli.output import json_line, write
from minirt.cli.settings import option_of
from minirt.loading.options import EMBEDDED, LoadOptions
from minirt.sizes import format_size

if TYPE_CHECKING:
    import torch

    from minirt.device import AbsentGPU
    from minirt.modeling.quantization_config import QuantizationConfig


@command(short_help="List the presets, and which of them fit.")
@option_of(LoadOptions, "device", "Model")
@gpu_option
@text_format_option
@debug_option
def models(output_format: str, **options: Any) -> None:
    """List the presets: their Hub ids, parameters, bytes of weights, and which fit on this machine. Needs no network.

    Models of the same architectures that are not listed load by their Hub id or folder.
    """
    gpu = planned_gpu(options)
    from minirt.device import free_memory, pick_device

    device = pick_device(options["device"]) if gpu is None else gpu
    rows = _rows(device)
    if output_format == "json":
        write(json_line({"device": str(device), "free_bytes": free_memory(device), "models": rows}))
        return
    formats = ("float32", "bf16") if device.type == "cpu" else ("bf16", "fp8")
    write(_table(rows, f"{device} · {format_size(free_memory(device))} free", formats))
    write(f"{_owners(rows)}\n")
    write_assumption(gpu)


def _rows(device: "torch.device | AbsentGPU") -> list[dict[str, Any]]:
    from minirt.models import presets

    rows, releases = [_row(EMBEDDED, None, device, None)], set[str]()
    for preset in presets():
        if preset.name.endswith("-FP8"):
            releases.add(preset.name.removesuffix("-FP8"))
        else:
            rows.append(_row(preset.name, preset.hub_id, device, preset.quantization))
    return [row | {"fp8_release": row["name"] in releases} for row in rows]


def _row(
    name: str, hub_id: str | None, device: "torch.device | AbsentGPU", stated: "QuantizationConfig | None"
) -> dict[str, Any]:
    """`stated`: the quantization of the model's only release, beside which no other is possible."""
    import torch

    from minirt.device import compute_capability
    from minirt.loading.load import find
    from minirt.loading.memory import plan_memory
    from minirt.loading.stored_formats import stored_formats
    from minirt.modeling.formats import Quantization
    from minirt.modeling.model import Model
    from minirt.models import build

    config = find(name, None, need_weights=False)[1]
    forms: list[Any] = [None, Quantization("fp8"), Quantization("int4")]
    if stated is not None:
        forms = [stored_formats(build(config), None, stated)] * 3
    plain, fp8, int4 = (Model(config, build(config), form) for form in forms)
    # The options to try, with the model that they give and the lowest compute capability; the first needs none.
    options = [("", plain, (0, 0)), ("--fp8", fp8, (8, 9)), ("--quantize int4", int4, (8, 0))][: 1 if stated else 3]
    if device.type == "cpu":
        narrow = [(f"--dtype bfloat16 {option}".rstrip(), model, torch.bfloat16) for option, model, _ in options]
        ways = [("", plain, torch.float32), *narrow]
    else:
        ways = [(option, model, torch.bfloat16) for option, model, least in options if compute_capability(device) >= least]
    fits = None
    for option, model, dtype in ways:
        model.dtype = model.kv_dtype = dtype
        if fits is None and plan_memory(model, config.context_len, device, LoadOptions(max_num_seqs=1)).fits:
            fits = option
    return {
        "name": name, "hub_id": hub_id, "parameters": plain.num_parameters,
        "float32_bytes": plain.weight_bytes(torch.float32), "bf16_bytes": plain.weight_bytes(torch.bfloat16),
        "fp8_bytes": fp8.weight_bytes(torch.bfloat16), "context": config.context_len, "fits": fits is not None,
        "fits_with": fits or None,
    }  # fmt: skip


def _table(rows: list[dict[str, Any]], title: str, formats: tuple[str, ...]) -> str:
    """One row for a model and its -Instruct form, which has the same shape but for its context.

    `formats`: those whose sizes are shown; on a CPU the default, float32, is one.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    names = {row["name"] for row in rows}
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("model", "params", *formats, "fits"):  # no name is cut; the options are wrapped first
        justify: Any = "left" if column in ("model", "fits") else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column != "fits")
    for row in rows:
        if row["name"].removesuffix("-Instruct") != row["name"] and row["name"].removesuffix("-Instruct") in names:
            continue
        suffix = "[-Instruct]" if f"{row['name']}-Instruct" in names else ""
        fits = row["fits_with"] or ("yes" if row["fits"] else "no")
        sizes = [format_size(row[f"{name}_bytes"]) for name in formats]
        count = row["parameters"]
        shown = f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"
        table.add_row(row["name"] + suffix, shown, *sizes, fits)
    printed, terminal = io.StringIO(), sys.stdout.isatty()
    width = None if terminal else 80
    console = Console(file=printed, width=width, force_terminal=terminal, markup=False, emoji=False, highlight=False)
    console.print(title, table, sep="\n")
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def _owners(rows: list[dict[str, Any]]) -> str:
    """Whose the models are on the Hub: a Hub id is OWNER/NAME."""
    families: dict[str, list[str]] = {}
    for row in rows:
        if row["hub_id"] is not None:
            owner, family = row["hub_id"].partition("/")[0], row["name"].partition("-")[0]
            families.setdefault(owner, []).append(family)
    owners = [f"{owner} ({', '.join(dict.fromkeys(names))})" for owner, names in families.items()]
    releases = ", ".join(row["name"] for row in rows if row["fp8_release"])
    lines = f"A Hub id is OWNER/MODEL. Owners: {', '.join(owners)}.", f"Also released in FP8, as NAME-FP8: {releases}."
    return "\n".join(textwrap.fill(line, 80) for line in lines)

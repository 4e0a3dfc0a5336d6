"""`minirt plan`: which implementation each layer runs, and why. Reads no weights."""

import io
import json
import sys
from typing import Any

import click

from minirt.cli.options import debug_option, model_name, model_options, to_load_options
from minirt.cli.output import format_bytes, write
from minirt.errors import printable


@click.command()
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@debug_option
def plan(as_json: bool, **options: Any) -> None:
    """Print the plan: each layer's implementation, the reason for it, and the size of its weights. Reads no weights.

    Of a checkpoint with quantized weights, it says the format, and what minirt does otherwise. It also says if the weights are
    larger than the free memory.
    """
    name = model_name(options)
    from minirt.device import free_memory
    from minirt.loading.load import plan_model

    model = plan_model(to_load_options(options, name))
    free = free_memory(model.device)
    if as_json:
        rows = [vars(row) for row in model.plan.rows]
        facts: dict[str, Any] = {"device": model.plan.device, "not_capturable": model.plan.not_capturable, "free_bytes": free}
        facts |= {"checkpoint": model.plan.checkpoint, "notes": model.plan.notes}
        record = facts | {"weight_bytes": model.plan.weight_bytes, "layers": rows}
        write(json.dumps(record) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    size = f"{model.num_parameters / 1e6:,.1f} M parameters"
    table = Table(title=printable(f"{name} · {model.config.model_type} · {size} · {model.plan.device}"))
    for column in ("layer", "implementation", "why", "dtype"):
        table.add_column(column)
    table.add_column("weights", justify="right")
    for row in model.plan.rows:
        table.add_row(*map(printable, (row.layer, row.implementation, row.reason, row.dtypes, format_bytes(row.bytes))))
    table.add_row("total", "", "", "", format_bytes(model.plan.weight_bytes))
    printed, terminal = io.StringIO(), sys.stdout.isatty()
    width = None if terminal else 110
    console = Console(file=printed, width=width, force_terminal=terminal, markup=False, emoji=False, highlight=False)
    console.print(table)
    if model.plan.checkpoint is not None:
        console.print(printable(f"Checkpoint: {model.plan.checkpoint}"))
    for remark in model.plan.notes:
        console.print(printable(f"Note: {remark}"))
    if model.plan.weight_bytes > free:
        weights = format_bytes(model.plan.weight_bytes)
        console.print(f"Does not fit: {weights} of weights, {format_bytes(free)} free on {model.plan.device}")
    if model.device.type == "cuda":
        reason = model.plan.not_capturable
        console.print("CUDA graphs: small steps" if reason is None else printable(f"CUDA graphs: none, since {reason}"))
    write(printed.getvalue())

"""`minirt plan`: which implementation each layer runs, and why. Reads no weights."""

import json
import sys
from typing import Any

import click

from minirt.cli.options import debug_option, model_name, model_options, text_format_option, to_load_options
from minirt.cli.output import write


@click.command()
@model_options
@text_format_option
@debug_option
def plan(output_format: str, **options: Any) -> None:
    """Print the plan: each layer's implementation, the reason for it, and the size of its weights. Reads no weights."""
    name = model_name(options)
    from minirt.loading.load import plan_model

    model = plan_model(to_load_options(options, name))
    if output_format == "json":
        rows = [vars(row) for row in model.plan.rows]
        facts = {"device": model.plan.device, "not_capturable": model.plan.not_capturable}
        record = facts | {"weight_bytes": model.plan.weight_bytes, "layers": rows}
        write(json.dumps(record) + "\n")
        return
    write(model.plan.render(name, terminal=sys.stdout.isatty()))

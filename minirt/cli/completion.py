"""What a shell completes after an option: values that are cheap to list. Imports neither PyTorch nor Triton."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import click
from click.shell_completion import CompletionItem

from minirt.cli.gpus import GPU_NAMES
from minirt.cli.help import MODEL_ARGUMENT

_LAYERS = ("embedding", "layers.*.attention", "layers.*.mlp", "layers.0.attention", "layers.0.mlp", "select", "head")
_IMPLEMENTATIONS = ("auto", "eager", "triton")
_VALUES: dict[str, tuple[str, ...]] = {
    "--device": ("auto", "cpu", "cuda"), "--dtype": ("auto", "bfloat16", "float16", "float32"), "--gpu": GPU_NAMES,
    "--impl": (*_IMPLEMENTATIONS, *(f"{layer}={name}" for layer in _LAYERS for name in _IMPLEMENTATIONS)),
    "--kv-cache-dtype": ("auto", "fp8"), "--layer": _LAYERS,
}  # fmt: skip


def attach(command: click.Command) -> None:
    """Let the options of a command, or of all commands in a group, complete their values."""
    for inner in getattr(command, "commands", {}).values():
        attach(inner)
    parameter: Any
    for parameter in command.params:
        option = parameter.opts[0]
        if parameter.name == MODEL_ARGUMENT or option == "--model":
            parameter.shell_complete = _models
        elif parameter.metavar == "FILE":
            parameter.shell_complete = lambda context, incomplete: [CompletionItem(incomplete, type="file")]
        elif option in _VALUES:
            parameter.shell_complete = partial(_begun, _VALUES[option])


def _begun(values: Iterable[str], context: click.Context, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(value) for value in values if value.lower().startswith(incomplete.lower())]


def _models(context: click.Context, incomplete: str) -> list[CompletionItem]:
    """Folders, the embedded model, and presets."""
    from minirt.loading.options import EMBEDDED
    from minirt.models import presets

    folders = CompletionItem(incomplete, type="dir")  # first: bash forgets what comes before it
    return [folders, *_begun([EMBEDDED, *(preset.name for preset in presets())], context, incomplete)]

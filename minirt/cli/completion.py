"""What a shell completes after an option: values that are cheap to list. Imports neither PyTorch nor Triton."""

from collections.abc import Callable, Iterable
from functools import partial

import click
from click.shell_completion import CompletionItem

from minirt.cli.gpus import GPU_NAMES

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
    for parameter in command.params:
        complete = _models if parameter.name == "named" else _completer(parameter.opts[0], parameter.metavar)
        if complete is not None:
            parameter.shell_complete = complete  # type: ignore[method-assign, assignment]


def _completer(option: str, metavar: str | None) -> Callable[[click.Context, str], list[CompletionItem]] | None:
    if option == "--model":
        return _models
    if metavar == "FILE":
        return lambda context, incomplete: [CompletionItem(incomplete, type="file")]
    return partial(_begun, _VALUES[option]) if option in _VALUES else None


def _begun(values: Iterable[str], context: click.Context, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(value) for value in values if value.lower().startswith(incomplete.lower())]


def _models(context: click.Context, incomplete: str) -> list[CompletionItem]:
    """Folders, the embedded model, and presets."""
    from minirt.loading.options import EMBEDDED
    from minirt.models import presets

    folders = CompletionItem(incomplete, type="dir")  # first: bash forgets what comes before it
    return [folders, *_begun([EMBEDDED, *(preset.name for preset in presets())], context, incomplete)]

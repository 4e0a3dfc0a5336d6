"""Presets with a quantized checkpoint of random weights, or with other sizes: options that scripts share.

python bench/tools/stored_format.py PRESET FOLDER [--stored FORMAT] [--set NAME=NUMBER …]

writes a model's config.json to a new folder in FOLDER, for `minirt bench speed --random-weights --model` and the like.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# quantization_config of the official FP8 files of Qwen and DeepSeek; of compressed-tensors, with a scale for each channel and
# with 4 bits; of GPTQ and AWQ. The LM head keeps 16 bits.
_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


def _compressed(form: str, weights: dict[str, Any], **activations: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights} | activations
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": {"group_0": group}}


FORMATS = {
    "fp8-blocks": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    },
    "fp8-channels": _compressed("float-quantized", _ROWS, input_activations=_ROWS | {"strategy": "token", "dynamic": True}),
    "w4a16": _compressed("pack-quantized", _GROUPS),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="PRESET")
    parser.add_argument("--stored", choices=FORMATS, metavar="FORMAT", help="the checkpoint is quantized: " + ", ".join(FORMATS))
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=NUMBER", help="fields of config.json, for widths that fill no tile"
    )


def changes(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of config.json that the options change."""
    changed: dict[str, Any] = {name: int(value) for name, _, value in (field.partition("=") for field in options.set)}
    return changed | ({"quantization_config": FORMATS[options.stored]} if options.stored else {})


def raw_config(preset: str) -> dict[str, Any]:
    """The config.json of a preset."""
    from minirt.models import raw_configs

    raw = next((raw for name, _, raw in raw_configs() if name == preset), None)
    return raw if raw is not None else sys.exit(f"{preset}: no preset has this name")


def write_config(parent: Path, options: argparse.Namespace) -> Path:
    """Write the config.json of the preset with the changes of the options to a new folder in `parent`. Returns the folder."""
    raw = raw_config(options.model)
    folder = parent / "-".join(filter(None, (options.model, options.stored)))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw | changes(options)), encoding="utf-8")
    return folder


@contextmanager
def chosen_model(options: argparse.Namespace) -> Iterator[str]:
    """The preset, or a temporary folder with its config.json if the options change it."""
    with tempfile.TemporaryDirectory() as parent:
        yield str(write_config(Path(parent), options)) if changes(options) else options.model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    print(write_config(chosen.folder, chosen))

"""Folders of compiled kernels that travel: `take_kernels` copies one into Triton's cache, if it is for this GPU.

`minirt compile` makes them. A folder has the form of Triton's cache, and a file that says what its kernels depend on.
"""

import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import triton

from minirt.device import AbsentGPU, compute_capability
from minirt.errors import CheckpointError
from minirt.files import read_json
from minirt.kernels.launch import sm_count

_MANIFEST = "minirt-kernels.json"
_MOST_BYTES = 1 << 16  # of that file
_GROUPS = "__grp__*"  # Triton's list of a kernel's files, with absolute paths


def describe(gpu: AbsentGPU | torch.device) -> dict[str, Any]:
    """What compiled kernels depend on, beside their source."""
    sms = gpu.sms if isinstance(gpu, AbsentGPU) else sm_count(gpu)
    capability = ".".join(map(str, compute_capability(gpu)))
    return {"minirt": version("minirt"), "triton": triton.__version__, "compute_capability": capability, "sms": sms}


def mark(folder: Path, facts: dict[str, Any]) -> None:
    """Write what the kernels of a folder depend on.

    Raises:
        CheckpointError: it has kernels that depend on something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / _MANIFEST).exists():
        check(folder, facts)
    (folder / _MANIFEST).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def check(folder: Path, facts: dict[str, Any]) -> None:
    """Raise CheckpointError unless the kernels of a folder are for `facts`."""
    stored = read_json(folder / _MANIFEST, limit=_MOST_BYTES, error=CheckpointError)
    stored = stored if isinstance(stored, dict) else {}
    differ = [name for name in facts if stored.get(name) != facts[name]]
    if differ:
        here, there = (", ".join(f"{name} {values.get(name)}" for name in differ) for values in (facts, stored))
        what, hint = "compiled kernels for something else", "compile them again: minirt compile"
        raise CheckpointError(what, where=f"--kernel-cache {folder}", expected=here, found=there, hint=hint)


def take_kernels(folder: Path, device: torch.device) -> None:
    """Copy a folder's kernels into Triton's cache, unless they are there.

    Raises:
        CheckpointError: it is no such folder, or for another GPU, Triton or minirt.
    """
    check(folder, describe(device))
    cache = Path(triton.knobs.cache.dir)
    cache.mkdir(parents=True, exist_ok=True)
    for kernel in folder.iterdir():
        target, part = cache / kernel.name, cache / f"{kernel.name}.{os.getpid()}"  # another process may do the same
        if not kernel.is_dir() or any(target.glob(_GROUPS)):
            continue
        part.mkdir()
        for file in kernel.iterdir():
            shutil.copyfile(file, part / file.name)
        for group in part.glob(_GROUPS):
            names = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
            group.write_text(json.dumps({"child_paths": {name: str(target / name) for name in names}}), encoding="utf-8")
        try:
            part.rename(target)  # which is not there, or is empty: Triton makes a folder when it looks for a kernel
        except OSError:  # the other process was faster
            shutil.rmtree(part)

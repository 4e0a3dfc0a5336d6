"""`--gpu`: GPUs that are not in this machine, for which `minirt plan` and `minirt models` plan, by name or memory."""

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from minirt.cli.help import option_in
from minirt.cli.output import write
from minirt.errors import DeviceError, InputError
from minirt.foreign_names import similar
from minirt.sizes import parse_size

if TYPE_CHECKING:
    from minirt.device import AbsentGPU

_LOWEST = (8, 0)  # the oldest compute capability that the kernels run on; assumed for a GPU of which only the memory is known
# Name: memory in MiB as the driver reports it (`nvidia-smi`, ECC on where that is the default: less than the datasheet says),
# compute capability (https://developer.nvidia.com/cuda-gpus), and streaming multiprocessors (datasheets).
_KNOWN = {
    "B200": (183359, (10, 0), 148), "H200": (143771, (9, 0), 132), "H100": (81559, (9, 0), 132),
    "H100-NVL": (95830, (9, 0), 132), "A100-80GB": (81920, (8, 0), 108), "A100-40GB": (40960, (8, 0), 108),
    "L40S": (46068, (8, 9), 142), "L4": (23034, (8, 9), 58), "A10": (23028, (8, 6), 72), "T4": (15360, (7, 5), 40),
    "RTX-PRO-6000": (97887, (12, 0), 188), "RTX-6000-Ada": (49140, (8, 9), 142), "RTX-A6000": (49140, (8, 6), 84),
    "RTX-5090": (32607, (12, 0), 170), "RTX-4090": (24564, (8, 9), 128), "RTX-3090": (24576, (8, 6), 82),
}  # fmt: skip
GPU_NAMES = tuple(_KNOWN)


def find_gpu(text: str) -> "AbsentGPU":
    """The GPU that `text` names: "H200", "rtx4090", or as `nvidia-smi` writes it ("NVIDIA H100 80GB HBM3"); its memory ("24GiB");
    or both its memory and its compute capability ("24GiB:8.9").

    Raises:
        DeviceError: an unknown name.
    """
    from minirt.device import CONTEXT_BYTES, AbsentGPU

    plain, size_gb = _parts(text)
    named = [name for name, (mib, *_) in _KNOWN.items() if _is_named(name, mib, plain, size_gb)]
    if len(named) == 1:
        mib, capability, sms = _KNOWN[named[0]]
        return AbsentGPU(named[0], mib << 20, capability, sms=sms)
    stated = re.fullmatch(r"([^:]*)(?::([0-9]{1,2})\.([0-9]))?", text)
    with suppress(InputError):
        if stated is not None and (memory := parse_size(stated[1])) >= CONTEXT_BYTES:
            capability = (int(stated[2]), int(stated[3])) if stated[2] else _LOWEST
            return AbsentGPU("".join(stated[1].split()), memory, capability, assumed=stated[2] is None)
    sizes = "a memory of at least 1GiB, such as 24GiB, or 24GiB:8.9 with a compute capability"
    near = named or _similar(plain)
    hint = f"did you mean {' or '.join(near)}?" if near else None
    raise DeviceError("unknown GPU", where="--gpu", expected=f"{sizes}, or one of {', '.join(_KNOWN)}", found=text, hint=hint)


gpu_option = option_in(
    "Model", "--gpu", callback=lambda context, parameter, value: None if value is None else find_gpu(value),
    help="A GPU that is not in this machine: its name, such as H200, or its memory, such as 24GiB, or 24GiB:8.9 with its compute "
    "capability (default: 8.0, which has no FP8).",
)  # fmt: skip


def planned_gpu(options: dict[str, Any]) -> "AbsentGPU | None":
    """The GPU of `--gpu`, which excludes a device of this machine other than "cuda"."""
    if options["gpu"] is not None and options["device"] not in ("auto", "cuda"):
        raise click.UsageError(f"--gpu is a GPU that is not here, and --device {options['device']} is a device that is")
    return options["gpu"]


def write_assumption(gpu: "AbsentGPU | None") -> None:
    """Say what to do about a compute capability that was not stated."""
    if gpu is not None and gpu.assumed:
        capability = ".".join(map(str, gpu.capability))
        write(f"Compute capability {capability} is assumed, which has no FP8; for 8.9, write --gpu {gpu.name}:8.9\n")


# Words of `nvidia-smi` and of shops that do not tell one GPU of the table from another.
_NOISE = re.compile(
    "nvidia|geforce|tesla|quadro|gpu|sxm[0-9]?|pcie|hbm[0-9]e?|gddr[0-9]x?|generation|blackwell|server|workstation|edition"
)
_SIZE = re.compile(r"(?:^|[^a-z0-9])([0-9]{2,3}) ?gi?b?(?=[^a-z0-9]|$)")
_SIZE_TOLERANCE = 0.08  # a GPU is sold with up to so much more memory than its driver reports


def _parts(name: str) -> tuple[str, int | None]:
    """"NVIDIA A100-SXM4-80GB" → ("a100", 80): what tells the GPU from others, and the memory in the name, in GB."""
    lower = name.lower()
    size = _SIZE.search(lower)
    words = re.findall("[a-z0-9]+", _SIZE.sub(" ", lower))
    return "".join(word for word in words if not _NOISE.fullmatch(word)), int(size[1]) if size else None


def _is_named(name: str, mib: int, plain: str, size_gb: int | None) -> bool:
    """Whether these `_parts` of a text are those of the GPU `name` of the table."""
    words = _parts(name)[0]
    fits = size_gb is None or abs((size_gb << 10) - mib) <= _SIZE_TOLERANCE * mib
    return fits and plain in (words, words.removeprefix("rtx"))


def _similar(plain: str) -> list[str]:
    """At most three GPUs whose names begin with `plain`; else those with which it begins, or that are spelled nearly like it."""
    bare, word = {name: _parts(name)[0].removeprefix("rtx") for name in _KNOWN}, plain.removeprefix("rtx")
    near = [one for one in bare.values() if word and one.startswith(word)] or similar(word, bare.values())
    return [name for name in _KNOWN if bare[name] in near][:3]

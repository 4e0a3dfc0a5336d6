"""Plan the kernels of presets for an absent GPU, compile two of them into a folder and take it, and print the results as JSON.

test_planned.py runs this in its own process, without TRITON_INTERPRET.
"""

import json
import os
import stat
from collections import Counter
from pathlib import Path

import torch
import triton

from minirt.device import AbsentGPU
from minirt.errors import CheckpointError
from minirt.kernels.compile import kernel_folder
from minirt.kernels.compile.absent_gpu import compile_listed
from minirt.kernels.compile.processes import CompileRequest
from minirt.kernels.linear import gemm_sm90
from minirt.loading.options import LoadOptions
from minirt.precompile.plan import planned_kernels

H100 = AbsentGPU("H100", 80 << 30, (9, 0), sms=132)
PRESETS = {"Qwen2.5-7B": {}, "Qwen2.5-7B fp8": {"quantization": "fp8"}, "Qwen2.5-0.5B": {}}


def plan(name: str, gpu: AbsentGPU = H100) -> list:
    options = LoadOptions(model=name.split()[0], random_weights=True, **PRESETS[name])
    return planned_kernels(options, gpu)


def refused(folder: Path, device: object) -> str:
    try:
        kernel_folder.check(folder, kernel_folder.describe(device))
    except CheckpointError as error:
        return str(error)
    return ""


def constant(request: CompileRequest, name: str) -> object:
    """A field of the record C of a `gemm_sm90` kernel."""
    return request.constants[list(request.signature).index("C"), gemm_sm90._Constants._fields.index(name)].value


def main() -> None:
    kernels = {name: plan(name) for name in PRESETS}
    seen = {"counts": {name: len(requests) for name, requests in kernels.items()}}
    first = kernels["Qwen2.5-7B"]
    seen["again"] = [request == other for request, other in zip(first, plan("Qwen2.5-7B"), strict=True)]
    pirate = LoadOptions(dtype="bfloat16", loras={"pirate": str(Path(__file__).parents[3] / "examples" / "pirate")})
    seen["adapters"] = sorted({request.name for request in planned_kernels(pirate, H100) if "adapters" in request.module})
    seen["targets"] = sorted({str(request.target) for requests in kernels.values() for request in requests})
    seen["other"] = sorted({request.target.arch for request in plan("Qwen2.5-0.5B", AbsentGPU("L4", 23 << 30, (8, 9), sms=58))})
    seen["in place"] = sum(not constant(request, "SHIFT") for request in first if request.name == "_gemm_sm90_kernel")
    seen["sampler"] = Counter(request.name for request in first if "sampling" in request.module)
    few = [request for request in first if request.name in ("_edit_kernel", "_embedding_kernel")]
    folder = Path(os.environ["TRITON_CACHE_DIR"]) / "travels"
    kernel_folder.mark(folder, kernel_folder.describe(H100))
    seen["progress"] = []
    compile_listed(few, folder, 1, lambda *step: seen["progress"].append(step))
    target = folder.with_name("cache")
    triton.knobs.cache.dir = str(target)
    seen["before"] = [request.is_cached() for request in few]
    for file in folder.rglob("*"):
        file.chmod(stat.S_IRUSR | (stat.S_IXUSR if file.is_dir() else 0))  # as in an image
    kernel_folder.describe, described = lambda device: described(H100), kernel_folder.describe
    inodes = []
    for _ in range(2):
        kernel_folder.take_kernels(folder, torch.device("cpu"))
        inodes.append([file.stat().st_ino for file in sorted(target.glob("*/*"))])
    kernel_folder.describe = described
    seen["after"] = [request.is_cached() for request in few]
    groups = [json.loads(group.read_text())["child_paths"] for group in target.glob("*/__grp__*")]
    places = [Path(path) for group in groups for path in group.values()]
    seen["places"] = sorted({str(path.parent.parent == target and path.exists()) for path in places})
    seen["names"] = sorted(path.name for path in target.iterdir()) == sorted(p.name for p in folder.iterdir() if p.is_dir())
    seen["kept"] = inodes[0] == inodes[1]
    seen["refused"] = refused(folder, AbsentGPU("A10", 23 << 30, (8, 6), sms=72))
    seen["no folder"] = refused(folder / "missing", H100)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()

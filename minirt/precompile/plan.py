"""`planned_kernels`: the kernels that a start compiles, without a GPU and without weights; `compile_kernels`: into a folder.

Warm-up runs on PyTorch's meta device, whose tensors have shapes and no memory, as it would on the GPU that this stands for.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from minirt.device import AbsentGPU
from minirt.engine.execute.runner import Runner
from minirt.engine.limits import EngineLimits
from minirt.engine.warmup.warm_up import first_launches, other_launches
from minirt.errors import UnsupportedError
from minirt.kernels.compile.absent_gpu import compile_listed, listed_kernels
from minirt.kernels.compile.kernel_folder import describe, mark
from minirt.kernels.compile.processes import CompileRequest
from minirt.kernels.launch import standing_for
from minirt.loading.load import plan_load
from minirt.loading.options import LoadOptions
from minirt.step.kv_cache import KVCache


def planned_kernels(options: LoadOptions, gpu: AbsentGPU) -> list[CompileRequest]:
    """The kernels that a start with these options compiles on `gpu`, each once. Those of drafts are not among them.

    Raises:
        UnsupportedError: Triton is not installed, or no layer runs on it.
    """
    model, memory = plan_load(options, gpu)
    if not model.uses("triton"):
        raise UnsupportedError("there are no kernels to compile", where=str(gpu), found=model.plan.not_capturable)
    cuda_graphs, vocab = model.capturable, model.config.vocab_size  # as planned for the GPU; the meta device has no graphs
    limits = EngineLimits(memory.context, memory.max_num_seqs, memory.max_num_batched_tokens)
    with torch.inference_mode(), standing_for(gpu) as device, listed_kernels(gpu) as kernels:
        model.allocate(device, model.dtype, memory.context, model.kv_dtype)
        model.resolve(options.impl)
        if model.adapters is not None:
            model.adapters.allocate()
        cache = KVCache(
            model.cache_specs, memory.pages, device, model.kv_dtype, num_slots=limits.max_num_seqs,
            num_snapshots=memory.snapshots, window_pages=memory.window_pages,
        )  # fmt: skip
        runner = Runner(model, cache, device, limits, vocab_size=vocab, cuda_graphs=cuda_graphs)
        for launch in (*first_launches(runner, model), *other_launches(runner, model)):
            launch()
    return kernels


def compile_kernels(
    options: LoadOptions, gpu: AbsentGPU, folder: Path, processes: int, progress: Callable[[int, int], None]
) -> int:
    """Compile `planned_kernels` into a folder, which may have those of other models for the same GPU. Returns their number.

    Args:
        progress: called with the numbers of compiled kernels and of all.
    Raises:
        CheckpointError: the folder has kernels for another GPU, Triton or minirt.
    """
    kernels = planned_kernels(options, gpu)
    mark(folder, describe(gpu))
    compile_listed(kernels, folder, processes, progress)
    return len(kernels)

"""`measure_step_bytes`: the device memory that a model's steps need beside weights and KV pages, measured before pages exist.

The steps are run without launching a kernel: every buffer is allocated as in a real step, and PyTorch's allocator counts. (vLLM
profiles a real forward pass for the same purpose.) Layers without Triton do run, on one KV page.
"""

import torch

from minirt.device import on_device
from minirt.engine.limits import EngineLimits
from minirt.engine.runner import Runner
from minirt.engine.warmup import largest_steps
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.modeling.model import Model
from minirt.step.kv_cache import KVCache


def measure_step_bytes(model: Model, limits: EngineLimits, *, cuda_graphs: bool) -> int | None:
    """Bytes that steps need: static buffers, the pool of the CUDA graphs, and the activations of the largest step. None: there is
    not enough free memory.

    Args:
        model: with weights, on a GPU.
    """
    from minirt.kernels.compile.ahead_of_time import without_launches

    device = model.device
    with on_device(device), without_launches(device):
        try:
            before = torch.cuda.memory_allocated(device)
            cache = KVCache(model.cache_specs, 1, device, model.kv_dtype, num_slots=limits.max_num_seqs)
            states = torch.cuda.memory_allocated(device) - before
            runner = Runner(
                model, cache, device, limits, vocab_size=model.config.vocab_size, cuda_graphs=cuda_graphs
            )
            steps = largest_steps(limits)
            ends = [[chunk.start + len(chunk.tokens) for chunk in chunks] for chunks in steps]
            model.reserve_splits(max(sum(-(-end // KV_SPLIT) for end in step) for step in ends))
            needed = runner.dry_run_bytes(steps)
            return torch.cuda.memory_allocated(device) - before - states + needed
        except torch.OutOfMemoryError:
            return None

"""`measure_step_bytes`: the device memory that a model's steps need beside weights and KV pages, measured before pages exist.

The steps are run without launching a kernel: every buffer is allocated as in a real step, and PyTorch's allocator counts. (vLLM
profiles a real forward pass for the same purpose.) Layers without Triton do run, on one KV page.
"""

import torch

from minirt.device import on_device
from minirt.engine.kv_cache import KVCache
from minirt.engine.runner import Runner
from minirt.engine.warmup import largest_steps
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.modeling.model import Model


def measure_step_bytes(model: Model, *, max_num_seqs: int, max_model_len: int, tokens: int, cuda_graphs: bool) -> int | None:
    """Bytes that steps of at most `tokens` tokens need: static buffers, the pool of the CUDA graphs, and the activations of the
    largest step. None: there is not enough memory for them now.

    Args:
        model: with weights, on a GPU.
    """
    from minirt.kernels.compile.ahead_of_time import without_launches

    device = model.device
    with on_device(device), without_launches(device):
        try:
            before = torch.cuda.memory_allocated(device)
            cache = KVCache(model.cache_specs, 1, device, model.kv_dtype, num_slots=max_num_seqs)
            states = torch.cuda.memory_allocated(device) - before
            runner = Runner(
                model, cache, device, vocab_size=model.config.vocab_size, max_num_seqs=max_num_seqs, max_seq_len=max_model_len,
                max_num_batched_tokens=tokens, cuda_graphs=cuda_graphs,
            )  # fmt: skip
            steps = largest_steps(tokens, max_model_len, max_num_seqs)
            ends = [[chunk.start + len(chunk.tokens) for chunk in chunks] for chunks in steps]
            model.reserve_splits(max(sum(-(-end // KV_SPLIT) for end in own) for own in ends))
            needed = runner.dry_run_bytes(steps)
            return torch.cuda.memory_allocated(device) - before - states + needed
        except torch.OutOfMemoryError:
            return None

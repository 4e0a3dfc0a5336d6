"""Qwen3.5-MoE and Qwen3-Next against transformers, in fp32: logits, greedy tokens, chunks, preemption, files, refusals."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hybrids import CASES, TEXT, make, prompts, truth

from minirt import Generator, SamplingParams
from minirt.errors import CheckpointError, ConfigError, UnsupportedError
from minirt.layers import MLP, GatedDeltaNet, MoE
from minirt.modeling.model import Model
from minirt.models import build, parse_config, preset
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import KVCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOE_TEXT = TEXT | {"model_type": "qwen3_5_moe_text"}
NEXT = TEXT | {"model_type": "qwen3_next", "intermediate_size": 56}


def load(folder: Path, **options: Any) -> Generator:
    return Generator.from_pretrained(folder, **{"device": "cpu", "kv_cache_memory": 1 << 24} | options)


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    """Logits of prompts in chunks, and greedy tokens of a ragged batch for which there are too few pages.

    Catches a row of another head or part in the grouped projections, an expert's weight that is not normalized, a shared expert
    without its gate, a dense layer in the place of a mixture, and a state that preemption or the next chunk loses.
    """
    model, texts = make(case, tmp_path), prompts(1, 17, 60, 65, 70)
    exact = truth(model, texts[-1])
    with load(tmp_path) as generator:
        own = generator.model
        for size in (1, 17, 64, 65):
            cache = KVCache(own.cache_specs, 4, own.device, own.kv_dtype, num_slots=3)
            outs = []
            for start in range(0, 70, size):
                chunk = Chunk(texts[-1][start : start + size], start, range(4), num_logits=1, slot=2)
                outs.append(own(Batch.build([chunk], cache.page_size).to(own.device), cache)[0])
            rows = [min(start + size, 70) - 1 for start in range(0, 70, size)]
            assert (torch.stack(outs) - exact[rows]).norm() < 1e-4 * exact[rows].norm(), size
        page = generator.memory.page
    params = [SamplingParams(max_tokens=count, ignore_eos=True, temperature=0) for count in (30, 12, 20, 6, 9)]
    with load(tmp_path, kv_cache_memory=5 * page, max_num_seqs=4, max_model_len=256) as generator:
        found = [completion.token_ids for completion in generator.generate(texts, params)]
        assert generator._live.stats.num_preemptions
    for prompt, tokens, own_params in zip(texts, found, params, strict=True):
        assert len(tokens) == own_params.max_tokens
        assert truth(model, prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens

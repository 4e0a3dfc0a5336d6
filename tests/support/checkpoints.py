"""What the tests of model folders share: load on a CPU, change the files, and look for refusals and warnings."""

import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minirt import Generator, LoadOptions
from minirt.errors import CheckpointError
from minirt.loading.load import plan_model
from minirt.modeling.plan import Plan

TOKENS = [(7 * i * i + 3 * i) % 211 for i in range(40)]


def load(folder: Path | str, **options: Any) -> Generator:
    return Generator.from_pretrained(folder, **{"device": "cpu", "kv_cache_memory": 1 << 22, **options})


def logits(folder: Path, tokens: list[int] = TOKENS, **options: Any) -> Tensor:
    with load(folder, **options) as generator:
        return generator.logits(tokens)


def plan(folder: Path, **options: Any) -> Plan:
    return plan_model(LoadOptions(model=folder, device="cpu", **options)).plan


def refused(folder: Path | str, words: str, error: Any = CheckpointError, *, by: Callable = load, **options: Any) -> None:
    with pytest.raises(error, match=words):
        by(folder, **options)


def transformers_logits(folder: Path, tokens: list[int] = TOKENS) -> Tensor:
    """Logits [T, V] in fp32 by transformers, from the same files."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def transformers_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def distance(result: Tensor, expected: Tensor) -> float:
    """Relative error, in fp64."""
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of model.safetensors."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def restate(folder: Path, **fields: Any) -> None:
    """Change fields of config.json; `...` removes one."""
    changed = {name: value for name, value in (config(folder) | fields).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(changed))


@contextmanager
def no_warning(*but: str) -> Iterator[None]:
    """A warning is an error, except those that begin with `but`."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for words in but:
            warnings.filterwarnings("ignore", words)
        yield


@contextmanager
def warned() -> Iterator[list[str]]:
    """The messages of all warnings, also of repeated ones; complete at the end."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(warning.message) for warning in caught]


@contextmanager
def one_warning(words: str | None) -> Iterator[None]:
    """All warnings are one, which has `words`; None: there is none."""
    with warned() as said:
        yield
    assert len(set(said)) == (words is not None), said
    assert all(re.search(words or "", text) for text in said), said

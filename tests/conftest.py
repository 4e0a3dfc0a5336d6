"""Fixtures for all tests: SmolLM2, and tiny random models of every family, written by transformers."""

import gc
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from minirt.wording import command_line

ROOT = Path(__file__).parents[1]
INTERPRETED = not torch.cuda.is_available() and "MINIRT_EMULATE" not in os.environ  # see tests/emulate
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before Triton is imported, which reads it once
    if find_spec("triton"):
        from support import interpreter

        interpreter.shorten()
else:  # padding and chunks during a lazy warm-up round differently, so only tests of it and of commands have one
    from minirt.loading.options import LoadOptions

    LoadOptions.__init__.__kwdefaults__["warm_up"] = "full"


@cache
def _shares_a_fixture(path: str) -> bool:
    return 'scope="module"' in (ROOT / path).read_text(encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With `-n`, a file with module fixtures runs in one process. The marks of pytest-xdist need private names of pytest."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            if "past_2_31" in nodeid:  # each test takes gigabytes of GPU memory, so they run one after the other
                return "past_2_31"
            return path if _shares_a_fixture(path) else nodeid

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU, those that need one are skipped, and of a test that runs kernels in the interpreter, which takes long, all
    but few cases are exhaustive: those whose names have the lowest checksums, so the choice stays."""
    counts = Counter[Any]()
    for item in sorted(items, key=lambda item: zlib.crc32(item.name.encode())) if INTERPRETED else ():
        folder, name = item.path.relative_to(ROOT / "tests").parts[0], f"{item.path.name}::{item.name}"
        kept = 1 if "make" in item.fixturenames else 3 if "device" in item.fixturenames else None
        if folder != "kernels":
            kept = 2 if folder == "layers" and "triton" in name else None
        counts[item.function] += 1
        if kept is not None and counts[item.function] > kept:
            item.add_marker(pytest.mark.exhaustive)
    if not torch.cuda.is_available():
        for item in items:
            emulated = "MINIRT_EMULATE" in os.environ and "on_hopper" in getattr(item, "fixturenames", ())
            if "gpu" in item.keywords and not emulated:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish() -> None:
    from support.garbage import freeze_tests

    freeze_tests()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries complain of objects that are left at the end


@pytest.fixture(scope="session", autouse=True)
def messages_of_the_command_line() -> Iterator[None]:
    """Messages name options in all tests, those of the Python API too. `test_wording.py` has the arguments of Python."""
    with command_line():
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct (fp32): the folder MINIRT_TEST_SMOLLM2, or a folder in .cache that is made once."""
    given = os.environ.get("MINIRT_TEST_SMOLLM2")
    if given:
        return Path(given)
    from support.smollm2 import make

    return make(ROOT / ".cache" / "smollm2")


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes a tiny random model and returns its folder: `hf_folder(family, seed=0, **config)`.

    `shard` is the size of a file; `fused` stores the experts of a layer as transformers keeps them, in two tensors.
    Norm weights are not uniform and biases are not zero. Otherwise errors in them would not show.
    """
    import transformers

    def make(family: str, seed: int = 0, shard: str | None = None, fused: bool = False, **options: object) -> Path:
        torch.manual_seed(seed)
        settings: dict[str, Any] = {
            "hidden_size": 64, "intermediate_size": 97, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 211, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
            "pad_token_id": 0,
        }  # fmt: skip
        settings |= options
        if family == "Mistral":
            settings.setdefault("sliding_window", None)
        config = getattr(transformers, f"{family}Config")(**settings)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    parameter.normal_(0, 0.3)
                else:
                    parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
        folder = tmp_path_factory.mktemp(family.lower())
        saving = ({"max_shard_size": shard} if shard else {}) | ({"save_original_format": False} if fused else {})
        model.save_pretrained(folder, **saving)
        return folder

    return make


@pytest.fixture(scope="session")
def folder(hf_folder: Callable[..., Path]) -> Path:
    """A tiny Llama with a tokenizer. Tests that change it take `copy`."""
    from support.tiny import add_tokenizer

    return add_tokenizer(hf_folder("Llama", seed=3))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "model")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """The command line, see `caller`."""
    from support.cli import caller

    return caller(capfd, monkeypatch)

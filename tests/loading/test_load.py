"""Load options are checked before anything is allocated: memory, length, device, dtype, implementation, name."""

import json
import shutil

import pytest
import torch
from support.tiny import add_tokenizer

from minirt import Generator
from minirt.errors import ConfigError, DeviceError, InputError, ModelNotFoundError, OutOfMemoryError, UnsupportedError
from minirt.loading import load as choose
from minirt.loading.options import pick_length
from minirt.models import parse_config


def load(folder, **options):
    return Generator.from_pretrained(folder, device="cpu", **{"kv_cache_memory": 1 << 22, **options})


@pytest.fixture(scope="module")
def folder(hf_folder):
    return add_tokenizer(hf_folder("Llama", seed=3))


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "model")


@pytest.fixture
def no_allocation(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("memory was allocated before the check")

    monkeypatch.setattr("minirt.modeling.model.Model.allocate", refuse)


@pytest.mark.usefixtures("no_allocation")
def test_memory_is_checked_first(folder, monkeypatch):
    for module in ("minirt.device", "minirt.loading.memory"):
        monkeypatch.setattr(f"{module}.free_memory", lambda device: 20 << 30)
    with pytest.raises(OutOfMemoryError, match=r"weights 270\.\d+GiB.*expected 271\.\d+GiB; found 20GiB free.*smaller"):
        load("Qwen2.5-72B", random_weights=True, kv_cache_memory=None)
    with pytest.raises(OutOfMemoryError, match=r"expected 3\d\.\d+GiB; found 20GiB free.*use --dtype bfloat16: 1\d\.\d+GiB"):
        load("Qwen2.5-7B", random_weights=True, kv_cache_memory=None)
    with pytest.raises(OutOfMemoryError, match=r"KV pages.*expected 192\..*GiB; found 20.*--kv-cache-memory"):
        load(folder, kv_cache_memory=900 << 30, max_num_seqs=1 << 20)
    for wrong in (0, -1, 1000, 1e9, True):
        with pytest.raises(ConfigError, match=r"--kv-cache-memory.*48KiB"):
            load(folder, kv_cache_memory=wrong)


def test_what_no_sequence_needs_is_neither_taken_nor_refused(folder, monkeypatch):
    for module in ("minirt.device", "minirt.loading.memory"):
        monkeypatch.setattr(f"{module}.free_memory", lambda device: 20 << 30)
    with load(folder, kv_cache_memory=900 << 30, max_num_seqs=3) as generator:
        assert generator.kv_cache_bytes == 3 * 4 * 49152


@pytest.mark.usefixtures("no_allocation")
def test_rope_tables_count_as_memory(copy, monkeypatch):
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 16 << 20}))
    for module in ("minirt.device", "minirt.loading.memory"):
        monkeypatch.setattr(f"{module}.free_memory", lambda device: 4 << 30)
    with pytest.raises(OutOfMemoryError, match=r"rope tables and states 4GiB.*lower --max-model-len"):
        load(copy)


def test_yarn_stretches_the_context(copy):
    """Qwen's documentation adds the rope scaling but does not change max_position_embeddings."""
    path = copy / "config.json"
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": None, "rope_scaling": scaling}))
    config = parse_config(json.loads(path.read_text()))
    assert config.max_position_embeddings == 256
    assert (pick_length(config, None), pick_length(config, 1024)) == (1024, 1024)
    with pytest.raises(ConfigError, match=r"--max-model-len.*1 to 1024"):
        pick_length(config, 1025)


@pytest.mark.usefixtures("no_allocation")
@pytest.mark.parametrize("wrong", [0, -5, 257, 2.5, True])
def test_bad_lengths(wrong, folder):
    with pytest.raises(ConfigError, match=r"--max-model-len.*1 to 256"):
        load(folder, max_model_len=wrong)


@pytest.mark.parametrize("device", ["tpu", "", "cpu:0", "cuda:-1", "cuda:x", "cuda:²", "cuda:999999", 7])
def test_bad_devices(device, folder):
    with pytest.raises(DeviceError, match="device"):
        Generator.from_pretrained(folder, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the case without a GPU")
def test_cuda_without_a_gpu(folder):
    with pytest.raises(DeviceError, match=r"--device cuda.*--device cpu"):
        Generator.from_pretrained(folder, device="cuda")


@pytest.mark.parametrize("dtype", ["int8", "fp8", "", "Float32"])
def test_bad_dtypes(dtype, folder):
    with pytest.raises(ConfigError, match="--dtype"):
        load(folder, dtype=dtype)


BAD_IMPL = ["foo", "layers.99.*=eager", "=eager", "layers.*=", "", ["eager", "triton"], "eager=head"]


@pytest.mark.parametrize("impl", BAD_IMPL)
def test_bad_implementations(impl, folder):
    with pytest.raises(UnsupportedError):
        load(folder, impl=impl)


def test_unknown_models(tmp_path, folder):
    for wrong, message in (
        (tmp_path / "nowhere", "nowhere"), (folder / "config.json", "file, not a folder"), (tmp_path, r"config\.json"),
        ("no-such-preset", r"Qwen2\.5-7B"), ("a\0b", "folder"), ("", "empty"), ("x" * 5000, "name too long"),
        ("~no-such-user/model", "looked up"),
    ):
        with pytest.raises((ModelNotFoundError, InputError), match=message):
            load(wrong)


def test_preset_with_random_weights_needs_no_files(monkeypatch):
    monkeypatch.setattr(choose, "resolve", lambda *_, **__: pytest.fail("looked for files"))
    small = {"max_model_len": 64, "dtype": "bfloat16", "kv_cache_memory": 1 << 23}
    with load("smollm2-135m", random_weights=True, **small) as random:
        assert random.tokenizer is None
        assert torch.isfinite(random.logits([3, 4, 5])).all()
        assert random.bytes_read == 0

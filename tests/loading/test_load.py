"""Load options are checked before anything is allocated: memory, length, device, dtype, implementation, name."""

import json

import pytest
import torch
import transformers
from support.checkpoints import config as read_config
from support.checkpoints import distance, load, one_warning, refused, restate, warned

from minirt import SamplingParams
from minirt.errors import ConfigError, DeviceError, InputError, ModelNotFoundError, OutOfMemoryError, UnsupportedError
from minirt.loading import load as choose
from minirt.loading.load import pick_length
from minirt.models import parse_config


@pytest.fixture
def no_allocation(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("memory was allocated before the check")

    monkeypatch.setattr("minirt.modeling.model.Model.allocate", refuse)


@pytest.fixture
def free(monkeypatch):
    def set_free(gigabytes):
        for module in ("minirt.device", "minirt.loading.memory"):
            monkeypatch.setattr(f"{module}.free_memory", lambda device: gigabytes << 30)

    return set_free


@pytest.mark.usefixtures("no_allocation")
def test_memory_is_checked_first(folder, copy, free):
    """Catches minutes of loading before a refusal, and a message without the sizes and the remedy."""
    free(20)
    for model, words in (
        ("Qwen2.5-72B", r"weights 270\.\d+GiB.*expected 271\.\d+GiB; found 20GiB free.*smaller"),
        ("Qwen2.5-7B", r"expected 28\.\d+GiB; found 20GiB free.*use --dtype bfloat16: at least 1\d\."),
    ):
        refused(model, words, OutOfMemoryError, random_weights=True, kv_cache_memory=None)
    words = r"KV pages.*expected 192\..*GiB; found 20.*--kv-cache-memory"
    refused(folder, words, OutOfMemoryError, kv_cache_memory=900 << 30, max_num_seqs=1 << 20)
    restate(copy, max_position_embeddings=16 << 20)
    refused(folder, "--max-model-len", ConfigError, max_model_len=257)
    free(4)
    refused(copy, r"rope tables and states 4GiB.*lower --max-model-len", OutOfMemoryError)
    for wrong, expected in (*((n, "48KiB") for n in (0, -1, 1000)), (1e9, "a number of bytes"), (True, "a number of bytes")):
        refused(folder, rf"--kv-cache-memory.*{expected}", ConfigError, kv_cache_memory=wrong)


def test_what_no_sequence_needs_is_neither_taken_nor_refused(folder, free):
    """Catches pages that no sequence can use."""
    free(20)
    with load(folder, kv_cache_memory=900 << 30, max_num_seqs=3) as generator:
        assert generator.kv_cache_bytes == 3 * 4 * 49152


def test_yarn_stretches_the_context(copy):
    """Qwen's documentation adds the rope scaling but does not change max_position_embeddings."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = parse_config(read_config(copy) | {"rope_parameters": None, "rope_scaling": scaling})
    assert config.max_position_embeddings == 256
    assert (pick_length(config, None), pick_length(config, 1024)) == (1024, 1024)
    with pytest.raises(ConfigError, match=r"--max-model-len.*1 to 1024"):
        pick_length(config, 1025)


WRONG = {  # values of an option, the error, and its words
    "max_model_len": ([0, -5, 257, 2.5, True], ConfigError, r"--max-model-len.*1 to 256"),
    "device": (["tpu", "", "cpu:0", "cuda:-1", "cuda:x", "cuda:²", "cuda:999999", 7], DeviceError, "device"),
    "dtype": (["int8", "fp8", "", "Float32"], ConfigError, "--dtype"),
    "impl": (
        ["foo", "layers.99.*=eager", "=eager", "layers.*=", "", ["eager", "triton"], "eager=head"], UnsupportedError, "impl",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("option", "wrong"), [(option, value) for option, row in WRONG.items() for value in row[0]])
def test_wrong_values_of_options(option, wrong, folder):
    """Catches a value that is taken for another one, or an error of PyTorch."""
    _, error, words = WRONG[option]
    refused(folder, words, error, **{option: wrong})


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the case without a GPU")
def test_cuda_without_a_gpu(folder):
    """Catches a fallback to the CPU without a word."""
    refused(folder, r"--device cuda.*--device cpu", DeviceError, device="cuda")


LONGROPE = {
    "type": "longrope", "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 128,
}  # fmt: skip
# Files that compute what a supported model does, at least up to some length: architecture, its options, changes of config.json,
# max_model_len, and a word of the only warning. Each is compared with transformers, which reads the same file.
EXACT = {
    "linear rope beyond its positions": (
        "Llama", {"max_position_embeddings": 64}, {"rope_scaling": {"type": "linear", "factor": 3.5}}, 224, "rope factor",
    ),
    "dynamic rope": ("Llama", {}, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, None, None),
    "dynamic rope beyond its positions": (
        "Llama", {"max_position_embeddings": 64}, {"rope_scaling": {"type": "dynamic", "factor": 3.5}}, 224,
        "above 64 tokens, rope type 'dynamic' has other frequencies",
    ),
    "longrope": ("Llama", {}, {"rope_scaling": LONGROPE}, None, "above 128 tokens, rope type 'longrope' has other frequencies"),
    "longrope up to its original positions": ("Llama", {}, {"rope_scaling": LONGROPE}, 128, None),
    "a window of the length": ("Mistral", {"sliding_window": 150}, {}, 150, None),
    "a window of more": ("Mistral", {"sliding_window": 151}, {}, 150, None),
    "a shorter window": ("Mistral", {"sliding_window": 149}, {}, 150, None),
    "a window of the positions": ("Mistral", {"sliding_window": 256}, {}, None, None),
    "a window in some layers": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": 150, "max_window_layers": 1}, {}, None, None,
    ),
    "layer types": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 150, "layer_types": ["full_attention", "sliding_attention"] * 2,
         "num_hidden_layers": 4}, {}, None, None,
    ),
    "FSDP": ("Qwen2", {}, {"architectures": ["FSDPQwen2ForCausalLM"]}, None, "FSDPQwen2ForCausalLM: the prefix FSDP is ignored"),
    "keys of rope that enter no formula": (
        "Llama", {},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "finetuned": True,
                          "attn_factor": None}, "rope_parameters": None}, None, None,
    ),
    "a dtype with a prefix": ("Llama", {}, {"torch_dtype": "torch.float32", "dtype": "float32"}, None, None),
}  # fmt: skip


@pytest.mark.parametrize("case", EXACT)
def test_what_is_exact_runs(case, hf_folder):
    """Catches a refusal of a file whose settings change nothing up to the served length, and one that is taken silently."""
    family, options, changes, length, words = EXACT[case]
    folder = hf_folder(family, seed=len(case), **options)
    if "rope_scaling" in changes:
        changes = {"rope_parameters": None, "rope_theta": 10000.0} | changes
    restate(folder, **changes)
    tokens = torch.randint(3, 211, (length or 256,), generator=torch.Generator().manual_seed(5)).tolist()
    theirs = {name: value for name, value in read_config(folder).items() if name != "torch_dtype"}
    config = transformers.AutoConfig.for_model(**theirs)
    config.dtype = None
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    with torch.no_grad():
        truth = model(torch.tensor([tokens])).logits[0]
    with one_warning(words), load(folder, max_model_len=length) as generator:
        assert distance(generator.logits(tokens), truth) < 1e-4
        assert generator.max_len == len(tokens)


def test_layers_have_windows_that_matter(hf_folder):
    """Catches a window that no served sequence reaches, which would keep layers from kernels and from one cache."""
    folder = hf_folder("Mistral", sliding_window=24)
    for length, window in ((None, 24), (25, 24), (24, None)):
        with load(folder, max_model_len=length) as generator:
            assert {layer.settings.window for layer in generator._model.layers if layer.kind == "attention"} == {window}


@pytest.mark.usefixtures("no_allocation")
def test_lengths_beyond_linear_rope_are_refused(copy):
    """Catches a bound that is off by one, or missing."""
    restate(copy, rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0})
    refused(copy, r"--max-model-len.*1 to 512; found 513", ConfigError, max_model_len=513)


def test_a_tokenizer_with_more_ids_than_the_model(copy):
    """Catches a refusal of the whole model, ids beyond the embedding, and an end of sequence that the model cannot generate."""
    path = copy / "tokenizer.json"
    content = json.loads(path.read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] += [{"id": 211 + i, "content": text} | flags for i, text in enumerate(("<new>", "<end>"))]
    path.write_text(json.dumps(content))
    path = copy / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<end>"}))
    (copy / "generation_config.json").unlink(missing_ok=True)
    restate(copy, eos_token_id=None)
    greedy = SamplingParams(max_tokens=3, temperature=0)
    with warned() as told:
        generator = load(copy)
    assert "the tokenizer has ids up to 212, but vocab_size of config.json is 211" in told[0]
    assert "ends of sequences that the model cannot generate" in told[1]
    assert len(told) == 2
    with generator:
        assert generator.eos_token_ids == ()
        assert len(generator.generate("the dog", greedy).token_ids) == 3
        words = r'prompt token {}: the model has no such token; expected ids from 0 to 210; found 211, "<new>"'
        for prompt, place in (("the<new> dog", None), ([5, 211], 1)):
            at = generator.encode(prompt).index(211) if place is None else place
            with pytest.raises(InputError, match=words.format(at)):
                generator.generate(prompt, greedy)
        with pytest.raises(InputError, match=r"prompts\[1\].*\<new\>"):
            generator.generate(["the dog", "<new>"], greedy)
        with pytest.raises(InputError, match=r"prompt token 1: not a token id of this model.*found 213"):
            generator.generate([5, 213], greedy)
        with pytest.raises(InputError, match=r"prompt token 0: not a token id of this model.*found 211"):
            generator.logits([211])


def test_unknown_models(tmp_path, folder):
    """Catches an error of Python or of the Hub in place of what the name may be."""
    for wrong, message in (
        (tmp_path / "nowhere", "nowhere"), (folder / "config.json", "file, not a folder"), (tmp_path, r"config\.json"),
        ("no-such-preset", "minirt models lists the presets"), ("a\0b", "folder"), ("", "empty"), ("x" * 5000, "name too long"),
        ("~no-such-user/model", "looked up"),
    ):
        refused(wrong, message, (ModelNotFoundError, InputError))


def test_preset_with_random_weights_needs_no_files(monkeypatch):
    """Catches files that are looked for, or read, though none is needed."""
    monkeypatch.setattr(choose, "find_model_files", lambda *_, **__: pytest.fail("looked for files"))
    small = {"max_model_len": 64, "dtype": "bfloat16", "kv_cache_memory": 1 << 23}
    with load("smollm2-135m", random_weights=True, **small) as random:
        assert random.tokenizer is None
        assert torch.isfinite(random.logits([3, 4, 5])).all()
        assert random.bytes_read == 0


def test_a_kernel_cache_without_a_gpu_has_no_effect():
    with pytest.warns(UserWarning, match="--kernel-cache has no effect: no kernel runs on cpu"):
        choose.load(choose.LoadOptions(device="cpu", kernel_cache="/no/such/folder", kv_cache_memory=8 << 20))

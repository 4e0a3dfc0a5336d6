"""Qwen3.5 (dense) against transformers, in fp32: logits, greedy tokens, chunked prompts, ragged batches, preemption, files."""

import gc
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine.test_drafts import Mixed
from safetensors.torch import load_file
from support.checkpoints import distance, restate, warned
from support.cli import caller
from support.hybrids import check_greedy, last_logits, prompts, randomize, truth, wrap

from minirt import Generator, SamplingParams
from minirt.cli.output import load_summary
from minirt.errors import ConfigError, UnsupportedError
from minirt.layers import Attention, GatedDeltaNet
from minirt.modeling.model import Model
from minirt.models import build, parse_config, preset
from minirt.sizes import format_size
from minirt.step.kv_cache import state_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ["eager", "auto"] if DEVICE == "cuda" else ["eager"]
ROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
}  # fmt: skip
TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 97, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 211, "max_position_embeddings": 1024, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "rope_parameters": ROPE, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 4,
    "patch_size": 2,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "2-to-1": {}, "1-to-1-tied": {"linear_num_value_heads": 2, "tie_word_embeddings": True},
    "3-to-1-bias": {"linear_num_value_heads": 6, "linear_value_head_dim": 8, "attention_bias": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each of VARIANTS, as a decoder alone."""
    made = {}
    for name, options in VARIANTS.items():
        torch.manual_seed(len(name))
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**TEXT | options))
        randomize(model)
        made[name] = tmp_path_factory.mktemp("qwen3_5")
        model.save_pretrained(made[name])
    return made


def their_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_parity(variant: str, impl: str, folders: dict[str, Path]) -> None:
    """Logits, and greedy tokens, 300 of one variant: alone, and ragged beside others that come and go."""
    model, texts = their_model(folders[variant]), prompts(1, 7, 64, 65, 130)
    counts = [300, 40, 90, 20, 60] if variant == "2-to-1" else [70, 12, 30, 5, 20]
    params = [SamplingParams(max_tokens=count, ignore_eos=True, temperature=0) for count in counts]
    options = {"device": DEVICE, "dtype": "float32", "impl": impl, "kv_cache_memory": 1 << 26, "max_num_seqs": 4}
    with Generator.from_pretrained(folders[variant], **options) as generator:
        for prompt in texts:
            assert distance(generator.logits(prompt), truth(model, prompt)) < 1e-4, len(prompt)
        alone = generator.generate(texts[0], params[0]).token_ids
        together = [completion.token_ids for completion in generator.generate(texts, params)]
    assert together[0] == alone
    for prompt, tokens, count in zip(texts, together, counts, strict=True):
        check_greedy(model, prompt, tokens, count)
    gc.collect()


@pytest.mark.parametrize("size", [1, 17, 63, 64, 65, 200])
def test_prompts_in_chunks(size: int, folders: dict[str, Path]) -> None:
    """The last logits do not depend on the division of a prompt; a single token follows."""
    (prompt,), starts = prompts(231), [*range(0, 230, size), 230]
    exact = truth(their_model(folders["2-to-1"]), prompt)
    with Generator.from_pretrained(folders["2-to-1"], device=DEVICE, dtype="float32", kv_cache_memory=1 << 24) as generator:
        outs = last_logits(generator.model, prompt, starts)
        assert distance(outs, exact[[*(stop - 1 for stop in starts[1:]), 230]]) < 1e-4


def test_drafts_change_no_token(folders: dict[str, Path]) -> None:
    """Right and wrong drafts, also with too few pages for all: states go on from the last right token, and those of preempted
    sequences are computed again, in other slots."""
    texts = prompts(50, 60, 62, seed=5)
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    options: dict[str, Any] = {"device": DEVICE, "dtype": "float32", "max_num_seqs": 3, "max_model_len": 256}
    with Generator.from_pretrained(folders["2-to-1"], kv_cache_memory=1 << 24, **options) as generator:
        expected = [generator.generate(text, params).token_ids for text in texts]
        page = generator.memory.page
    for memory in (1 << 24, 4 * page):
        proposer = Mixed(most=3, right=0.8)
        proposer.known = {len(text): tokens for text, tokens in zip(texts, expected, strict=True)}
        with Generator.from_pretrained(folders["2-to-1"], kv_cache_memory=memory, speculative=proposer, **options) as generator:
            assert [done.token_ids for done in generator.generate(texts, params)] == expected
            stats = generator._engine.engine.stats
            assert 0 < stats.drafts.num_accepted_tokens < stats.drafts.num_draft_tokens
            assert (stats.num_preemptions > 0) == (memory < 1 << 24)


def official(folder: Path, source: Path) -> dict[str, torch.Tensor]:
    """Write the decoder of `source` as official files are, of two dtypes."""
    tensors = load_file(source / "model.safetensors")
    fp32 = ("A_log", "linear_attn.norm.weight")
    tensors = {name: value if name.endswith(fp32) else value.bfloat16() for name, value in tensors.items()}
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    restate(folder, full_attention_interval=4)
    wrap(folder, tensors, "qwen3_5", "Qwen3_5ForConditionalGeneration", VISION | {"model_type": "qwen3_5"})
    return tensors


@pytest.mark.parametrize("variant", ["2-to-1", "1-to-1-tied"])
def test_official_files(variant: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Names below model.language_model., A_log in fp32 beside bf16, tied or not by the config; what is skipped is said."""
    tensors = official(tmp_path, folders[variant])
    plain = their_model(folders[variant])
    plain.load_state_dict(tensors, strict=False)
    (prompt,) = prompts(70)
    with warned() as said:
        generator = Generator.from_pretrained(tmp_path, device=DEVICE, dtype="float32", kv_cache_memory=1 << 24)
        rounded = Generator.from_pretrained(tmp_path, device=DEVICE, dtype="bfloat16", kv_cache_memory=1 << 24)
    assert sum("1 tensors model.visual.* are not used" in text for text in said) == 2
    with generator, rounded:
        assert generator.plan.notes == ("1 tensors mtp.* are not loaded: --speculate mtp makes drafts with them",)
        assert distance(generator.logits(prompt), truth(plain, prompt)) < 1e-4
        assert generator.config.tie_word_embeddings == (variant == "1-to-1-tied")
        layer = next(layer for layer in rounded.model.layers if isinstance(layer, GatedDeltaNet))
        name = "model.layers.0.linear_attn.A_log"
        assert torch.equal(layer.A_log.weight.cpu(), tensors[name])  # not rounded to the model's dtype


def test_layers_follow_the_config() -> None:
    """`layer_types`, or every so many layers; both give the layers of transformers, in order."""
    listed = TEXT | {"model_type": "qwen3_5_text", "layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"]}
    kinds = {Attention: "full_attention", GatedDeltaNet: "linear_attention"}

    def layers(raw: dict[str, Any]) -> list[str]:
        return [kinds[type(layer)] for layer in build(parse_config(raw)) if type(layer) in kinds]

    assert layers(listed) == listed["layer_types"]
    every = TEXT | {"model_type": "qwen3_5_text", "full_attention_interval": 2}
    assert layers(every) == ["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"]
    assert layers(TEXT | {"model_type": "qwen3_5_text"}) == transformers.Qwen3_5TextConfig(**TEXT).layer_types


@pytest.mark.parametrize(("field", "value", "kind"), [
    ("attn_output_gate", False, UnsupportedError), ("linear_conv_kernel_dim", 3, UnsupportedError),
    ("mamba_ssm_dtype", "bfloat16", UnsupportedError), ("output_gate_type", "sigmoid", UnsupportedError),
    ("hidden_act", "gelu", UnsupportedError), ("linear_num_value_heads", 5, ConfigError),
    ("layer_types", ["full_attention"], ConfigError), ("layer_types", ["mamba"] * 5, UnsupportedError),
    ("linear_key_head_dim", 0, ConfigError), ("full_attention_interval", 0, ConfigError),
], ids=str)  # fmt: skip
def test_other_values_are_refused_by_name(field: str, value: Any, kind: type[Exception]) -> None:
    """Nothing that would change the result is ignored; in text_config, too."""
    with pytest.raises(kind, match=field):
        parse_config(TEXT | {"model_type": "qwen3_5_text", field: value})
    with pytest.raises(kind, match=rf"text_config\.{field}"):
        parse_config({"model_type": "qwen3_5", "text_config": TEXT | {field: value}})


def test_a_quarter_is_rotated_by_default() -> None:
    """As in transformers; stated in either place."""
    base = {name: value for name, value in TEXT.items() if name != "rope_parameters"} | {"model_type": "qwen3_5_text"}
    assert parse_config(base).attention(0).rotary_dim == 8
    assert parse_config(base | {"partial_rotary_factor": 0.5}).attention(0).rotary_dim == 16
    rope = {"rope_type": "default", "partial_rotary_factor": 1.0, "rope_theta": 1e7}
    assert parse_config(base | {"rope_parameters": rope}).attention(0).rotary_dim == 32


@pytest.mark.parametrize(("name", "parameters", "heads"), [
    ("Qwen3.5-0.8B", 0.752e9, 18 * 16), ("Qwen3.5-4B", 4.206e9, 24 * 32), ("Qwen3.5-9B", 8.954e9, 24 * 32),
    ("Qwen3.5-27B", 26.896e9, 48 * 48),
])  # fmt: skip
def test_presets(name: str, parameters: float, heads: int) -> None:
    """Parameters of the decoder as published, and 64 KiB for each value head of a sequence beside the convolutions' inputs."""
    entry = preset(name)
    assert entry is not None
    model = Model(entry.config, build(entry.config))
    assert model.num_parameters == pytest.approx(parameters, rel=1e-3)
    layers = [layer for layer in model.layers if isinstance(layer, GatedDeltaNet)]
    inputs = sum(4 * layer.channels * 4 for layer in layers)  # in fp32, as no dtype is chosen yet
    assert state_bytes(model.cache_specs) == heads * 65536 + inputs


def test_a_model_without_a_prefix_cache_says_so(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches a prefix cache that is left out without a word, and memory that the plan does not count."""
    options: dict[str, Any] = {"device": DEVICE, "kv_cache_memory": 1 << 24, "warm_up": "none", "max_num_seqs": 3}
    with Generator.from_pretrained(folders["2-to-1"], state_cache_memory=0, **options) as generator:
        assert generator.prefix_cache_stats is None
        assert "no prefix cache" in load_summary(generator)
    with Generator.from_pretrained(folders["2-to-1"], **options) as generator:
        assert generator.memory.snapshots == 12
        assert generator.prefix_cache_stats is not None
        assert "prefix cache" not in load_summary(generator)
        assert generator.kv_cache_bytes == generator.memory.pages * generator.memory.page + 15 * generator.memory.state
        state = generator.memory.state
    with pytest.raises(ConfigError, match=r"--state-cache-memory.*or more"):
        Generator.from_pretrained(folders["2-to-1"], state_cache_memory=state - 1, **options)
    with pytest.raises(ConfigError, match="no recurrent layers"):
        Generator.from_pretrained(state_cache_memory=1 << 20, **options)
    run = caller(capfd, monkeypatch)
    arguments = ("plan", "--model", str(folders["2-to-1"]), "--max-num-seqs", 3)
    assert re.search(r"state cache +\S+ +12 snapshots of states", run(*arguments)[1])
    assert "No prefix cache" in run(*arguments, "--state-cache-memory", 0)[1]


def test_the_plan_says_what_states_take(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """By hand for Qwen3.5-0.8B in bf16: 18 layers with 16 matrices of 128 x 128 in fp32, and four rows of 6,144 inputs."""
    run = caller(capfd, monkeypatch)
    matrices, ring = 18 * 16 * 128 * 128 * 4, 18 * 4 * 6144 * 2
    arguments = ("plan", "--model", "Qwen3.5-0.8B", "--gpu", "H100", "--max-model-len", 4096)
    record = json.loads(run(*arguments, "-o", "json")[1])
    assert (record["memory"]["state"], record["memory"]["step_state"]) == (matrices + ring, 2 * matrices + ring)
    text = " ".join(run(*arguments)[1].split())
    assert f"{format_size(matrices + ring)} are states of recurrent layers, whatever the length" in text
    assert f"moves {format_size(2 * matrices + ring)} for each sequence" in text
    assert "are states" not in run("plan", "--model", "Qwen2.5-0.5B", "--gpu", "H100")[1]

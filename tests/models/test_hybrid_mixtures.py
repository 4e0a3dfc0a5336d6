"""Qwen3.5-MoE and Qwen3-Next against transformers, in fp32: logits, greedy tokens, chunks, preemption, files, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import checkpoints, hybrids, quantized, quantized_int4
from support.checkpoints import config as read_config
from support.checkpoints import distance, refused, restate, rewrite, warned
from support.hybrids import CASES, TEXT, check_greedy, last_logits, make, prompts, truth
from support.quantized import LINEARS

from minirt import Generator, SamplingParams
from minirt.errors import UnsupportedError
from minirt.layers import MLP, GatedDeltaNet, MoE
from minirt.models import build, parse_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOE_TEXT = TEXT | {"model_type": "qwen3_5_moe_text"}
NEXT = TEXT | {"model_type": "qwen3_next", "intermediate_size": 56}
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


def load(folder: Path, **options: Any) -> Generator:
    return checkpoints.load(folder, **{"kv_cache_memory": 1 << 24} | options)


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    """Logits of prompts in chunks, and greedy tokens of a ragged batch for which there are too few pages.

    Catches a row of another head or part in the grouped projections, an expert's weight that is not normalized, a shared expert
    without its gate, a dense layer in the place of a mixture, and a state that preemption or the next chunk loses.
    """
    model, texts = make(case, tmp_path), prompts(1, 17, 60, 65, 70)
    exact = truth(model, texts[-1])
    with load(tmp_path) as generator:
        for size in (1, 17, 64, 65):
            starts = [*range(0, 70, size)]
            rows = [stop - 1 for stop in (*starts[1:], 70)]
            assert distance(last_logits(generator.model, texts[-1], starts), exact[rows]) < 1e-4, size
        page = generator.memory.page
    params = [SamplingParams(max_tokens=count, ignore_eos=True, temperature=0) for count in (30, 12, 20, 6, 9)]
    with load(tmp_path, kv_cache_memory=5 * page, max_num_seqs=4, max_model_len=256) as generator:
        answers = [completion.token_ids for completion in generator.generate(texts, params)]
        assert generator._engine.engine.stats.num_preemptions
    for prompt, tokens, asked in zip(texts, answers, params, strict=True):
        check_greedy(model, prompt, tokens, asked.max_tokens)


def wrap(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    restate(folder, mlp_only_layers=[])
    hybrids.wrap(folder, tensors, "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", {"depth": 1})


@pytest.mark.parametrize("case", ["qwen3_5_moe", "qwen3_next"])
def test_experts_in_one_tensor(case: str, tmp_path: Path) -> None:
    """The same weights one by one, fused, and fused as official files of Qwen3.5 are, whose extras are told: the same bits."""
    (tokens,) = prompts(9)
    folders = [tmp_path / name for name in ("single", "fused", "official")]
    for folder, fused in zip(folders, (False, True, True), strict=True):
        make(case, folder, fused)
    if case == "qwen3_5_moe":
        wrap(folders[2], load_file(folders[2] / "model.safetensors"))
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(folders[1] / "model.safetensors")
    results = []
    for folder in folders:
        with warned() as said, load(folder, dtype="float32") as generator:
            results.append(generator.logits(tokens))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    skipped = [text.split(": ")[-2] for text in said]
    assert skipped == (["1 tensors model.visual.* are not used"] if case == "qwen3_5_moe" else [])


def check_rows(folder: Path, tokens: list[int], expected: torch.Tensor) -> Generator:
    """Load a quantized decoder: the logits of single tokens, and no warning but those that it always has inside a wrapper."""
    with warned() as said:
        generator = load(folder, dtype="float32")
    assert all("are not used" in text or text.startswith("on a CPU, quantized weights") for text in said), said
    assert distance(torch.stack([generator.logits([token])[0] for token in tokens]), expected) < 1e-4
    return generator


SIZES = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 3, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
}  # fmt: skip
ENDS = ("qkv", "z", "qkvz", "a", "b", "ba")
NAMES = (*LINEARS, *(f".in_proj_{end}.weight" for end in ENDS), "mlp.gate.weight", "shared_expert_gate.weight")
KEPT = ("lm_head", "in_proj_a", "in_proj_b", "in_proj_ba", "mlp.gate", "shared_expert_gate")  # in 16 bits in every release
PACKERS = {
    "fp8 block": quantized, "compressed-tensors channel": quantized, "packed 128": quantized_int4, "packed 32": quantized_int4,
    "gptq 128": quantized_int4, "awq 128": quantized_int4,
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose heads have 128 channels, so that no block of FP8 has rows of two parts."""
    folders = {}
    for case in ("qwen3_5_moe", "qwen3_next"):
        folders[case] = tmp_path_factory.mktemp("plain")
        make(case, folders[case], **SIZES | ({"mlp_only_layers": [0]} if case == "qwen3_next" else {}))
    return folders


def exact_logits(written: quantized.Written, source: Path, folder: Path, tokens: list[int]) -> torch.Tensor:
    """The logits of a checkpoint in 32 bits with the numbers that quantized weights stand for."""
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file({name: tensor.float() for name, tensor in written.exact.items()}, folder / "model.safetensors", {"format": "pt"})
    with load(folder, dtype="float32") as generator:
        return torch.stack([generator.logits([token])[0] for token in tokens])  # single ones: activations are not rounded


@pytest.mark.parametrize(("case", "style"), [
    ("qwen3_5_moe", "fp8 block"), ("qwen3_5_moe", "compressed-tensors channel"), ("qwen3_5_moe", "packed 128"),
    ("qwen3_next", "fp8 block"), ("qwen3_next", "packed 32"), ("qwen3_next", "gptq 128"), ("qwen3_next", "awq 128"),
])  # fmt: skip
def test_quantized_files(case: str, style: str, plain: dict[str, Path], tmp_path: Path) -> None:
    """Files of an independent packer give the logits of the numbers that they stand for; those of Qwen3.5 as they are published.

    Catches scales or zero points of other rows of a grouped projection, of another expert, and lists that name the modules as
    they are inside the model with a vision encoder and that are not understood: there would be a warning.
    """
    written = PACKERS[style].write(plain[case], tmp_path / "q", style, skip=KEPT, linears=NAMES)
    tokens = [5, 99, 170]
    expected = exact_logits(written, plain[case], tmp_path / "exact", tokens)
    if case == "qwen3_5_moe":
        wrap(written.folder, written.tensors)
        config = (written.folder / "config.json").read_text()
        (written.folder / "config.json").write_text(config.replace('"model.layers.', '"model.language_model.layers.'))
    with check_rows(written.folder, tokens, expected) as generator:
        formats = {row.layer: row.formats for row in generator.plan.rows}
        assert all(formats[name] for name in ("layers.0.gated_delta_net", "layers.1.attention", "layers.1.moe"))


def test_gptq_as_qwen_publishes_it(plain: dict[str, Path], tmp_path: Path) -> None:
    """4-bit routed experts beside 16-bit attention and shared experts; entries of `dynamic` without settings change nothing."""
    skip = (*KEPT, *(f"{part}_proj" for part in "qkvo"), "in_proj_qkv", "in_proj_z", "out_proj")
    skip += tuple(f"shared_expert.{part}_proj" for part in ("gate", "up", "down"))
    written = quantized_int4.write(plain["qwen3_5_moe"], tmp_path / "q", "gptq 128", skip=skip, linears=NAMES)
    expected = exact_logits(written, plain["qwen3_5_moe"], tmp_path / "exact", [5, 99])
    wrap(written.folder, written.tensors)
    stated = read_config(written.folder)["quantization_config"]
    stated["dynamic"] = {"lm_head": {}, "model.language_model.embed_tokens": {}}
    stated["dynamic"] |= {f"-:.*{part}.*": {} for part in ("attn", "shared_expert", "mtp", "visual")}
    restate(written.folder, quantization_config=stated)
    with check_rows(written.folder, [5, 99], expected):
        pass
    stated["dynamic"]["lm_head"] = {"bits": 8}
    restate(written.folder, quantization_config=stated)
    refused(written.folder, r"dynamic: settings of single modules are not supported; found 'lm_head'", UnsupportedError)


@pytest.mark.parametrize("style", ["fp8 block", "gptq 128"])
@pytest.mark.parametrize("name", ["in_proj_ba", "mlp.gate"])
def test_a_quantized_weight_that_has_16_bits_elsewhere(name: str, style: str, plain: dict[str, Path], tmp_path: Path) -> None:
    """Catches a weight without a quantized form that is read as plain numbers, or called missing."""
    kept = tuple(module for module in KEPT if module != name)
    written = PACKERS[style].write(plain["qwen3_next"], tmp_path, style, skip=kept, linears=NAMES)
    last = "weight" if style == "fp8 block" else "qweight"
    refused(written.folder, rf"{name}\.{last}: this weight cannot be quantized", UnsupportedError)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_5_moe", {"num_experts": 8}, r"are missing; .*experts\.7\."),
    ("qwen3_next", {"num_experts": 6}, r"mlp\.gate\.weight: wrong shape; expected \[6, 64\]; found \[7, 64\]"),
    ("qwen3_next", {"shared_expert_intermediate_size": 48}, r"shared_expert\.\w+\.weight: wrong shape"),
    ("qwen3_next", {"mlp_only_layers": []}, r"layers\.1\.mlp\."),
    ("qwen3_next", {"linear_num_key_heads": 4}, r"linear_attn\.\w+.*wrong shape"),
]


@pytest.mark.parametrize(("case", "fields", "message"), WRONG, ids=str)
def test_files_of_another_shape(case: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Catches weights of a model with other experts, or other layers, that load."""
    make(case, tmp_path)
    restate(tmp_path, **fields)
    refused(tmp_path, message)


def test_damaged_files(tmp_path: Path) -> None:
    """Catches a shared expert that is left out without a word, and fused experts of another number."""
    make("qwen3_5_moe", tmp_path, fused=True)
    rewrite(tmp_path, lambda tensors: tensors.update({GATE_UP: tensors[GATE_UP][:-1]}))
    refused(tmp_path, rf"{GATE_UP}: wrong shape; expected \[7, 48, 64\]; found \[6, 48, 64\]")
    make("qwen3_5_moe", tmp_path)
    rewrite(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".1.mlp.shared_expert" in name])
    refused(tmp_path, r"4 of \d+ tensors are missing; .*layers\.1\.mlp\.shared_expert")


def test_layers_follow_the_config() -> None:
    """Catches a mixture in every layer of a model that names dense ones."""
    kinds = [type(layer) for layer in build(parse_config(NEXT | {"mlp_only_layers": [0], "num_hidden_layers": 4}))]
    assert [kind for kind in kinds if kind in (MLP, MoE)] == [MLP, MoE, MoE, MoE]
    assert [kind for kind in kinds if kind is GatedDeltaNet] == [GatedDeltaNet] * 2
    assert parse_config(MOE_TEXT).moe == parse_config(NEXT).moe

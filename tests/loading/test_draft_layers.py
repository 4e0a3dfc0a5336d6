"""Loading the layers of a draft model: `mtp.*` of Qwen3.5.

Catches weights that are loaded or counted though nobody asked for drafts, weights that are held twice, another rule of formats
than the target's, rows of the head that belong to other ids, and a checkpoint or a config that cannot be used but is not refused.
"""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import checkpoints
from support.checkpoints import no_warning, restate, rewrite, warned
from support.mtp import make
from support.tiny import add_tokenizer

from minirt import Generator, LoadOptions
from minirt.errors import CheckpointError, ConfigError, UnsupportedError
from minirt.layers import Head, Tap
from minirt.loading.load import plan_load, plan_model
from minirt.modeling.config import MTPConfig
from minirt.models import build, build_with_drafts, preset
from minirt.speculative.draft_vocabulary import draft_ids
from minirt.speculative.options import SpeculativeOptions
from minirt.step.kv_cache import page_bytes
from minirt.text.tokenizer import Tokenizer

OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_memory": 1 << 24, "max_num_seqs": 2, "max_model_len": 256}
NOT_LOADED = "15 tensors mtp.* are not loaded: --speculate mtp makes drafts with them"
MTP = SpeculativeOptions(method="mtp", draft_vocab_size=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 211 ids. Its products are large enough for FP8 and 4 bits."""
    made = tmp_path_factory.mktemp("model")
    make(made, hidden_size=128, intermediate_size=256)
    return made


def load(folder: Path, **options: Any) -> Generator:
    return checkpoints.load(folder, **{**OPTIONS, "speculative": MTP, **options})


refused = partial(checkpoints.refused, by=load)


def test_nothing_is_kept_without_drafts(folder: Path) -> None:
    """Neither weights, nor pages, nor hidden states; a note of the plan says what would use them."""
    with no_warning():
        plain, drafting = load(folder, speculative=None), load(folder)
        planned = plan_model(LoadOptions(model=folder, device="cpu"))
    with plain, drafting:
        assert plain.plan.notes == planned.plan.notes == (NOT_LOADED,)
        assert drafting.plan.notes == ()
        assert plain.model.draft_model is None
        assert not any(isinstance(layer, Tap) for layer in plain.model.layers)
        assert plain._engine.engine._runner._taps is None
        assert len(plain.unused_tensors) == 15
        assert drafting.unused_tensors == ()
        tensors = load_file(folder / "model.safetensors")
        added = sum(value.numel() for name, value in tensors.items() if name.startswith("mtp.")) + 100 * 128
        assert drafting.plan.num_parameters == plain.plan.num_parameters + added
        assert drafting.memory.weights == plain.memory.weights + 4 * added
        assert drafting.memory.page == plain.memory.page * 2, "one layer of attention beside one"
        assert drafting.decode_read_bytes == plain.decode_read_bytes
        taps = drafting._engine.engine._runner._taps
        assert taps is not None
        assert taps.shape == (256, 128)


def test_weights_are_the_target_s_or_the_checkpoint_s(folder: Path) -> None:
    """Embedding and norms are shared; the head has the rows of its ids."""
    tensors = load_file(folder / "model.safetensors")
    for size in (100, 211, 0):
        with load(folder, speculative=SpeculativeOptions(method="mtp", draft_vocab_size=size)) as generator:
            model, draft = generator.model, generator.model.draft_model
            assert draft is not None
            assert [layer.kind for layer in draft.layers] == ["draft_input", "attention", "select", "mlp", "tap", "head"]
            assert [layer.kind for layer in model.layers[-3:]] == ["tap", "select", "head"]
            assert draft.layers[0].table is model.layers[0].table
            assert model.layers[-3].norm is model.layers[-1].norm
            head = draft.layers[-1].lm_head
            assert (head is model.layers[-1].lm_head) == (size != 100)
            wanted = tensors["lm_head.weight"]
            assert torch.equal(head.weight, wanted[head.ids] if size == 100 else wanted)
            assert torch.equal(draft.layers[0].fc.weight, tensors["mtp.fc.weight"])
            assert torch.equal(draft.layers[-2].norm.weight, tensors["mtp.norm.weight"] + 1)


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
@pytest.mark.parametrize("head", [None, True, False])
def test_formats_follow_the_target(quantization: str, head: bool | None, folder: Path) -> None:
    """The products of the block are quantized, `fc` is not, and the head is if the target's is: its rows are the target's."""
    with load(folder, quantization=quantization, quantize_head=head, dtype="bfloat16") as generator:
        draft = generator.model.draft_model
        assert draft is not None
        first, attention, _, mlp, _, last = draft.layers
        target = generator.model.layers[-1].lm_head
        assert first.fc.format is None
        assert first.fc.weight.dtype == torch.bfloat16
        for weights in (attention.qkv, attention.o, mlp.gate_up, mlp.down):
            assert weights.format is not None
            assert weights.format.name == quantization
        assert last.lm_head.format == target.format
        ids = last.lm_head.ids
        assert torch.equal(last.lm_head.weight.view(torch.uint8), target.weight[ids].view(torch.uint8))
        if target.format is not None:
            scale = target.scale[ids] if quantization == "fp8" else target.scale[:, ids]
            assert torch.equal(last.lm_head.scale, scale)
        assert generator.generate([5, 6, 7]).token_ids
        rows = {row.layer: row for row in generator.plan.rows}
        assert rows["mtp.attention"].formats == (quantization,)


@pytest.mark.parametrize(("stored", "formats"), [
    ("target and draft", ("fp8", "fp8")), ("target alone", ("fp8", None)), ("head, too", ("fp8", "fp8")),
])  # fmt: skip
def test_stored_formats_are_found_by_their_tensors(
    stored: str, formats: tuple[str, str | None], folder: Path, tmp_path: Path
) -> None:
    """A checkpoint with FP8 weights: `mtp.fc` is not; the draft model's products and the head are, or are not.

    Catches rows of a quantized head without their scales.
    """
    tensors, quantized = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        linear = module.endswith(("_proj", "in_proj_qkv", "in_proj_z")) or (stored == "head, too" and module == "lm_head")
        if linear and (stored != "target alone" or not name.startswith("mtp.")):
            scale = value.abs().amax(1, keepdim=True) / 448
            quantized[name], quantized[f"{module}.weight_scale"] = (value / scale).to(torch.float8_e4m3fn), scale
        else:
            quantized[name] = value.bfloat16()
    save_file(quantized, tmp_path / "model.safetensors", {"format": "pt"})
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}
    ignored = ["lm_head"] * (stored != "head, too") + ["re:.*in_proj_[ab]$", "mtp.fc"]
    shutil.copy(folder / "config.json", tmp_path)
    restate(tmp_path, quantization_config={
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}, "ignore": ignored,
    })  # fmt: skip
    with warned():
        generator = load(tmp_path, dtype="bfloat16")
    with generator:
        draft = generator.model.draft_model
        assert draft is not None
        products = [layer.o.format for layer in (generator.model.layers[3], draft.layers[1])]
        assert tuple(format and format.name for format in products) == formats
        assert draft.layers[0].fc.format is None
        whole = draft.layers[-1].lm_head is generator.model.layers[-1].lm_head
        assert whole == (stored == "head, too") == any("drafts may have all ids" in note for note in generator.plan.notes)
        assert generator.generate([5, 6, 7]).token_ids


def test_a_preset_counts_them_only_when_asked() -> None:
    """27B: the 15 tensors of `mtp.*` as the format's description gives their shapes, and 32,768 rows of the head."""
    h, i = 5120, 17408
    attention, mlp = h * (2 * 24 * 256 + 2 * 4 * 256) + 24 * 256 * h + 2 * 256, 3 * h * i
    plain = plan_model(LoadOptions(model="Qwen3.5-27B", device="cpu"))
    drafting = plan_model(LoadOptions(model="Qwen3.5-27B", device="cpu", speculative=SpeculativeOptions(method="mtp")))
    assert drafting.num_parameters - plain.num_parameters == 2 * h * h + attention + mlp + 5 * h + 32768 * h
    assert page_bytes(drafting.cache_specs, torch.bfloat16) == page_bytes(plain.cache_specs, torch.bfloat16) * 17 // 16
    assert "mtp.head" in str(drafting.plan)
    assert "mtp" not in str(plain.plan)
    tied = plan_load(LoadOptions(model="Qwen3.5-0.8B", device="cpu", speculative=SpeculativeOptions(method="mtp")))
    assert tied[0].draft_model is not None


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"mtp_num_hidden_layers": 2}, UnsupportedError, "mtp_num_hidden_layers: this number of layers .*expected 1; found 2"),
    ({"mtp_num_hidden_layers": 0}, UnsupportedError, "mtp_num_hidden_layers: .*found 0"),
    ({"mtp_use_dedicated_embeddings": True}, UnsupportedError, "mtp_use_dedicated_embeddings: .*of its own"),
    ({"mtp_num_hidden_layers": "1"}, ConfigError, "mtp_num_hidden_layers"),
    ({"mtp_intermediate_size": 0}, ConfigError, "mtp_intermediate_size"),
    ({"mtp_intermediate_size": 255}, CheckpointError, r"mtp\.layers\.0\.mlp.*\[255, 128\].*\[256, 128\]"),
], ids=str)  # fmt: skip
def test_configs_that_cannot_be_used(changes: dict[str, Any], error: Any, message: str, folder: Path, tmp_path: Path) -> None:
    """Catches drafts of another model than the file's, and a refusal where nobody asks for drafts."""
    copied = shutil.copytree(folder, tmp_path / "model")
    restate(copied, **changes)
    refused(copied, message, error)
    if error is UnsupportedError:
        with warned() as said:
            load(copied, speculative=None).close()
        words = "15 tensors mtp.* are not used: the model has no layers of multi-token prediction"
        assert sum(words in text for text in said) == (changes.get("mtp_num_hidden_layers") == 0)


def test_checkpoints_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    """One tensor more, one missing, one of another shape, and none of them."""
    extra, fc, norm = "mtp.layers.1.input_layernorm.weight", "mtp.fc.weight", "mtp.norm.weight"
    for change, words in (
        (lambda t: t.update({extra: torch.ones(128)}), r"1 unexpected tensors.*mtp\.layers\.1"),
        (lambda t: t.pop(norm), r"1 of \d+ tensors are missing.*mtp\.norm\.weight"),
        (lambda t: t.update({fc: torch.ones(128, 128)}), r"mtp\.fc\.weight.*\[128, 256\].*\[128, 128\]"),
    ):
        copied = shutil.copytree(folder, tmp_path / "model", dirs_exist_ok=True)
        rewrite(copied, change)
        refused(copied, words)
    rewrite(copied, lambda t: [t.pop(name) for name in list(t) if name.startswith("mtp.")])
    refused(copied, r"has no weights of the draft model; expected mtp\..*ngram", UnsupportedError)


def test_models_that_cannot_draft(folder: Path) -> None:
    """Another architecture, a composed model, and a model that was built without."""
    with pytest.raises(UnsupportedError, match=r"model_type llama: .*no multi-token prediction; expected qwen2, qwen3_5.*ngram"):
        plan_model(LoadOptions(model="Llama-3.1-8B", device="cpu", speculative=MTP))
    with pytest.raises(UnsupportedError, match=r"mtp_num_hidden_layers: the model has no multi-token prediction; .*ngram"):
        plan_model(LoadOptions(model="Qwen2.5-7B", device="cpu", speculative=MTP))
    with pytest.raises(UnsupportedError, match=r"mtp_intermediate_size: .*mixtures of experts; .*found 64"):
        build_with_drafts(replace(preset("Qwen3.5-35B-A3B").config, mtp=MTPConfig(1, intermediate_size=64)))
    refused(folder, "a composed model has no draft model", UnsupportedError, layers=build)
    with load(folder, speculative=None) as generator, pytest.raises(UnsupportedError, match="built without a draft model"):
        Generator(generator.model, speculative=MTP, kv_cache_memory=1 << 24, max_num_seqs=2)


def test_random_weights(folder: Path) -> None:
    """Without a tokenizer, drafts are among the first ids."""
    with load(folder, random_weights=True, dtype="bfloat16") as generator:
        draft = generator.model.draft_model
        assert draft is not None
        head = next(layer for layer in draft.layers if isinstance(layer, Head))
        assert head.lm_head.ids.tolist() == list(range(100))
        assert head.lm_head.weight.isfinite().all()
        assert generator.generate([5, 6, 7, 8]).token_ids


def test_ids_of_drafts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Special tokens, then the most frequent ids of a text, then the lowest ids; in ascending order."""
    monkeypatch.setenv("MINIRT_CACHE", str(tmp_path / "cache"))
    assert draft_ids(None, 5, 211).tolist() == [0, 1, 2, 3, 4]
    add_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    special = sorted(tokenizer.added_ids)
    assert special
    vocab, others = tokenizer.vocab_size, [token for token in range(tokenizer.vocab_size) if token not in special]
    count = len(special) + 3
    assert draft_ids(tokenizer, count, vocab).tolist() == sorted([*special, *others[:3]])
    text = tmp_path / "text.txt"
    text.write_text("zzzz yyyy\nzz y\n")
    frequent = tokenizer.encode_plain("z")[-1:] + tokenizer.encode_plain("y")[-1:]
    assert draft_ids(tokenizer, len(special) + 2, vocab, str(text)).tolist() == sorted([*special, *frequent])
    assert draft_ids(tokenizer, vocab, vocab, str(text)).tolist() == list(range(vocab))
    with pytest.raises(ConfigError, match="no-such-file"):
        draft_ids(tokenizer, 5, vocab, str(tmp_path / "no-such-file"))
    with pytest.raises(ConfigError, match="draft_vocab_text: a text needs a tokenizer"):
        draft_ids(None, 5, vocab, str(text))


def test_counts_of_a_text_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a text that is read again at each load, counts of another text, and a damaged file that is believed."""
    cache, text = tmp_path / "cache", tmp_path / "text.txt"
    monkeypatch.setenv("MINIRT_CACHE", str(cache))
    add_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    encoded: list[str] = []
    encode = Tokenizer.encode_plain
    monkeypatch.setattr(Tokenizer, "encode_plain", lambda self, line: encoded.append(line) or encode(self, line))
    count, vocab = len(tokenizer.added_ids) + 1, tokenizer.vocab_size
    text.write_text("zzz y")
    first = draft_ids(tokenizer, count, vocab, str(text)).tolist()
    assert draft_ids(tokenizer, count, vocab, str(text)).tolist() == first
    assert encoded == ["zzz y"]
    text.write_text("z yyy")
    assert draft_ids(tokenizer, count, vocab, str(text)).tolist() != first
    (file, _) = sorted(cache.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    assert len(encoded) == 2
    for damaged in (b"", b"not an array", file.read_bytes()[:-8]):
        file.write_bytes(damaged)
        text.write_text("zzz y")
        assert draft_ids(tokenizer, count, vocab, str(text)).tolist() == first
    assert len(encoded) == 5
    monkeypatch.setenv("MINIRT_CACHE", str(text / "no folder"))
    with pytest.warns(UserWarning, match="cannot be written, so each load reads"):
        assert draft_ids(tokenizer, count, vocab, str(text)).tolist() == first


def test_mixtures_may_be_fused(tmp_path: Path) -> None:
    """`mtp.layers.0.mlp.experts.gate_up_proj`, as in bf16 files. Catches experts that are looked for one by one."""
    make(tmp_path, "qwen3_5_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    expected = {name: value for name, value in tensors.items() if name.startswith("mtp.")}
    prefix = "mtp.layers.0.mlp.experts."
    pairs = [[tensors.pop(f"{prefix}{e}.{part}_proj.weight") for part in ("gate", "up")] for e in range(7)]
    tensors[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    tensors[f"{prefix}down_proj"] = torch.stack([tensors.pop(f"{prefix}{e}.down_proj.weight") for e in range(7)])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with load(tmp_path, dtype="float32") as generator:
        draft = generator.model.draft_model
        assert draft is not None
        experts = draft.layers[3].gate_up.stacked[0]
        assert torch.equal(experts[5, :24], expected[f"{prefix}5.gate_proj.weight"])

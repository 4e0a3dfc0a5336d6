"""Models in shares: the ranks are threads here, each with its share, and exchange through gloo as processes do.

The reference is the same model in one piece, which other tests compare with transformers.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory

import pytest
import torch
from support import experts, hybrids, model_cases, mtp, quantized, quantized_int4

from minirt import Generator, LoadOptions, SamplingParams
from minirt.errors import UnsupportedError
from minirt.kernels import reference
from minirt.layers import base
from minirt.loading import checkpoint
from minirt.loading.load import load, plan_load, plan_model
from minirt.modeling.parameters import Shard
from minirt.parallel.ranks import Ranks

PROMPTS = [[3, 5, 7, 9, 11, 200] * 7, [4, 8], [100, 20, 30, 41, 52, 63]]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
EVEN = {"intermediate_size": 96}


def computed(folder, options, prompts, this=None):
    """Tokens and logits of one rank, which has the whole engine here, and its share's bytes."""
    settings = LoadOptions(
        model=folder, device="cpu", max_model_len=128, kv_cache_memory=1 << 24,
        tensor_parallel=1 if this is None else this.shard.ranks, **options,
    )  # fmt: skip
    with Generator._of_rank(settings, this) as generator:
        tokens = [completion.token_ids for completion in generator.generate(prompts, GREEDY)]
        return tokens, generator.logits(prompts[0]), generator.plan.weight_bytes


def check(folder, count, prompts=PROMPTS, **options):
    """All ranks give the tokens of one, and the logits up to rounding, the same bits on each rank."""
    whole, expected, nbytes = computed(folder, options, prompts)
    with TemporaryDirectory() as meeting, ThreadPoolExecutor(count) as pool:
        signs = torch.zeros(2, count, dtype=torch.int32)

        def rank(number):
            return computed(folder, options, prompts, Ranks(Shard(number, count), torch.device("cpu"), meeting, signs))

        ranks = list(pool.map(rank, range(count)))
    for tokens, logits, share in ranks:
        assert tokens == whole
        assert torch.equal(logits, ranks[0][1])
        assert (logits - expected).abs().max() < 1e-4
        assert share < nbytes


ARCHITECTURES = [
    ("smollm3, listed", 4, EVEN), ("ministral3", 2, EVEN), ("phi3", 2, EVEN), ("seed_oss", 4, EVEN), ("granite, tied", 2, EVEN),
    ("exaone4", 2, EVEN), ("gpt_oss", 2, {}), ("gpt_oss, listed", 4, {}), ("qwen3_5_moe", 2, {}), ("qwen3_next", 2, {}),
    ("qwen3_5_moe, 3 to 1", 2, {}), ("hunyuan", 2, EVEN), ("qwen2_moe with windows", 2, EVEN),
]  # fmt: skip


@pytest.mark.parametrize(("case", "count", "changes"), ARCHITECTURES, ids=[f"{case[0]}, {case[1]}" for case in ARCHITECTURES])
def test_architectures(case, count, changes, tmp_path):
    """Catches a head, neuron, expert row, bias, sink or id at another rank's place, a bias that every rank adds, a norm before
    the sum, KV heads that do not follow their queries, and ranks whose bits differ. (212 ids can be divided, 211 cannot.)"""
    changes = changes | ({"vocab_size": 212} if count == 4 else {})
    (hybrids if case in hybrids.CASES else model_cases).make(case, tmp_path, **changes)
    check(tmp_path, count)


@pytest.mark.parametrize("case", ["muse_glimmer", "gemma4 with experts"])
def test_models_with_a_vision_encoder(case, tmp_path):
    """Catches a gate at other heads, and norms after a part of the sum in layers of an MLP beside experts."""
    model_cases.make(case, tmp_path, text_config=model_cases.CASES[case][2]["text_config"] | EVEN)
    check(tmp_path, 2)


def test_fused_experts(tmp_path):
    """Catches rows of `gate_up_proj` taken for those of one half."""
    hybrids.make("qwen3_5_moe", tmp_path, fused=True)
    check(tmp_path, 2)


SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "vocab_size": 212,
}  # fmt: skip


@pytest.fixture(scope="module")
def large(hf_folder):
    """A model whose shares have whole blocks and groups."""
    return hf_folder("Llama", **SIZES)


@pytest.mark.parametrize("style", ["fp8 block", "modelopt block", "compressed-tensors channel", "modelopt"])
def test_fp8_checkpoints(style, large, tmp_path):
    """Catches scales of other rows or blocks than those of the share. The activations of a single
    token are not rounded, as those of several are, with a scale of each share."""
    quantized.write(large, tmp_path / "q", style)
    check(tmp_path / "q", 2, [[5]])


@pytest.mark.parametrize("style", [*quantized_int4.STYLES][:6])
def test_int4_checkpoints(style, large, tmp_path):
    """Catches words, scales and zero points of other rows or groups, in each layout."""
    quantized_int4.write(large, tmp_path / "q", style)
    check(tmp_path / "q", 2)


@pytest.mark.parametrize("format", ["fp8", "int4", "mxfp4"])
def test_quantization_while_loading(format, large):
    """Catches a share that is quantized by itself: the scale of a row of FP8 is that of all its columns."""
    check(large, 2, [[5]] if format == "fp8" else PROMPTS, quantization=format)


def test_drafts(tmp_path):
    """Catches a draft model whose share is the whole, or that proposes from a part of the logits."""
    mtp.make(tmp_path, intermediate_size=96)
    check(tmp_path, 2, speculative={"method": "mtp", "num_speculative_tokens": 2, "adaptive": False})


def test_an_implementation_of_users_that_adds_nothing_is_refused(tmp_path, monkeypatch):
    """Catches the product of one rank taken for that of all: no output shows it."""
    monkeypatch.setattr(base, "_REGISTRY", {**base._REGISTRY})

    @base.register("mlp", "mine")
    def mine(layer):
        return lambda x, batch, kv: x + reference.linear(x, layer.gate_up.weight).chunk(2, -1)[0] @ layer.down.weight.T

    model_cases.make("smollm3", tmp_path, **EVEN)
    with pytest.raises(UnsupportedError, match="'mine' does not add the products of all ranks"):
        check(tmp_path, 2, impl=["auto", "layers.1.mlp=mine"])


@pytest.mark.parametrize(("case", "count", "changes", "words"), [
    ("smollm3", 3, {}, "4 attention heads cannot be divided evenly among 3 ranks"),
    ("smollm3", 2, {}, "97 neurons cannot be divided evenly"),
    ("olmo3", 2, EVEN, "a QK-norm over all heads cannot be divided"),
    ("qwen3_5_moe", 4, {}, "2 key heads of gated DeltaNet cannot be divided evenly"),
])  # fmt: skip
def test_uneven_shares_are_refused(case, count, changes, words, tmp_path):
    """Catches shares that leave heads or neurons out."""
    (hybrids if case in hybrids.CASES else model_cases).make(case, tmp_path, **changes)
    with pytest.raises(UnsupportedError, match=words):
        plan_model(LoadOptions(model=tmp_path, device="cpu", tensor_parallel=count))


# Kind of a file → tensors that a rank reads whole though it has a share: rows that are quantized while loading, one group of zero
# points, rows of several linears in one tensor, KV heads of which there is one, and what is small.
LINEAR_ATTENTION = "in_proj_qkv|conv1d|A_log|q_proj"
OTHERS = ["fp8 block", *[*quantized_int4.STYLES][:6], "gpt_oss", "gpt_oss in MXFP4"]
FILES = dict.fromkeys(["plain", "plain, int4", "plain, mxfp4", *OTHERS], "qzeros|sinks") | {
    "plain, fp8": "o_proj|down_proj", "qwen3_5_moe": LINEAR_ATTENTION, "fused": LINEAR_ATTENTION,
    "fused, fp8": f"{LINEAR_ATTENTION}|down_proj|o_proj|out_proj", "gemma4 with experts": "k_proj",
}  # fmt: skip


def read_whole(model, entries, names):
    """Bytes of the tensors that each rank reads whole: also norms and the like, biases, and scales, which are checked."""
    specs = {spec.name: (spec, parameter.sharded) for parameter in model.parameters() for spec in parameter.expected()}
    return sum(
        entries[name].nbytes for name, (spec, sharded) in specs.items()
        if not sharded or spec.scale or spec.values or re.search(rf"({names}|bias|g_idx|shape)(\.weight)?$", name)
    )  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_a_rank_reads_its_part_of_the_file(kind, large, tmp_path, monkeypatch):
    """Catches a share that needs bytes of others, which are NaN here, and ranks that read what they do not need."""
    stored, _, quantization = kind.partition(", ")
    folder, options = write(stored, large, tmp_path), {"quantization": quantization or None}
    read, buffers, filled = checkpoint._read, checkpoint.PinnedBuffers(1 << 22, None), []

    def of_garbage(group, place, _):
        buffers.of_thread()[:] = b"\xff" * (1 << 22)
        filled.append(read(group, place, buffers))
        return filled[-1]

    def share(rank):
        settings = LoadOptions(model=folder, device="cpu", tensor_parallel=2, **options)
        return load(settings, None, _Alone(Shard(rank, 2), "")).model

    expected = [share(rank) for rank in range(2)]
    monkeypatch.setattr(checkpoint, "GAP_BYTES", 1)
    monkeypatch.setattr(checkpoint, "_read", of_garbage)
    for model, wanted in zip([share(rank) for rank in range(2)], expected, strict=True):
        for one, other in zip(model.parameters(), wanted.parameters(), strict=True):
            for name in "weight", "scale", "bias":
                first, second = (getattr(parameter, name, None) for parameter in (one, other))
                assert first is second is None or torch.equal(bits(first), bits(second)), (next(one.expected()), name)
    entries = checkpoint.read_headers(sorted(folder.glob("*.safetensors")))
    assert sum(filled) <= sum(entry.nbytes for entry in entries.values()) + read_whole(model, entries, FILES[kind])


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def write(kind, large, folder):
    """A checkpoint of this kind."""
    if kind == "plain":
        return large
    if kind == "fp8 block":
        quantized.write(large, folder / "q", kind)
        return folder / "q"
    if kind in quantized_int4.STYLES:
        quantized_int4.write(large, folder / "q", kind)
        return folder / "q"
    if kind in ("fused", "qwen3_5_moe"):
        hybrids.make("qwen3_5_moe", folder, fused=kind == "fused")
    elif kind == "gemma4 with experts":
        model_cases.make(kind, folder, text_config=model_cases.CASES[kind][2]["text_config"] | EVEN)
    else:
        model_cases.make("gpt_oss", folder, hidden_size=96, intermediate_size=128)
        if kind == "gpt_oss in MXFP4":
            experts.in_mxfp4(folder, folder / "q", range(-8, -4))
            return folder / "q"
    return folder


def test_a_cut_within_a_group_is_refused(large, tmp_path):
    """Catches scales of blocks of 128 columns for a share of 64."""
    quantized.write(large, tmp_path / "q", "fp8 block")
    with pytest.raises(UnsupportedError, match="not whole groups"), TemporaryDirectory() as meeting:
        Generator._of_rank(LoadOptions(model=tmp_path / "q", device="cpu", tensor_parallel=8), _Alone(Shard(0, 8), meeting))


class _Alone(Ranks):
    """A rank without others, as far as loading goes."""

    def __init__(self, shard, folder):
        self.shard, self.device, self.reduction = shard, torch.device("cpu"), None

    def prepare(self, model):
        pass


def test_the_plan_needs_no_gpus(large):
    """Catches a plan of a share that counts whole weights or KV heads, or shows the count as that of the model."""
    (whole, one), (model, two) = (plan_load(LoadOptions(model=large, device="cpu", tensor_parallel=n)) for n in (1, 2))
    assert two.page * 2 == one.page
    assert one.weights / 2 < two.weights < 0.6 * one.weights
    assert model.plan.weight_bytes == two.weights
    assert "parameters in the share of a rank · cpu" in model.plan.title
    assert "parameters · cpu" in whole.plan.title


def test_random_weights(large):
    """Catches ranks with the same random shares, whose sums would be too large, or with different norms and embeddings."""
    models = []
    for rank in range(2):
        options = LoadOptions(model=large, device="cpu", tensor_parallel=2, random_weights=True)
        models.append(load(options, None, _Alone(Shard(rank, 2), "")).model)
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(first.weight, second.weight) != first.sharded, next(first.expected())

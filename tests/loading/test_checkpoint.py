"""Strict loading: every damage to a checkpoint is an error that names tensor, file, expected value and found value."""

import errno
import io
import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import TOKENS, distance, load, logits, no_warning, one_warning, plan, refused, restate, rewrite
from support.checkpoints import transformers_logits as logits_of_transformers
from support.weights import loads_alike

from minirt.errors import CheckpointError, DeviceError, OutOfMemoryError
from minirt.loading import checkpoint
from minirt.loading.checkpoint import PinnedBuffers, read_headers
from minirt.models import build

DOWN = "model.layers.1.mlp.down_proj.weight"
K_BIAS = "model.layers.0.self_attn.k_proj.bias"
EXPERT = "model.layers.1.mlp.experts.4.up_proj.weight"
FAULTS = {
    "missing": (lambda t: t.pop(DOWN), f"1 of .* missing.*{DOWN}"), "half packed": (lambda t: t.pop(K_BIAS), K_BIAS),
    "unexpected": (lambda t: t.update(extra=torch.zeros(3)), "unexpected.*extra"),
    "misshapen": (
        lambda t: t.update({DOWN: t[DOWN].T.contiguous()}), rf"{DOWN}: wrong shape; expected \[64, 97\]; found \[97, 64\]",
    ),
    "a dim too many": (lambda t: t.update({K_BIAS: t[K_BIAS][None]}), "wrong shape"),
    "an integer": (lambda t: t.update({DOWN: t[DOWN].to(torch.int8)}), f"{DOWN}: wrong dtype.*F32.*I8"),
    "a double": (lambda t: t.update({DOWN: t[DOWN].double()}), "wrong dtype.*F64"),
    "an expert missing": (lambda t: t.pop(EXPERT), f"1 of .* missing.*{EXPERT}"),
    "an expert too many": (lambda t: t.update({EXPERT.replace("4", "5"): t[EXPERT].clone()}), r"1 unexpected.*experts\.5\.up"),
    "a misshapen expert": (
        lambda t: t.update({EXPERT: t[EXPERT][:-1].clone()}), rf"{EXPERT}: wrong shape; expected \[24, 64\]; found \[23, 64\]"
    ),
    "fused experts": (
        lambda t: t.update({EXPERT.replace("4.up_proj.weight", "gate_up"): torch.zeros(9)}), "unexpected.*experts.gate_up",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_tensors(fault, hf_folder):
    """Catches a tensor that is ignored, invented, reshaped or cast without a word."""
    change, message = FAULTS[fault]
    sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
    folder = hf_folder("Qwen3Moe", **sizes) if "expert" in fault else hf_folder("Qwen2")
    rewrite(folder, change)
    refused(folder, message)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_check_weights(value, hf_folder):
    folder = hf_folder("Qwen2")
    rewrite(folder, lambda t: t[DOWN].view(-1)[77:79].fill_(value))
    refused(folder, f"{DOWN}: 2 NaN or Inf", check_weights=True)
    load(folder).close()


def _header(data, write):
    """Another header in front of the same data; `write` makes its text from what it describes."""
    size = int.from_bytes(data[:8], "little")
    text = write(json.loads(data[8 : 8 + size])).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def _described(header, **changes):
    return json.dumps(header | {DOWN: header[DOWN] | changes})


def _twice(header):
    """One tensor is described with two shapes."""
    return json.dumps({DOWN: header[DOWN] | {"shape": header[DOWN]["shape"][::-1]}})[:-1] + ", " + json.dumps(header)[1:]


UNUSUAL = rf"{DOWN}: not a readable .* a tensor is not described as usual"
HEADERS = {  # which safetensors itself accepts
    "a list": (lambda header: json.dumps(header | {DOWN: list(header[DOWN].values())}), UNUSUAL),
    "an object for the dtype": (lambda header: _described(header, dtype={header[DOWN]["dtype"]: None}), UNUSUAL),
    "twice": (_twice, rf"model\.safetensors: is not readable JSON: a key is repeated.*{DOWN}"),
}


@pytest.mark.parametrize("form", HEADERS)
def test_unusual_descriptions(form, hf_folder):
    """Catches a header that safetensors reads and that means something else here."""
    folder = hf_folder("Qwen2")
    path = folder / "model.safetensors"
    path.write_bytes(_header(path.read_bytes(), HEADERS[form][0]))
    if form != "twice":
        load_file(path)
    refused(folder, HEADERS[form][1])


def test_files_that_are_no_files(tmp_path):
    """Also without `resolve`, which refuses them first."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to("gone")
    for name in ("pipe", "broken", "absent", "."):
        with pytest.raises(CheckpointError, match="is not a file, or is a broken link"):
            read_headers([tmp_path / name])
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        read_headers([tmp_path / "sparse"])


DAMAGE = {
    "truncated": lambda data: data[: len(data) * 2 // 3], "empty": lambda data: b"",
    "header length": lambda data: (1 << 62).to_bytes(8, "little") + data[8:],
    "long header": lambda data: (1 << 25).to_bytes(8, "little") + b" " * (1 << 25) + data,
    "header text": lambda data: data[:8] + b"\xff" * 64 + data[72:],
    "offsets": lambda data: _header(data, lambda header: _described(header, data_offsets=[0, 10**15])),
    "a web page": lambda data: b"<!DOCTYPE html><html></html>" * 9,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files(damage, hf_folder):
    folder = hf_folder("Qwen2")
    path = folder / "model.safetensors"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    refused(folder, r"model\.safetensors: not a readable safetensors file")


@pytest.mark.parametrize("room", [1 << 20, 9_000, 100])
def test_parts_through_a_buffer(room, hf_folder, monkeypatch):
    """As on a GPU: parts that fit are read into a buffer, which is used again, and the others are mapped. Catches a wrong place
    in the buffer, and weights that still refer to it."""
    folder = hf_folder("Qwen2")
    expected = logits(folder)
    original, buffers, used = checkpoint._read, PinnedBuffers(room, None), []

    def read(group, place, _=None):
        used.append(checkpoint._size(group) <= room)
        return original(group, place, buffers)

    monkeypatch.setattr(checkpoint, "_read", read)
    monkeypatch.setattr(checkpoint, "PART_BYTES", 16_000)
    with load(folder) as generator:
        buffers.of_thread()[:] = b"\xff" * room
        assert torch.equal(generator.logits(TOKENS), expected)
    assert any(used) == (room > 100)
    assert all(used) == (room == 1 << 20)


def test_memory_that_cannot_be_pinned(monkeypatch):
    """As with a low limit of locked memory. Catches an error of PyTorch's that leaves the public API."""

    class Runtime:
        cudaHostRegister = staticmethod(lambda *args: 801)

    def check_error(code):
        if code:
            raise RuntimeError(f"operation not supported ({code})")  # torch.cuda.CudaError is one

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    monkeypatch.setattr(checkpoint, "on_device", nullcontext)
    buffers = PinnedBuffers(1 << 14, torch.device("cuda", 0))
    for _ in range(2):  # the thread reads other groups after the first error
        with pytest.raises(DeviceError, match=r"cuda:0: host memory.*pinned.*16KiB.*801.*ulimit"):
            buffers.of_thread()
    buffers.close()


def test_a_buffer_is_as_large_as_the_largest_group_that_is_pinned(tmp_path, monkeypatch):
    """Three groups: two tensors together, one that is read alone, and one that is too large and so mapped."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(10), "b": torch.ones(15), "c": torch.ones(50), "d": torch.ones(51)}, path)
    monkeypatch.setattr(checkpoint, "PART_BYTES", 100)
    groups = checkpoint._groups(piece for entry in read_headers([path]).values() for piece in checkpoint._pieces(entry))
    assert [checkpoint._size(group) for group in groups] == [100, 200, 204]
    for most, expected in ((204, 204), (203, 200), (200, 200), (199, 100), (99, 0)):
        monkeypatch.setattr(checkpoint, "MAX_PINNED", most)
        assert checkpoint._buffer_bytes(groups) == expected
    assert checkpoint._buffer_bytes([]) == 0


@pytest.mark.parametrize(("used", "split", "gap", "ranges"), [
    ((2, 3, 10), True, 25, [(8, 20), (48, 60), (88, 100), (128, 140)]),
    ((2, 3, 10), True, 30, [(0, 160)]),
    ((10, 20, 40), True, 1, [(40, 120)]),
    ((10, 20, 40), False, 1, [(40, 120)]),
    ((12, 14, 40), True, 1, [(48, 104)]),
    ((5, 5, 10), True, 1, [(20, 40), (60, 80), (100, 120), (140, 160)]),
    (None, True, 1, [(0, 160)]),
])  # fmt: skip
def test_what_is_read_of_a_tensor(used, split, gap, ranges, tmp_path, monkeypatch):
    """[4, 10] of fp32. Catches a read for each of many small parts, other bytes than those in use, and a count of other bytes."""
    save_file({"a": torch.zeros(4, 10)}, tmp_path / "model.safetensors")
    entry = read_headers([tmp_path / "model.safetensors"])["a"]
    monkeypatch.setattr(checkpoint, "GAP_BYTES", gap)
    pieces = list(checkpoint._pieces(entry, split, used))
    assert [(start - entry.start, stop - entry.start) for start, stop in checkpoint._ranges(pieces)] == ranges
    assert checkpoint._read_bytes(pieces) == sum(stop - start for start, stop in ranges)


def test_no_memory_for_a_buffer(monkeypatch):
    """Catches an error that blames the file."""

    def full(*args):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(checkpoint.mmap, "mmap", full)
    with pytest.raises(OutOfMemoryError, match="loading buffer; expected 3KiB; found Cannot allocate"):
        PinnedBuffers(3 << 10, None).of_thread()


def test_a_failed_gpu_is_not_taken_for_memory_that_cannot_be_pinned(hf_folder, monkeypatch):
    """CUDA repeats an error at each later call, also when the buffers are unpinned. The first error counts."""
    closed = []

    class Runtime:
        cudaHostRegister = staticmethod(lambda *args: 0)
        cudaHostUnregister = staticmethod(lambda start: closed.append(start) or 700)

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(checkpoint, "on_device", nullcontext)
    buffers = PinnedBuffers(1 << 14, torch.device("cuda", 0))
    with ThreadPoolExecutor(2) as pool:
        meet = threading.Barrier(2, timeout=60)
        list(pool.map(lambda _: (meet.wait(), buffers.of_thread()), range(2)))
    buffers.close()
    assert len(set(closed)) == 2, "all are unpinned"


@pytest.mark.parametrize("prefix", ["mtp.", "model.visual.", "visual."])
def test_tensors_of_what_is_not_supported_are_named(prefix, hf_folder):
    """Layers for multi-token prediction and vision encoders belong to no decoder layer: accepted, with a warning."""
    folder = hf_folder("Qwen2")
    rewrite(folder, lambda t: t.update({f"{prefix}layers.0.weight": torch.ones(3), f"{prefix}norm.weight": torch.ones(3)}))
    with one_warning(rf"{folder}.*2 tensors {prefix}\* are not used: "), load(folder) as generator:
        plan(folder)
        assert generator.unused_tensors == (f"{prefix}layers.0.weight", f"{prefix}norm.weight")


def test_a_composed_model_uses_a_part_without_a_warning(hf_folder):
    folder = hf_folder("Qwen2")
    rewrite(folder, lambda t: t.update({"mtp.norm.weight": torch.ones(3), "other.weight": torch.ones(3)}))
    with no_warning(), load(folder, layers=build) as generator:
        plan(folder, layers=build)
        assert generator.unused_tensors == ("mtp.norm.weight", "other.weight")


def test_a_pointer_of_git_lfs(hf_folder):
    """What a clone without Git LFS has instead of the weights."""
    folder = hf_folder("Qwen2")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    for action in (load, plan):
        refused(folder, r"model\.safetensors: is a pointer of Git LFS.*git lfs pull", by=action)


def test_a_plan_without_weights_says_so(hf_folder):
    folder = hf_folder("Qwen2")
    (folder / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match="there are no safetensors files, so the plan follows config.json alone"):
        plan(folder)
    with no_warning():
        plan(folder, random_weights=True)


def test_reads_that_return_less(tmp_path):
    """The system may return fewer bytes than asked for. A file that became shorter is an error."""

    class Slow(io.FileIO):
        def readinto(self, view):
            return super().readinto(view[:7])

    (tmp_path / "file").write_bytes(bytes(range(100)))
    memory = PinnedBuffers(90, None).of_thread()
    with Slow(tmp_path / "file") as file:
        checkpoint._fill(memory, file, 13, 80)
        assert memory[:] == bytes(range(13, 93)) + bytes(10)
        with pytest.raises(OSError, match="ends after 100 bytes"):
            checkpoint._fill(memory, file, 13, 88)


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
@pytest.mark.parametrize(("hidden_size", "heads"), [(64, 4), (1152, 18)])
def test_weights_on_a_gpu_are_those_on_the_cpu(quantization, hidden_size, heads, hf_folder, monkeypatch):
    """Catches a buffer that is filled again before it was copied, and a kernel that quantizes weights unlike
    `reference.quantize_fp8`, be it with short rows or with long ones."""
    folder = hf_folder("Qwen2", hidden_size=hidden_size, num_attention_heads=heads)

    def damage(tensors):
        name = "model.layers.0.mlp.gate_proj.weight"
        tensors[name][3] = 0
        tensors[name][5, 7:9] = torch.tensor([torch.nan, -torch.inf])
        tensors[name][6] *= 1e-30

    if quantization != "int4":  # its reference has no rule for NaN
        rewrite(folder, damage)
    monkeypatch.setattr(checkpoint, "PART_BYTES", 9_000)  # many parts: each thread uses its buffer again and again
    assert (loads_alike(folder, quantization) > 0) == (quantization is not None)


def test_shards_match_the_single_file(hf_folder):
    single, sharded = hf_folder("Qwen3"), hf_folder("Qwen3", shard="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert torch.equal(logits(single), logits(sharded))


def test_index_and_shards_must_agree(hf_folder):
    folder = hf_folder("Qwen3", shard="40KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = content["weight_map"]
    first, second = sorted(set(names.values()))[:2]
    moved = next(n for n, f in names.items() if f == first)
    crowded = next(n for n, f in names.items() if list(names.values()).count(f) > 1)
    index.write_text(json.dumps({**content, "weight_map": {**names, moved: second}}))
    refused(folder, moved)
    index.write_text(json.dumps({**content, "weight_map": {n: f for n, f in names.items() if n != crowded}}))
    refused(folder, "missing from the index")


def test_total_size_of_the_index(hf_folder):
    folder = hf_folder("Qwen3", shard="40KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    with no_warning():
        load(folder).close()  # as transformers writes it
    right = content["metadata"]["total_size"]
    for wrong in (right * 2, 10**30, right + 0.5, float("nan")):
        index.write_text(json.dumps(content | {"metadata": {"total_size": wrong}}))
        with pytest.warns(UserWarning, match=rf"the index states {re.escape(str(wrong))} bytes .* hold {right}$"):
            load(folder).close()


def test_tied_head_saved_twice(hf_folder):
    """With tie_word_embeddings, a saved head that equals the embedding is accepted; a different head is refused."""
    folder = hf_folder("Llama", tie_word_embeddings=True)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(folder).close()
    rewrite(folder, lambda t: t["lm_head.weight"].view(-1)[5].add_(1))
    refused(folder, r"lm_head\.weight")
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].double()}))
    refused(folder, r"lm_head\.weight: wrong dtype.*F64")


def check_logits(folder, truth, words):
    """The folder's logits are `truth`, and there is one warning, which has `words`."""
    with one_warning(words):
        assert distance(logits(folder), truth) < 1e-5
        plan(folder)


@pytest.mark.parametrize("in_files", [False, True])
def test_a_tied_head_in_the_index_or_in_the_files_alone(in_files, hf_folder):
    """Catches an index that is refused though the tensor in question is not needed; a head that is not tied is."""
    folder = hf_folder("Llama", tie_word_embeddings=True, shard="40KB")
    truth = logits_of_transformers(folder)
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    shard = content["weight_map"]["model.embed_tokens.weight"]
    if in_files:
        tensors = load_file(folder / shard)
        save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / shard)
        del content["metadata"]["total_size"]
    else:
        content["weight_map"]["lm_head.weight"] = shard
    path.write_text(json.dumps(content))
    check_logits(folder, truth, r"index and the files disagree about tensors that are not needed: lm_head\.weight")
    restate(folder, tie_word_embeddings=False)
    words = r"missing from the index.*lm_head" if in_files else r"lm_head\.weight: the index and the files disagree"
    refused(folder, words)


def test_a_tied_embedding_that_is_stored_as_the_head(hf_folder):
    """safetensors keeps the first of two names of one tensor. Catches "1 tensor is missing" of a complete checkpoint."""
    folder = hf_folder("Qwen2", tie_word_embeddings=True)
    truth = logits_of_transformers(folder)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    check_logits(folder, truth, r"the embedding, which is also the head, is stored as lm_head\.weight")
    check_logits(folder, logits_of_transformers(folder), "stored as")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_wrappers(prefix, hf_folder):
    """Catches a refusal of files that a compiled or distributed model has saved, and a prefix that only some names have."""
    folder = hf_folder("Qwen3")
    truth = logits_of_transformers(folder)
    rewrite(folder, lambda t: [t.update({f"{prefix}{name}": t.pop(name)}) for name in list(t)])
    if prefix.count(".") == 1:
        check_logits(folder, truth, rf"all names of tensors begin with {prefix}, which is left out")
    else:
        assert distance(logits(folder), truth) < 1e-5
    rewrite(folder, lambda t: t.update({"lm_head.weight": t.pop(f"{prefix}lm_head.weight")}))
    refused(folder, "tensors are missing")


def test_names_of_a_model_without_a_head(hf_folder):
    """As LlamaModel.save_pretrained writes them. Catches a refusal; transformers loads such files too."""
    folder = hf_folder("Llama", tie_word_embeddings=True)
    truth = logits_of_transformers(folder)
    rewrite(folder, lambda t: [t.update({name.removeprefix("model."): t.pop(name)}) for name in list(t)])
    check_logits(folder, truth, 'the names of tensors do not begin with "model."')
    check_logits(folder, logits_of_transformers(folder), "do not begin")
    restate(folder, tie_word_embeddings=False)
    refused(folder, r"1 of .* tensors are missing.*lm_head\.weight")


def test_biases_of_zeros(hf_folder):
    """Of linears without a bias, in a checkpoint that is not quantized. Catches a refusal, and a bias that is not zero."""
    folder = hf_folder("Llama")
    truth = logits_of_transformers(folder)
    bias = DOWN.replace("weight", "bias")
    rewrite(folder, lambda t: t.update({bias: torch.zeros(64), "lm_head.bias": torch.zeros(211)}))
    check_logits(folder, truth, "2 biases of linear layers that have none are not used; loading checks that they are zero")
    with pytest.warns(UserWarning, match="2 biases"), load(folder) as generator:
        assert generator.unused_tensors == ()
    rewrite(folder, lambda t: t[bias][7:9].fill_(1e-30))
    with one_warning("2 biases"):
        refused(folder, rf"{bias}: .* zeros; found 2 values")
    rewrite(folder, lambda t: t.update({bias: torch.zeros(64, dtype=torch.int8)}))
    refused(folder, rf"{bias}: wrong dtype.*I8")
    rewrite(folder, lambda t: t.update({bias: torch.zeros(64), "model.norm.bias": torch.zeros(64)}))
    refused(folder, r"1 unexpected tensors.*model\.norm\.bias")


def test_scales_of_attention_in_a_checkpoint_that_is_not_quantized(hf_folder):
    """Catches a refusal of plain weights with calibrated scales of an FP8 KV cache, and scales that are dropped silently."""
    folder = hf_folder("Llama")
    truth = logits_of_transformers(folder)
    names = [f"model.layers.{i}.self_attn.{end}" for i, end in enumerate(("k_scale", "attn.v_scale", "k_proj.k_scale"))]
    rewrite(folder, lambda t: t.update({name: torch.tensor(0.5) for name in names}))
    check_logits(folder, truth, "3 scales of FP8 attention are not used")
    rewrite(folder, lambda t: t.update({"model.k_scale": torch.tensor(0.5)}))
    refused(folder, r"1 unexpected tensors.*model\.k_scale")


def test_old_rotary_buffers_are_skipped(hf_folder):
    folder = hf_folder("Llama")
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load(folder).close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts(dtype, hf_folder):
    folder = hf_folder("Llama")
    exact = logits(folder)
    rewrite(folder, lambda t: t.update({name: tensor.to(dtype) for name, tensor in t.items()}))
    assert 0 < distance(logits(folder), exact) < 0.1


def test_random_weights_are_seeded_and_lively(hf_folder):
    folder = hf_folder("Qwen2")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    first, again, other = (logits(folder, random_weights=True, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.isfinite(first).all()
    assert 0.1 < first.std() < 10

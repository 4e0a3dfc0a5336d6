"""Plans for GPUs that are not here: which layers run on Triton, what fits, and names and sizes of GPUs."""

import pytest
import torch
from support.cli import refused

from minirt.cli.gpus import GPU_NAMES, find_gpu
from minirt.device import CONTEXT_BYTES, compute_capability, free_memory, is_nvidia
from minirt.errors import DeviceError
from minirt.loading.load import plan_load
from minirt.loading.options import LoadOptions


def planned(gpu, **options):
    return plan_load(LoadOptions(**{"model": "Qwen2.5-7B", "device": "auto", **options}), find_gpu(gpu))


def implementations(model):
    return {row.kind: row.implementation for row in model.plan.rows}


@pytest.mark.parametrize("text", ["H200", "h200", "NVIDIA H200", "nvidia-h200"])
def test_names(text):
    gpu = find_gpu(text)
    assert (gpu.name, gpu.capability) == ("H200", (9, 0))
    assert 139 < gpu.memory / 2**30 < 141
    assert str(gpu) == "cuda (H200, sm_90)"
    assert find_gpu("NVIDIA GeForce RTX 4090") == find_gpu("rtx-4090") == find_gpu("4090")
    assert {find_gpu(name).name for name in GPU_NAMES} == set(GPU_NAMES)


@pytest.mark.parametrize(("texts", "name"), [
    (("H100-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "h100 sxm5", "H100 80G"), "H100"),
    (("NVIDIA H100 NVL", "h100nvl"), "H100-NVL"), (("rtx4090", "RTX 4090 24GB", "GeForce RTX 4090"), "RTX-4090"),
    (("a100-40gb", "a100 40 gb", "NVIDIA A100-PCIE-40GB"), "A100-40GB"), (("NVIDIA A100-SXM4-80GB", "A100 80GB"), "A100-80GB"),
    (("Tesla T4", "t4-16gb"), "T4"), (("l4-24gb", "NVIDIA L4"), "L4"), (("A6000", "NVIDIA RTX A6000"), "RTX-A6000"),
    (("NVIDIA RTX PRO 6000 Blackwell Server Edition",), "RTX-PRO-6000"), (("H200 141GB",), "H200"),
])  # fmt: skip
def test_names_that_people_type(texts, name):
    """What `nvidia-smi` prints was an unknown GPU, and so was H100-80GB."""
    assert {find_gpu(text).name for text in texts} == {name}


@pytest.mark.parametrize(("text", "hint"), [
    ("A100", "A100-80GB or A100-40GB"), ("A100-64GB", "A100-80GB or A100-40GB"), ("H100 94GB", "H100 or H100-NVL"),
    ("A10G", "A10"), ("RTX 4090 Laptop", "RTX-4090"), ("b300", "B200 or RTX-3090"), ("rtx 6000", "RTX-6000-Ada"),
    ("rtx4080", "RTX-4090"), ("MI300X", None), ("80", None),
])  # fmt: skip
def test_names_near_a_known_one(text, hint):
    """Another GPU is not taken for the one in the table, nor another memory. The nearest names are said; no name is no hint."""
    with pytest.raises(DeviceError, match="--gpu: unknown GPU") as error:
        find_gpu(text)
    assert error.value.hint == (hint and f"did you mean {hint}?")


def test_sizes():
    assert find_gpu("24GiB").memory == 24 << 30
    assert str(find_gpu("24GiB")) == "cuda (24GiB, sm_80 assumed)"
    assert str(find_gpu("40GB:12.0")) == "cuda (40GB, sm_120)"
    sizes = "24GiB:", "24GiB:9", "24GiB:x.y", "-1GiB", "24GiB:8.9:1", "0", "24", "80:9.0"
    for wrong in ("", "H300", "A100", "24XB", "GiB", *sizes):
        with pytest.raises(DeviceError, match=r"--gpu: .*24GiB:8\.9.*H200") as error:
            find_gpu(wrong)
        assert error.value.is_usage


def test_the_capability_decides(monkeypatch):
    """Not what this machine has: neither its Triton nor its environment."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("minirt.layers.base.triton_installed", lambda: False)
    assert compute_capability(find_gpu("L4")) == (8, 9)
    assert is_nvidia(find_gpu("L4"))
    for gpu in ("A100-80GB", "L4", "H200", "B200", "RTX-5090"):
        model, _ = planned(gpu)
        assert set(implementations(model).values()) == {"triton"}, gpu
        assert model.dtype == torch.bfloat16
        assert model.plan.not_capturable is None
    old = planned("T4")[0]
    assert set(implementations(old).values()) == {"eager"}
    assert any("never tested" in note for note in old.plan.notes), "the plan ended with Fits., as if all were well"
    model, _ = planned("A10", quantization="fp8")
    assert implementations(model) == {
        "embedding": "triton", "attention": "eager", "mlp": "eager", "select": "triton", "head": "eager",
    }  # fmt: skip
    assert "8.6 is below 8.9 for fp8 weights" in model.plan.rows[1].reason
    slow = "57 of 59 layers run eager on this GPU, which is slow: compute capability 8.6 is below 8.9 for fp8 weights"
    assert model.plan.notes[-1] == f"{slow} (use --quantize int4)", "the plan only said Fits."
    both, _ = planned("A10", quantization="fp8", kv_cache_dtype="fp8")
    assert both.plan.notes[-1].endswith("for fp8 KV pages; compute capability 8.6 is below 8.9 for fp8 weights "
                                        "(use --quantize int4 and --kv-cache-dtype auto)")  # fmt: skip
    assert not planned("A10", quantization="int4")[0].plan.notes
    assert not planned("A10", impl="eager")[0].plan.notes, "who asks for eager layers knows"
    assert set(implementations(planned("L4", quantization="fp8")[0]).values()) == {"triton"}
    assert implementations(planned("A10", kv_cache_dtype="fp8")[0])["attention"] == "eager"
    assert implementations(planned("L4", kv_cache_dtype="fp8")[0])["attention"] == "triton"


def test_memory():
    """The sizes of Qwen2.5-7B, counted by hand: 7.62 G parameters; 28 layers of 2 · 4 heads · 128 values a token."""
    model, memory = planned("H200")
    assert memory.weights == model.plan.weight_bytes == 7_615_616_512 * 2
    assert memory.page == 64 * 28 * 2 * 4 * 128 * 2
    assert memory.free == find_gpu("H200").memory - CONTEXT_BYTES == free_memory(find_gpu("H200"))
    assert memory.budget == int(0.9 * memory.free)
    assert (memory.total, memory.held_by_others) == (find_gpu("H200").memory, 0)
    assert memory.pages == (memory.budget - memory.weights - memory.other - memory.step) // memory.page
    assert memory.tokens == 64 * memory.pages
    assert memory.fits
    assert memory.needed <= memory.free
    halved = planned("H200", kv_cache_dtype="fp8")[1]
    assert halved.page == 64 * 28 * 2 * 4 * (128 + 4), "a scale for each token and head"
    assert planned("H200", max_model_len=130, max_num_seqs=2)[1].pages == 2 * 3, "no more than full sequences need"
    assert planned("H200", kv_cache_memory=5 * memory.page + 1)[1].pages == 5


@pytest.mark.parametrize(("options", "fits"), [({}, False), ({"quantization": "fp8"}, True), ({"dtype": "float32"}, False)])
def test_what_does_not_fit(options, fits):
    memory = planned("15GiB:8.9", **options)[1]
    assert memory.fits == fits
    assert (memory.pages > 0) == fits
    assert (memory.needed <= memory.free) == fits
    assert not planned("15GiB:8.9", quantization="fp8", kv_cache_memory=12 << 30)[1].fits, "pages count as well"


def test_small_weights_of_a_gpu_stay_in_16_bits():
    """FP8 weights whose inputs take a kernel of their own to be rounded made Qwen2.5-0.5B slower than in bf16."""
    small, _ = planned("H200", model="Qwen2.5-0.5B", quantization="fp8")
    names = {name: p.format for p in small.parameters() for name in getattr(p, "modules", ())}
    kept = {name for name, own in names.items() if own is None and "layers" in name}
    assert kept == {f"model.layers.{i}.self_attn.o_proj" for i in range(24)}
    assert small.plan.notes == ("24 small weights stay in 16 bits: to round their inputs to FP8 would take longer than it saves",)
    assert names["model.layers.0.mlp.down_proj"] is not None
    for other in ({"gpu": "cpu", "model": "Qwen2.5-0.5B"}, {"gpu": "H200", "model": "Qwen2.5-1.5B", "quantization": "int4"}):
        gpu = other.pop("gpu")
        options = LoadOptions(**{"quantization": "fp8", "device": "cpu", **other})
        model, _ = plan_load(options, None if gpu == "cpu" else find_gpu(gpu))
        assert all(p.format is not None for p in model.parameters() if ".layers." in "".join(getattr(p, "modules", ())))
        assert not any("16 bits" in note for note in model.plan.notes)
    assert not planned("H200", quantization="fp8")[0].plan.notes


def test_what_cannot_be_compiled_is_refused_by_name(run, tmp_path):
    """Before anything is compiled, which takes minutes."""
    compile_for = ("compile", "--model", "Qwen2.5-0.5B", "-q", "--output", str(tmp_path / "kernels"))
    refused(run(*compile_for), "--gpu", "such as --gpu H100", code=2)
    refused(run(*compile_for, "--gpu", "24GiB:8.9"), "--gpu 24GiB", "SMs", "such as H100", code=2)
    refused(run(*compile_for, "--gpu", "H100", "--device", "cpu"), "--gpu", "--device cpu", code=2)
    refused(run(*compile_for, "--gpu", "T4"), "T4", "there are no kernels to compile", "every layer is eager")
    assert not (tmp_path / "kernels").exists()

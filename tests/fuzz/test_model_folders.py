"""Damaged model folders: each gives a model or a `MinirtError`, in bounded time and memory; none contradicts itself silently.

A tiny folder is changed in a seeded way: values and bytes of its JSON files, headers and bytes of its shards, and the files
themselves (links, pipes, sparse files). Other forms of a good folder must load. A folder that loads computes what transformers
computes from the same files, or from the weights that quantized files stand for. MINIRT_FUZZ sets the number of cases.
"""

import json
import os
import resource
import shutil
import signal
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load, load_file, save, save_file
from support import quantized_int4
from support.mutate import BYTE_MUTATORS, JSON_MUTATORS, budget, dump, mutated
from support.quantized import STYLES, write

from minirt import Generator, SamplingParams
from minirt.errors import MinirtError, NumericsError

SECONDS = 30  # a case takes about 10 ms
HIDDEN, INTER, VOCAB, LAYERS, HEAD_DIM = 12, 20, 23, 2, 6
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX, CONFIG, GENERATION = "model.safetensors.index.json", "config.json", "generation_config.json"
JSON_FILES = (CONFIG, GENERATION, INDEX)
FILES = (*JSON_FILES, *SHARDS)
SCALES = ("_scale", "_scale_inv")
Folder = dict[str, bytes]  # file name → content


class Hang(BaseException):
    """A case took too long. No handler of minirt catches it."""


def base() -> Folder:
    """A valid Llama of two layers in two shards, in a dialect that states rope_theta and dtype twice."""
    torch.manual_seed(1)
    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN), "model.norm.weight": torch.rand(HIDDEN) + 0.5}
    for layer in (f"model.layers.{i}." for i in range(LAYERS)):
        for name, rows, columns in (
            *(("self_attn.q_proj", 2 * HEAD_DIM, HIDDEN), ("self_attn.o_proj", HIDDEN, 2 * HEAD_DIM)),
            *(("self_attn.k_proj", HEAD_DIM, HIDDEN), ("self_attn.v_proj", HEAD_DIM, HIDDEN)),
            *(("mlp.gate_proj", INTER, HIDDEN), ("mlp.up_proj", INTER, HIDDEN), ("mlp.down_proj", HIDDEN, INTER)),
        ):
            tensors[f"{layer}{name}.weight"] = torch.randn(rows, columns) / columns**0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = torch.rand(HIDDEN) + 0.5
    tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
    names = sorted(tensors)
    halves = dict(zip(SHARDS, (names[:9], names[9:]), strict=True))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 500.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        "layer_types": ["full_attention"] * LAYERS,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": -1,
    }
    generation = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "eos_token_id": [2, 3], "bos_token_id": 1}
    index = {
        "metadata": {"total_size": sum(4 * tensor.numel() for tensor in tensors.values())},
        "weight_map": {name: shard for shard, members in halves.items() for name in members},
    }
    folder = {CONFIG: config, GENERATION: generation, INDEX: index}
    return {name: json.dumps(content).encode() for name, content in folder.items()} | {
        shard: save({name: tensors[name] for name in members}, {"format": "pt"}) for shard, members in halves.items()
    }


BASE = base()


def quantized(style: str) -> Folder:
    """The model of BASE in a quantized format, in one file. Its rows are so short that each is one group of any size."""
    with tempfile.TemporaryDirectory() as place:
        source, target = Path(place, "source"), Path(place, "target")
        source.mkdir()
        save_file({name: tensor for shard in SHARDS for name, tensor in load(BASE[shard]).items()}, source / "model.safetensors")
        (source / CONFIG).write_bytes(BASE[CONFIG])
        (write if style in STYLES else quantized_int4.write)(source, target, style)
        return {path.name: path.read_bytes() for path in target.iterdir()}


QUANTIZED = {style: quantized(style) for style in (*STYLES, *quantized_int4.STYLES)}
Case = tuple[str, Folder, Callable[[Path], object] | None, str]  # what it is, files, what happens to them on disk, outcome


# --- random damage: any outcome but a silent contradiction ---


def damaged_json(random: Random) -> Case:
    name = random.choice((CONFIG, CONFIG, GENERATION, INDEX))
    return name, BASE | {name: mutated(random, BASE[name])}, None, "any"


def damaged_shard(random: Random) -> Case:
    name = random.choice(SHARDS)
    if random.random() < 0.5:
        return f"{name}, bytes", BASE | {name: random.choice(BYTE_MUTATORS)(random, BASE[name])}, None, "any"
    header, data = split(BASE[name])
    changed = header
    for _ in range(random.choice((1, 1, 2))):
        changed = random.choice(JSON_MUTATORS)(random, changed)
    text = dump(changed).encode()
    return f"{name}, header", BASE | {name: len(text).to_bytes(8, "little") + text + data}, None, "any"


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def damaged_quantized(random: Random) -> Case:
    """A quantized model with other fields of its format, or damaged tensors; or as it is, which must load."""
    files = QUANTIZED[random.choice(list(QUANTIZED))]
    chance = random.random()
    if chance < 0.15:
        return "quantized", files, None, "loaded"
    if chance < 0.65:
        name = "hf_quant_config.json" if "hf_quant_config.json" in files else CONFIG
        content = json.loads(files[name])
        part = content if name != CONFIG else content["quantization_config"]
        for _ in range(random.choice((1, 1, 2))):
            part = random.choice(JSON_MUTATORS)(random, part)
        changed = part if name != CONFIG else content | {"quantization_config": part}
        return f"quantized, {name}", files | {name: dump(changed).encode()}, None, "any"
    header, data = split(files["model.safetensors"])
    if chance < 0.85:
        header = random.choice(JSON_MUTATORS)(random, header)
    else:
        data = random.choice(BYTE_MUTATORS)(random, data)
    text = dump(header).encode()
    return "quantized, tensors", files | {"model.safetensors": len(text).to_bytes(8, "little") + text + data}, None, "any"


# --- forms that must load, and compute what they state ---


def harmless(random: Random) -> Case:
    """Fields that are absent, null, stated in another dialect, or have another valid value; other files in the folder."""
    files = {name: json.loads(BASE[name]) for name in JSON_FILES}
    config, rope = files[CONFIG], files[CONFIG]["rope_parameters"]
    theta = random.choice([500.0, 1e4, 5e5, 1e6])
    config |= {"rope_theta": theta, "max_position_embeddings": random.randint(16, 99)}
    config["rms_norm_eps"] = random.choice([1e-6, 1e-5, 1e-2])
    config["hidden_act"] = random.choice(["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh"])
    del rope["rope_theta"]
    kind = random.choice(["llama3", "llama3", "linear", "yarn", "default"])
    if kind == "llama3":
        rope |= {"factor": random.choice([2.0, 8.0, 32.0]), "original_max_position_embeddings": random.choice([4, 16, 64])}
    else:
        rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 16, "truncate": random.random() < 0.5}
        rope = {key: rope[key] for key in {"yarn": list(rope), "linear": ["rope_type", "factor"], "default": ["rope_type"]}[kind]}
    dialects = {
        "new": {"rope_theta": ..., "rope_parameters": rope | {"rope_theta": theta}},
        "old": {"rope_parameters": ..., "rope_scaling": None if kind == "default" else rope},
        "legacy": {"rope_parameters": ..., "rope_scaling": {"type": rope["rope_type"]} | rope},
        "both": {"rope_parameters": rope | {"rope_theta": theta}, "rope_scaling": rope if random.random() < 0.5 else None},
    }
    config |= random.choice(list(dialects.values()))
    extra = {"_unknown": {"a": [1]}, "quantization_config": None, "rope_scaling": None, "sliding_window": 99, "pretraining_tp": 2}
    config |= {key: value for key, value in extra.items() if key not in config and random.random() < 0.3}
    optional = ("architectures", "layer_types", "dtype", "torch_dtype", "head_dim")
    optional += ("bos_token_id", "eos_token_id", "pad_token_id")
    for name in (*optional, "attention_bias", "mlp_bias", "tie_word_embeddings"):
        if random.random() < 0.2:
            config[name] = None if name in optional and random.random() < 0.5 else ...
    for content in (files[GENERATION], files[INDEX]["metadata"]):
        for name in list(content):
            if random.random() < 0.2:
                del content[name]
    files[CONFIG] = dict(random.sample(list(config.items()), len(config)))
    files[CONFIG] = {key: value for key, value in files[CONFIG].items() if value is not ...}
    written = {name: json.dumps(content, indent=random.choice([None, 2])).encode() for name, content in files.items()}
    others = ("consolidated.safetensors", "README.md", ".gitattributes", "pytorch_model.bin", "vocab.txt")
    return "harmless", BASE | written | {name: b"\xff" for name in others if random.random() < 0.3}, None, "loaded"


# --- the file system ---


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 3 << 30)


def _into_blobs(path: Path) -> None:
    """A link to the file, as in the Hub cache."""
    (path.parent / "blob").write_bytes(BASE[path.name])
    path.symlink_to("blob")


def damaged_file(random: Random) -> Case:
    """A file is no longer a regular file, or not the right one."""
    name = random.choice(FILES)
    what, act, outcome = random.choice(
        [
            ("absent", lambda path: None, "any" if name == GENERATION else "refused"),
            ("pipe", os.mkfifo, "refused"),
            ("folder", os.mkdir, "refused"),
            ("broken link", lambda path: path.symlink_to("gone"), "refused"),
            ("link loop", lambda path: path.symlink_to(path.name), "refused"),
            ("link to a folder", lambda path: path.symlink_to("."), "refused"),
            ("link to a device", lambda path: path.symlink_to(random.choice(("/dev/zero", "/dev/null", "/dev/tty"))), "refused"),
            ("link into /proc", lambda path: path.symlink_to("/proc/self/maps"), "refused"),
            ("sparse", _sparse, "refused"),
            ("link to a good file", _into_blobs, "loaded"),
            ("empty", lambda path: path.touch(), "refused"),
            ("another file", lambda path: path.symlink_to(random.choice([n for n in FILES if n != name])), "any"),
        ]
    )

    def apply(folder: Path) -> None:
        (folder / name).unlink()
        act(folder / name)

    return f"{name}: {what}", BASE, apply, outcome


# --- running a case ---


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(folder: Path) -> tuple[str, str]:
    """Load and compute: ("loaded" | "warned" | "refused", message)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            generator = Generator.from_pretrained(folder, device="cpu", max_model_len=16, max_num_seqs=2, kv_cache_memory=1 << 17)
        except MinirtError as error:
            return "refused", str(error)
        with generator:
            prompt = [5, 4, 7, 1, 9]
            try:
                # A step of one token does not round its activations to FP8.
                prompt = prompt[:1] if generator.plan.checkpoint else prompt
                logits = generator.logits(prompt)
            except NumericsError as error:
                return "refused", str(error)
            try:
                generator.generate(prompt, SamplingParams(max_tokens=2))
            except MinirtError as error:  # a setting of generation_config.json
                return "refused", str(error)
    ours = [str(warning.message) for warning in caught if str(folder) in str(warning.message)]
    if ours:
        return "warned", ours[0]
    compare(folder, prompt, logits)
    return "loaded", ""


def compare(folder: Path, prompt: list[int], logits: torch.Tensor) -> None:
    """transformers, given the same config and tensors, computes the same logits, if it takes the config."""
    raw = json.loads((folder / CONFIG).read_bytes())
    stated = raw.pop("quantization_config", None)
    try:
        config = transformers.AutoConfig.for_model(**raw)
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    except Exception:
        return
    tensors = {name: tensor for path in folder.glob("model*.safetensors") for name, tensor in load_file(path).items()}
    COUNTS["compared"] += 1
    if any(name.endswith(("qweight", "weight_packed")) for name in tensors):
        version = stated.get("checkpoint_format") or stated.get("format")  # null counts as absent
        offset = None if stated["quant_method"] == "awq" else 0 if version in ("gptq_v2", "gptq_p") else 1
        tensors = quantized_int4.dequantized(tensors, offset)
        widths = {name: own.shape[-1] for name, own in theirs.state_dict().items()}
        tensors = {name: tensor[..., : widths[name]] for name, tensor in tensors.items() if not name.endswith(SCALES)}
        COUNTS["4 bits"] += 1
    elif stated or (folder / "hf_quant_config.json").exists():
        scales = {name.rpartition(".")[0]: tensor for name, tensor in tensors.items() if "weight_scale" in name}
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALES)}
        for module, scale in scales.items():  # all blocks are single ones
            tensors[f"{module}.weight"] = tensors[f"{module}.weight"].float() * scale.float().reshape(-1, 1)
    theirs.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor([prompt])).logits[0]
    error, size = (logits - expected).norm(), expected.norm()
    assert error <= 1e-4 * size, f"logits of norm {size:.1e} differ from transformers' by {error:.1e}"


KINDS = [damaged_json] * 4 + [damaged_shard] * 2 + [damaged_file] * 2 + [damaged_quantized] * 3 + [harmless] * 2


def check(seed: int, folder: Path) -> str | None:
    """Run the case of a seed. Returns what is wrong with the outcome, or None."""
    random = Random(seed)
    what, files, act, expected = random.choice(KINDS)(random)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    try:
        with time_limit(SECONDS):
            if act is not None:
                act(folder)
            outcome, message = run(folder)
    except (Exception, Hang) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{what}: {type(error).__name__}: {str(error)[:300]} in {where.filename}:{where.lineno}"
    finally:
        shutil.rmtree(folder)
    COUNTS[outcome] += 1
    if expected not in ("any", outcome):
        return f"{what}: {outcome} instead of {expected}: {message}"
    if len(message) > 2000:
        return f"{what}: a message of {len(message)} characters: {message[:300]}"
    return None


COUNTS: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def test_the_folder_is_good(tmp_path: Path) -> None:
    for name, content in BASE.items():
        (tmp_path / name).write_bytes(content)
    assert run(tmp_path) == ("loaded", "")


def test_damaged_folders(tmp_path: Path) -> None:
    COUNTS.clear()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cases = budget(1000)
    wrong = {seed: fault for seed in range(cases) if (fault := check(seed, tmp_path / str(seed))) is not None}
    assert not wrong, f"{len(wrong)} of {cases} cases, by seed:\n" + "\n".join(f"{k}: {v}" for k, v in list(wrong.items())[:20])
    assert all(COUNTS[outcome] > cases / 50 for outcome in ("loaded", "refused")), COUNTS
    assert COUNTS["compared"] > 0.8 * COUNTS["loaded"], COUNTS
    assert COUNTS["4 bits"] > cases / 50, COUNTS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1 << 20, "more than 1 GiB"

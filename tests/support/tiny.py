"""A tokenizer for the tiny models: byte-level BPE of 211 ids, trained on a few lines of ASCII, and a chat template."""

import json
from pathlib import Path

TEXT = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "The capital of France is Paris; what is the capital of Spain?", "".join(chr(i) for i in range(32, 127)) + "\n",
]  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def add_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Write tokenizer.json and tokenizer_config.json to a folder of conftest's `hf_folder`; returns the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=211, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder

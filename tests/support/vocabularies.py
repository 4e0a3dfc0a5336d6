"""Small tokenizers like those of known models, and what their tokens decode to, in plain Python where the library differs.

`save` writes one to a folder of conftest's `hf_folder`. All have the special tokens <unk>, <s> and </s> with the ids 0, 1 and 2.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<unk>", "<s>", "</s>"]
TEXTS = [
    "Once upon a time there was a dog, and the dog wasn't there.", "def f(x):\n    return x\n\n", "你好，世界", "naïve café 🙂👧",
    "was it? it's done . do n't ! 12 345", "the therefore other",
]  # fmt: skip
_WORDS = ["▁Once", "▁upon", "▁a", "▁time", "▁there", "there", "▁was", "▁the", "▁▁▁▁", "▁▁", "return", "def", "▁("]
_LETTERS = "▁(:.,abcdefghilmnoprstuvwx你好é\u2003"


def llama_like(words: Sequence[str] = _WORDS, metaspace: bool = False) -> Tokenizer:
    """As Llama 2's: a space before each text, which the decoder drops, and byte tokens for what is not in the vocabulary.

    `metaspace`: with a pre-tokenizer in place of normalizers, as newer files have it.
    """
    vocab = {token: i for i, token in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))])}
    merges = []
    for letter in _LETTERS + "".join(words):
        vocab.setdefault(letter, len(vocab))
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                merges.append((word[: end - 1], word[end - 1]))
                vocab[word[:end]] = len(vocab)
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.add_special_tokens(SPECIAL)
    return made


def gpt2_like() -> Tokenizer:
    """Byte-level BPE, whose merges do not respect characters."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=letters))
    made.add_tokens(["<tool>", "两 words"])
    return made


def bert_like() -> Tokenizer:
    """WordPiece, whose decoder puts spaces between words and removes those before punctuation."""
    words = ["Once", "upon", "a", "the", "there", "was", "dog", "do", "n't", "'s", "'", *".,?!(你好🙂nts", "12"]
    parts = ["##" + part for part in ("re", "the", "there", "s", "d", "2", "好", ".", "n't")]
    made = Tokenizer(models.WordPiece({token: i for i, token in enumerate([*SPECIAL, *words, *parts])}, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=True)
    made.add_special_tokens(SPECIAL)
    return made


VOCABULARIES: dict[str, Callable[[], Tokenizer]] = {"llama": llama_like, "gpt2": gpt2_like, "bert": bert_like}


def save(made: Tokenizer, folder: Path, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json to a folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | config))
    return folder


def decoded(made: Tokenizer, ids: Sequence[int], skip: bool = True) -> str:
    """What minirt makes of ids: the library's text, but characters of byte tokens stay where the run has wrong bytes, too.

    These texts are made in plain Python, as Llama's decoder makes them.
    """
    tokens = [token for i in ids if (token := made.id_to_token(i)) is not None and not (skip and token in SPECIAL)]
    runs, run = list[bytes | str](), b""
    for token in tokens:
        if re.fullmatch("<0x[0-9A-F]{2}>", token) and made.token_to_id("<0x00>") is not None:
            run += bytes.fromhex(token[3:5])
        else:
            runs, run = [*runs, run, token.replace("▁", " ")], b""
    runs.append(run)
    if all(_is_utf8(own) for own in runs if isinstance(own, bytes)):
        return made.decode(ids, skip_special_tokens=skip)
    text = "".join(own if isinstance(own, str) else characters(own) for own in runs)
    return text.removeprefix(" ")


def characters(data: bytes) -> str:
    """The characters of bytes, and U+FFFD for each byte that is part of none."""
    text = ""
    while data:
        size = next((size for size in range(1, 5) if _is_utf8(data[:size])), 0)
        text, data = text + (data[:size].decode() if size else "\ufffd"), data[size or 1 :]
    return text


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True

"""One case of the tokenizer's fuzz test: a model folder with one damaged file, loaded and used."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from support.mutate import BYTE_MUTATORS, mutated
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from minirt.errors import ContextLengthError
from minirt.text import tokenizer as ours
from minirt.text.detokenizer import incremental_decoder

EMBEDDED = Path(__file__).parents[2] / "models" / "embedded" / "tokenizer.json"
TEXTS = ["", "Hello, world! ", "naïve 你好 👩‍👩‍👧‍👦 \x00\x7f", " " * 100, "a" * 70 + "b", "<s>the quick</s> [UNK] 123\n\n\tx"]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <there> 你好"}]
CORPUS = ["the quick brown fox jumps over the lazy dog 123, and sleeps.", "你好，世界。 naïve café", "def f(x):\n\treturn x\n"]
SPECIAL = ["<unk>", "<s>", "</s>"]
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] | trim + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    "{%- set ns = namespace(system='') -%}{%- for m in messages -%}{%- if m.role == 'system' -%}{%- set ns.system = m.content -%}"
    "{%- endif -%}{%- endfor -%}{%- macro turn(m) -%}[{{ m.role | upper }}] {{ m.content.split('x')[-1] }}{%- endmacro -%}"
    "{%- for m in messages -%}{%- if loop.first and m.role != 'system' -%}{{ raise_exception('no system') }}{%- endif -%}"
    "{{ turn(m) }}{%- if not loop.last %}{{ '\\n' * 2 }}{% endif -%}{%- endfor -%}"
    "{{ ns.system | tojson }}{{ strftime_now('%Y') }}",
]


def _trained(model: Any, trainer: Any, **parts: Any) -> str:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer.to_str()


def _byte_level() -> str:
    letters = pre_tokenizers.ByteLevel.alphabet()
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s+(?!\S)|\s+|[^\s\p{N}]+"), "isolated")
    return _trained(
        models.BPE(), trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False),
        normalizer=normalizers.NFC(), decoder=decoders.ByteLevel(),
        pre_tokenizer=pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        post_processor=processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]),
    )  # fmt: skip


def _byte_fallback() -> str:
    vocabulary = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlow", "he", "ll", "▁a"]
    model = models.BPE(
        {token: i for i, token in enumerate(vocabulary)}, [("h", "e"), ("l", "l"), ("▁", "a")],
        unk_token="<unk>", fuse_unk=True, byte_fallback=True,
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer.to_str()


def _wordpiece() -> str:
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False)
    return _trained(
        models.WordPiece(unk_token="<unk>"), trainer,
        normalizer=normalizers.BertNormalizer(), pre_tokenizer=pre_tokenizers.BertPreTokenizer(), decoder=decoders.WordPiece(),
    )  # fmt: skip


def _unigram() -> str:
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    return _trained(
        models.Unigram(), trainer, normalizer=normalizer, pre_tokenizer=pre_tokenizers.Metaspace(), decoder=decoders.Metaspace()
    )


BUILDERS: list[Callable[[], str]] = [_byte_level, _byte_fallback, _wordpiece, _unigram, EMBEDDED.read_text]


@cache
def bases() -> list[dict[str, bytes]]:
    """File name → content of sound model folders, one for each kind of tokenizer."""
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False, "__type": "AddedToken"}, "pad_token": None}
    folders = []
    for i, build in enumerate(BUILDERS):
        special = {"eos_token": "<|endoftext|>"} if build == EMBEDDED.read_text else named
        added = {"1": {"content": "<s>", "special": True}} if build != EMBEDDED.read_text else {}
        template = TEMPLATES[i % 2] if i % 3 else [{"name": "default", "template": TEMPLATES[i % 2]}]
        config = {"model_max_length": 512, "chat_template": template, "added_tokens_decoder": added}
        folders.append({
            "tokenizer.json": build().encode(), "tokenizer_config.json": json.dumps(special | config).encode(),
            "special_tokens_map.json": json.dumps(special).encode(),
        })  # fmt: skip
    return folders


def case(random: Random, folder: Path) -> str:
    """Damage one file (tokenizer.json most often), load the folder, and use what loads. Returns how it ended."""
    files = dict(random.choice(bases()))
    name = random.choices([*files, "chat_template.jinja"], [6, 2, 1, 1])[0]
    if name == "chat_template.jinja":
        text = random.choice(TEMPLATES).encode()
        files[name] = mutated(random, text, BYTE_MUTATORS, bytes_share=1)
    else:
        files[name] = mutated(random, files[name])
    for other, content in files.items():
        (folder / other).write_bytes(content)
    tokenizer = ours.Tokenizer.load(folder)
    assert tokenizer is not None
    uses_template = name != "tokenizer.json" and random.random() < 0.5  # each starts a process
    if uses_template and tokenizer.has_chat_template:
        tokenizer.encode_chat(CHAT)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == tokenizer.encode(text), "the same text gives other tokens"
        assert tokenizer.min_tokens(text) <= len(ids), "fewer tokens than promised"
        decoder = incremental_decoder(tokenizer)
        pieces = "".join(map(decoder.push, ids)) + decoder.flush()
        assert pieces == tokenizer.decode(ids), "pieces do not join to the text"
    long = "the quick " * 200
    try:
        tokenizer.encode(long, max_tokens=5)
    except ContextLengthError:
        assert len(tokenizer.encode(long)) > 5
    for added in json.loads(files["tokenizer.json"]).get("added_tokens") or []:
        assert tokenizer.token_id(added["content"]) == added["id"], "an added token has another id"
    return "works"

"""The embedded model's training recipe: outlines, filters, packing, the network, its draft layers, and its checkpoint.

Reads no real model. Catches a plot that mentions a character before the introduction, a filter that accepts bad text, rows that
do not begin with a story, a network or checkpoint that differs from Qwen2 in transformers and minirt, and draft layers that are
trained on other inputs than they get at inference.
"""

import json
import random
import re

import pytest
import torch
from speculative.test_draft_model import watch
from support.package import ROOT

from minirt import Generator, SamplingParams
from minirt.speculative.options import SpeculativeOptions

NAMES = ("outlines", "clean", "network", "train", "train_mtp", "stories")


@pytest.fixture(scope="module")
def recipe():
    """The recipe's modules by name. They are scripts in a folder, not a package."""
    import sys
    from importlib import import_module
    from types import SimpleNamespace

    folder = str(ROOT / "models" / "recipe")
    before = sys.path.copy()
    sys.path.insert(0, folder)
    try:
        yield SimpleNamespace(**{name: import_module(name) for name in NAMES})
    finally:
        sys.path[:] = before
        for name in NAMES:
            sys.modules.pop(name, None)


def finished(outline, continuation="!!"):
    while outline.advance() is not None:
        outline.fill(continuation)
    return outline.text


def test_every_outline_is_a_story_without_its_slots(recipe):
    """Whichever slots are left out, every character is introduced before being mentioned, and no markup remains."""
    rng, seen = random.Random(0), set()
    for _ in range(1500):
        outline = recipe.outlines.draw(rng)
        seen.add(outline.plot)
        text = finished(outline)
        assert not re.search(r"[{}>~/|;]|\s[.,!?']|  |\n\n\n|\ba [aeiou]|[.!?] [a-z](?![a-z ]*named)", text), text
        assert text.count('"') % 2 == 0
        assert outline.written == 0
        for name in outline.names:
            assert name not in text or f"named {name}" in text, text
            assert re.search(rf"\b{name}\b", text) is None or text.index(f"named {name}") + 6 == text.index(name), text
    assert len(seen) == 20


def test_drawing_is_repeatable(recipe):
    first, second = ([finished(recipe.outlines.draw(random.Random(seed))) for seed in range(20)] for _ in range(2))
    assert first == second
    assert len(set(first)) == 20


@pytest.mark.parametrize(("text", "quoted", "expected"), [
    (" ran home. Then", False, "ran home."), (' said, "Hello!" Then', False, 'said, "Hello!"'),
    (' said, "Hello," and went. Then', False, 'said, "Hello," and went.'),
    ('I will help. Come on." Pip', True, 'I will help. Come on."'), ('I will," said Pip. He', True, 'I will," said Pip.'),
    ("I will... and so", False, "I will..."), ("no end", False, None), ("line\nbreak.", False, None),
    ("One. Two. Three.", True, None),
])  # fmt: skip
def test_first_sentence(recipe, text, quoted, expected):
    assert recipe.outlines.first_sentence(text, quoted) == expected


@pytest.fixture
def outline(recipe):
    text = 'Once upon a time, there was a fox named Pip. Pip had a red hat. He said, "I like my red hat."'
    names, absent = frozenset(("Pip", "Lily")), frozenset(("she", "her", "herself"))
    return recipe.outlines.Outline("lost", "", ["Pip felt >", 'Pip said, ">'], names, absent, text)


@pytest.mark.parametrize(
    "good", ["sad because the wind was cold.", "very happy and ran home. He ate.", "that Pip's tail was wet."]
)
def test_accepted(outline, good):
    assert outline.advance().endswith("Pip felt")
    assert outline.fill(" " + good)
    assert outline.text.endswith(" Pip felt " + good.split(". ")[0].removesuffix(".") + ".")
    assert outline.written > 0


def test_packing(recipe):
    """Every row begins with a whole story, and every story appears whole."""
    import numpy as np

    width = recipe.network.CONTEXT + 1
    rng = np.random.default_rng(0)
    stories = [np.append(np.full(n, i + 1, np.int16), 0).astype(np.int16) for i, n in enumerate(rng.integers(5, 400, 40))]
    order = rng.permutation(40)
    for fill in (True, False):
        rows = recipe.train.pack(stories, order, fill=fill)
        assert rows.shape[1] == width
        whole = []
        for row in rows:
            text = [*row[row >= 0]]
            assert fill == (len(text) == width) or len(text) == width
            while text:
                story = stories[text[0] - 1]
                if text[: len(story)] == [*story]:
                    whole.append(text[0] - 1)
                else:
                    assert fill
                    assert text == [*story[: len(text)]]
                text = text[len(story) :]
        # A story that exactly fills the end of a row counts there too, in addition to its own row.
        assert sorted(set(whole)) == sorted(order)
        assert len(whole) == 40 or fill


def test_the_network_is_qwen2(recipe, tmp_path):
    """On the written checkpoint, logits equal those of transformers and minirt. Biases and norms are not trivial."""
    import transformers

    torch.manual_seed(0)
    model = recipe.network.qwen2(vocab_size=300, hidden_size=56, num_hidden_layers=2, intermediate_size=64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name))
            parameter.copy_(parameter.to(torch.bfloat16))
    recipe.train.write_model(model, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json"} < names
    tokens = torch.randint(0, 300, (1, 77))
    with torch.no_grad():
        ours = model(tokens).logits[0]
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()(tokens).logits[0]
    assert (ours - theirs).norm() < 1e-4 * theirs.norm()
    with Generator.from_pretrained(tmp_path, device="cpu", kv_cache_memory=1 << 22, check_weights=True) as generator:
        logits = generator.logits(tokens[0].tolist())
        assert generator.eos_token_ids == (0,)
    assert (logits - theirs).norm() < 1e-4 * theirs.norm()


def test_the_tokenizer(recipe, tmp_path):
    """Any text survives the round trip, the end token has id 0, and minirt and transformers give the same ids."""
    import transformers

    from minirt.text.tokenizer import Tokenizer

    texts = [finished(recipe.outlines.draw(random.Random(seed))) for seed in range(50)]
    recipe.train.train_tokenizer(texts, 600, tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.vocab_size == 600
    assert tokenizer.eos_token_id == theirs.eos_token_id == 0
    for text in (texts[0], " é€\n\n🦊 don't", recipe.train.END + "Once"):
        ids = tokenizer.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode(recipe.train.END + "Once")[0] == 0
    (ids,) = recipe.train.encode(tmp_path, [texts[0]])
    assert ids.tolist() == [*tokenizer.encode(texts[0]), 0]


@pytest.fixture
def tiny(recipe, tmp_path):
    """A tiny model and draft layers, with biases and norms that are not trivial, written to `tmp_path` in fp32 values of bf16."""
    torch.manual_seed(1)
    model = recipe.network.qwen2(
        vocab_size=97, hidden_size=56, num_hidden_layers=2, intermediate_size=64, max_position_embeddings=160
    )
    mtp = recipe.train_mtp.MTP(model.config, 24)
    with torch.no_grad():
        for module in (model, mtp):
            for name, parameter in module.named_parameters():
                parameter.copy_((torch.randn_like(parameter) * 0.2 + ("norm" in name)).to(torch.bfloat16))
    recipe.train.write_model(model, tmp_path)
    recipe.train_mtp.write(mtp, model, tmp_path)
    return model, mtp, tmp_path


def test_the_draft_layers_are_trained_on_what_they_get_at_inference(recipe, tiny):
    """minirt's drafts are those of the network, which computes all of them for all positions at once.

    Catches halves of `fc` that are exchanged, states of another position, further drafts that see rows of the first one which do
    not exist yet, and an MLP of the decoder's size.
    """
    _, mtp, folder = tiny
    model = recipe.train_mtp.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = SpeculativeOptions(method="mtp", adaptive=False)
    texts = [[5, 6, 7], [(7 * i * i + 3) % 96 + 1 for i in range(70)]]
    with Generator.from_pretrained(
        folder, device="cpu", dtype="float32", kv_cache_memory=1 << 22, max_num_seqs=2, speculative=options
    ) as generator:
        assert generator.unused_tensors == ()
        seen = watch(generator)
        done = generator.generate(texts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    checked = set()
    for length, cached, _, drafts in seen:
        text, completion = next((text, completion) for text, completion in zip(texts, done, strict=True) if len(text) == length)
        tokens = torch.tensor([[*text, *completion.token_ids][: cached + 1] + drafts])
        with torch.no_grad():
            logits = mtp(model, tokens, recipe.network.states_of(model, tokens))
        for number, draft in enumerate(drafts):
            row = logits[number][0, cached - 1 + number]
            assert row[draft] >= row.max() - 1e-4
            checked.add(number)
    assert checked == {0, 1, 2}
    assert len(seen) > 30

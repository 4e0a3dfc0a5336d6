"""Text after a prompt: decode(prompt) + text = decode(prompt + tokens), for tokens and splits of every kind.

Catches a space that is lost between prompt and text, characters that come late, twice or never, and work that grows with the
prompt.
"""

import random
from collections.abc import Sequence
from unittest.mock import Mock

import pytest
from support.vocabularies import TEXTS, VOCABULARIES, decoded, gpt2_like, llama_like, save
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models

from minirt.text.detokenizer import incremental_decoder, prompt_text
from minirt.text.tokenizer import Tokenizer, byte_alphabet


def load(made: HFTokenizer, folder) -> Tokenizer:
    return Tokenizer.load(save(made, folder)) or pytest.fail("no tokenizer")


def pieces_after(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], skip: bool = True) -> list[str]:
    decoder = incremental_decoder(tokenizer, skip, prompt)
    return [*map(decoder.push, ids), decoder.flush()]


def broken_end(made: HFTokenizer, ids: Sequence[int], skip: bool) -> int:
    """How many U+FFFD decode(ids) ends with because a character is not complete: the rule for splits inside a character."""
    data = b""
    for token in map(made.id_to_token, ids):
        if token is None or (skip and token in ("<unk>", "<s>", "</s>")):
            continue
        if made.token_to_id("<0x00>") is not None:
            data = data + bytes.fromhex(token[3:5]) if token.startswith("<0x") else b""
        elif made.token_to_id("Ġ") is not None:
            letters = byte_alphabet()
            data += bytes(letters[c] for c in token) if letters.keys() >= set(token) else token.encode()
    if data[-2:-1] == b"\xed" and 0xA0 <= data[-1] < 0xC0:  # Python waits for half a surrogate pair's third byte
        return 2
    for size in (1, 2, 3):
        try:
            data[-size:].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return size if made.token_to_id("<0x00>") is not None else 1
    return 0


def some_ids(rng: random.Random, made: HFTokenizer) -> list[int]:
    """Texts, single characters in bytes, random tokens and special ones, in any order and cut anywhere."""
    ids: list[int] = []
    for _ in range(rng.randrange(6)):
        kind = rng.randrange(5)
        if kind == 0:
            ids += made.encode(rng.choice(TEXTS), add_special_tokens=rng.random() < 0.5).ids[rng.randrange(3) :]
        elif kind == 1 and made.token_to_id("<0x00>") is not None:
            own = [made.token_to_id(f"<0x{byte:02X}>") for byte in rng.choice(["\n", " ", "你", "🙂", "\n\n", "é"]).encode()]
            ids += own[: rng.choice([1, 2, 9, 9, 9])]
        elif kind == 2:
            ids += [rng.randrange(3)]
        else:
            ids += [rng.randrange(made.get_vocab_size() + 2) for _ in range(rng.randrange(6))]
    return ids


@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_text_of_prompt_and_completion_is_that_of_all_tokens(name, tmp_path):
    """10,000 splits. Without the prompt, the first space of the completion is lost, or a word is not separated."""
    made = VOCABULARIES[name]()
    tokenizer, rng, inside, exact = load(made, tmp_path), random.Random(5), 0, 0
    for _ in range(10_000 // 3 + 1):
        ids, skip = some_ids(rng, made), rng.random() < 0.7
        split = rng.randrange(len(ids) + 1)
        prompt, rest = ids[:split], ids[split:]
        before, text = prompt_text(tokenizer, prompt, skip), "".join(pieces_after(tokenizer, prompt, rest, skip))
        assert before + text == decoded(made, ids, skip), (prompt, rest)
        end = broken_end(made, prompt, skip)
        assert before + "\ufffd" * end == decoded(made, prompt, skip), "the character at the end is the completion's"
        inside += end > 0
        first, whole = (made.decode(own, skip_special_tokens=skip) for own in (prompt, ids))
        if not end and (first, whole) == (decoded(made, prompt, skip), decoded(made, ids, skip)):  # all runs are valid
            exact += 1
            assert first + text == whole
    assert exact > 1500
    assert (inside > 100) == (name != "bert")


@pytest.mark.parametrize(("prompt", "token"), [("Once upon a time", "▁there"), ("def a:\n", "▁▁▁▁"), ("(", "▁a"), ("a", "▁")])
@pytest.mark.parametrize("metaspace", [False, True])
def test_the_first_space_of_a_completion_is_kept(prompt, token, metaspace, tmp_path):
    tokenizer = load(llama_like(metaspace=metaspace), tmp_path)
    ids = tokenizer.encode(prompt)
    assert prompt_text(tokenizer, ids) == prompt
    assert "".join(pieces_after(tokenizer, ids, [tokenizer.token_id(token)])) == token.replace("▁", " ")


def test_without_text_before_it_the_first_space_goes_unless_it_is_to_stay(tmp_path):
    """BOS alone is no text: the decoder drops the space, as for the whole. A grammar's text keeps it."""
    tokenizer = load(llama_like(), tmp_path)
    a, bare = tokenizer.token_id("▁a"), tokenizer.token_id("▁")
    for prompt in ([], [1], [1, 2, 1], [10**6], [None, -1, "a", 1.5, 2**40]):  # what is no id is refused elsewhere
        assert pieces_after(tokenizer, prompt, [a, a]) == ["a", " a", ""]
        assert pieces_after(tokenizer, prompt, [bare, a]) == ["", " a", ""]
        decoder = incremental_decoder(tokenizer, True, prompt, keep_space=True)
        assert [decoder.push(a), decoder.push(a)] == [" a", " a"]
    assert pieces_after(tokenizer, [1], [a], skip=False) == [" a", ""], "<s> is text if special tokens are not left out"
    assert pieces_after(tokenizer, [1, bare], [a]) == [" a", ""], "the prompt's own space was dropped"


def test_characters_of_byte_tokens_come_with_their_last_byte(tmp_path):
    """They were held back to the end of their run. Wrong bytes after them do not change them."""
    tokenizer = load(llama_like(), tmp_path)

    def run(data: bytes) -> list[int]:
        return [3 + byte for byte in data]

    a = tokenizer.token_id("▁a")
    assert pieces_after(tokenizer, [a], run("\n\n龘🙂".encode())) == ["\n", "\n", "", "", "龘", "", "", "", "🙂", ""]
    assert pieces_after(tokenizer, [a], [*run("龘".encode()[:2]), a]) == ["", "", "\ufffd\ufffd a", ""]
    assert pieces_after(tokenizer, [a], run(b"\n\xff\n\xe9\xbe")) == ["\n", "\ufffd", "\n", "", "", "\ufffd\ufffd"]
    assert pieces_after(tokenizer, [a], run(b"\xe9\xe9\xbe\n")) == ["", "\ufffd", "", "\ufffd\ufffd\n", ""]
    assert pieces_after(tokenizer, [a], run(b"\xed\xa0\x80\xc0\x80")) == ["", "", "\ufffd" * 3, "\ufffd", "\ufffd", ""]
    assert pieces_after(tokenizer, [a, *run("龘".encode()[:2])], run("龘".encode()[2:])) == ["龘", ""]
    assert pieces_after(tokenizer, [a, *run("龘".encode()[:1])], [2, *run("龘".encode()[1:])]) == ["", "", "龘", ""]
    assert pieces_after(tokenizer, [], run(b"  ")) == ["", " ", ""], "the first space of the text"


def test_decoders_that_look_at_neighbours_follow_the_prompt_too(tmp_path):
    """A suffix becomes a space where a token follows; byte tokens before other steps than Fuse are one decision for the run."""
    tokens = ["<unk>", "<s>", "</s>", "b", "c</w>", "▁", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = {token: i for i, token in enumerate(tokens)}
    suffix = HFTokenizer(models.BPE(words, []))
    suffix.decoder = decoders.BPEDecoder()
    late = HFTokenizer(models.BPE(words, []))
    late.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    rng = random.Random(3)
    for name, made in (("suffix", suffix), ("late", late)):
        tokenizer = load(made, tmp_path / name)
        for _ in range(500):
            ids = rng.choices([*range(7), 7 + 10, 7 + 0xC3, 7 + 0xA9], k=rng.randrange(12))
            split = rng.randrange(len(ids) + 1)
            text = "".join(pieces_after(tokenizer, ids[:split], ids[split:], skip=False))
            assert prompt_text(tokenizer, ids[:split], False) + text == made.decode(ids, skip_special_tokens=False), (ids, split)


@pytest.mark.parametrize("made", [llama_like, gpt2_like])
def test_a_long_prompt_costs_no_more_than_a_short_one(made, tmp_path):
    """Counts the calls of the library for a prompt of 100,000 tokens: those of the whole would take tens of milliseconds."""
    tokenizer = load(made(), tmp_path)
    prompt = tokenizer.encode(" ".join(TEXTS)) * 2000
    tokenizer._library = library = Mock(wraps=tokenizer._library)
    decoder = incremental_decoder(tokenizer, True, prompt)
    assert len(prompt) > 100_000
    assert len(library.method_calls) < 40
    assert decoder.push(tokenizer.token_id("▁there") or tokenizer.encode(" there")[0])[0] == " "


def test_tokens_without_text_at_the_beginning_cost_no_more_than_others(tmp_path):
    """All of them were decoded again with each, until one had text: the square of their number."""
    made = llama_like()
    made.decoder = decoders.Sequence([decoders.Replace("é", ""), *[made.decoder]])
    tokenizer = load(made, tmp_path)
    nothing, a = tokenizer.token_id("é"), tokenizer.token_id("▁a")
    tokenizer._library = library = Mock(wraps=tokenizer._library)
    assert "".join(pieces_after(tokenizer, [], [nothing] * 500 + [a, nothing, a])) == "a a" == made.decode([nothing, a, a])
    assert sum(len(call.args[0]) for call in library.decode.call_args_list) < 1200

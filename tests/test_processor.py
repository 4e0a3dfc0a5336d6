"""From requests to text with the tokenizers of known models, without an engine: prompts, stop strings and bad words.

Catches text that does not continue its prompt, stop strings that end a text late or never, and bad words that are forbidden only
at the beginning of a text.
"""

import itertools

import pytest
from support.vocabularies import bert_like, gpt2_like, llama_like, save

from minirt import SamplingParams
from minirt.call_driver import CallDriver
from minirt.engine.request import TokenLogprobs, TokenOutput
from minirt.errors import InputError
from minirt.processor import Call, Processor
from minirt.text.tokenizer import Tokenizer

EOS = 2


class NoEngine:
    max_len, keeps_states = 256, False

    def __init__(self):
        self._ids = itertools.count()

    def new_id(self):
        return next(self._ids)

    check = submit = abort = lambda *_: None


def made(library, folder, generation_config=None, **config) -> Processor:
    tokenizer = Tokenizer.load(save(library, folder, **config))
    return Processor(NoEngine(), "model", tokenizer, generation_config, (EOS,), tokenizer.vocab_size)


@pytest.fixture
def llama(tmp_path):
    return made(llama_like(), tmp_path)


def started(call: Call):
    """The request of a call, and its driver."""
    driver = CallDriver(call, NoEngine(), None)
    driver.start()
    return call.requests[0], driver


def run(call: Call, tokens) -> list[tuple[str, str | None]]:
    """The pieces of a call whose engine draws these tokens, and why each was the last. Ends as an engine does."""
    request, driver = started(call)
    ends, pieces = {EOS, *request.sampling.stop_token_ids}, []
    for i, token in enumerate(tokens, 1):
        reason = "stop" if token in ends else "length" if i == len(tokens) else None
        _, piece = driver.push(TokenOutput(request.id, (token,), reason))
        pieces.append((piece.text, piece.finish_reason))
        if piece.finish_reason is not None:
            break
    assert "".join(text for text, _ in pieces) == call.result().text
    return pieces


def prepared(processor, prompt, **options) -> Call:
    return processor.prepare(prompt, SamplingParams(**options), single=True)


@pytest.mark.parametrize(("prompt", "token"), [("Once upon a time", "▁there"), ("def a:\n", "▁▁▁▁")])
def test_prompt_and_text_join(llama, prompt, token):
    """The first space of the completion was lost: "Once upon a timethere"."""
    tokenizer = llama.text()
    call = prepared(llama, prompt)
    run(call, [tokenizer.token_id(token)])
    done = call.result()
    assert prompt + done.text == tokenizer.decode(done.prompt_token_ids + done.token_ids)
    samples = llama.prepare(prompt, SamplingParams(n=2, temperature=1), single=True)
    assert [stream.decoder.push(tokenizer.token_id(token)) for stream in samples.streams] == [token.replace("▁", " ")] * 2
    assert run(prepared(llama, prompt, truncate_prompt_tokens=1), [tokenizer.token_id(token)])[0][0] == token.replace("▁", " ")


def test_a_stop_string_that_begins_with_a_space_matches_the_first_token(llama):
    there = llama.text().token_id("▁there")
    assert run(prepared(llama, "Once", stop=" there"), [there, there]) == [("", "stop")]
    assert run(prepared(llama, [1], stop=" there"), [there, there]) == [("there", None), ("", "stop")], "no space without text"


def test_a_grammar_may_begin_with_a_space(llama):
    """The text is what the grammar accepted, also after a prompt without text."""
    there = llama.text().token_id("▁there")
    for prompt in ("Once", [1]):
        assert run(prepared(llama, prompt, structured_outputs={"regex": " there"}), [there, EOS])[0][0] == " there"
    late = {"regex": " there", "reasoning_end": "</think>"}
    assert run(prepared(llama, [1], structured_outputs=late), [there, EOS])[0][0] == "there", "the reasoning comes first"


def test_a_newline_in_bytes_stops_at_once(llama):
    """A stop string of byte tokens was found at the end of their run, up to max_tokens late."""
    newline = llama.text().token_id("<0x0A>")
    assert run(prepared(llama, "a"), [newline] * 6) == [("\n", None)] * 5 + [("\n", "length")]
    assert run(prepared(llama, "a", stop="\n"), [newline] * 6) == [("", "stop")]
    two = prepared(llama, "a", stop="\n\n", include_stop_str_in_output=True)
    assert run(two, [newline] * 6) == [("", None), ("\n\n", "stop")]
    wide = [llama.text().token_id(f"<0x{byte:02X}>") for byte in "龘龘".encode()]
    assert run(prepared(llama, "a", stop="龘"), wide) == [("", None), ("", None), ("", "stop")]


@pytest.mark.parametrize("library", [llama_like, gpt2_like, bert_like])
@pytest.mark.parametrize("skip", [True, False])
def test_a_special_token_as_stop_string_is_a_stop_token(library, skip, tmp_path):
    """It was never found, because special tokens are left out of the text."""
    processor = made(library(), tmp_path)
    a = processor.encode("a")[-1]
    for stop in ("<s>", "</s>"):
        token = processor.text().token_id(stop)
        options = {"stop": ["zzz", stop], "skip_special_tokens": skip}
        call = prepared(processor, "Once", **options)
        assert token in call.requests[0].sampling.stop_token_ids
        plain, _ = run(call, [a, token, a])
        assert call.result().finish_reason == "stop"
        assert call.result().token_ids == [a, token]
        assert call.streams[0].stops.match == stop
        assert call.result().text == plain[0]
        call = prepared(processor, "Once", include_stop_str_in_output=True, **options)
        run(call, [a, token, a])
        spaced = " " * (library is bert_like and not skip)  # as the decoder writes it
        assert (call.result().text, call.streams[0].stops.match) == (f"{plain[0]}{spaced}{stop}", stop)
    call = prepared(processor, "Once", stop_token_ids=[a], stop="</s>")
    run(call, [a])
    assert call.streams[0].stops.match is None, "another stop token ended it"


def test_what_is_held_back_comes_before_a_stop_token(llama):
    """The beginning of another stop string, and bytes that are no character, belong to the text."""
    tokenizer = llama.text()
    a, byte, bos = tokenizer.token_id("▁a"), tokenizer.token_id("<0xE9>"), 1
    call = prepared(llama, "Once", stop=[" ab", "<s>"])
    assert run(call, [a, bos]) == [("", None), (" a", "stop")]
    assert call.streams[0].stops.match == "<s>"
    assert run(prepared(llama, "Once", stop="<s>", include_stop_str_in_output=True), [byte, bos])[-1] == ("\ufffd<s>", "stop")


def test_a_stop_string_with_a_special_token_and_other_text_is_refused(llama, tmp_path):
    """It can only match if special tokens are part of the text."""
    for stop in ("</s>\n", "a<s>", ["b", "</s></s>"]):
        with pytest.raises(InputError, match=r"^stop: a stop string holds the special token </?s>.*skip_special_tokens=False"):
            prepared(llama, "Once", stop=stop)
        with pytest.raises(InputError, match="stop string holds"):
            llama.check([1], SamplingParams(stop=stop))
        prepared(llama, "Once", stop=stop, skip_special_tokens=False)
    tokens = [EOS - 1, llama.text().token_id("<0x0A>")]
    assert run(prepared(llama, "Once", stop="<s>\n", skip_special_tokens=False), tokens) == [("", None), ("", "stop")]
    filed = made(llama_like(), tmp_path / "filed", {"stop_strings": ["</s>\n"]})
    with pytest.raises(InputError, match=r"^generation_config\.json: stop_strings: a stop string holds"):
        prepared(filed, "Once")
    prepared(filed, "Once", stop=[])


@pytest.mark.parametrize("library", [llama_like, lambda: llama_like(metaspace=True), gpt2_like])
def test_bad_words_are_forbidden_within_a_word_and_after_a_space(library, tmp_path):
    """With a prefix space, the form within a word was not forbidden, and the other one had two spaces."""
    processor = made(library(), tmp_path)
    tokenizer = processor.text()
    for word in ("there", "a", "(", "\n", "好", "the there", "龘", "🙂"):
        (request,) = prepared(processor, "Once", bad_words=word).requests
        texts = [b"".join(map(tokenizer.token_bytes, ids)).decode() for ids in request.bad_words]
        assert texts == [word.lstrip() or word, " " + (word.lstrip() or word)]
    if library is not gpt2_like:
        ids = {tokenizer.token_id("there"), tokenizer.token_id("▁there")}
        assert {ids for (ids,) in prepared(processor, "Once", bad_words=" there").requests[0].bad_words} == ids
    assert (EOS,) in prepared(processor, "Once", bad_words="</s>").requests[0].bad_words


def test_a_part_of_a_text_is_encoded_as_in_a_text(tmp_path):
    """Against the tokens of a longer text, at places where its tokens do not merge with it."""
    for name, library in (("llama", llama_like()), ("gpt2", gpt2_like()), ("bert", bert_like())):
        tokenizer = made(library, tmp_path / name).text()
        whole = tokenizer.encode("Once upon a time there was the ( (\n", None)
        for part in (" there", " upon", " (", " a"):
            ids = tokenizer.encode_inside(part)
            assert any(whole[i : i + len(ids)] == ids for i in range(len(whole))), (name, part, ids)
    bert = Tokenizer.load(tmp_path / "bert")
    assert bert.spellings("there") == [(bert.token_id("##there"),), (bert.token_id("there"),)]


def test_a_stop_string_inside_the_tokens_of_a_step(llama):
    """Four tokens in one output, three of them drafts. Catches tokens, log-probabilities or drafts behind the stop string."""
    there, upon = (prepared(llama, f"Once {text}").requests[0].prompt_token_ids[-1] for text in ("there", "upon"))
    call = prepared(llama, "Once", stop=" there", logprobs=0)
    request, driver = started(call)
    tokens = (upon, there, upon, upon)
    rows = tuple(TokenLogprobs(token, -1.0, 1) for token in tokens)
    _, piece = driver.push(TokenOutput(request.id, tokens, None, logprobs=rows, num_draft_tokens=4, num_accepted_tokens=3))
    assert (piece.token_ids, piece.text, piece.finish_reason) == ((upon, there), " upon", "stop")
    done = call.result()
    assert (done.token_ids, [row.token_id for row in done.logprobs]) == ([upon, there], [upon, there])
    assert (done.num_draft_tokens, done.num_accepted_tokens, done.acceptance_length) == (4, 1, 2.0)


def test_requests_say_where_the_history_of_a_conversation_ends(tmp_path, monkeypatch):
    """Also if the beginning of the prompt is cut off; not of other prompts."""
    monkeypatch.setattr(NoEngine, "keeps_states", True)
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    processor = made(llama_like(), tmp_path, chat_template=template)
    tokens = processor.encode_chat([{"role": "user", "content": "Once upon a time"}])
    kept, added = len(tokens), len(tokens) - tokens.history_len
    assert 0 < added < kept
    for params, history in (
        (None, kept - added), (SamplingParams(truncate_prompt_tokens=added + 2), 2), (SamplingParams(truncate_prompt_tokens=1), 0)
    ):
        (request,) = processor.prepare(tokens, params, single=True).requests
        assert request.history_len == history
    (request,) = processor.prepare(list(tokens), None, single=True).requests
    assert request.history_len == 0

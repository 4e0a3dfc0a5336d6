"""Grammars and masks without a model: languages, ends, reasoning blocks, limits, the cache.

Catches a mask that allows too much or too little, an end before the grammar's, ids that the tokenizer lacks, a choice that hides
another, state that two sequences share, and errors of llguidance that escape.
"""

import random
import re
import sys
import threading
from contextlib import suppress

import llguidance
import pytest
import tokenizers
import torch
from support.structured import EOS, TOKENIZER, VOCAB, allowed, compiled, constraints, draw, text_of
from tokenizers import decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Sequence

from minirt.engine.token_constraints import ConstrainedRows
from minirt.errors import InputError, UnsupportedError
from minirt.structured import constraints as module
from minirt.structured import grammar, matchers
from minirt.structured.constraints import Constraints
from minirt.structured.params import StructuredOutputsParams
from minirt.text.addressed import ADDRESSED
from minirt.text.harmony import HARMONY

OWN = constraints()


def ids(text):
    return TOKENIZER.encode(text)


def after(constraint, text):
    constraint.accept(ids(text))
    return allowed(OWN, constraint)


REGEXES = [
    "a", "ab*c?", "(cat|dog)s? [0-9]{3}", "[^a-z]{1,5}", ".{2,4}", "(?s:.){3}", "[äöüß]+", "日本?語", "😀{1,3}",
    r"\d+\.\d{2}", "[a-z]+@[a-z]+", "(ab|a)(bc|c)?", "x{0,7}y", "[\\u0041-\\u0043]+", '"[^"\\\\]*"', "(a|b){4}!", "(?i)hello",
]  # fmt: skip


@pytest.mark.parametrize("regex", REGEXES)
def test_a_regular_expression_matches_the_whole_text(regex):
    compiled_regex = compiled(OWN, regex=regex)
    texts = {text_of(tokens) for seed in range(6) for tokens, done in [draw(OWN, compiled_regex.start((EOS,), 0), seed)] if done}
    assert texts
    for text in texts:
        assert re.fullmatch(regex, text), text


CHOICES = [
    ["a", "ab", "abc"], ["yes", "no"], ["x"], ["a b", "a  b", " a"], ["été", "ete", "日本", "日", "😀😀", "😀"],
    ['"', "\\", "\n", "/", "'"], ["(a)", "[b]", "a|b", ".*", "$x^", "%json", "<|endoftext|>"],
    ["\x00", "\x1f", "\x7f", "a\x7fb", "\x85", "\u2028"],
]  # fmt: skip


@pytest.mark.parametrize("choices", CHOICES)
def test_every_choice_and_nothing_else(choices):
    """Choices that begin with another choice, and characters that mean something in a grammar."""
    own = compiled(OWN, choice=choices)
    texts = {text_of(tokens) for seed in range(40) for tokens, done in [draw(OWN, own.start((EOS,), 0), seed, push=99)] if done}
    assert texts == set(choices)


def test_a_grammar():
    lark = 'start: item ("," item)*\nitem: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,3}/\n'
    own = compiled(OWN, grammar=lark)
    for seed in range(8):
        tokens, done = draw(OWN, own.start((EOS,), 0), seed, limit=300)
        text = text_of(tokens)
        assert set(text) <= set("0123456789(),")
        if done:
            inner = re.sub(r"[0-9]{1,3}", "n", text)
            while inner != (inner := re.sub(r"\(n(,n)*\)", "n", inner)):
                pass
            assert re.fullmatch("n(,n)*", inner), text


def test_json_object_is_an_object():
    first = allowed(OWN, compiled(OWN, json_object=True).start((EOS,), 0))
    assert {TOKENIZER.decode([token]) for token in first.nonzero().flatten().tolist()} == {"{"}


def test_the_text_ends_only_where_the_grammar_does():
    constraint = compiled(OWN, regex="ab+").start((EOS,), 0)
    assert not allowed(OWN, constraint)[EOS]
    assert not after(constraint, "a")[EOS]
    assert after(constraint, "b")[EOS]
    done = compiled(OWN, regex="ab").start((EOS,), 0)
    assert after(done, "ab").nonzero().flatten().tolist() == [EOS]


def test_any_number_of_tokens_at_once():
    together, apart = (compiled(OWN, regex="[a-f]{6}[0-9]{3}").start((EOS,), 0) for _ in range(2))
    tokens = [token for letter in "abcdef01" for token in ids(letter)]
    together.accept(tokens[:5])
    together.accept(tokens[5:])
    for token in tokens:
        apart.accept([token])
        last = allowed(OWN, apart)
    assert torch.equal(allowed(OWN, together), last)
    assert torch.equal(allowed(OWN, together), last), "asking twice changes nothing"
    assert {TOKENIZER.decode([t]) for t in last.nonzero().flatten().tolist()} == set("0123456789")


def test_sequences_of_one_grammar_share_no_state(monkeypatch):
    """Neither that of the parser, nor the lexer's, whose states are limited."""
    own = compiled(OWN, regex="a{3}b")
    first, second = own.start((EOS,), 0), own.start((EOS,), 0)
    after(first, "aaab")
    third = own.start((EOS,), 0)
    assert torch.equal(allowed(OWN, second), allowed(OWN, third))
    assert not allowed(OWN, third)[EOS]
    monkeypatch.setattr(grammar.limits, "MAX_LEXER_STATES", 300)
    limited = constraints()
    growing, letters = compiled(limited, regex=".*a.{12}"), random.Random(0)
    failing = growing.start((EOS,), 0)
    failing.accept([token for _ in range(2000) for token in ids(letters.choice("ab"))])
    with pytest.raises(InputError):
        allowed(limited, failing)
    assert allowed(limited, growing.start((EOS,), 0)).any()


def test_several_ends():
    """Two end-of-sequence tokens, and a stop token of the request: allowed where the text may end, and only there."""
    own, stop = constraints((EOS, 7)), 2040
    constraint = compiled(own, regex="q+").start((EOS, 7, stop), 0)
    assert not allowed(own, constraint)[[EOS, 7, stop]].any()
    constraint.accept(ids("q"))
    assert allowed(own, constraint)[[EOS, 7, stop]].all()
    assert not allowed(own, constraint)[[5, 6, 8, 2039]].any()
    beyond = compiled(own, regex="q").start((EOS, 7, VOCAB - 1), 0)
    beyond.accept(ids("q"))
    assert allowed(own, beyond).nonzero().flatten().tolist() == [EOS, 7], "an end that the tokenizer lacks"


def test_an_end_that_is_ordinary_text():
    """One of the model's is allowed only where the text may end. One of the request's that fits ends the text anywhere."""
    (letter,) = ids("q")
    for own, ends in ((constraints((EOS, letter)), (EOS, letter)), (constraints((letter,)), (letter,))):
        constraint = compiled(own, regex="[a-z]{3}").start(ends, 0)
        for text in ("a", "bc"):
            assert not allowed(own, constraint)[letter]
            constraint.accept(ids(text))
        assert allowed(own, constraint).nonzero().flatten().tolist() == list(ends)
    assert allowed(OWN, compiled(OWN, regex="[a-z]{3}").start((EOS, letter), 0))[letter]


def test_min_tokens():
    constraint = compiled(OWN, regex="[xyz]{1,5}").start((EOS, 9), 3)
    for _ in range(2):
        assert not after(constraint, "x")[[EOS, 9]].any()
    assert after(constraint, "x")[[EOS, 9]].all()
    forced = compiled(OWN, regex="xx?").start((EOS,), 3)
    assert not after(forced, "x")[EOS]
    assert after(forced, "x").nonzero().flatten().tolist() == [EOS], "the grammar allows nothing else"


@pytest.mark.parametrize("lark", ["start: <[*]>", "start: <[40-2099]>", "start: <[2050]> | <[3]>", 'start: <[^5]> "x"'])
def test_ids_that_the_tokenizer_lacks_are_never_allowed(lark):
    choice = allowed(OWN, compiled(OWN, grammar=lark).start((EOS,), 0))
    assert choice.any()
    assert not choice[TOKENIZER.vocab_size :].any()


@pytest.mark.parametrize("spec", [{"regex": "a{2000}b*"}, {"grammar": "start: <|endoftext|> /b+/"}, {"json": {"const": "a"}}])
def test_looking_ahead_changes_no_mask(spec):
    """A grammar with only one beginning is tried by one token when it is checked. The first matcher is the one that was used."""
    own = constraints()
    grammar_of = compiled(own, **spec)
    tried, fresh = (grammar_of.start((1,), 0) for _ in range(2))
    for _ in range(20):
        choice = allowed(own, fresh)
        assert torch.equal(allowed(own, tried), choice)
        token = int(choice.nonzero()[-1])
        if token == 1:
            break
        for each in (tried, fresh):
            each.accept([token])


def test_a_grammar_may_name_special_tokens():
    choice = allowed(OWN, compiled(OWN, grammar="start: <|endoftext|>").start((1,), 0))
    assert choice.nonzero().flatten().tolist() == [0]


NAME = TOKENIZER.decode([EOS], skip_special_tokens=False)


@pytest.mark.parametrize(("spec", "text"), [
    ({"choice": [NAME]}, NAME), ({"regex": re.escape(NAME) + "abc"}, NAME + "abc"), ({"json": {"const": NAME}}, f'"{NAME}"'),
    ({"json": {"const": f"a {NAME} b"}}, f'"a {NAME} b"'), ({"grammar": f'start: "{NAME}" "x"'}, NAME + "x"),
    ({"json": {"type": "object", "properties": {NAME: {"const": 1}}, "required": [NAME], "additionalProperties": False},
      "disable_any_whitespace": True}, f'{{"{NAME}":1}}'),
    ({"grammar": f'start: "{NAME}" {NAME} "x"'}, NAME + NAME + "x"),
])  # fmt: skip
def test_the_name_of_a_special_token_is_text(spec, text):
    """llguidance tokenizes a text that is the only one. A Lark grammar may have the name as text and as token."""
    constraint, tokens = compiled(OWN, **spec).start((1,), 0), []
    while text_of(tokens) != text:
        choice = allowed(OWN, constraint).nonzero().flatten().tolist()
        assert choice, text_of(tokens)
        tokens.append(choice[0])
        constraint.accept(tokens[-1:])
        assert text.startswith(text_of(tokens)), text_of(tokens)
    assert tokens.count(EOS) == text.count(NAME) - 1
    assert allowed(OWN, constraint)[1], "complete"


def byte_level(normalizer=None, prefix=False):
    """A tokenizer.json with a token for each byte. `prefix`: it puts a space before a text."""
    own = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    own.normalizer, own.pre_tokenizer, own.decoder = normalizer, ByteLevel(add_prefix_space=prefix), decoders.ByteLevel()
    return own


def metaspace():
    """Its pre-tokenizer puts a space before a text."""
    own = sentencepiece(models.BPE({piece: i for i, piece in enumerate(PIECES)}, [], unk_token="<unk>", byte_fallback=True))
    own.normalizer, own.pre_tokenizer = None, Sequence([Metaspace(prepend_scheme="always", split=False)])
    return own


def sentencepiece(model):
    own = tokenizers.Tokenizer(model)
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    own.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return own


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["<unk>", "</s>", *BYTES, *"▁<>/Aahiknstu"]


@pytest.mark.parametrize(
    "own",
    [
        byte_level(), byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
        sentencepiece(models.BPE({piece: i for i, piece in enumerate(PIECES)}, [], unk_token="<unk>", byte_fallback=True)),
        sentencepiece(models.Unigram([(piece, -float(i > 1)) for i, piece in enumerate(PIECES)], 0, True)),
        byte_level(prefix=True), metaspace(),
    ],
    ids=["byte-level", "normalizers", "BPE", "Unigram", "byte-level with a prefix", "Metaspace"],
)  # fmt: skip
def test_a_text_is_tokenized_to_its_bytes(own):
    """For llguidance: no special token, nor what it counts as one, no normalizer, no space in front.

    Other added tokens still match.
    """
    own.add_special_tokens(["<unk>", "</s>"])
    own.add_tokens(["<think>", "[INST]", "a  "])
    source = matchers.without_special(own.to_str())
    made = llguidance.LLTokenizer(source, n_vocab=own.get_vocab_size(), eos_token=[own.token_to_id("</s>")])
    for text in ("</s>", "a</s> a", "<think>A</think>", "e\u0301 ", " <unk>"):
        tokens = made.tokenize_str(text)
        assert made.decode_bytes(tokens).decode() == text
        assert not any(map(made.is_special_token, tokens))
    assert made.tokenize_str("[INST]a  ") == [own.token_to_id("[INST]"), own.token_to_id("a  ")]
    matcher = llguidance.LLMatcher(made, llguidance.LLMatcher.grammar_from_lark("start: </s>"), log_level=0)
    assert matcher.compute_ff_tokens() == [own.token_to_id("</s>")], "a grammar may name it"


def test_a_library_that_takes_a_text_for_a_special_token_is_refused(monkeypatch):
    monkeypatch.setattr(matchers, "without_special", lambda serialized: serialized)
    with pytest.raises(UnsupportedError, match=r"this version of llguidance takes .* found <\|endoftext\|>"):
        compiled(constraints(), regex="a")


MARKERS = [
    (".", "I think", "."), ("</think>", "</thi", "nk>"), ("ab", "aa", "b"), ("é!", "é", "!"), ("n an", "n a", "n"),
    ("th", "t", "h"),
]  # fmt: skip


@pytest.mark.parametrize(("marker", "before", "final"), MARKERS)
def test_the_grammar_begins_after_the_reasoning_block(marker, before, final):
    constraint, end = compiled(OWN, regex="[0-9]+", reasoning_end=marker).start((EOS, 8), 0), marker.encode()
    texts = {token: TOKENIZER.token_bytes(token) for token in range(TOKENIZER.vocab_size)}
    for text in ("", before):
        choice = after(constraint, text) if text else allowed(OWN, constraint)
        expected = [t for t, own in texts.items() if t not in (EOS, 8) and not (text.encode() + own).partition(end)[2]]
        why = "free, but no end, no id that the tokenizer lacks, and no text after the end of the block in its token"
        assert choice.nonzero().flatten().tolist() == expected, why
    assert len(expected) < len(texts) - 2 or marker == "</think>", "some tokens go beyond the end"
    choice = after(constraint, final)
    assert {TOKENIZER.decode([t]) for t in choice.nonzero().flatten().tolist()} <= {str(i) for i in range(10**5)}
    assert not choice[[EOS, 8]].any()
    assert after(constraint, "42")[[EOS, 8]].all()


HEADERS = {
    HARMONY[1]: ("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant to=functions.f<|channel|>commentary json"),
    ADDRESSED[1]: (" to=self<|message|>", "<|eom|>", "<|start|>assistant to=f"),
}  # fmt: skip


@pytest.mark.parametrize("end", HEADERS)
@pytest.mark.parametrize("most", [1, 2, 5, 99])
def test_a_call_may_end_the_text_before_the_grammar(end, most):
    """In any number of tokens at once, and as drafts. Catches an end of the reasoning without a call, a call that cannot end, one
    before `min_tokens`, a grammar that does not hold after a call, and drafts that change the state."""
    think, close, header = HEADERS[end]

    def ends(constraint, text="", expected=False):
        left = ids(text)
        while left:
            constraint.accept(left[:most])
            left = left[most:]
            assert left == [] or not allowed(OWN, constraint)[[EOS, 8]].any()
        choice = allowed(OWN, constraint)
        assert choice[[EOS, 8]].tolist() == [expected] * 2, text
        return choice

    of_spec = compiled(OWN, regex="[0-9]", reasoning_end=end, may_call=True)
    constraint = of_spec.start((EOS, 8), 0)
    for text in (think, f"Hm to=functions.f {close}{header}", "<|messag"):
        ends(constraint, text)
    drafts = [*ids("e|>{}"), EOS]
    masks = torch.zeros(len(drafts), -(-VOCAB // 32), dtype=torch.int32)
    assert not OWN.fill(masks, [ConstrainedRows(constraint, len(drafts), drafts)])
    assert (masks[:, 0] & 1).tolist() == [0] + [0] * (len(ids("e|>")) - 1) + [1] * (len(drafts) - len(ids("e|>")))
    ends(constraint)
    constraint.accept(ids("e|>{}"))
    assert ends(constraint, expected=True).sum() > VOCAB / 2, "and anything may follow"
    for token in ids(f"{close}<|start|>assistant {end}"):
        constraint.accept([token])
    assert "".join(sorted({TOKENIZER.decode([t])[0] for t in ends(constraint).nonzero().flatten().tolist()})) == "0123456789"
    ends(constraint, "4", expected=True)
    late, without = of_spec.start((EOS, 8), 400), compiled(OWN, regex="[0-9]", reasoning_end=end).start((EOS, 8), 0)
    for other in (late, without):
        ends(other, f"{think}{close}{header}<|message|>{{}}")


@pytest.mark.parametrize("marker", ["</think>", None])
def test_a_call_in_an_unknown_form_is_refused(marker):
    """Catches a request whose calls cannot be told from its reasoning, so that it may end anywhere."""
    with pytest.raises(InputError, match=r"^structured_outputs\.may_call: the form of calls is not known; expected .*; found"):
        compiled(OWN, regex="a", reasoning_end=marker, may_call=True)


def test_the_end_of_a_reasoning_block_costs_little(monkeypatch):
    """It is looked for in the tokenizer once, not with each grammar, and in the last bytes of the text, not in all of it."""
    made, own = [], constraints()
    monkeypatch.setattr(grammar, "ReasoningEnd", lambda *args, inner=grammar.ReasoningEnd: made.append(args[0]) or inner(*args))
    bound = [compiled(own, regex=letter, reasoning_end="!?!").start((EOS,), 0) for letter in "abc"]
    assert made == ["!?!"]
    compiled(own, regex="a", reasoning_end="?")
    assert made == ["!?!", "?"]
    bound[0].accept(TOKENIZER.encode("Once upon a time! ") * 20)
    assert len(bound[0]._tail) < len("!?!")
    for i in range(grammar._MAX_REASONING_ENDS):
        compiled(own, regex="a", reasoning_end=f"?{i}")
    assert own._need_tokenizer().reasoning_end.cache_info().currsize <= grammar._MAX_REASONING_ENDS


def test_a_reasoning_block_that_ends_in_the_middle_of_several_tokens():
    constraint = compiled(OWN, regex="[0-9]{2}", reasoning_end="!").start((EOS,), 0)
    assert after(constraint, "hm! 1"[:3] + "12").nonzero().flatten().tolist() == [EOS]


@pytest.mark.parametrize(("spec", "error", "message"), [
    ({"regex": "(a"}, InputError, r'\.regex: the grammar is wrong; found invalid regex "\(a": unclosed group$'),
    ({"regex": "a{1,8("}, InputError, r'found invalid regex "a\{1,8\(": unclosed counted repetition$'),
    ({"json": {"type": "string", "pattern": "(a"}}, InputError, r"/pattern: .* found invalid regex \(a: unclosed group$"),
    ({"regex": "(?=a)"}, UnsupportedError, r"\.regex: .*look-around"),
    ({"regex": r"(a)\1"}, UnsupportedError, "backreferences"),
    ({"grammar": "start: limit"}, InputError, "the grammar is wrong; .*unknown name"),
    ({"grammar": "start: x"}, InputError, r'\.grammar: .*found line 1, column 8: unknown name: "x"'),
    ({"grammar": 'start: "a"\nx: ('}, InputError, r"\.grammar: the grammar is wrong; found line 2, column 5: "),
    ({"grammar": "start: <|nope|>"}, InputError, "unknown special token"),
    ({"grammar": "start: <[9999]>"}, InputError, "9999"),
    ({"grammar": 'start: "a" x\nx: "b" start'}, InputError, r"\.grammar: the grammar allows only one text, which is endless"),
    ({"grammar": "start: <|endoftext|> start"}, InputError, "only one text, which .* too long; .*let the text end"),
    ({"json": {"type": "array", "items": {"type": "null"}, "minItems": 10**5}, "disable_any_whitespace": True},
     InputError, r"\.json: the grammar allows only one text, which is .* too long"),
    ({"grammar": 'start: %json {"not": {}}'}, UnsupportedError, r'grammar, %json at line 1: .* found "not"'),
    ({"json": {"$ref": "#"}}, InputError, "no text fits"),
    ({"json": {"$ref": "#/$defs/x"}}, InputError, r'^structured_outputs\.json: "\$ref" refers to nothing.*defs/x'),
])  # fmt: skip
def test_errors_of_a_grammar_say_where(spec, error, message):
    with pytest.raises(error, match=message) as caught:
        compiled(OWN, **spec)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("structured_outputs.")


HARD = ["(a*)*b", "(a|aa)*c", "(.*a){30}", ".*a.{60}", "((a?){50}){50}", "(x+x+)+y", "[a-z]{1,30000}",
        "(a{0,1000}b){0,1000}(a{0,1000}c){0,1000}(.{1000}){1000}"]  # fmt: skip


@pytest.mark.parametrize("regex", HARD)
def test_regular_expressions_that_hang_others_do_not(regex):
    """They give texts, or errors of minirt."""
    with suppress(InputError):
        draw(OWN, compiled(OWN, regex=regex).start((EOS,), 0), 1, push=99, limit=60)


def test_a_grammar_that_grows_too_large_while_it_runs(monkeypatch):
    monkeypatch.setattr(grammar.limits, "MAX_LEXER_STATES", 300)
    own = constraints()
    constraint, letters = compiled(own, regex=".*a.{12}").start((EOS,), 0), random.Random(0)
    constraint.accept([token for _ in range(2000) for token in ids(letters.choice("ab"))])
    with pytest.raises(InputError, match=r"^generated token 2000: the grammar is too complex; expected .+simplify"):
        allowed(own, constraint)


def test_a_grammar_whose_only_text_has_no_end_from_some_token_on():
    constraint = compiled(OWN, grammar='start: /[0-9]/ x\nx: "a" x').start((EOS,), 0)
    constraint.accept(ids("7"))
    allowed(OWN, constraint)
    constraint.accept(ids("a"))
    with pytest.raises(InputError, match=r"^generated token 2: the grammar cannot go on: it allows only one text .*let the"):
        allowed(OWN, constraint)


def test_grammars_are_checked_once_and_the_last_are_kept(monkeypatch):
    made, inner = [], module.Grammar
    monkeypatch.setattr(module, "Grammar", lambda spec, tools: made.append(spec) or inner(spec, tools))
    monkeypatch.setattr(module, "MAX_GRAMMARS", 2)
    own = constraints()
    specs = [StructuredOutputsParams(regex=letter) for letter in "abc"]
    for spec in (specs[0], StructuredOutputsParams(regex="a"), specs[1], specs[0], specs[2], specs[0]):
        own.compile(spec)
    assert made == specs
    own.compile(specs[1])
    assert made == [*specs, specs[1]], "the one that was used last long ago is dropped"


def test_a_matcher_is_ready_or_another_thread_compiles_it(monkeypatch):
    threads, inner = [], grammar.GrammarTokenizer.compile
    monkeypatch.setattr(
        grammar.GrammarTokenizer, "compile", lambda *args: threads.append(threading.current_thread()) or inner(*args)
    )
    own, spec = constraints(), StructuredOutputsParams(regex="a")
    own.compile(spec)
    assert own.prepare(spec, (EOS,), 0).done()
    started = [own.prepare(spec, (EOS,), 0) for _ in range(5)]
    matchers = {id(future.result(timeout=60).matcher) for future in started}
    assert len(matchers) == 5, "each sequence has its own"
    other = own.prepare(StructuredOutputsParams(regex="b"), (EOS,), 0)
    assert allowed(own, other.result(timeout=60)).any()
    with pytest.raises(InputError, match="unclosed"):
        own.prepare(StructuredOutputsParams(regex="("), (EOS,), 0).result(timeout=60)
    assert threading.current_thread() not in threads, "their stacks have a size that is known"


def test_without_llguidance(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=r"needs llguidance.*pip install llguidance"):
        constraints().compile(StructuredOutputsParams(regex="a"))


def test_models_that_cannot_be_constrained():
    with pytest.raises(UnsupportedError, match="ends with an end-of-sequence token"):
        Constraints(TOKENIZER, VOCAB, ()).compile(StructuredOutputsParams(regex="a"))
    with pytest.raises(UnsupportedError, match="ends with an end-of-sequence token"):
        Constraints(TOKENIZER, VOCAB, (VOCAB - 1,)).compile(StructuredOutputsParams(regex="a"))
    with pytest.raises(UnsupportedError, match="no logits for; expected ids below 2047; found 2047"):
        Constraints(TOKENIZER, 2047, (EOS,)).compile(StructuredOutputsParams(regex="a"))


def test_a_panic_in_rust_is_an_error():
    class PanicException(BaseException):
        pass

    def panic():
        raise PanicException("index out of bounds")

    with pytest.raises(InputError, match="cannot be compiled: index out of bounds"):
        grammar._call(panic, "cannot be compiled")
    with pytest.raises(KeyboardInterrupt):
        grammar._call(lambda: (_ for _ in ()).throw(KeyboardInterrupt), "cannot be compiled")

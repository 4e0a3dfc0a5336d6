"""`SpeculativeOptions` from its fields, from `--speculate` and from vLLM's JSON.

Catches a key that is ignored, a default that is lost, a value that the kernel cannot take, and an error that does not say where.
"""

import subprocess
import sys
from dataclasses import replace

import pytest

from minirt.errors import ConfigError, UnsupportedError
from minirt.speculative.options import MAX_DRAFTS, SpeculativeOptions


def test_the_three_ways_give_the_same():
    assert SpeculativeOptions.parse("ngram") == SpeculativeOptions.from_config('{"method": "ngram"}') == SpeculativeOptions()
    assert SpeculativeOptions.parse("ngram:7") == SpeculativeOptions(num_speculative_tokens=7)
    config = '{"method": "ngram_gpu", "num_speculative_tokens": 1, "prompt_lookup_min": 3, "prompt_lookup_max": 16}'
    expected = SpeculativeOptions(num_speculative_tokens=1, prompt_lookup_min=3, prompt_lookup_max=16)
    assert SpeculativeOptions.from_config(config) == expected


def test_multi_token_prediction():
    """A default of its own, and vLLM's names. Catches 4 drafts where 3 are the default, and an option of n-grams that is kept."""
    mtp = SpeculativeOptions.parse("mtp")
    assert (mtp.method, mtp.num_speculative_tokens, mtp.draft_vocab_size, mtp.has_draft_model) == ("mtp", 3, 32768, True)
    assert SpeculativeOptions.parse("mtp:5") == SpeculativeOptions(method="mtp", num_speculative_tokens=5)
    for name in ("mtp", "qwen3_5_mtp", "qwen3_next_mtp"):
        config = f'{{"method": "{name}", "num_speculative_tokens": 2, "draft_vocab_size": 99}}'
        assert SpeculativeOptions.from_config(config) == replace(mtp, num_speculative_tokens=2, draft_vocab_size=99)
    assert [mtp.draft_rows(vocab) for vocab in (32767, 32768, 32769)] == [None, None, 32768]
    assert replace(mtp, draft_vocab_size=0).draft_rows(99) is None
    assert not SpeculativeOptions().has_draft_model


@pytest.mark.parametrize(("given", "least", "most"), [
    ('"prompt_lookup_max": 9', 9, 9), ('"prompt_lookup_min": 1', 1, 1), ('"prompt_lookup_min": null', 2, 4),
    ('"prompt_lookup_min": null, "prompt_lookup_max": 1', 1, 1), ('"prompt_lookup_min": 1, "prompt_lookup_max": 5', 1, 5),
])  # fmt: skip
def test_one_length_alone_is_both(given, least, most):
    """As in vLLM."""
    options = SpeculativeOptions.from_config(f'{{"method": "ngram", {given}}}')
    assert (options.prompt_lookup_min, options.prompt_lookup_max) == (least, most)


@pytest.mark.parametrize(("given", "message"), [
    ({"num_speculative_tokens": 0}, f"num_speculative_tokens: .* from 1 to {MAX_DRAFTS}; found 0$"),
    ({"num_speculative_tokens": True}, "found True$"), ({"num_speculative_tokens": 2.0}, "found 2.0$"),
    ({"prompt_lookup_min": 5}, "prompt_lookup_min: is larger .* prompt_lookup_max, 4; found 5"),
    ({"prompt_lookup_max": 17}, "prompt_lookup_max: .* from 1 to 16; found 17$"), ({"adaptive": 1}, "adaptive: "),
    ({"method": None}, "method: .*; expected ngram or mtp; found None$"), ({"num_drafts": 3}, "no such argument"),
    ({"model": "x"}, 'no draft models in files of their own; write "method"'), ({"method": ["mtp"]}, "method: .*mtp"),
    ({"draft_vocab_size": 9}, "draft_vocab_size: only method 'mtp' has this option; found 9"),
    ({"draft_vocab_text": "a"}, "draft_vocab_text: only method 'mtp'"),
    ({"method": "mtp", "prompt_lookup_max": 3}, "prompt_lookup_max: only method 'ngram' has"),
    ({"method": "mtp", "draft_vocab_size": -1}, "draft_vocab_size: .*0 for all; found -1"),
    ({"method": "mtp", "draft_vocab_size": True}, "found True"),
    ({"method": "mtp", "draft_vocab_text": ""}, "draft_vocab_text: .*a text file; found ''"),
    ({"method": "mtp", "draft_vocab_text": "a", "draft_vocab_size": 0}, "draft_vocab_size other than 0"),
])  # fmt: skip
def test_fields_are_checked(given, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeOptions(**given)


@pytest.mark.parametrize(("text", "message"), [
    ("", "--speculate : .*found ''"), ("draft", "^--speculate draft: minirt does not .*; expected ngram.*; found 'draft'$"),
    ("eagle3", "found 'eagle3'"), ("ngram_gpu", "found 'ngram_gpu'"), ("ngram:", "found ''"),
    ("ngram:8", "^--speculate ngram:8: not .* from 1 to 7; found 8$"),
    ("ngram:-1", "found '-1'"), ("ngram:3:2", "found '3:2'"), ("ngram:٣", "found '٣'"),
    ("ngram:" + "9" * 5000, "found '9999"), ("Ngram", "found 'Ngram'"),
])  # fmt: skip
def test_short_texts_are_checked(text, message):
    """The error names what was typed: it named the keys `method` and `num_speculative_tokens`, which nobody had written."""
    with pytest.raises(ConfigError, match=message) as caught:
        SpeculativeOptions.parse(text)
    assert caught.value.is_usage
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(("text", "error", "message"), [
    ("", ConfigError, "is not readable JSON: .* an object such as"), ("[" * 100_000, ConfigError, "is not readable JSON"),
    ('[["method", "ngram"]]', ConfigError, "is not a JSON object"),
    ("{}", ConfigError, 'the method is missing; expected "method": "ngram"'),
    ('{"method": "ngram", "method": "ngram"}', ConfigError, "a key is repeated, and its values may differ: .*method"),
    ('{"method": "ngram", "k": 4}', ConfigError, "unknown key; expected method, num_.*; found k"),
    ('{"method": "ngram", "model": "x/y"}', UnsupportedError, "this key of vLLM; found model .*no draft models"),
    ('{"method": "ngram", "model": null}', UnsupportedError, "found model"),
    ('{"method": "suffix", "suffix_decoding_max_tree_depth": 24}', UnsupportedError, "max_tree_depth .*no suffix decoding"),
    ('{"method": "ngram", "rejection_sample_method": "block"}', UnsupportedError, "the sampler verifies drafts"),
    ('{"method": "ngram", "num_speculative_tokens_per_batch_size": []}', UnsupportedError, "adapts to the batch"),
    ('{"method": "mtp", "prompt_lookup_min": 3}', ConfigError, "prompt_lookup_.*: only method 'ngram' has"),
    ('{"method": "eagle3"}', UnsupportedError, "method: .*found 'eagle3'"),
    ('{"method": {"a": 1}}', UnsupportedError, "method: "),
    ('{"method": "ngram", "num_speculative_tokens": "4"}', ConfigError, "num_speculative_tokens: .*found '4'"),
    ('{"method": "ngram", "prompt_lookup_max": 20}', ConfigError, "prompt_lookup_max: .*found 20"),
    ('{"method": "ngram", "prompt_lookup_min": "2"}', ConfigError, "prompt_lookup_min: .*found '2'"),
    ('{"method": "ngram", "prompt_lookup_max": true}', ConfigError, "prompt_lookup_max: .*found True"),
])  # fmt: skip
def test_configs_are_checked(text, error, message):
    with pytest.raises(error, match=message) as caught:
        SpeculativeOptions.from_config(text)
    assert caught.value.is_usage
    assert len(str(caught.value)) < 400


def test_options_need_no_torch():
    """The front of the server and --help have none."""
    code = "import sys, minirt.speculative.options; print({'torch', 'triton', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

"""Sampling settings: refused values, precedence of the sources, reports. Also the random number generator of the draws."""

import copy
import math
import pickle
from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from minirt.errors import ConfigError, InputError
from minirt.kernels.sampling.philox import philox, uniform
from minirt.sampling_params import DEFAULT_MAX_TOKENS, EffectiveSampling, SamplingParams, resolve
from minirt.structured.params import StructuredOutputsParams

FILE = "generation_config.json"
FIELDS = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop", "ignore_eos")
FLAGS = {"ignore_eos": False, "include_stop_str_in_output": False, "skip_special_tokens": True, "detokenize": True}
ALL = tuple(field.name for field in fields(SamplingParams) if field.name != "n")  # a property of the call, not of a request


@pytest.mark.parametrize(("name", "words"), [
    ("use_beam_search", "not supported: minirt has no beam search"), ("best_of", "not supported"),
    ("guided_decoding", "structured_outputs"), ("max_new_tokens", "max_tokens"), ("temprature", "did you mean temperature"),
])  # fmt: skip
def test_arguments_that_do_not_exist(name: str, words: str) -> None:
    """A bare TypeError did not say what to use instead."""
    with pytest.raises(InputError, match=f"SamplingParams: no such argument.*found {name}.*{words}"):
        SamplingParams(**{name: 1})
    with pytest.raises(InputError, match=r"StructuredOutputsParams: no such argument.*did you mean regex"):
        StructuredOutputsParams(regexp="a")
    params = SamplingParams(n=2, top_k=5)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == replace(params, n=2) == params


def test_nothing_is_set_by_default() -> None:
    params = SamplingParams()
    assert all(getattr(params, name) is None for name in ALL if name not in FLAGS)
    assert all(getattr(params, name) is usual for name, usual in FLAGS.items())


@pytest.mark.parametrize(("name", "accepted"), [
    ("temperature", [0, 0.0, 1, 0.7, 1e300, np.float32(0.5), Fraction(1, 2)]), ("top_k", [0, 1, 50, 10**400, np.int64(7)]),
    ("top_p", [1, 1.0, 0.5, 1e-300]), ("min_p", [0, 1, 0.05]), ("seed", [0, 1, 2**63, 2**64 - 1]),
    ("max_tokens", [1, 10**9]), ("min_tokens", [0, 5]), ("presence_penalty", [-2, 2, 0.5, Fraction(1, 4)]),
    ("frequency_penalty", [-2.0, 2.0, 0]), ("repetition_penalty", [1, 1.3, 1e-3]),
    ("truncate_prompt_tokens", [-1, 1, 10**9]), ("logprobs", [-1, 0, 20, np.int64(3)]), ("prompt_logprobs", [-1, 0, 20]),
])  # fmt: skip
def test_accepted_values_are_kept(name: str, accepted: list) -> None:
    kind = float if name.endswith(("_p", "penalty", "temperature")) else int
    for value in accepted:
        found = getattr(SamplingParams(**{name: value}), name)
        assert found == value
        assert type(found) is kind  # a temperature of 1 becomes 1.0, a NumPy number becomes a Python number


@pytest.mark.parametrize(("name", "refused", "expected"), [
    ("temperature", [-0.1, -1, math.inf, -math.inf, 10**400], "a finite number >= 0"),
    ("top_k", [-2, 1.0, 50.0], "an integer >= 0"), ("top_p", [0, 0.0, -0.5, 1.0000001, 2, math.inf], "above 0 and at most 1"),
    ("min_p", [-1e-9, 1.1, math.inf], "from 0 to 1"), ("seed", [-1, 2**64, 0.0], r"from 0 to 2\*\*64 - 1"),
    ("max_tokens", [-1, 1.0], "an integer >= 1, or 0 with prompt_logprobs"), ("min_tokens", [-1, 1.0], "an integer >= 0"),
    ("presence_penalty", [-2.1, 2.01, math.inf], "a number from -2 to 2"),
    ("frequency_penalty", [-2.1, 2.01, -math.inf], "a number from -2 to 2"),
    ("repetition_penalty", [0, 1e-320, 1e308, math.inf], "a number from 0.001 to 1,000"),
    ("truncate_prompt_tokens", [-2, 1.0], "an integer >= 1, or -1"),
    ("logprobs", [-2, 21, 1.0], "an integer from 0 to 20, or -1"),
    ("prompt_logprobs", [-2, 21, 1.0], "an integer from 0 to 20, or -1"),
])  # fmt: skip
def test_refused_values_are_named(name: str, refused: list, expected: str) -> None:
    for value in [*refused, math.nan, True, False, "1", "hot", b"1", [1], 1j]:
        with pytest.raises(InputError, match=rf"SamplingParams\.{name}: .*{expected}") as raised:
            SamplingParams(**{name: value})
        assert raised.value.found == repr(value)


def test_minus_one_switches_top_k_off() -> None:
    assert SamplingParams(top_k=-1).top_k == 0


def test_stop_strings() -> None:
    for given, kept in (("###", ("###",)), (["a", "b\n"], ("a", "b\n")), (("é",), ("é",)), ([], ()), ((), ())):
        assert SamplingParams(stop=given).stop == kept
    for wrong in ("", ["a", ""], [1], b"a", b"", ["a", None], 3, {"a": 1}, [["a"]]):
        with pytest.raises(InputError, match=r"SamplingParams\.stop"):
            SamplingParams(stop=wrong)
    with pytest.raises(InputError, match=r"SamplingParams\.ignore_eos: .*True or False; found 1"):
        SamplingParams(ignore_eos=1)


def test_token_ids_and_biases() -> None:
    assert SamplingParams(stop_token_ids=[5, 5, np.int64(2)]).stop_token_ids == (5, 2)
    assert SamplingParams(allowed_token_ids=(7,)).allowed_token_ids == (7,)
    assert SamplingParams(logit_bias={"12": -100, 3: 0.5}).logit_bias == {12: -100.0, 3: 0.5}
    assert SamplingParams(bad_words="x").bad_words == ("x",)
    for wrong in ([-1], [1.0], ["1"], [True], 3, "12", {1: 2}, [[1]]):
        for name in ("stop_token_ids", "allowed_token_ids"):
            with pytest.raises(InputError, match=rf"SamplingParams\.{name}: not token ids"):
                SamplingParams(**{name: wrong})
    keys = ({-1: 1}, {"x": 1}, {"²": 1}, {"1": 1, 1: 2}, {True: 1}, {1.0: 1})
    for wrong in (*keys, {1: 100.5}, {1: "1"}, {1: math.nan}, {1: None}, [1], "1"):
        with pytest.raises(InputError, match=r"SamplingParams\.logit_bias"):
            SamplingParams(logit_bias=wrong)
    for wrong in ("", ["a", ""], [1], b"a"):
        with pytest.raises(InputError, match=r"SamplingParams\.bad_words: not acceptable bad words"):
            SamplingParams(bad_words=wrong)


@pytest.mark.parametrize(("options", "name", "reason"), [
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "is above max_tokens"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "allows no token"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves no token of the prompt"),
    ({"detokenize": False, "stop": "x"}, "stop", "needs the text"),
    ({"detokenize": False, "include_stop_str_in_output": True}, "include_stop_str_in_output", "needs the text"),
    ({"detokenize": False, "skip_special_tokens": False}, "skip_special_tokens", "is about the text"),
])  # fmt: skip
def test_contradictions_are_refused(options: dict, name: str, reason: str) -> None:
    with pytest.raises(InputError, match=rf"SamplingParams\.{name}: {name} {reason}"):
        SamplingParams(**options)


def test_contradictions_with_the_file_or_a_default_are_refused() -> None:
    with pytest.raises(InputError, match=r"is above max_tokens; expected at most 256, which is max_tokens \(default\)"):
        resolve(SamplingParams(min_tokens=257), None)
    with pytest.raises(InputError, match=rf"max_tokens \({FILE}\)"):
        resolve(SamplingParams(min_tokens=7), {"max_new_tokens": 6})
    with pytest.raises(InputError, match=rf"detokenize is False, and stop strings need the text.*{FILE}"):
        resolve(SamplingParams(detokenize=False), {"stop_strings": "END"})
    assert resolve(SamplingParams(detokenize=False, stop=[]), {"stop_strings": "END"}).stop == ()


def test_a_repetition_penalty_of_the_file_needs_no_do_sample() -> None:
    e = resolve(SamplingParams(presence_penalty=0.5), {"repetition_penalty": 1.1, "presence_penalty": 9})
    assert (e.repetition_penalty, e.sources["repetition_penalty"], e.presence_penalty) == (1.1, FILE, 0.5)
    assert e.describe() == f"greedy (default) · presence_penalty 0.5 (user) · repetition_penalty 1.1 ({FILE})"
    with pytest.raises(ConfigError, match=r"generation_config\.json: repetition_penalty"):
        resolve(None, {"repetition_penalty": 0})


def test_greedy_unless_somebody_asks_for_more() -> None:
    for config in (None, {}, {"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_k": 50}):
        for params in (None, SamplingParams()):
            e = resolve(params, config)
            assert (e.temperature, e.top_k, e.top_p, e.min_p, e.seed) == (0, 0, 1, 0, 0)
            assert (e.max_tokens, e.stop, e.ignore_eos, e.not_applied) == (DEFAULT_MAX_TOKENS, (), False, ())
            assert e.sources == dict.fromkeys(ALL, "default")
            assert e.describe() == "greedy (default)"


def test_user_over_file_over_default() -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 99}
    config |= {"stop_strings": ["END"], "min_p": None}
    e = resolve(SamplingParams(temperature=0.3, top_k=0, seed=7, ignore_eos=True), config)
    assert (e.temperature, e.top_k, e.top_p, e.min_p, e.seed) == (0.3, 0, 0.95, 0, 7)
    assert (e.max_tokens, e.stop, e.ignore_eos) == (99, ("END",), True)
    expected = ("user", "user", FILE, "default", "user", FILE, FILE, "user")
    assert e.sources == dict.fromkeys(ALL, "default") | dict(zip(FIELDS, expected, strict=True))
    e = resolve(SamplingParams(temperature=0, max_tokens=5, stop="x"), config)
    assert (e.temperature, e.max_tokens, e.stop) == (0, 5, ("x",))
    assert e.describe() == "greedy (user)"


def test_length_and_stop_strings_do_not_need_do_sample() -> None:
    e = resolve(None, {"max_new_tokens": 12, "stop_strings": "END"})
    assert (e.max_tokens, e.stop, e.temperature) == (12, ("END",), 0)


def test_do_sample_alone_means_temperature_one_and_no_filter() -> None:
    """transformers would add its own default top_k of 50, which is not in the file."""
    e = resolve(None, {"do_sample": True})
    assert (e.temperature, e.top_k, e.sources["temperature"], e.sources["top_k"]) == (1, 0, FILE, "default")


@pytest.mark.parametrize("given", [{"top_k": 9}, {"top_p": 0.5}, {"min_p": 0}, {"seed": 3}, {"seed": 3, "top_p": 0.5}])
def test_a_filter_or_a_seed_implies_draws(given: dict) -> None:
    first = "top_p" if "top_p" in given else next(iter(given))
    for config in ({}, {"temperature": 0.6}, {"do_sample": True, "temperature": 0.0}):
        e = resolve(SamplingParams(**given), config)
        assert (e.temperature, e.sources["temperature"]) == (1.0, f"implied by {first}")
    assert resolve(SamplingParams(**given, temperature=0), None).temperature == 0
    e = resolve(SamplingParams(**given), {"do_sample": True, "temperature": 0.6})
    assert (e.temperature, e.sources["temperature"]) == (0.6, FILE)


def test_a_seed_is_drawn_once_and_only_for_draws() -> None:
    drawn = [resolve(SamplingParams(temperature=1), {"seed": 5}) for _ in range(20)]
    assert len({e.seed for e in drawn}) == 20
    assert all(0 <= e.seed < 2**64 and e.sources["seed"] == "random" for e in drawn)
    assert max(e.seed for e in drawn) >= 2**32  # all 64 bits are in use
    assert resolve(SamplingParams(temperature=0), None).sources["seed"] == "default"


@pytest.mark.parametrize(("field", "value"), [
    *(("temperature", v) for v in ("hot", -1, math.nan, True, [0.5])), *(("top_k", v) for v in (5.5, "50", -3)),
    *(("top_p", v) for v in (0, 1.5, "0.9")), *(("min_p", v) for v in (2, {})),
    *(("max_new_tokens", v) for v in (0, "many", 2.5)), *(("stop_strings", v) for v in ("", [1], 5)),
    *(("do_sample", v) for v in ("true", 1)),
])  # fmt: skip
def test_a_malformed_file_is_refused(field: str, value: object) -> None:
    for config in ({field: value}, {"do_sample": True, field: value}, {"do_sample": False, field: value}):
        with pytest.raises(ConfigError, match=rf"generation_config\.json: {field}: ") as raised:
            resolve(None, config)
        assert raised.value.found == repr(value)
    with pytest.raises(ConfigError, match=r"generation_config\.json: not a JSON object"):
        resolve(None, [1])


def test_a_malformed_value_that_the_user_replaces_does_no_harm() -> None:
    assert resolve(SamplingParams(temperature=0.5), {"temperature": "hot"}).temperature == 0.5


def test_what_is_not_supported_is_reported() -> None:
    off = {"encoder_repetition_penalty": 1.0, "num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1, "penalty_alpha": None}
    off |= {"suppress_tokens": [], "epsilon_cutoff": 0.0, "bad_words_ids": None, "min_length": 0, "eos_token_id": [1]}
    assert resolve(None, off).not_applied == ()
    on = {"encoder_repetition_penalty": 1.1, "num_beams": 4, "no_repeat_ngram_size": 3, "typical_p": 0.9, "penalty_alpha": 0.6}
    on |= {"token_healing": True}
    on |= {"suppress_tokens": [5], "epsilon_cutoff": 3e-4, "bad_words_ids": [[7]], "min_length": 2, "eos_token_id": 2}
    expected = {f"{name}={value}" for name, value in on.items() if name != "eos_token_id"}
    assert set(resolve(SamplingParams(temperature=0.2), on).not_applied) == expected


def test_describe_names_what_decides() -> None:
    config = {"do_sample": True, "top_p": 0.95, "top_k": 0}
    e = resolve(SamplingParams(temperature=0.7, seed=123), config)
    assert e.describe() == f"temperature 0.7 (user) · top_p 0.95 ({FILE}) · seed 123 (user)"
    e = resolve(SamplingParams(min_p=0.05, top_k=40, top_p=1.0), None)
    expected = "temperature 1.0 (implied by top_k) · top_k 40 (user) · min_p 0.05 (user) · seed"
    assert e.describe() == f"{expected} {e.seed} (random)"
    assert isinstance(e, EffectiveSampling)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # known answers from Random123 (kat_vectors)
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter: str, key: str, words: str) -> None:
    c, k, expected = ([int(word, 16) for word in text.split()] for text in (counter, key, words))
    seed = torch.tensor([k[0] | k[1] << 32], dtype=torch.uint64).view(torch.int64)
    assert [w.item() for w in philox(seed, *(torch.tensor([word]) for word in c))] == expected


def test_uniform_is_as_documented() -> None:
    edges = [0, 1, 2, 2**23 - 1, 2**23, 2**24 + 1, 2**31, 2**32 - 257, 2**32 - 129, 2**32 - 128, 2**32 - 1]
    words = np.concatenate([edges, np.random.default_rng(0).integers(0, 2**32, 10_000)])
    u = uniform(torch.from_numpy(words)).numpy()
    exact = words.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    np.testing.assert_array_equal(u, np.minimum(exact, np.float32(1 - 2.0**-24)))
    assert (u.min(), u.max()) == (2.0**-33, 1 - 2.0**-24)
    np.testing.assert_array_equal(u[:4].astype(np.float64), (words[:4] + 0.5) / 2**32)

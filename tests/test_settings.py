"""Records of settings: what follows from one, without a second declaration."""

import math
from dataclasses import fields

import click
import pytest
from click.testing import CliRunner

from minirt import LoadOptions, SamplingParams, SpeculativeOptions, StructuredOutputsParams
from minirt.cli.settings import given, options_of
from minirt.errors import InputError
from minirt.foreign_names import names
from minirt.sampling_params import EffectiveSampling
from minirt.server.options import ServerOptions
from minirt.settings import Integer, Number, Settings, setting, settings_of, switch, texts

CLASSES = (LoadOptions, SamplingParams, ServerOptions, SpeculativeOptions, StructuredOutputsParams)


class Example(Settings):
    """Settings of a test."""

    width: int = setting("Columns.", 80, check=Integer(1, 200), option="--width -w")
    ratio: float | None = setting("See `width`.", check=Number(0, 1, "1 is off", open_low=True), details="In Python, a number.")
    words: str | list[str] | None = setting("Words.", check=texts("words"), kind="several")
    wraps: bool = setting("Wrap lines.", True, check=switch, option_help="Do not wrap lines.")


def parsed(*arguments):
    """What a command with these options gives to the settings, or its message."""
    seen = []

    @click.command()
    @options_of(Example, "", title="General")
    def command(**options):
        seen.append(given(Example, options))

    done = CliRunner().invoke(command, list(map(str, arguments)))
    return seen[0] if seen else done.output


def test_options_follow_from_a_record():
    assert parsed() == {"width": 80, "wraps": True}
    assert parsed("-w", 7, "--ratio", 0.5, "--words", "a", "--words", "b", "--no-wraps") == {
        "width": 7, "ratio": 0.5, "words": ("a", "b"), "wraps": False,
    }  # fmt: skip
    shown = parsed("--help")
    for text in ("-w, --width INTEGER", "[default: 80]", "See --width.", "Words (repeatable).", "--no-wraps", "Do not wrap"):
        assert text in shown
    assert "In Python" not in shown


def test_checks_names_and_docstring_follow_from_a_record():
    assert Example(words="a", width=3) == Example(words=["a"], width=3)
    for wrong, message in (
        ({"width": 201}, r"Example.width: .*an integer from 1 to 200; found 201"), ({"wraps": 1}, "True or False; found 1"),
        ({"ratio": 0}, r"a number above 0 and at most 1 \(1 is off\)"), ({"ratio": math.nan}, "found nan"),
        ({"widht": 3}, "did you mean width"), ({"n_ctx": 3}, r"llama.cpp's name; here max_model_len=…"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            Example(**wrong)
    assert names()["n_ctx"] == ("llama.cpp's name", "--max-model-len", "max_model_len=…")
    assert "ratio: See `width`. In Python, a number." in Example.__doc__


@pytest.mark.parametrize("kind", CLASSES)
def test_records_are_whole(kind):
    """Catches a help text that is no sentence, and a setting that its class's docstring lacks."""
    for name, record in settings_of(kind).items():
        assert record.text.endswith("."), name
        assert (record.option_help or ".").endswith("."), name
        assert f"        {name}: " in kind.__doc__


def test_a_request_runs_with_each_setting():
    """Catches a field of another type than its values have: messages between the server's processes are decoded by it."""
    kinds = {field.name: field.type for field in fields(EffectiveSampling)}
    assert kinds.keys() - {"sources", "not_applied"} == {field.name for field in fields(SamplingParams)} - {"n"}
    expected = {
        "temperature": float, "top_k": int, "stop": tuple[str, ...], "stop_token_ids": tuple[int, ...], "ignore_eos": bool,
        "logit_bias": dict[int, float], "allowed_token_ids": tuple[int, ...] | None, "logprobs": int | None,
        "structured_outputs": StructuredOutputsParams | None,
    }  # fmt: skip
    assert {name: kinds[name] for name in expected} == expected

"""`perplexity` against the loss of transformers; its windows and errors; and `minirt eval perplexity`.

Catches a token scored twice, never, or from the wrong row; a window that starts at the wrong token; sums in low precision.
"""

import json
import math
import shutil

import pytest
import torch
from click.testing import CliRunner
from support.tiny import add_tokenizer

from minirt import Generator
from minirt.bench.perplexity import perplexity
from minirt.cli.eval import evaluate
from minirt.errors import ContextLengthError, InputError, NumericsError, TokenizerError

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. What is the capital of Spain? Paris; is it?\n" * 4


@pytest.fixture(scope="module")
def folder(hf_folder):
    return add_tokenizer(hf_folder("Qwen2", num_attention_heads=7, num_key_value_heads=1, hidden_size=112))


@pytest.fixture(scope="module")
def generator(folder):
    with Generator.from_pretrained(folder, device="cpu", dtype="float32", kv_cache_memory=1 << 24) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def model(folder):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@torch.no_grad()
def reference(model, tokens, window, stride):
    """Score token by token, each with a forward pass over exactly the context that the definition gives it."""
    total = 0.0
    for place in range(1, len(tokens)):
        start = 0
        while start + window <= place:  # the first window that holds the token
            start += stride
        context = torch.tensor([tokens[start:place]])
        total -= torch.log_softmax(model(context).logits[0, -1].double(), -1)[tokens[place]].item()
    return total


@pytest.mark.parametrize(
    ("count", "window", "stride"),
    [(2, 16, 8), (3, 2, 1), (16, 16, 5), (17, 16, 15), (37, 16, 5), (40, 16, 1), (41, 16, 8), (150, 128, 64)],
)
def test_every_token_once_from_its_window(generator, model, count, window, stride):
    tokens = torch.randint(3, 211, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    result = perplexity(generator, tokens, window=window, stride=stride)
    expected = reference(model, tokens, window, stride)
    assert result.tokens == count - 1
    assert result.nll == pytest.approx(expected, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(expected / (count - 1)), rel=1e-5)
    assert result.windows == 1 + max(0, -(-(count - window) // stride))


def test_defaults_and_progress(generator):
    """The default window is all that the model holds, the stride half of it. Progress ends at the number of scored tokens."""
    seen = []
    result = perplexity(generator, TEXT * 2, progress=lambda done, total: seen.append((done, total)))
    assert (result.window, result.stride) == (256, 128)
    assert [total for _, total in seen] == [result.tokens] * result.windows
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (result.tokens, result.tokens)
    again = perplexity(generator, TEXT * 2)
    assert again == result


def test_bits_per_byte(generator):
    """The bytes are those of the text, without the special token that the tokenizer adds at the start."""
    result = perplexity(generator, TEXT)
    assert result.bytes == len(TEXT)
    assert result.bits_per_byte == pytest.approx(result.nll / math.log(2) / result.bytes)


def test_without_a_tokenizer(hf_folder):
    with Generator.from_pretrained(hf_folder("Llama"), device="cpu", kv_cache_memory=1 << 22) as generator:
        result = perplexity(generator, [5, 6, 7, 8])
        assert (result.tokens, result.bytes, result.bits_per_byte) == (3, None, None)


def test_refusals(generator):
    with pytest.raises(InputError, match="too short"):
        perplexity(generator, [5])
    with pytest.raises(InputError, match="empty"):
        perplexity(generator, "")
    with pytest.raises(ContextLengthError, match="256"):
        perplexity(generator, [5, 6, 7], window=257)
    for window, stride in ((1, 1), (8, 0), (8, 8), (8, -1)):
        with pytest.raises(InputError):
            perplexity(generator, [5, 6, 7], window=window, stride=stride)


class Broken:
    """A generator with bad logits in one row."""

    tokenizer, max_len = None, 16

    def __init__(self, value):
        self.value = value

    def encode(self, tokens):
        return list(tokens)

    def logits(self, tokens):
        rows = torch.zeros(len(tokens), 10)
        rows[2] = self.value
        return rows


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_no_number_is_an_error_that_names_the_token(value):
    with pytest.raises(NumericsError, match="token 3"):
        perplexity(Broken(value), [1, 2, 3, 4, 5])


def test_uniform_logits_give_the_vocabulary():
    assert perplexity(Broken(0.0), range(10)).perplexity == pytest.approx(10, rel=1e-12)


def test_command(folder, generator, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    common = ["perplexity", "--model", str(folder), "--device", "cpu", "--text", str(path), "--max-length", "64"]
    done = CliRunner().invoke(evaluate, [*common, "--stride", "16", "--json"], catch_exceptions=False)
    record = json.loads(done.output)
    expected = perplexity(generator, TEXT, window=64, stride=16)
    assert record["perplexity"] == expected.perplexity
    assert (record["tokens"], record["windows"]) == (expected.tokens, expected.windows)
    plain = CliRunner().invoke(evaluate, common, catch_exceptions=False).output
    assert plain.startswith(f"model          {folder} · float32 · ")
    assert f"\nperplexity     {perplexity(generator, TEXT, window=64).perplexity:.6g}\n" in plain
    assert "bits a byte" in plain
    for options, flag in ((("--max-length", "1"), "--max-length"), (("--stride", "64"), "--stride")):
        with pytest.raises(InputError, match=f"^{flag}: "):
            CliRunner().invoke(evaluate, [*common, *options], catch_exceptions=False)
    shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(TokenizerError, match=r"^--text: the model has no tokenizer"):
        CliRunner().invoke(evaluate, [common[0], "--model", str(tmp_path / "bare"), *common[3:]], catch_exceptions=False)
    path.write_text("")
    with pytest.raises(InputError, match=r"text\.txt: "):
        CliRunner().invoke(evaluate, common, catch_exceptions=False)

"""`generate --prompts`: the format of the lines, the order of results, and the results after Ctrl-C or a failure.

Catches results in the order of finishing, line numbers off by one (empty lines count), sampling values of a request that are lost
or leak into the next, a malformed line found only after other requests have run, and finished work lost after an error or Ctrl-C.
"""

import io
import json
import os
import pty
import re
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file
from support.cli import CACHE, LONG, refused, start, succeeded
from support.tiny import add_tokenizer

from minirt import Generator, SamplingParams
from minirt.cli import generate_many
from minirt.cli.request_file import read_prompt_lines
from minirt.errors import InputError
from minirt.generator import Generator as Loaded


@pytest.fixture(scope="module")
def expected(folder):
    """A function (prompt, sampling values) → the completion of the Python API for this prompt alone."""
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=8 << 20) as generator:

        def complete(prompt, **values):
            prompt = generator.encode_chat(prompt) if isinstance(prompt, list) and isinstance(prompt[0], dict) else prompt
            return generator.generate(prompt, SamplingParams(**values))

        yield complete


@pytest.fixture
def file(tmp_path):
    """A function that writes lines (JSON values, or raw bytes) to a file and returns its path."""

    def write(*lines):
        path = tmp_path / "p.jsonl"
        path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
        return path

    return write


CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
LINES = (
    "hello", b"  ", {"prompt": "the fox\n", "max_tokens": 2, "id": "ß"}, {"messages": CHAT, "id": 7},
    {"prompt_token_ids": [5, 6, 7], "temperature": 0.9, "top_k": 20, "seed": 11, "max_tokens": 7},
    {"prompt": "hello", "min_p": 0.2, "top_p": 0.9, "seed": 5, "id": None},
    {"prompt": "x", "ignore_eos": False, "max_tokens": 1}, b"",
)  # fmt: skip
ANSWERS = (
    ("hello", {"max_tokens": 12, "ignore_eos": True}), ("the fox\n", {"max_tokens": 2, "ignore_eos": True}),
    (CHAT, {"max_tokens": 12, "ignore_eos": True}),
    ([5, 6, 7], {"max_tokens": 7, "ignore_eos": True, "temperature": 0.9, "top_k": 20, "seed": 11}),
    ("hello", {"max_tokens": 12, "ignore_eos": True, "min_p": 0.2, "top_p": 0.9, "seed": 5}), ("x", {"max_tokens": 1}),
)  # fmt: skip


@pytest.mark.parametrize("seqs", [64, 2])
def test_results_in_input_order_as_each_prompt_alone_gives_them(run, folder, expected, file, seqs):
    base = ("generate", "-m", folder, *CACHE, "--max-tokens", 12, "--ignore-eos", "--max-num-seqs", seqs)
    out, err = succeeded(run(*base, "--json", "-v", "--prompts", file(*LINES)))
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["line"] for record in records] == [1, 3, 4, 5, 6, 7]
    assert [record.get("id") for record in records] == [None, "ß", 7, None, None, None]
    for record, (prompt, values) in zip(records, ANSWERS, strict=True):
        truth = expected(prompt, **values)
        assert record["token_ids"] == truth.token_ids
        assert record["text"] == truth.text
        assert record["prompt_token_ids"] == truth.prompt_token_ids
        assert record["finish_reason"] == truth.finish_reason
        assert record["sampling"]["max_tokens"] == values["max_tokens"]
        assert record["time_to_first_token_s"] > 0
        assert "error" not in record
    assert records[0]["prompt"] == "hello"
    assert records[2]["messages"] == CHAT
    assert "prompt" not in records[3]
    assert records[5]["decode_tokens_per_s"] is None, "one token has no rate"
    prompt_tokens, new = (sum(len(r[name]) for r in records) for name in ("prompt_token_ids", "token_ids"))
    assert f"6 prompts of {prompt_tokens} tokens · {new} new tokens in " in err
    assert " tokens/s" in err
    assert "unfinished" not in err


def test_texts_and_stdin(run, folder, expected, file, monkeypatch):
    base = ("generate", "-m", folder, *CACHE, "--max-tokens", 12, "--ignore-eos", "-q", "--prompts")
    path = file(*LINES)
    texts = "".join(expected(prompt, **values).text + "\n" for prompt, values in ANSWERS)
    assert run(*base, path) == (0, texts, "")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + path.read_bytes() + b"\r\n")))
    assert run(*base, "-") == (0, texts, ""), "with a byte order mark and a CRLF"


def test_chat_is_for_texts(run, folder, expected, file):
    path = file("hello", {"prompt": "hello"}, {"prompt_token_ids": [5, 6]}, {"messages": CHAT})
    _, out, _ = run("generate", "-m", folder, *CACHE, "--chat", "--max-tokens", 3, "-q", "--json", "--prompts", path)
    prompts = [json.loads(line)["prompt_token_ids"] for line in out.splitlines()]
    one = expected([{"role": "user", "content": "hello"}], max_tokens=1).prompt_token_ids
    assert prompts == [one, one, [5, 6], expected(CHAT, max_tokens=1).prompt_token_ids]


def test_without_a_tokenizer(run, hf_folder, file):
    bare = hf_folder("Llama", seed=3)
    path = file("1 2 3", {"prompt_token_ids": [1, 2, 3]})
    code, out, _ = run("generate", "-m", bare, *CACHE, "-q", "--max-tokens", 4, "--prompts", path)
    first, second = out.splitlines()
    assert code == 0
    assert first == second
    assert len(first.split()) == 4
    refused(run("generate", "-m", bare, *CACHE, "--prompts", file("1", "hello")), "line 2", "token ids")
    refused(run("generate", "-m", bare, *CACHE, "--prompts", file({"messages": CHAT})), "line 1", "no tokenizer")


def test_sampling_values_of_a_line(run, folder, expected, file):
    own = {"presence_penalty": 1.0, "logit_bias": {"5": 4}, "min_tokens": 2, "stop_token_ids": [9], "logprobs": 1}
    path = file("hello", {"prompt": "hello", **own}, {"prompt": "hello", "detokenize": False, "bad_words": ["x"]})
    base = ("generate", "-m", folder, *CACHE, "-q", "--max-tokens", 6, "--prompts")
    _, out, _ = run(*base, path, "--json", "-v")
    records = [json.loads(line) for line in out.splitlines()]
    truth = expected("hello", max_tokens=6, **own)
    assert records[1]["token_ids"] == truth.token_ids
    assert len(records[1]["logprobs"]) == len(truth.token_ids)
    assert "logprobs" not in records[0]
    assert (records[2]["text"], records[2]["sampling"]["bad_words"]) == ("", ["x"])
    refused(run(*base, path), "p.jsonl line 2", "logprobs: needs --json")


NAN = b'{"prompt": "x", "temperature": NaN}'
DEEP = b"[" * 100_000
BAD = {
    "not JSON": (b"{", ["not valid JSON: ", "column 2"]),
    "a bare word": (b"hello", ["not valid JSON", "column 1"]),
    "a number": (5, ["a text or an object", "found 5"]),
    "not UTF-8": (b'"caf\xe9"', ["UTF-8", "0xe9 at offset 4"]),
    "deep": (DEEP, ["not acceptable JSON"]),
    "a long number": (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", ["not acceptable JSON"]),
    "twice": (b'{"prompt": "x", "id": 1, "id": 2}', ["a key is repeated", "'id'"]),
    "unknown key": ({"prompt": "x", "max_token": 5}, ['"max_token"', "unknown key", "did you mean max_tokens?"]),
    "transformers' key": ({"prompt": "x", "max_new_tokens": 5}, ['"max_new_tokens"', """here "max_tokens")"""]),
    "vLLM's key": ({"prompt": "x", "guided_regex": "a"}, ["""here "structured_outputs": {"regex": …})"""]),
    "of loading": ({"prompt": "x", "quantization": "fp8"}, ["here --quantize)"]),
    "CSV": (b"id,prompt", ["not valid JSON", '"From CSV to JSON lines" in docs/python-api.md']),
    "no prompt": ({"max_tokens": 5}, ["not one prompt", "found none"]),
    "two prompts": ({"prompt": "x", "messages": CHAT}, ["not one prompt", "prompt and messages"]),
    "null": ({"prompt": None}, ["not one prompt", "found none"]),
    "prompt": ({"prompt": 5}, ['"prompt": wrong type', "a text", "found 5"]),
    "id": ({"prompt": "x", "id": 1.5}, ['"id": wrong type', "found 1.5"]),
    "NaN": (NAN, ['"temperature"', "finite number"]),
    "max_tokens": ({"prompt": "x", "max_tokens": 2.0}, ['"max_tokens"', "integer >= 1", "2.0"]),
    "seed": ({"prompt": "x", "seed": True}, ['"seed"', "True"]),
    "stop": ({"prompt": "x", "stop": ["a", ""]}, ['"stop"', "none empty"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_lines_are_named_before_the_model_is_loaded(name, run, folder, file, monkeypatch):
    monkeypatch.setattr(Loaded, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    bad, words = BAD[name]
    refused(run("generate", "-m", folder, *CACHE, "--prompts", file("fine", b"", bad)), "p.jsonl line 3", *words)


NOT_FOR_THIS_MODEL = {
    "empty": ("", ["empty"]), "no ids": ({"prompt_token_ids": []}, ["empty"]),
    "an id": ({"prompt_token_ids": [1, 211]}, ["prompt token 1", "0 to 210", "found 211"]),
    "a float": ({"prompt_token_ids": [1, 2.0]}, ["prompt token 1", "2.0"]), "too long": ("x" * 400, ["at most 255 tokens"]),
    "surrogate": (b'"lone \\udce9"', ["surrogate"]), "messages": ({"messages": [{"role": "user"}]}, ["messages[0]"]),
    "no messages": ({"messages": []}, ["the conversation is empty"]),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_FOR_THIS_MODEL)
def test_all_are_checked_before_the_first_runs(name, run, folder, file):
    bad, words = NOT_FOR_THIS_MODEL[name]
    refused(run("generate", "-m", folder, *CACHE, "--prompts", file("fine", bad)), "p.jsonl line 2", *words)


@pytest.mark.parametrize("option", [
    ("--logit-bias", "999=1"), ("--stop-token-ids", "999"), ("--allowed-token-ids", "999"), ("--regex", "("), ("--chat",),
    ("--stop", "x<s>y"), ("--bad-words", "\x00"), ("--logprobs", "1"),
    ("--min-tokens", "300"), ("--json-schema", '{"type": 5}'),
])  # fmt: skip
def test_an_error_of_an_option_does_not_name_the_file(option, run, hf_folder, file):
    """Catches "p.jsonl line 1, SamplingParams.logit_bias": the line is right. A line that contradicts the option is named."""
    base = ("generate", "-m", add_tokenizer(hf_folder("Llama", seed=3), template=None), *CACHE, *option, "--prompts")
    code, out, err = run(*base, file("hello"))
    assert (code, out, "p.jsonl" in err) == (2, "", False), err
    assert err.startswith(f"minirt: {option[0]}")


def test_a_line_that_contradicts_an_option(run, folder, file):
    base = ("generate", "-m", folder, *CACHE, "--prompts")
    result = run(*base, file({"prompt": "a", "max_tokens": 2}), "--min-tokens", 5)
    refused(result, "--min-tokens, ", "p.jsonl line 1: is above --max-tokens; expected at most 2", code=2)
    refused(run(*base, file({"prompt": "a", "logit_bias": {"999": 1}}), "--min-tokens", 5), "p.jsonl line 1, ", "logit_bias")


@pytest.mark.parametrize("many", [False, True])
def test_results_in_a_file(many, run, folder, file, tmp_path):
    """The same bytes as on stdout, and nothing there."""
    base = ("generate", "-m", folder, *CACHE, "--max-tokens", 4, "--temperature", 0)
    base += ("--prompts", file("hello", "a b")) if many else ("hello", "a b")
    expected, target = run(*base)[1], tmp_path / "out.txt"
    code, out, err = run(*base, "--output-file", target)
    assert (code, out, target.read_text()) == (0, "", expected)
    assert f"results in {target}" in err
    refused(run(*base, "--output-file", tmp_path / "none" / "out"), "--output-file: the folder of", code=2)


def test_no_requests_and_misuse(run, folder, file, tmp_path):
    base = ("generate", "-m", folder, *CACHE, "--prompts")
    for content in ([], [b""], [b"  ", b"\r"]):
        refused(run(*base, file(*content)), "p.jsonl", "no request")
    refused(run(*base, tmp_path / "none"), "none", "No such file")
    refused(run(*base, tmp_path), "found a folder")
    refused(run(*base, file("a"), "b"), " --help)", "--prompt-file", code=2)
    refused(run(*base, file("a"), "--prompt-file", "c"), " --help)", code=2)
    refused(run(*base, file("a"), "--max-num-seqs", 0), "--max-num-seqs: ", code=2)
    refused(run(*base, file("a"), "--top-p", 2), "--top-p", code=2)


def test_own_values_go_before_the_command_lines():
    params = SamplingParams(temperature=0.5, top_k=3, stop=["."], ignore_eos=True)
    lines = [{"prompt": "a", "temperature": 0, "stop": "!", "top_k": None}, "b", {"prompt": "c", "ignore_eos": False}]
    first, second, third = read_prompt_lines("\n".join(map(json.dumps, lines)).encode(), "f", params)
    assert (first.params.temperature, first.params.top_k, first.params.stop) == (0, 3, ("!",))
    assert second.params == params
    assert (third.params.ignore_eos, third.params.temperature) == (False, 0.5)
    (one,) = read_prompt_lines('"\u2028"'.encode(), "f", params)
    assert one.content == "\u2028", "a line separator inside a text does not end the line"
    with pytest.raises(InputError, match="f line 2: not valid JSON"):
        read_prompt_lines(b'"a"\n"\x00"', "f", params)


def completion(tokens, reason="length"):
    done = SimpleNamespace(token_ids=tokens, text="", finish_reason=reason, prompt_token_ids=[1], peak_memory_bytes=5)
    done.outputs, done.prompt_logprobs = [done], None
    return done


def test_a_result_is_printed_once_those_before_it_are(monkeypatch):
    out = []
    monkeypatch.setattr(generate_many.output, "write", out.append)
    printing = generate_many.Printing(as_json=False, verbose=False, quiet=True)
    results = generate_many._Results(printing, SimpleNamespace(tokenizer=None, speculative=None))
    results.rows = [(SimpleNamespace(params=SamplingParams(), record=dict), completion([i], None)) for i in range(4)]
    for finished, printed in ((2, ""), (0, "0"), (3, "0"), (1, "0123")):
        results.rows[finished][1].finish_reason = "length"
        results.print()
        assert "".join(out).replace("\n", "") == printed
    results.print(rest=True)
    assert len(out) == 4


def test_samples_of_a_line(run, folder, file, expected):
    """Each is a result of its own. A greedy line with several samples is refused before the model is loaded."""
    base = ("generate", "-m", folder, *CACHE, "--max-tokens", 4, "--ignore-eos", "--json", "--prompts")
    lines = ["hello", {"prompt": "hello", "n": 3, "seed": 4}, {"prompt": "x", "n": 1}]
    code, out, err = run(*base, file(*lines))
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(record["line"], record.get("sample")) for record in records] == [(1, None), (2, 0), (2, 1), (2, 2), (3, None)]
    for i in range(3):
        truth = expected("hello", seed=4 + i, temperature=1.0, max_tokens=4, ignore_eos=True)
        assert records[1 + i]["token_ids"] == truth.token_ids
    tokens = sum(len(record["prompt_token_ids"]) for record in (records[0], records[1], records[4]))
    assert f"3 prompts of {tokens} tokens · 5 samples · " in err, "samples share the prompt of their line"
    code, _, err = run(*base, file({"prompt": "hello", "n": 3, "temperature": 0}))
    assert code == 1
    assert 'p.jsonl line 1, "n": greedy decoding has one sample' in err


def test_a_failure_does_not_take_the_others_along(run, folder, file, tmp_path):
    """A NaN in the embedding of token 9 fails only the requests with this token, and no line is lost."""
    broken = shutil.copytree(folder, tmp_path / "model")
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][9] = float("nan")
    save_file(weights, broken / "model.safetensors")
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6], [5, 9], [6, 5], [9], [7])]
    base = ("generate", "-m", broken, *CACHE, "--json", "-q", "--max-tokens", 3, "--ignore-eos", "--prompts")
    code, out, err = run(*base, file(*prompts))
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert [record["finish_reason"] for record in records] == ["length", "error", "length", "error", "length"]
    assert [len(record["token_ids"]) for record in records] == [3, 0, 3, 0, 3]
    assert "NaN" in records[1]["error"]
    assert err.startswith("minirt: ")
    assert err.count("\n") == 1
    assert "p.jsonl lines 2, 4: 2 of 5 requests failed: the logits are NaN" in err
    code, out, _ = run(*(word for word in base if word != "--json"), file(*prompts))
    assert code == 1
    assert out.count("\n") == 5, "a failed request has an empty line, so that lines still match"


def test_an_error_that_ends_the_run_leaves_what_is_finished(run, folder, file, monkeypatch):
    from minirt.generator import Completions

    original = Completions.__next__

    def failing(self):
        if sum(done.finish_reason is not None for done in self.all) == 1:
            raise RuntimeError("the roof is on fire")
        return original(self)

    monkeypatch.setattr(Completions, "__next__", failing)
    path = file({"prompt": "a", "max_tokens": 9}, {"prompt": "b", "max_tokens": 1}, {"prompt": "c", "max_tokens": 8})
    base = ("generate", "-m", folder, *CACHE, "--ignore-eos", "--max-num-seqs", 2, "--json", "--prompts", path)
    code, out, err = run(*base)
    assert code == 1
    assert [(r["line"], r["finish_reason"]) for r in map(json.loads, out.splitlines())] == [(1, "abort"), (2, "length")]
    assert "the roof is on fire" in err
    assert "unfinished: line 1\nleft out: line 3" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_prints_what_there_is(number, endless, file):
    path = file({"prompt": "a", "max_tokens": 2}, {"prompt": "b", "id": "long"}, {"prompt": "c", "max_tokens": 3}, "d")
    options = ("--ignore-eos", "--max-tokens", 10**6, "--max-num-seqs", 2, "--json", "--prompts", path)
    with start("generate", "-m", endless, *LONG, *options) as process:
        first = json.loads(process.stdout.readline())  # afterwards b and c run, and d after c has ended
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    records = [first, *map(json.loads, out.splitlines())]
    assert process.returncode == 128 + number
    assert records[0]["finish_reason"] == "length"
    assert (records[1]["line"], records[1]["finish_reason"], records[1]["id"]) == (2, "abort", "long")
    assert records[1]["token_ids"]
    assert records[1]["text"]
    assert [record["line"] for record in records] == sorted(record["line"] for record in records)
    assert re.search(rb"^unfinished: lines? 2", err, flags=re.MULTILINE)
    assert b"Traceback" not in err


def test_a_second_signal_does_not_cut_the_last_output(run, folder, file, monkeypatch):
    """A terminal that closes sends SIGHUP more than once."""
    original, texts = generate_many.output.write, []

    def write(text):
        texts.append(text)
        os.kill(os.getpid(), signal.SIGHUP)
        original(text)

    monkeypatch.setattr(generate_many.output, "write", write)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        path = file(*({"prompt": "a", "max_tokens": n} for n in (3, 9, 9)))
        code, out, err = run("generate", "-m", folder, *CACHE, "--ignore-eos", "--json", "--prompts", path)
    finally:
        assert signal.signal(signal.SIGHUP, before) is signal.SIG_DFL, "the handler is restored"
    assert code == 129
    assert [json.loads(line)["finish_reason"] for line in out.splitlines()] == ["abort", "abort"]
    assert len(texts) == 3, "the first write, during the run, ended the run"
    assert "3 prompts" in err


def test_messages_name_a_few_lines_only(run, folder, file, monkeypatch):
    from minirt.generator import Completions

    monkeypatch.setattr(Completions, "__next__", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    code, out, err = run("generate", "-m", folder, *CACHE, "--prompts", file(b"", *["hello"] * 3000))
    assert (code, out) == (130, "")
    assert "left out: lines 2, 3, 4, 5, 6 and 2995 more\n" in err


def test_the_bar_is_on_a_terminal_and_results_are_not_in_it(folder, file):
    path = file(*({"prompt": "hello", "max_tokens": 3} for _ in range(4)))
    terminal, side = pty.openpty()
    options = ("generate", "-m", folder, *CACHE, "--ignore-eos", "--prompts", path)
    with start(*options, stderr=side) as process:
        os.close(side)
        shown = b""
        try:
            while more := os.read(terminal, 10_000):
                shown += more
        except OSError:  # raised at the end of the output
            pass
        out = process.stdout.read()
    os.close(terminal)
    assert process.returncode == 0
    assert len(out.splitlines()) == 4
    assert b"\x1b" not in out
    assert b"prompts" in shown
    assert b"4/4" in shown or b"3/4" in shown
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h"), "the cursor is hidden"


def test_system_message_of_all_lines(run, folder, file, expected):
    """Catches a system message that is dropped, or that a line which has no place for it ignores."""
    base = ("generate", "-m", folder, *CACHE, "--max-tokens", 3, "--json", "--chat", "--system", "be brief", "--prompts")
    code, out, _ = run(*base, file("hello"))
    assert (code, json.loads(out)["prompt_token_ids"]) == (0, expected(CHAT, max_tokens=3).prompt_token_ids)
    for line in ({"messages": CHAT}, {"prompt_token_ids": [5]}):
        refused(run(*base, file("hello", line)), "p.jsonl line 2", "--system is for prompts that are texts")

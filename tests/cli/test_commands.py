"""The command line: output on stdout and stderr, conversations, exit codes, signals. For bad input see test_errors.py.

Most tests call `main` in this process. Tests of signals, closed pipes and the terminal start a new process.
"""

import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import tomllib

import click
import psutil
import pytest
import torch
from safetensors.torch import load_file
from support.cli import CACHE, LONG, printed, refused, start, succeeded
from support.package import ROOT
from support.quantized import write
from support.tiny import add_tokenizer

from minirt import Generator, SamplingParams
from minirt.cli import app as cli
from minirt.cli import chat
from minirt.cli.help import TITLES, option_group
from minirt.errors import shortened
from minirt.generator import Generator as Loaded


@pytest.fixture(scope="module")
def bare(hf_folder):
    return hf_folder("Llama", seed=3)


@pytest.fixture(scope="module")
def expected(folder):
    """A function (prompt, number of tokens) → the completion of the Python API."""
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=8 << 20) as generator:
        yield lambda prompt, count, **own: generator.generate(prompt, SamplingParams(max_tokens=count, **own))


# generate


def test_text_goes_to_stdout_and_figures_to_stderr(run, folder, expected):
    out, err = succeeded(run("generate", "-m", folder, *CACHE, "--max-tokens", 9, "hello", "the fox"))
    assert out == "".join(expected(p, 9).text + "\n" for p in ("hello", "the fox"))
    words = ("load ", "first token", "decode 9 tokens", "tokens/s", "GB/s of weights", "peak memory", "greedy (default)")
    assert [word for word in words if err.count(word) < 2] == []
    words = ("prompt 5 tokens", "prompt 4 tokens", "finished: length", f" · {torch.get_num_threads()} thread")
    assert [word for word in words if word not in err] == []
    assert run("generate", "-m", folder, *CACHE, "--max-tokens", 9, "-q", "hello", "the fox") == (0, out, "")


def test_threads(run, folder, monkeypatch):
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    assert run("generate", "-m", folder, *CACHE, "--threads", 1, "-q", "--max-tokens", 1, "hello")[0] == 0
    assert counts == [1]
    refused(run("generate", "-m", folder, "--threads", 10**9, "hello"), "threads", "the CPUs here", code=2)
    refused(run("generate", "-m", folder, "--threads", 0, "hello"), "--threads", code=2)


def test_effective_sampling_is_shown_with_its_sources(run, copy):
    config = {"do_sample": True, "top_k": 7, "typical_p": 0.8}
    (copy / "generation_config.json").write_text(json.dumps(config))
    _, _, err = run("generate", "-m", copy, *CACHE, "--max-tokens", 2, "--seed", 5, "--top-p", 0.5, "hello")
    for words in ("top_k 7 (generation_config.json)", "top_p 0.5 (user)", "seed 5 (user)", "typical_p=0.8"):
        assert words in err


def test_json(run, folder, expected):
    out = printed(run("generate", "-m", folder, *CACHE, "--json", "-q", "--max-tokens", 9, "hello", 'quote " and \n'))
    for line, prompt in zip(out.splitlines(), ("hello", 'quote " and \n'), strict=True):
        record, truth = json.loads(line), expected(prompt, 9)
        names = ("prompt_token_ids", "token_ids", "text", "finish_reason")
        assert record.items() >= {"prompt": prompt, **{name: getattr(truth, name) for name in names}}.items()
        for name in ("time_to_first_token_s", "decode_tokens_per_s", "peak_memory_bytes"):
            assert record[name] > 0
        assert not {"sampling", "sampling_sources", "seed"} & record.keys()
    for option in ("-v", "--verbose"):
        record = json.loads(run("generate", "-m", folder, *CACHE, "--json", "-q", "--max-tokens", 9, option, "hello")[1])
        assert record["sampling"]["max_tokens"] == 9
        assert record["sampling_sources"]["max_tokens"] == "user"
    base = ("generate", "-m", folder, *CACHE, "--json", "-q", "--temperature", 0.9, "hello")
    drawn = json.loads(run(*base)[1])
    again = json.loads(run(*base, "--seed", drawn["seed"])[1])
    assert drawn["token_ids"] == again["token_ids"], "without its seed, a result cannot be had again"


def test_every_sampling_option_arrives(run, folder):
    flags = ["--min-tokens", 1, "--stop-token-ids", "7,0", "--include-stop-str-in-output", "--presence-penalty", 0.5]
    flags += ["--frequency-penalty", -0.5, "--repetition-penalty", 1.5, "--logit-bias", "3=-5.5", "--logit-bias", "0=1"]
    flags += ["--allowed-token-ids", "0,3,5,6,7", "--bad-words", "quick", "--bad-words", "dog", "--no-skip-special-tokens"]
    flags += ["--truncate-prompt-tokens", 4, "--logprobs", 2, "--prompt-logprobs", 0, "--ignore-eos", "--stop=a", "--stop=b"]
    out = printed(run("generate", "-m", folder, *CACHE, "--json", "-vq", "--max-tokens", 3, *flags, "the quick brown fox"))
    record = json.loads(out)
    expected = {
        "min_tokens": 1, "stop_token_ids": [7, 0], "include_stop_str_in_output": True, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.5, "logit_bias": {"3": -5.5, "0": 1.0},
        "allowed_token_ids": [0, 3, 5, 6, 7], "bad_words": ["quick", "dog"], "skip_special_tokens": False,
        "truncate_prompt_tokens": 4, "logprobs": 2, "prompt_logprobs": 0, "ignore_eos": True, "stop": ["a", "b"],
    }  # fmt: skip
    assert {name: record["sampling"][name] for name in expected} == expected
    assert all(record["sampling_sources"][name] == "user" for name in expected)
    assert len(record["prompt_token_ids"]) == len(record["prompt_logprobs"]) == 4
    assert record["prompt_logprobs"][0] is None
    assert [row["token_id"] for row in record["prompt_logprobs"][1:]] == record["prompt_token_ids"][1:]
    assert [row["token_id"] for row in record["logprobs"]] == record["token_ids"]
    assert set(record["token_ids"]) <= {0, 3, 5, 6, 7}
    for row in record["logprobs"]:
        assert set(row) == {"token_id", "logprob", "rank", "top"}
        assert len(row["top"]) == 2
    ids = run("generate", "-m", folder, *CACHE, "-q", "--max-tokens", 3, "--no-detokenize", "hello")[1]
    assert len(ids.split()) == 3


def test_samples(run, folder, expected):
    """They are what their seeds give alone, in each form of printing. Those after the first find the pages of the prompt."""
    prompt = "the quick brown fox jumps over the lazy dog. " * 5
    base = ("generate", "-m", folder, *CACHE, "-q", "--n", 3, "--seed", 4, "--max-tokens", 4, "--ignore-eos", prompt, "hello")
    wanted = [(text, i) for text in (prompt, "hello") for i in range(3)]
    truths = [expected(text, 4, seed=4 + i, temperature=1.0, ignore_eos=True) for text, i in wanted]
    records = [json.loads(line) for line in run(*base, "--json")[1].splitlines()]
    assert [(r["prompt"], r["sample"]) for r in records] == wanted
    assert [r["token_ids"] for r in records] == [truth.token_ids for truth in truths]
    assert [r["cached_tokens"] for r in records] == [0, 64, 64, 0, 0, 0]
    code, out, err = run(*base)
    assert (code, err, out) == (0, "", "".join(truth.text + "\n" for truth in truths))
    assert run(*base, "--no-detokenize")[1].split() == [str(token) for truth in truths for token in truth.token_ids]


def test_the_summary_counts_the_drafts_of_all_samples(run, folder, monkeypatch):
    """It counted those of the first sample."""
    monkeypatch.setattr("minirt.cli.output.drafts_summary", lambda generator, samples: f"drafts of {len(samples)} samples")
    options = ("--n", 3, "--seed", 4, "--max-tokens", 4, "--speculate", "ngram", "hello")
    assert "drafts of 3 samples" in run("generate", "-m", folder, *CACHE, *options)[2]


def test_one_token_has_no_rate(run, folder):
    """A text of one token was said to be decoded with 0.0 tokens/s and 0.0 GB/s."""
    err = run("generate", "-m", folder, *CACHE, "--max-tokens", 1, "--speculate", "ngram", "hello")[2]
    assert "decode 1 token · peak memory" in err
    assert "drafts: none were verified, as nothing was proposed\n" in err


def test_what_drafts_change_in_the_output(run, folder):
    """A step yields several tokens, so tokens by bytes of weights are no bandwidth. JSON has the same keys on each line."""
    options = ("--max-tokens", 60, "--ignore-eos", "--temperature", 0, "--speculate", "ngram", "hello hello hello")
    err = run("generate", "-m", folder, *CACHE, *options)[2]
    assert "accepted" in err
    assert "GB/s of weights" not in err
    for prompt in ("hello hello hello", "world"):
        record = json.loads(run("generate", "-m", folder, *CACHE, "--max-tokens", 2, "--speculate", "ngram", "--json", prompt)[1])
        assert {"num_draft_tokens", "num_accepted_tokens", "acceptance_length"} <= record.keys()
    assert "num_draft_tokens" not in json.loads(run("generate", "-m", folder, *CACHE, "--max-tokens", 2, "--json", "hello")[1])


@pytest.mark.parametrize("group", [(), ("bench",), ("eval",)])
def test_the_list_of_commands_has_whole_sentences(run, group):
    """On 80 columns they were cut: "Measure a model: its speed with prompts and decode steps;..."."""
    lines = run(*group, "--help")[1].partition("Commands:\n")[2].splitlines()
    assert len(lines) > 1
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []


def test_options_that_make_no_sense_are_refused(run, folder):
    base = ("generate", "-m", folder, *CACHE, "hello")
    refused(run(*base, "--n", 2, "--temperature", 0), "--n", "greedy decoding has one sample", code=2)
    refused(run(*base, "--n", 0), "--n", "from 1 to", code=2)
    refused(run(*base, "--logprobs", 1), "need --json", code=2)
    refused(run(*base, "--prompt-logprobs", 1), "need --json", code=2)
    refused(run(*base, "--json", "--logprobs", 21), "--logprobs", "0 to 20", code=2)
    refused(run(*base, "--min-tokens", 5, "--max-tokens", 4), "--min-tokens", "above --max-tokens", code=2)
    refused(run(*base, "--no-detokenize", "--stop", "x"), "--stop", "needs the text", code=2)
    refused(run(*base, "--no-detokenize", "--no-skip-special-tokens"), "--no-skip-special-tokens: ", "about the text", code=2)
    refused(run(*base, "--logit-bias", "3"), "no token id and number", code=2)
    refused(run(*base, "--logit-bias", "3=1", "--logit-bias", "3=2"), "--logit-bias", "twice", code=2)
    refused(run(*base, "--logit-bias", "3=101"), "--logit-bias", "-100 to 100", code=2)
    refused(run(*base, "--max-tokens", 0), "--max-tokens: asks for nothing without --prompt-logprobs", code=2)
    for prompts in (("a",), ("a", "b")):
        refused(run("generate", "-m", folder, *CACHE, *prompts, "--logit-bias", "211=1"), "minirt: --logit-bias: not a t", code=2)
    refused(run(*base, "--stop-token-ids", "3,x"), "is not token ids", code=2)
    refused(run(*base, "--stop-token-ids", "211"), "--stop-token-ids", "0 to 210", code=2)


def test_json_is_whole_whatever_the_terminal_shows(folder):
    """A character that is not in the terminal's encoding is escaped, not replaced."""
    arguments = ("generate", "-m", folder, *CACHE, "--json", "-q", "--max-tokens", 1, "日本 ß")
    process = start(*arguments, env={"PYTHONIOENCODING": "ascii"})
    out, _ = process.communicate()
    assert json.loads(out)["prompt"] == "日本 ß"


def test_prompt_files_are_verbatim(run, folder, expected, tmp_path, monkeypatch):
    text = "  two spaces, \r\n a CRLF and newlines \n\n"
    (tmp_path / "p").write_bytes(text.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" from stdin \n")))
    files = ("--prompt-file", tmp_path / "p", "--prompt-file", "-")
    _, out, _ = run("generate", "-m", folder, *CACHE, "--json", "-q", "--max-tokens", 1, *files, "first")
    prompts = [json.loads(line)["prompt_token_ids"] for line in out.splitlines()]
    assert prompts == [expected(p, 1).prompt_token_ids for p in ("first", text, " from stdin \n")]


@pytest.mark.parametrize(("prompts", "texts"), [((), ["a\n b "]), (("-",), ["a\n b "]), (("hello", "-"), ["hello", "a\n b "])])
def test_a_pipe_is_a_prompt(prompts, texts, run, folder, expected, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\n b \r\n")))
    out, _ = succeeded(run("generate", "-m", folder, *CACHE, "--json", "-q", "--max-tokens", 1, *prompts))
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == texts


def test_a_terminal_is_no_prompt(run, folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Keyboard("hello\n"))
    refused(run("generate", "-m", folder, *CACHE), "no prompt", code=2)


def test_text_is_flushed_as_it_comes(folder, monkeypatch):
    class Stream(io.StringIO):
        pending, flushes = False, 0

        def write(self, text):
            assert not self.pending, "two writes without a flush between them"
            self.pending = bool(text)
            return super().write(text)

        def flush(self):
            self.pending, self.flushes = False, self.flushes + 1

    stream = Stream()
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit):
        cli.main(["generate", "-m", str(folder), *CACHE, "-q", "--max-tokens", "12", "hello"])
    assert stream.flushes >= 12


def test_token_ids_without_a_tokenizer(run, bare, expected):
    ids = expected("hello", 1).prompt_token_ids
    for text in (" ".join(map(str, ids)), ",".join(map(str, ids)) + "\n"):
        out, _ = succeeded(run("generate", "-m", bare, *CACHE, "-q", "--max-tokens", 9, text))
        assert [int(word) for word in out.split()] == expected("hello", 9).token_ids
    refused(run("generate", "-m", bare, *CACHE, "hello"), "no tokenizer", "token ids", "'1 2 3'")
    refused(run("generate", "-m", bare, *CACHE, "1 2 211"), "0 to 210", "found 211")
    refused(run("generate", "-m", bare, *CACHE, " , "), "empty")
    refused(run("generate", "-m", bare, *CACHE, "1 2", "--stop", "a"), "tokenizer")
    refused(run("generate", "-m", bare, *CACHE, "--chat", "1 2"), "no tokenizer")
    refused(run("chat", "-m", bare, *CACHE), "no tokenizer")


def test_a_structured_text_that_is_cut_is_a_warning(run, folder, tmp_path):
    """Half a JSON object was printed without a word. The schema is given as a text, without a file."""
    schema = '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'
    out, err = succeeded(run("generate", "-m", folder, *CACHE, "-q", "--max-tokens", 2, "--json-schema", schema, "hello", "a"))
    assert out.startswith("{")
    assert "warning: 2 of 2 texts are incomplete: --max-tokens 2 came before the end" in err
    lines = tmp_path / "lines.jsonl"
    lines.write_text('"hello"\n{"prompt": "a", "structured_outputs": {"json_object": true}}\n')
    many = run("generate", "-m", folder, *CACHE, "-q", "--max-tokens", 2, "--prompts", lines)
    assert "warning: 1 of 2 texts are incomplete" in many[2]
    assert "white space" not in err + many[2]
    whole = run("generate", "-m", folder, *CACHE, "-q", "--max-tokens", 20, "--choice", "a", "hello")
    assert (whole[0], "incomplete" in whole[2]) == (0, False)


def test_without_a_model(run, folder, monkeypatch):
    _, err = succeeded(run("generate", *CACHE, "--max-tokens", 1, "hello"))
    assert "the embedded model" in err
    assert run("generate", *CACHE, "--max-tokens", 1, "-q", "hello")[2] == ""
    _, err = succeeded(run("plan", "--device", "cpu"))
    assert "the embedded model" in err
    monkeypatch.setenv("MINIRT_MODEL", str(folder / "nowhere"))
    refused(run("generate", *CACHE, "hello"), "nowhere")


def test_nothing_is_printed_before_all_prompts_are_checked(run, folder, tmp_path):
    refused(run("generate", "-m", folder, *CACHE, "hello", "x" * 400), "at most 255 tokens", "the model itself takes at most 256")
    refused(run("generate", "-m", folder, *CACHE, "--json", "hello", ""), "empty")
    refused(run("generate", "-m", folder, *CACHE, "hello", "--prompt-file", tmp_path / "none"), "none", "No such file")


# chat


class Keyboard(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def seen(monkeypatch):
    """The prompts of all turns, as token ids."""
    prompts, original = [], Loaded.stream_completion

    def spy(self, prompt, params=None):
        prompts.append(prompt)
        return original(self, prompt, params)

    monkeypatch.setattr(Loaded, "stream_completion", spy)
    return prompts


def ids(folder, text):
    from minirt.text.tokenizer import Tokenizer

    return Tokenizer.load(folder)._encode(text, add_special_tokens=False)


@pytest.mark.parametrize(("options", "opening"), [((), ""), (("--system", "be brief"), "[system]be brief\n"),
                                                  (("--system", ""), "[system]\n")])  # fmt: skip
def test_conversation(options, opening, run, folder, monkeypatch, seen):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n  \nthe fox \n/reset\na\n/exit\nnever\n"))
    out = printed(run("chat", "-m", folder, *CACHE, "--max-tokens", 5, "-q", *options))
    first, second, third = out.removesuffix("\n").split("\n")
    assert first
    assert third
    texts = [f"<s>{opening}[user]hello\n[assistant]"]
    texts.append(f"<s>{opening}[user]hello\n[assistant]{first}\n[user]the fox \n[assistant]")
    texts.append(f"<s>{opening}[user]a\n[assistant]")
    assert seen == [ids(folder, text) for text in texts]
    assert second


def test_a_conversation_that_grows_too_long(run, folder, monkeypatch, seen):
    lines = "hello\n" + "x" * 300 + "\nfox\n"
    monkeypatch.setattr(sys, "stdin", Keyboard(lines))
    out, err = succeeded(run("chat", "-m", folder, *CACHE, "--max-tokens", 5, "-q"))
    assert out.count("\n") == 2
    assert "at most 255 tokens" in err
    assert "/reset starts over" in err
    assert len(seen) == 3, "the refused message is not part of the conversation"
    assert len(seen[2]) < 100
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code, _, err = run("chat", "-m", folder, *CACHE, "--max-tokens", 5, "-q")
    assert code == 1, "a script must see the failure"


def test_control_c_stops_an_answer_only(run, folder, monkeypatch, seen):
    original, calls = chat.write, []

    def interrupted(text):
        calls.append(text)
        if len(calls) == 3:
            raise KeyboardInterrupt
        original(text)

    monkeypatch.setattr(chat, "write", interrupted)
    monkeypatch.setattr(sys, "stdin", Keyboard("hello\n/stats\nthe fox\n"))
    out, err = succeeded(run("chat", "-m", folder, *CACHE, "--max-tokens", 5))
    assert "(stopped; Ctrl-C again ends" in err
    assert out.count("\n") == 2
    short, rest = re.findall(r"^3 tokens, .*|^decode 3 tokens.*", err, flags=re.MULTILINE)
    assert short.endswith(" tokens/s, abort")
    assert rest.endswith("finished: abort")
    assert not re.search(r"\b0 B|None", err)
    stopped = "".join(calls[:3])
    assert seen[1] == ids(folder, f"<s>[user]hello\n[assistant]{stopped}\n[user]the fox\n[assistant]")


def test_control_c_before_the_first_token_takes_the_message_back(run, folder, monkeypatch, seen):
    original, calls = Loaded.stream_completion, []

    def interrupted(self, prompt, params=None):
        calls.append(prompt)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return original(self, prompt, params)

    monkeypatch.setattr(Loaded, "stream_completion", interrupted)
    monkeypatch.setattr(sys, "stdin", Keyboard("hello\n/stats\nthe fox\n"))
    _, err = succeeded(run("chat", "-m", folder, *CACHE, "--max-tokens", 2))
    assert "no answer yet" in err
    assert calls[1] == ids(folder, "<s>[user]the fox\n[assistant]")


def test_chat_commands(run, folder, tmp_path, monkeypatch, seen):
    saved = tmp_path / "saved.jsonl"
    lines = ["/system", "/system be\x1b[31m brief", "hello", f"/save {saved}", "/system", "/help", "/stats", "/reset", "a",
             " /not a command", f"/save {saved}", "/save", "/wobble 5", "/", "/exit", "never"]  # fmt: skip
    monkeypatch.setattr(sys, "stdin", Keyboard("\n".join(lines)))
    out, err = succeeded(run("chat", "-m", folder, *CACHE, "--max-tokens", 4, "--ignore-eos"))
    first, second, third = out.removesuffix("\n").split("\n")
    begin = "<s>[system]be\x1b[31m brief\n"
    assert seen == [ids(folder, begin + text) for text in (
        "[user]hello\n[assistant]", "[user]a\n[assistant]", f"[user]a\n[assistant]{second}\n[user] /not a command\n[assistant]",
    )]  # fmt: skip
    assert third
    messages = [("system", "be\x1b[31m brief"), ("user", "hello"), ("assistant", first)]
    assert json.loads(saved.read_text()) == {"messages": [{"role": r, "content": c} for r, c in messages]}
    assert saved.read_text().count("\n") == 1
    for words in ("no system message\n", "system message: be\\x1b[31m brief\n", "/save FILE ", "/exit ", "3 messages in",
                  "saved.jsonl: cannot be written: File exists", "/save: no file", "minirt: /wobble: unknown command",
                  "minirt: /: unknown command", "decode 4 tokens"):  # fmt: skip
        assert words in err, words
    assert len(re.findall(r"^4 tokens, [0-9.]+ tokens/s, cut at 4 tokens", err, flags=re.MULTILINE)) == 3
    for command in ("/wobble", "/save", f"/save {saved}"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{command}\nhello\n"))
        refused(run("chat", "-m", folder, *CACHE), command.split()[-1])


THINKS = (
    "{% for m in messages %}[{{ m.role }}{{ '(' ~ m.reasoning_content ~ ')' if m.reasoning_content }}]{{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<think>' if enable_thinking is undefined or enable_thinking else '<think></think>' }}{% endif %}"
)


def test_variables_of_the_chat_template(run, hf_folder, tmp_path):
    """They reach the template of every conversation; what the template does not use, or no conversation, is refused by name."""
    thinks, off = add_tokenizer(hf_folder("Llama"), template=THINKS), '{"enable_thinking": false}'
    base = ("generate", "-m", thinks, *CACHE, "--json", "-q", "--max-tokens", 2)
    for switch, end in (((), "<think>"), (("--chat-template-kwargs", off), "<think></think>")):
        record = json.loads(run(*base, "--chat", *switch, "hi")[1])
        assert record["prompt_token_ids"] == ids(thinks, f"[user]hi\n{end}")
        lines = tmp_path / "lines"
        lines.write_text('"hi"\n{"messages": [{"role": "user", "content": "ho"}]}\n')
        out = run(*base, "--chat", *switch, "--prompts", lines)[1].splitlines()
        prompts = [json.loads(line)["prompt_token_ids"] for line in out]
        assert prompts == [ids(thinks, f"[user]{own}\n{end}") for own in ("hi", "ho")]
    refused(run(*base, "--chat", "--chat-template-kwargs", '{"mood": 1}', "hi"), "does not use mood", code=2)
    refused(run(*base, "--chat", "--chat-template-kwargs", "[1]", "hi"), "not a JSON object", code=2)
    refused(run(*base, "--chat-template-kwargs", off, "hi"), "needs --chat", code=2)
    lines.write_text('"hi"\n')
    refused(run(*base, "--chat-template-kwargs", off, "--prompts", lines), "is for conversations", code=2)


def test_reasoning_is_not_content_in_the_next_turn(run, hf_folder, monkeypatch, seen):
    """An answer after `<think>` goes back as reasoning and content, as the template takes them."""
    thinks = add_tokenizer(hf_folder("Llama"), template=THINKS)
    monkeypatch.setattr(sys, "stdin", Keyboard("hi\nho\n"))
    code, out, _ = run("chat", "-m", thinks, *CACHE, "--choice", "Hm\n</think>\n\nyes")
    assert (code, out) == (0, 2 * "Hm\n</think>\n\nyes\n")
    assert seen[1] == ids(thinks, "[user]hi\n[assistant(Hm)]yes\n[user]ho\n<think>")


def test_a_saved_conversation_is_a_request(run, folder, tmp_path, monkeypatch):
    saved = tmp_path / "s"
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"hello\n/save {saved}\n"))
    assert run("chat", "-m", folder, *CACHE, "--max-tokens", 3, "-q", "--system", "é\udce9")[0] == 1, "half a surrogate pair"
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"hello\n/save {saved}2\n"))
    assert run("chat", "-m", folder, *CACHE, "--max-tokens", 3, "-q", "--system", "é")[0] == 0
    assert run("generate", "-m", folder, *CACHE, "--max-tokens", 1, "-q", "--prompts", f"{saved}2")[0] == 0


def test_a_template_without_a_system_message(run, hf_folder, monkeypatch):
    refusal = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template = f"{{% for m in messages %}}{refusal}{{{{ m.content }}}}{{% endfor %}}"
    folder = add_tokenizer(hf_folder("Llama"), template=template)
    monkeypatch.setattr(sys, "stdin", Keyboard("/system be brief\n/system\nhello\n"))
    out, err = succeeded(run("chat", "-m", folder, *CACHE, "--max-tokens", 2))
    assert out
    assert "no system\n" in err or "no system (" in err
    assert "no system message" in err


def test_chat_with_the_embedded_model_is_refused_before_it_is_loaded(run, monkeypatch):
    monkeypatch.setattr(Loaded, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    words = ("embedded model", "no chat template", "--model SmolLM2-135M-Instruct", "minirt generate")
    for model in ((), ("-m", "embedded")):
        refused(run("chat", *model, *CACHE), *words)


def test_no_chat_template(run, hf_folder):
    """The error says what to do: it said "use a plain prompt" to who had given one, with --chat."""
    folder = add_tokenizer(hf_folder("Llama"), template=None)
    refused(run("chat", "-m", folder, *CACHE), "no chat template", "conversations need a chat model")
    words = ("--chat: the model has no chat template", "leave --chat out", "--model SmolLM2-135M-Instruct")
    refused(run("generate", "-m", folder, *CACHE, "--chat", "hello"), *words, code=2)


# plan and env


def leaves(group=cli.cli, path=()):
    """(words, command) of all commands that are no groups."""
    for word, command in group.commands.items():
        yield from leaves(command, (*path, word)) if hasattr(command, "commands") else [((*path, word), command)]


def test_every_command_that_prints_results_has_json():
    def flags(command):
        return {flag for parameter in command.params for flag in parameter.opts}

    without = {" ".join(words) for words, command in leaves() if not {"--json", "--output-format", "-o"} <= flags(command)}
    assert without == {"chat", "compile", "serve"}, "a conversation, a folder and a server have no results"


def test_json_is_an_output_format(run, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    facts = json.loads(run("env", "--json")[1])
    assert facts == json.loads(run("env", "-o", "json")[1]) == json.loads(run("env", "--json", "-o", "json")[1])
    assert facts["torch"] == torch.__version__
    refused(run("env", "--json", "-o", "text"), "--json", "--output-format text", code=2)
    assert run("env", "-o", "text")[1] == run("env")[1]
    assert json.loads(run("bench", "kernels", "o", "--list", "--device", "cpu", "--json")[1]).keys() == {"o"}


def test_plan(run, folder):
    out = printed(run("plan", "-m", "SmolLM2-135M", "--device", "cpu"))
    assert [line.split()[0] for line in out.splitlines() if "layers." in line] == ["layers.0-29.attention", "layers.0-29.mlp"]
    for word in ("embedding", "head", "eager", "134.5 M parameters", "513.13MiB", " × 30"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 80, "the default width of a terminal"
    impl = ("--impl", "layers.1.*=eager", "--impl", "auto")
    record = json.loads(run("plan", "-m", folder, "--device", "cpu", "--json", *impl)[1])
    assert [row["layer"] for row in record["layers"]][-4:] == ["layers.2.attention", "select", "layers.2.mlp", "head"]
    assert len(record["layers"]) == 9
    assert record["weight_bytes"] == sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    reasons = {row["layer"]: row["reason"] for row in record["layers"]}
    assert reasons["layers.1.mlp"] == "--impl layers.1.*=eager"
    assert "cpu" in reasons["layers.0.mlp"]


def test_plan_of_quantized_weights(run, hf_folder, tmp_path, monkeypatch):
    folder = write(hf_folder("Llama", seed=3), tmp_path / "model", "modelopt").folder
    code, out, err = run("plan", "-m", folder, "--device", "cpu")
    assert (code, err) == (0, "")
    assert "float32 · fp8" in out
    assert "Checkpoint: modelopt: FP8, one scale for each tensor" in out
    assert "Note: 21 input scales are not used: activations have a scale for each token" in out
    assert "Does not fit" not in out
    record = json.loads(run("plan", "-m", folder, "--device", "cpu", "--json")[1])
    assert record["checkpoint"] == "modelopt: FP8, one scale for each tensor"
    assert len(record["notes"]) == 3
    assert "slow" in record["notes"][-1]
    assert record["layers"][1]["formats"] == ["fp8"]
    text = folder / "config.json"
    refused(run("eval", "fp8", "-m", add_tokenizer(folder), "--device", "cpu", "--text", text), "quantized already", code=2)
    monkeypatch.setattr("minirt.loading.memory.free_memory", lambda device: 1000)
    code, out, _ = run("plan", "-m", folder, "--device", "cpu")
    assert code == 1, "a script asks whether it fits"
    assert re.search(r"^Does not fit: it needs .* \(use a smaller model, or free memory\)$", out, re.MULTILINE)
    assert run("plan", "-m", folder, "--device", "cpu", "--json")[0] == 1
    refused(run("plan", "-m", folder, "--device", "cpu", "--fp8"), "quantized already", code=2)


def test_plan_counts_what_drafts_take(run):
    """Layers, pages, and states that can be taken back. Catches a plan that fits where loading with drafts does not."""
    base = ("plan", "-m", "Qwen3.5-0.8B", "--gpu", "H200", "--json")
    plain, ngram, mtp = (json.loads(run(*base, *own)[1]) for own in ((), ("--speculate", "ngram"), ("--speculate", "mtp:2")))
    names = [{layer["layer"] for layer in record["layers"]} for record in (plain, ngram, mtp)]
    assert names[0] == names[1]
    assert names[2] - names[0] == {"tap", *(f"mtp.{name}" for name in ("input", "attention", "select", "mlp", "tap", "head"))}
    assert plain["weight_bytes"] == ngram["weight_bytes"] < mtp["weight_bytes"]
    assert mtp["memory"]["page"] == plain["memory"]["page"] * 7 // 6
    assert plain["memory"]["state"] < mtp["memory"]["state"] < ngram["memory"]["state"]
    refused(run("plan", "-m", "Qwen2.5-7B", "--device", "cpu", "--speculate", "mtp"), "no multi-token prediction")
    refused(run("plan", "-m", "Qwen2.5-7B", "--device", "cpu", "--speculate", "eagle"), "expected ngram or mtp", code=2)


def test_plan_for_a_gpu_that_is_not_here(run):
    base = ("plan", "-m", "Qwen2.5-7B")
    code, out, err = run(*base, "--device", "cuda", "--gpu", "h200")
    assert (code, err) == (0, "")
    assert "cuda (H200, sm_90)" in out
    assert out.count(" triton ") == 5
    assert "CUDA graphs: small steps" in out
    assert "this compute capability only: decode_sm90, gemm_sm90, prefill_sm90\n" in out
    for line in (
        r"Memory: 139.4GiB free of 140.4GiB \(estimate\); minirt takes at most 125\.\d+GiB of\n  it, 90% \(--gpu-memory-.*",
        r"  weights +14.19GiB",
        r"  steps .*estimate, at most 8,192 tokens.*", r"  KV cache +1\d\d\.\d+GiB  [0-9,]+ pages, .*", r"Fits\.",
        r"One sequence of 131,072 tokens needs 7GiB of KV cache, 2[0-9.]+GiB with weights and\n  steps\.",
    ):  # fmt: skip
        assert re.search(f"^{line}$", out, re.MULTILINE), line
    out = run(*base, "--gpu", "24GiB:8.9", "--gpu-memory-utilization", 0.8)[1]
    assert re.search(r"at most 18\.\d+GiB\s+of\s+it,\s+80%", out)
    assert "not used" not in out, "the KV cache takes what remains"
    assert re.search(r"^Fits with a context of [0-9,]+ instead of 131,072; for all of it, use\s--.*\.$", out, re.DOTALL | re.M)
    refused(run(*base, "--device", "cpu", "--gpu-memory-utilization", 0.8), "--gpu-memory-utilization", code=2)
    refused(run(*base, "--gpu", "h200", "--gpu-memory-utilization", 1.5), "--gpu-memory-utilization", code=2)
    code, out, _ = run(*base, "--gpu", "rtx 3090", "--dtype", "float32")
    assert code == 1
    assert re.search(r"^Does not fit: it needs at least 28\.\d+GiB \(use --dtype bfloat16: at least 1\d.*GiB\)$", out, re.M)
    even = "at least 5.92GiB even with --quantize int4: use a smaller model, or a GPU with more memory)"
    for gpu, words in (("12GiB:8.9", "use --fp8: at least 8"), ("10GiB", "use --quantize int4: at least 5"), ("2GiB", even)):
        assert f"({words}" in run(*base, "--gpu", gpu)[1].splitlines()[-1]
    assert "sm90" not in out
    assert "assumed" not in out
    assert "8.0 is assumed, which has no FP8; for 8.9, write --gpu 24GB:8.9\n" in run(*base, "--gpu", "24 GB")[1]
    record = json.loads(run(*base, "--gpu", "l4", "--fp8", "--kv-cache-dtype", "fp8", "--max-model-len", 4096, "--json")[1])
    assert record["memory"]["fits"]
    assert record["memory"]["tokens"] == 64 * record["memory"]["pages"] <= 64 * 4096
    assert {row["implementation"] for row in record["layers"]} == {"triton"}
    refused(run(*base, "--gpu", "h300"), "--gpu: unknown GPU", "H200", "24GiB:8.9", code=2)
    refused(run(*base, "--gpu", "a100"), "found a100 (did you mean A100-80GB or A100-40GB?)", code=2)
    refused(run(*base, "--gpu", "h200", "--device", "cpu"), "--device cpu", code=2)


def test_plan_says_what_fits_here(run, folder, monkeypatch):
    for module in ("minirt.device", "minirt.loading.memory"):
        monkeypatch.setattr(f"{module}.free_memory", lambda device: 1 << 20)
    out = run("plan", "-m", folder, "--device", "cpu", "--max-num-seqs", 1)[1]
    assert re.search(r"^Memory: 1MiB free now; minirt takes at most \d+.*KiB of it: the weights, ", out, re.MULTILINE), out
    assert re.search(r"^  KV cache +\d+KiB  \d pages, \d+ tokens$", out, re.MULTILINE), out
    assert "not used" not in out
    out = run("plan", "-m", folder, "--device", "cpu", "--max-num-seqs", 1, "--kv-cache-memory", "48KiB")[1]
    assert "minirt takes at most" not in out, "no quarter of the memory decides"
    assert re.search(r"^  not used +\d+.*  as --kv-cache-memory says$", out, re.MULTILINE), out
    monkeypatch.setattr("minirt.loading.memory.free_memory", lambda device: 1 << 30)
    out = run("plan", "-m", folder, "--device", "cpu", "--max-num-seqs", 1)[1]
    assert re.search(r"^  not used +\d+.*  --max-num-seqs 1 needs no more$", out, re.MULTILINE), out
    code, out, _ = run("plan", "-m", "Qwen2.5-0.5B", "--device", "cpu")
    assert (code, "Does not fit" in out) == (1, True)


def test_plan_of_a_context_that_does_not_fit(run):
    """Catches exit code 0 for an explicit context that loading refuses, and advice that does not fit itself."""
    base = ("plan", "-m", "Qwen2.5-7B", "--gpu", "24GiB:8.9")
    code, out, _ = run(*base, "--max-model-len", "131072", "--fp8", "--dtype", "bfloat16", "--kv-cache-memory", "4GiB")
    assert code == 1
    assert re.search(
        r"^Does not fit: a context of 131,072 tokens needs 7GiB of KV cache, which has room for 4GiB, 74,880 tokens "
        r"\(raise --kv-cache-memory 7GiB, or --max-model-len 74880\)$", out, re.M
    ), out
    for advice in (("131072", "--kv-cache-memory", "7GiB"), ("74880", "--kv-cache-memory", "4GiB")):
        assert run(*base, "--fp8", "--max-model-len", *advice)[0] == 0
    code, out, _ = run(*base, "--max-model-len", "131072")
    assert (code, "(use --kv-cache-dtype fp8, or --max-model-len " in out) == (1, True), out
    assert run(*base, "--max-model-len", "131072", "--kv-cache-dtype", "fp8")[0] == 0
    shorter = re.search(r"--max-model-len (\d+)\)$", out, re.M)[1]
    assert run(*base, "--max-model-len", shorter)[0] == 0
    assert run(*base, "--max-model-len", int(shorter) * 11 // 10)[0] == 1
    record = json.loads(run(*base, "--max-model-len", "131072", "--json")[1])
    assert (record["memory"]["fits"], record["memory"]["context"]) == (False, int(shorter))
    assert run(*base, "--max-model-len", "auto")[0] == run(*base)[0] == 0, "nobody asked for all positions"


def test_the_hint_that_loses_least_comes_first(run):
    """States of 64 sequences took the memory that a long context needs, and the hint was FP8 pages. The advice fits."""
    base = ("plan", "-m", "Qwen3.5-27B", "--gpu", "H100")
    code, out, _ = run(*base, "--max-model-len", "262144")
    assert (code, "(use --max-num-seqs 4, or --max-model-len 1" in out) == (1, True), out
    assert " instead of 262,144; for all of it, use\n--max-num-seqs 4.\n" in run(*base)[1]
    assert run(*base, "--max-model-len", "262144", "--max-num-seqs", 4)[0] == 0
    assert run(*base, "--max-model-len", "262144", "--max-num-seqs", 8)[0] == 1


def test_plan_of_a_hybrid_and_of_an_fp8_release(run):
    """Catches rows that break inside words, kernels that this plan does not use, and presets of 3.6, 3.8 and in FP8."""
    for name in ("Qwen3.5-27B", "Qwen3.6-35B-A3B-FP8", "Qwen3.8-27B-FP8"):
        code, out, _ = run("plan", "-m", name, "--gpu", "H100")
        lines = out.splitlines()
        assert code == 0
        assert max(map(len, lines[: lines.index("CUDA graphs: small steps")])) <= 80
        assert any("gated_delta_net " in f"{line} " for line in lines)
        used = re.search(r"compute capability only: (.*?)\nMemory", out, re.DOTALL)[1].split()
        experts = ["experts_sm90,"] * ("A3B" in name)
        assert used == ["decode_sm90,", *experts, "gemm_sm90,", "prefill_sm90"]
        assert ("Checkpoint: fp8: FP8, one scale for each block of 128x128" in lines) == name.endswith("FP8")
    memory = json.loads(run("plan", "-m", "Qwen3.8-27B-FP8", "--gpu", "H100", "--json")[1])["memory"]
    assert 27e9 < memory["weights"] < 30.9e9, "the files have 30.9 GB, with a vision encoder and MTP"
    out = run("plan", "-m", "Qwen3-8B", "--gpu", "H100", "--quantize", "int4", "--kv-cache-dtype", "fp8")[1]
    assert "decode_fp8_sm90, gemm_int4_sm90,\ngemm_int4_small_sm90, gemm_sm90, gemv_int4_sm90\n" in out
    assert "compute capability only" not in run("plan", "-m", "Qwen3-8B", "--gpu", "H100", "--impl", "eager")[1]


# For each option of loading that `plan` does not have: another value than the default.
OTHER = {"max_step_ms": 5.0, "max_waiting": 3, "threads": 2, "random_weights": True, "check_weights": True, "warm_up": "full",
         "kernel_cache": "folder"}  # fmt: skip


def test_plan_has_each_option_that_changes_it():
    """Catches an option of loading that `plan` does not have although it changes what fits or how layers run: `plan` had no
    --max-num-batched-tokens and no --no-cuda-graphs. A new option fails here until `plan` has it, or `OTHER` a value."""
    from minirt.cli.gpus import find_gpu
    from minirt.cli.options import load_options, prefix_cache_option, speculative_options, to_load_options
    from minirt.loading.load import plan_load

    defaults = cli.cli.commands["generate"].make_context("generate", ["hi"]).params

    def planned(**changes):
        model, memory = plan_load(to_load_options(defaults | changes, "Qwen3.5-0.8B"), find_gpu("24GiB:8.9"))
        return memory, model.plan

    for name, value in {"max_num_batched_tokens": 100, "no_cuda_graphs": True, "no_prefix_cache": True}.items():
        assert planned(**{name: value}) != planned(), f"{name}: the comparison sees no difference"
    of_loading = option_group(None, load_options, prefix_cache_option, speculative_options)(lambda: None).__click_params__
    missing = {own.name for own in of_loading} - {own.name for own in cli.cli.commands["plan"].params}
    assert missing == OTHER.keys()
    for name in missing:
        assert to_load_options(defaults | {name: OTHER[name]}, "m") != to_load_options(defaults, "m"), name
        assert planned(**{name: OTHER[name]}) == planned(), name


def test_help_lists_options_in_groups(run):
    """Catches a new option without a group, and commands that put an option that they share under different titles."""
    titles = {}
    for own in all_commands(cli.cli):
        for option in own.params:
            if isinstance(option, click.Option):
                title = titles.setdefault(option.opts[0], option.group)
                others = {"--model", "--api-key", "--seed"}  # of another thing in benchmarks: the server, the measurement
                assert option.group in TITLES
                assert option.group == title or option.opts[0] in others, (own.name, option.opts)
    out = run("generate", "--help")[1]
    shown = re.findall(r"^([A-Z][a-z ]+):$", out, re.M)
    assert shown == ["Prompts", "Model", "Sampling", "Structured output", "Output", "Memory and speed", "General"]
    first = [re.search(r"--[a-z-]+", part)[0] for part in re.split(r"^[A-Z][a-z ]+:$", out, flags=re.M)[1:]]
    assert first[:5] == ["--chat", "--model", "--max-tokens", "--json-schema", "--json"]
    assert all(name in out for own in cli.cli.commands["generate"].params for name in own.opts if name.startswith("-"))


def all_commands(group):
    for own in group.commands.values():
        yield from all_commands(own) if hasattr(own, "commands") else [own]


def test_models(run, monkeypatch):
    out = printed(run("models", "--gpu", "24GiB:8.9"))
    assert max(map(len, out.splitlines())) <= 80, "the default width of a terminal"
    rows = {name: rest for name, *rest in (re.split("  +", line.strip()) for line in out.splitlines() if line.strip())}
    assert rows["Qwen2.5-7B[-Instruct]"] == ["7.62 B", "14.19GiB", "7.61GiB", "yes"]
    assert rows["Qwen3-14B"][-1] == "--fp8"
    assert rows["Qwen2.5-72B[-Instruct]"][-1] == "no"
    assert "embedded" in rows
    assert "Qwen (Qwen2.5, Qwen3, Qwen3.5, Qwen3.6, Qwen3.8), meta-llama (Llama)" in " ".join(out.split())
    assert "…" not in out
    assert "assumed" not in out
    assert "--gpu 24GiB:8.9" in run("models", "--gpu", "24GiB")[1]
    record = json.loads(run("models", "--gpu", "24GiB:8.6", "-o", "json")[1])
    presets = {row["name"]: row for row in record["models"]}
    assert presets["Llama-3.1-8B-Instruct"]["hub_id"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert presets["Qwen3-14B"]["fits_with"] == "--quantize int4", "FP8 weights need compute capability 8.9"
    assert presets["Qwen3-30B-A3B"]["fits_with"] == "--quantize int4"
    assert len(presets) == len(record["models"]) == 74
    for module in ("minirt.device", "minirt.loading.memory"):
        monkeypatch.setattr(f"{module}.free_memory", lambda device: 20 << 30)
    out = run("models", "--device", "cpu")[1]
    assert "…" not in out, "names that are cut cannot be copied"
    assert max(map(len, out.splitlines())) <= 80
    rows = {name: rest for name, *rest in (re.split("  +", line.strip()) for line in out.splitlines() if line.strip())}
    assert rows["model"] == ["params", "float32", "bf16", "fits"], "a CPU computes in float32, which decides what fits"
    assert rows["Qwen2.5-7B[-Instruct]"] == ["7.62 B", "28.37GiB", "14.19GiB", "--dtype bfloat16"], "not wrapped"
    record = json.loads(run("models", "--device", "cpu", "--json")[1])
    fits = {row["name"]: row["fits_with"] or row["fits"] for row in record["models"]}
    narrow = "--dtype bfloat16"
    ways = [True, narrow, f"{narrow} --fp8", f"{narrow} --quantize int4", False]
    assert [fits[f"Qwen2.5-{size}B"] for size in (3, 7, 14, 32, 72)] == ways


def test_an_unknown_model_is_told_what_there_is(run):
    refused(run("plan", "-m", "qwen2.5-7b-instrukt"), "did you mean Qwen2.5-7B-Instruct", "minirt models")
    accepted = "(give a folder, a Hub id org/name, or a preset; minirt models lists the presets)"
    refused(run("plan", "-m", "nobodys-model"), accepted)
    refused(run("plan", "-m", "llama3.1:8b"), "did you mean Llama-3.1-8B, Llama-3.1-8B-Instruct?")
    refused(run("plan", "-m", ":"), accepted)
    refused(run("plan", "-m", "SmolLM2"), "did you mean SmolLM2-135M, SmolLM2-135M-Instruct, ", "? Otherwise give a folder")


@pytest.mark.parametrize(("name", "family"), [
    ("gemma-3-4b", "gemma-3"), ("Mixtral-8x7B-v0.1", "mixtral"), ("google/gemma-3-4b-it", "gemma-3"),
    ("google/gemma-4-E4B-it", "gemma-4-e4b"),
])  # fmt: skip
def test_a_model_of_a_family_that_is_not_supported(run, monkeypatch, name, family):
    """Mixtral was answered with "did you mean Mistral-7B?", and Gemma with how to name a model. What runs is said, too."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    out = run("plan", "-m", name)
    types = "expected a model of one of the types exaone4, "
    refused(out, f"minirt does not support {family} models; {types}", "minirt models lists")
    assert ("HF_HUB_OFFLINE is set" in out[2]) == ("/" in name), "the name of a family proves nothing about a Hub model"


def test_a_preset_without_its_files_needs_no_other_name(run, monkeypatch):
    """Offline, `--model Qwen3-4B` was told to give the name of a preset. Other Hub models have no random weights."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("qwen3-4B", "Qwen/Qwen3-4B"):
        hint = "give the folder; --model Qwen3-4B --random-weights measures without a download, with token ids as prompts)"
        refused(run("generate", "-m", name, "hi"), "Hub model Qwen/Qwen3-4B: is missing", hint)
    refused(run("generate", "-m", "nobody/model", "hi"), "download it elsewhere and give the folder)")


# completion


def completions(*words):
    """What `words` can become at the end of a command line."""
    from click.shell_completion import ShellComplete

    found = ShellComplete(cli.cli, {}, "minirt", "_MINIRT_COMPLETE").get_completions(list(words[:-1]), words[-1])
    return [item.value for item in found if item.type == "plain"]


def test_completion():
    assert completions("generate", "--model", "qwen3-1") == ["Qwen3-1.7B", "Qwen3-14B", "Qwen3-14B-FP8"]
    assert "Llama-3.2-1B-Instruct" in completions("eval", "fp8", "-m", "llama-3.2")
    assert completions("plan", "--gpu", "h") == ["H200", "H100", "H100-NVL"]
    assert completions("chat", "--dtype", "f") == ["float16", "float32"]
    assert completions("bench", "speed", "--device", "") == ["auto", "cpu", "cuda"]
    assert completions("compare", "--layer", "layers.*.m") == ["layers.*.mlp"]
    assert completions("plan", "--impl", "head=") == ["head=auto", "head=eager", "head=triton"]
    assert completions("plan", "-o", "") == ["text", "json"]
    assert completions("ge") == ["generate"]


def test_what_completion_offers_is_accepted(run):
    from minirt.cli.completion import _VALUES

    for option in ("--dtype", "--gpu", "--impl", "--kv-cache-dtype"):
        for value in _VALUES[option]:
            if "triton" not in value:
                assert run("plan", "-m", "SmolLM2-135M", option, value, "-o", "json")[0] == 0, (option, value)


def test_a_shell_is_answered_without_heavy_imports():
    code = "import sys; from minirt.cli import app\ntry: app.main([])\nfinally: print({'torch', 'triton'} & set(sys.modules))"
    environment = {"_MINIRT_COMPLETE": "bash_complete", "COMP_WORDS": "minirt plan --model Qwen3-4", "COMP_CWORD": "3"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=os.environ | environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["dir,Qwen3-4", "plain,Qwen3-4B", "set()"], done.stderr


def test_fp8_reaches_the_model(run, folder):
    def answers(*flags):
        return json.loads(run("generate", "-m", folder, *CACHE, *flags, "--json", "-q", "--max-tokens", 9, "hello")[1])

    values = {"quantization": "fp8", "quantize_head": False, "kv_cache_dtype": "fp8"}
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=8 << 20, **values) as generator:
        tokens, size = generator.generate("hello", SamplingParams(max_tokens=9)).token_ids, generator.plan.weight_bytes
    assert answers("--fp8", "--no-fp8-head", "--kv-cache-dtype", "fp8")["token_ids"] == tokens
    assert answers()["token_ids"] != tokens
    plan = ("plan", "-m", folder, "--device", "cpu", "--json", "--fp8")
    assert json.loads(run(*plan, "--no-fp8-head")[1])["weight_bytes"] == size
    assert json.loads(run(*plan)[1])["weight_bytes"] < size
    assert answers("--quantize", "fp8", "--no-quantize-head", "--kv-cache-dtype", "fp8")["token_ids"] == tokens
    four = ("plan", "-m", folder, "--device", "cpu", "--json", "--quantize", "int4")
    formats = [json.loads(run(*four, *head)[1])["layers"][-1]["formats"] for head in ((), ("--quantize-head",))]
    assert formats == [[], ["int4"]]
    refused(run("generate", "-m", folder, "--no-fp8-head", "hello"), "--no-quantize-head: needs --quantize", code=2)
    refused(run("generate", "-m", folder, "--random-weights", "--check-weights", "hello"), "no checkpoint to check", code=2)
    refused(run("generate", "-m", folder, "--fp8", "--quantize", "int4", "hello"), "exclude each other", code=2)
    for command in (("score", "x", "y"), ("profile",), ("bench", "speed"), ("bench", "throughput"), ("bench", "start")):
        refused(run(*command, "-m", folder, "--lora", "a=b"), "no request of this command names an adapter", code=2)
    refused(run("generate", "-m", folder, "--quantize", "int3", "hello"), "--quantize", "int3", code=2)
    refused(run("generate", "-m", folder, "--kv-cache-dtype", "int8", "hello"), "--kv-cache-dtype", "auto or fp8", code=2)


def test_env(run):
    """Catches a package of the extras that a bug report does not name, and lines that are not aligned."""
    out, _ = succeeded(run("env"))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    optional = [re.split("[>=]", package)[0] for name in ("serve", "structured") for package in extras[name]]
    for word in ("minirt", "torch", "python", "cuda", "host memory", *optional):
        assert f"\n{word} " in "\n" + out
    assert all(line[17] == " " != line[18] for line in out.splitlines()[:14])


# Processes


def test_a_reader_that_goes_away(endless):
    with start("generate", "-m", endless, *LONG, "--ignore-eos", "--max-tokens", 10**6, "hello") as process:
        assert process.stdout.read(5)
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 1
    assert err == b""


def test_control_c_at_the_prompt_leaves_the_terminal_clean(folder):
    terminal, side = pty.openpty()
    before = termios.tcgetattr(terminal)
    with start("chat", "-m", folder, *CACHE, stdin=side, stdout=side, stderr=side) as process:
        os.close(side)  # so that reading ends when the process dies
        shown = b""
        while not shown.endswith(b"> "):
            shown += os.read(terminal, 100)
        os.write(terminal, b"/reset\n")
        while shown.count(b"> ") < 2:
            shown += os.read(terminal, 100)
        while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING:
            pass  # a signal between the prompt and the read would be handled only after a line (CPython's input)
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)  # a second signal during the exit would kill it
    with contextlib.suppress(OSError):  # raised at the end of the output
        while left := os.read(terminal, 1000):
            shown += left
    assert termios.tcgetattr(terminal) == before
    os.close(terminal)
    assert process.returncode == 130
    assert shown.endswith(b"> \r\n")
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h"), "the cursor is hidden"


def test_closed_streams():
    command = f"'{sys.executable}' -P -m minirt generate -m SmolLM2-135M --prompt-file - <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command]).returncode == 1, "the prompt is empty"


def test_a_warm_prompt_is_kept(run, tmp_path, capfd):
    """The embedded model's own words: a file of more than 64 tokens, then a prompt that begins with it."""
    text = "Once upon a time there was a little dog. " * 12
    (tmp_path / "stem.txt").write_text(text)
    options = ["generate", "--temperature", "0", "--max-tokens", "5", "--json", text + "The dog"]
    plain = run(*options, "--no-prefix-cache")
    warm = run(*options, "--warm-prompt", tmp_path / "stem.txt")
    assert warm[0] == plain[0] == 0
    assert json.loads(warm[1])["token_ids"] == json.loads(plain[1])["token_ids"]
    assert re.search(r"stem\.txt: (64|128|192) tokens are kept", warm[2])
    code, _, err = run("generate", "--no-prefix-cache", "--warm-prompt", tmp_path / "stem.txt", "hi")
    assert code == 1
    assert "no prefix cache" in err


# scores


def test_score(run, folder):
    """Catches scores that are printed beside another completion, and columns that disagree with the Python API."""
    completions = [" fox", " the dog\n", "x"]
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=8 << 20) as generator:
        truths = generator.score("the quick brown", completions)
    base = ("score", "-m", folder, *CACHE, "-q")
    out = printed(run(*base, "the quick brown", *completions))
    head, *rows = out.splitlines()
    assert head.split() == ["logprob", "tokens", "greedy", "completion"]
    for row, text, truth in zip(rows, completions, truths, strict=True):
        logprob, tokens, greedy, shown = row.split(maxsplit=3)
        assert float(logprob) == pytest.approx(truth.logprob, abs=1e-4)
        assert (int(tokens), greedy, shown) == (len(truth.token_ids), "yes" if truth.is_greedy else "no", repr(text))
    records = [json.loads(line) for line in run(*base, "--json", "the quick brown", *completions)[1].splitlines()]
    for record, text, truth in zip(records, completions, truths, strict=True):
        assert (record["prompt"], record["completion"], record["token_ids"]) == ("the quick brown", text, truth.token_ids)
        assert record["prompt_token_ids"] == truth.prompt_token_ids
        assert record["is_greedy"] == truth.is_greedy
        assert record["logprob"] == pytest.approx(sum(row["logprob"] for row in record["logprobs"]))


def test_a_score_of_answers(run, folder, hf_folder):
    """Catches a template that is not applied, white space of the template that counts as the answer's, and a second BOS."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    completions = ["hello world", " fox"]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "fox"}]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    base = ("score", "-m", folder, *CACHE, "-q", "--json")
    out = run(*base, "--chat", "--system", "be brief", "fox", *completions)[1]
    for line, text in zip(out.splitlines(), completions, strict=True):
        before = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        own = tokenizer.encode(text, add_special_tokens=False)
        record = json.loads(line)
        assert (record["prompt_token_ids"], record["token_ids"]) == (before, own)
        truth = model(torch.tensor([before + own])).logits[0].log_softmax(-1)[len(before) - 1 : -1]
        assert record["logprob"] == pytest.approx(truth.gather(1, torch.tensor(own)[:, None]).sum().item(), abs=1e-3)
    refused(run(*base, "--system", "be brief", "a", "b"), "--system needs --chat", code=2)
    refused(run(*base, "--chat-template-kwargs", "{}", "a", "b"), "--chat-template-kwargs needs --chat", code=2)
    refused(run("score", "--chat", *CACHE, "-q", "a", "b"), "no chat template", code=2)


def test_a_score_of_token_ids(run, bare, monkeypatch):
    code, out, _ = run("score", "-m", bare, *CACHE, "-q", "--json", "5 6", "7, 8")
    assert (code, json.loads(out)["prompt_token_ids"], json.loads(out)["token_ids"]) == (0, [5, 6], [7, 8])
    refused(run("score", "-m", bare, *CACHE, "-q", "5 6", "seven"), "token ids", "seven")


def test_scores_that_make_no_sense_are_refused(run, folder):
    base = ("score", "-m", folder, *CACHE, "-q")
    refused(run(*base, "hello"), "COMPLETION", code=2)
    refused(run(*base), "PROMPT", code=2)
    refused(run(*base, "hello", ""), "no token of its own")
    refused(run(*base, "hello " * 200, "x"), "too long")
    refused(run(*base, "--max-tokens", 5, "hello", "x"), "--max-tokens", code=2)
    refused(run(*base, "-o", "csv", "hello", "x"), "csv", code=2)
    refused(run(*base, "hello", "\udcff"), "surrogate")


# the chat template


def test_a_template_that_is_not_applied_is_said(run, folder, copy, monkeypatch):
    """Catches the empty line and nothing more of a chat model that is asked without its template."""
    base = ("generate", "-m", folder, *CACHE, "--max-tokens", 2)
    said = "a chat template that was not applied: --chat applies it"
    code, _, err = run(*base, "--ignore-eos", "hello", "the fox")
    assert (code, err.count(said)) == (0, 1)
    assert run(*base, "--ignore-eos", "-q", "hello")[2] == ""
    assert said not in run(*base, "--chat", "hello")[2]
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(211))}))  # any token ends the text
    code, out, err = run("generate", "-m", copy, *CACHE, "-q", "hello")
    assert (code, out) == (0, "\n")
    assert err == f"minirt: warning: the text is empty; the model has {said}\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'"hello"\n{"messages": [{"role": "user", "content": "x"}]}')))
    _, _, err = run("generate", "-m", copy, *CACHE, "-q", "--prompts", "-")
    assert err == f"minirt: warning: the text is empty; the model has {said}\n", "the line of messages had the template"


def test_a_prompt_that_is_a_name_is_said(run, folder, tmp_path):
    """Catches `minirt generate MODEL PROMPT` and `generate FILE`: the names were completed as texts, without a word."""
    (tmp_path / "words.txt").write_text("hello")
    base = ("generate", "-m", folder, *CACHE, "--max-tokens", 1)
    for name in ("qwen3-4B", folder):
        code, _, err = run(*base, name, "hello")
        said = f"the prompt {shortened(repr(str(name)), 80)} is the name of a model: --model names"
        assert (code, said in err) == (0, True), err
    name = tmp_path / "words.txt"
    said = f"the prompt {shortened(repr(str(name)), 80)} is the name of a file: --prompt-file reads"
    assert said in run(*base, name)[2]
    for name in ("hello", tmp_path, "a" * 250, "x/y"):
        assert "is the name of" not in run(*base, name)[2]
    assert "is the name of" not in run(*base, "-q", folder)[2]


def test_a_system_message(run, folder, expected):
    base = ("generate", "-m", folder, *CACHE, "--json", "-q", "--max-tokens", 2)
    record = json.loads(run(*base, "--chat", "--system", "be brief", "hello")[1])
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=8 << 20) as generator:
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        assert record["prompt_token_ids"] == generator.encode_chat(messages)
        messages[0]["content"] = ""
        assert json.loads(run(*base, "--chat", "--system", "", "hello")[1])["prompt_token_ids"] == generator.encode_chat(messages)
    refused(run(*base, "--system", "be brief", "hello"), "--system needs --chat", code=2)
    refused(run("generate", "-m", folder, *CACHE, "-v", "hello"), "--verbose needs --json", code=2)
    refused(run(*base, "--max-tokens", 0, "hello"), "--max-tokens", "asks for nothing", code=2)
    refused(run(*base, "--max-tokens", 0, "--prompt-logprobs", 1, "--n", 2, "hello"), "--n", "--max-tokens is 0", code=2)
    refused(run(*base, "--max-tokens", -1, "hello"), "--max-tokens", "or 0 with --prompt-logprobs", code=2)


def test_a_prompt_that_is_only_scored(run, folder):
    """Catches a division by the time of a first token that never comes."""
    code, out, err = run("generate", "-m", folder, *CACHE, "--json", "--max-tokens", 0, "--prompt-logprobs", 0, "hello")
    record = json.loads(out)
    assert (code, record["token_ids"], record["time_to_first_token_s"]) == (0, [], None)
    assert len(record["prompt_logprobs"]) == len(record["prompt_token_ids"])
    assert f"prompt {len(record['prompt_token_ids'])} tokens\n" in err
    assert "decode" not in err


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_quantized_weights_on_a_cpu_say_that_they_are_slow(run, folder, form):
    _, _, err = run("generate", "-m", folder, *CACHE, "-q", "--max-tokens", 1, "--chat", "--quantize", form, "hello")
    assert err == "minirt: warning: on a CPU, quantized weights save memory, not time: every step unpacks them, which is slow\n"
    assert "which is slow" in run("plan", "-m", folder, "--device", "cpu", "--quantize", form)[1].replace("\n", " ")
    assert "slow" not in run("plan", "-m", folder, "--device", "cpu")[1]

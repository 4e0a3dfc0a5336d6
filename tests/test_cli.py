"""The command line: what it prints where, exit codes, and one clear line on stderr for every bad input.

Most of it runs in this process, through `main`; what only a process shows (signals, closed pipes, the terminal) starts one.
"""

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios

import click
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import add_tokenizer

from minirt import Generator, SamplingParams, cli, weights
from minirt.generator import Generator as Loaded

CACHE = ("--kv-cache-memory", "8MiB", "--device", "cpu")


@pytest.fixture(scope="module")
def folder(hf_folder):
    return add_tokenizer(hf_folder("Llama", seed=3))


@pytest.fixture(scope="module")
def bare(hf_folder):
    return hf_folder("Llama", seed=3)


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "model")


@pytest.fixture(scope="module")
def expected(folder):
    """A function: prompt, number of tokens → the completion that the Python API gives."""
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=8 << 20) as generator:
        yield lambda prompt, count: generator.generate(prompt, SamplingParams(max_tokens=count))


@pytest.fixture
def run(capfd, monkeypatch):
    """A function that runs the command line → (exit code, stdout, stderr)."""
    monkeypatch.delenv("MINIRT_MODEL", raising=False)

    def call(*arguments):
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main([str(a) for a in arguments])
        out, err = capfd.readouterr()
        return end.value.code or 0, out, err

    return call


def refused(result, *words, code=1):
    """Check a refusal: the exit code, nothing on stdout, no traceback, and a message with all of `words`."""
    found, out, err = result
    assert found == code, err
    assert out == ""
    assert "Traceback" not in err
    assert "unexpected" not in err
    for word in words:
        assert word in err
    if code == 1:
        assert err.startswith("minirt: ")
        assert err.count("\n") == 1
    return True


# generate


def test_text_goes_to_stdout_and_figures_to_stderr(run, folder, expected):
    code, out, err = run("generate", "-m", folder, *CACHE, "--max-tokens", 9, "hello", "the fox")
    assert code == 0
    assert out == "".join(expected(p, 9).text + "\n" for p in ("hello", "the fox"))
    for word in ("load", "first token", "prompt 5 tokens", "decode 9 tokens", "tokens/s", "GB/s", "peak memory", "greedy"):
        assert err.count(word) >= 2, word
    assert "finished: length" in err
    assert run("generate", "-m", folder, *CACHE, "--max-tokens", 9, "-q", "hello", "the fox") == (0, out, "")


def test_effective_sampling_is_shown_with_its_sources(run, copy):
    config = {"do_sample": True, "top_k": 7, "repetition_penalty": 1.2}
    (copy / "generation_config.json").write_text(json.dumps(config))
    _, _, err = run("generate", "-m", copy, *CACHE, "--max-tokens", 2, "--seed", 5, "--top-p", 0.5, "hello")
    for words in ("top_k 7 (generation_config.json)", "top_p 0.5 (user)", "seed 5 (user)", "repetition_penalty=1.2"):
        assert words in err


def test_json(run, folder, expected):
    code, out, err = run("generate", "-m", folder, *CACHE, "--json", "-q", "--max-tokens", 9, "hello", 'quote " and \n')
    assert (code, err) == (0, "")
    for line, prompt in zip(out.splitlines(), ("hello", 'quote " and \n'), strict=True):
        record, truth = json.loads(line), expected(prompt, 9)
        assert record["prompt"] == prompt
        assert record["prompt_token_ids"] == truth.prompt_token_ids
        assert record["token_ids"] == truth.token_ids
        assert record["text"] == truth.text
        assert record["finish_reason"] == "length"
        for name in ("time_to_first_token_s", "decode_tokens_per_s", "peak_memory_bytes"):
            assert record[name] > 0
        assert record["sampling"]["max_tokens"] == 9
        assert record["sampling_sources"]["max_tokens"] == "user"


def test_stop_and_end_of_sequence(run, copy, expected):
    done = expected("hello", 20)
    stop = done.text[4:7]
    arguments = ("generate", "-m", copy, *CACHE, "--json", "-q", "--max-tokens", 20, "hello")
    record = json.loads(run(*arguments, "--stop", "never seen", "--stop", stop)[1])
    assert record["text"] == done.text[: done.text.find(stop)]
    assert record["finish_reason"] == "stop"
    path = copy / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [done.token_ids[3]]}))
    assert json.loads(run(*arguments)[1])["finish_reason"] == "stop"
    assert json.loads(run(*arguments, "--ignore-eos")[1])["token_ids"] == done.token_ids
    path.write_text(json.dumps({"stop_strings": [stop]}))
    assert json.loads(run(*arguments)[1])["text"] == record["text"], "the file's stop strings hold without --stop"


def test_prompt_files_are_verbatim(run, folder, expected, tmp_path, monkeypatch):
    text = "  two spaces, \r\n a CRLF and newlines \n\n"
    (tmp_path / "p").write_bytes(text.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" from stdin \n")))
    files = ("--prompt-file", tmp_path / "p", "--prompt-file", "-")
    _, out, _ = run("generate", "-m", folder, *CACHE, "--json", "-q", "--max-tokens", 1, *files, "first")
    prompts = [json.loads(line)["prompt_token_ids"] for line in out.splitlines()]
    assert prompts == [expected(p, 1).prompt_token_ids for p in ("first", text, " from stdin \n")]


def test_chat_template(run, folder, expected):
    _, out, _ = run("generate", "-m", folder, *CACHE, "--chat", "-q", "--max-tokens", 9, "hello")
    assert out == expected([1, *expected("[user]hello\n[assistant]", 1).prompt_token_ids[1:]], 9).text + "\n"


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
        code, out, _ = run("generate", "-m", bare, *CACHE, "-q", "--max-tokens", 9, text)
        assert code == 0
        assert [int(word) for word in out.split()] == expected("hello", 9).token_ids
    refused(run("generate", "-m", bare, *CACHE, "hello"), "no tokenizer", "token ids", "'1 2 3'")
    refused(run("generate", "-m", bare, *CACHE, "1 2 211"), "0 to 210", "found 211")
    refused(run("generate", "-m", bare, *CACHE, " , "), "empty")
    refused(run("generate", "-m", bare, *CACHE, "1 2", "--stop", "a"), "tokenizer")
    refused(run("generate", "-m", bare, *CACHE, "--chat", "1 2"), "no tokenizer")
    refused(run("chat", "-m", bare, *CACHE), "no tokenizer")


def test_the_demo_model(run, folder, monkeypatch):
    assert cli.DEFAULT_MODEL == "SmolLM2-135M-Instruct"
    monkeypatch.setattr(cli, "DEFAULT_MODEL", str(folder))
    code, _, err = run("generate", *CACHE, "--max-tokens", 1, "hello")
    assert code == 0
    assert f"demo model, {folder}" in err
    assert run("generate", *CACHE, "--max-tokens", 1, "-q", "hello")[2] == ""
    code, _, err = run("plan", "--device", "cpu")
    assert code == 0
    assert "demo model" in err
    monkeypatch.setenv("MINIRT_MODEL", str(folder / "nowhere"))
    refused(run("generate", *CACHE, "hello"), "nowhere")


def test_nothing_is_printed_before_all_prompts_are_checked(run, folder, tmp_path):
    refused(run("generate", "-m", folder, *CACHE, "hello", "x" * 400), "at most 255 tokens", "--max-model-len")
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
    from minirt.tokenizer import Tokenizer

    return Tokenizer.load(folder)._encode(text, add_special_tokens=False)


@pytest.mark.parametrize(("options", "opening"), [((), ""), (("--system", "be brief"), "[system]be brief\n"),
                                                  (("--system", ""), "[system]\n")])  # fmt: skip
def test_conversation(options, opening, run, folder, monkeypatch, seen):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n  \nthe fox \n/clear\na\n/exit\nnever\n"))
    code, out, err = run("chat", "-m", folder, *CACHE, "--max-tokens", 5, "-q", *options)
    assert (code, err) == (0, "")
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
    code, out, err = run("chat", "-m", folder, *CACHE, "--max-tokens", 5, "-q")
    assert code == 0
    assert out.count("\n") == 2
    assert "at most 255 tokens" in err
    assert "/clear" in err
    assert len(seen) == 3, "the refused message is not part of the conversation"
    assert len(seen[2]) < 100
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code, _, err = run("chat", "-m", folder, *CACHE, "--max-tokens", 5, "-q")
    assert code == 1, "a script must learn of it"


def test_control_c_stops_an_answer_only(run, folder, monkeypatch):
    original, calls = cli._write, []

    def interrupted(text):
        calls.append(text)
        if len(calls) == 3:
            raise KeyboardInterrupt
        original(text)

    monkeypatch.setattr(cli, "_write", interrupted)
    monkeypatch.setattr(sys, "stdin", Keyboard("hello\nthe fox\n"))
    code, out, err = run("chat", "-m", folder, *CACHE, "--max-tokens", 5, "-q")
    assert code == 0
    assert "(stopped)" in err
    assert out.count("\n") == 2


def test_no_chat_template(run, hf_folder):
    folder = add_tokenizer(hf_folder("Llama"), template=None)
    refused(run("chat", "-m", folder, *CACHE), "no chat template")
    refused(run("generate", "-m", folder, *CACHE, "--chat", "hello"), "no chat template", "plain prompt")


# plan and env


def test_plan(run, folder):
    code, out, err = run("plan", "-m", "SmolLM2-135M", "--device", "cpu")
    assert (code, err) == (0, "")
    assert sum(line.count("layers.") for line in out.splitlines()) == 60
    for word in ("embedding", "head", "eager", "134.5 M parameters", "538.06 MB"):
        assert word in out
    impl = ("--impl", "layers.1.*=eager", "--impl", "auto")
    record = json.loads(run("plan", "-m", folder, "--device", "cpu", "--json", *impl)[1])
    assert len(record["layers"]) == 8
    assert record["weight_bytes"] == sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    reasons = {row["layer"]: row["reason"] for row in record["layers"]}
    assert reasons["layers.1.mlp"] == "--impl layers.1.*=eager"
    assert "cpu" in reasons["layers.0.mlp"]


def test_plan_of_a_folder_with_a_strange_name(run, folder, tmp_path):
    strange = shutil.copytree(folder, tmp_path / "[bold]x[/nothing] :smile:")
    assert "[bold]x[/nothing] :smile:" in run("plan", "-m", strange, "--device", "cpu")[1].replace("\n", "")


def test_env(run):
    code, out, _ = run("env")
    assert code == 0
    for word in ("minirt", "torch", "python", "cuda", "host memory"):
        assert f"\n{word} " in "\n" + out


# Bad input


def test_usage(run, folder):
    for arguments in (
        ["generate", "-m", folder], ["generate", "-m", folder, "x", "--max-tokens", "many"], ["no-such-command"],
        ["generate", "x", "--kv-cache-memory", "x"], ["generate", "x", "--no-such-flag"], ["plan", "extra"],
        ["generate", "x", "-m", folder, "--random-weights", "--check-weights"], ["generate", "-m"],
    ):  # fmt: skip
        refused(run(*arguments), "Usage: ", code=2)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("4GiB", 4 << 30), ("4gib", 4 << 30), ("1.5 MiB", 3 << 19), ("2kB", 2000), ("3G", 3 * 10**9), ("7B", 7),
     (" 1TiB ", 1 << 40)],
)  # fmt: skip
def test_sizes(text, value):
    assert cli.parse_size(text) == value


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "nan", "inf", "1e9", "4XB", "GiB", "4 4", "1" * 99, "0.1", "٣"])
def test_bad_sizes(text):
    with pytest.raises(click.BadParameter, match="4GiB"):
        cli.parse_size(text)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--temperature", "nan"), ("--temperature", "-1"), ("--temperature", "inf"), ("--top-p", "nan"), ("--top-p", "0"),
     ("--top-p", "1.1"), ("--min-p", "-0.1"), ("--top-k", "-2"), ("--seed", "-1"), ("--seed", str(2**64)),
     ("--max-tokens", "0"), ("--max-tokens", "-3"), ("--stop", ""), ("--device", "tpu"), ("--dtype", "int4"),
     ("--impl", "foo"), ("--impl", "layers.99.*=eager"), ("--impl", "layers.*="), ("--max-model-len", "0"),
     ("--max-model-len", "257"), ("--kv-cache-memory", "100"), ("--kv-cache-memory", "900TiB"), ("--revision", "main")],
)  # fmt: skip
def test_bad_values(flag, value, run, folder):
    name = {"--impl": value.partition("=")[2] or value, "--revision": "revision"}.get(flag, flag)
    refused(run("generate", "-m", folder, "--device", "cpu", flag, value, "hello"), name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_cuda_without_a_gpu(run, folder):
    refused(run("generate", "-m", folder, "--device", "cuda", "hello"), "--device cuda", "--device cpu")


def test_out_of_memory(run, folder, monkeypatch):
    monkeypatch.setattr(weights, "free_memory", lambda device: 20 << 30)
    result = run("generate", "-m", "Qwen2.5-72B", "--random-weights", "--device", "cpu", "hello")
    refused(result, "271.10 GiB", "20.00 GiB free", "smaller model")
    refused(run("generate", "-m", folder, "--kv-cache-memory", "900GiB", "hello"), "900.", "lower --kv-cache-memory")
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")):
        monkeypatch.setattr(Loaded, "check", lambda *_, error=error: (_ for _ in ()).throw(error))
        refused(run("generate", "-m", folder, *CACHE, "hello"), "out of memory", "--max-model-len")


def test_bad_prompts(run, folder, tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "empty").touch()
    base = ("generate", "-m", folder, *CACHE)
    refused(run(*base, ""), "empty")
    refused(run(*base, "--prompt-file", tmp_path / "empty"), "empty")
    refused(run(*base, "--prompt-file", tmp_path / "latin"), "UTF-8", "0xe9 at offset 3")
    refused(run(*base, "--prompt-file", tmp_path), "directory")
    refused(run(*base, "lone \udce9 surrogate"), "surrogate")
    refused(run(*base, "a" * 1_000_000), "at most 255 tokens", "--max-model-len")


def test_debug_shows_the_cause(folder, capsys):
    with pytest.raises(Exception, match="empty"):
        cli.main(["generate", "-m", str(folder), *CACHE, "--debug", ""])


def test_unforeseen_errors_are_one_line(run, folder, monkeypatch):
    monkeypatch.setattr(Loaded, "check", lambda *_: 1 / 0)
    code, out, err = run("generate", "-m", folder, *CACHE, "hello")
    assert (code, out) == (1, "")
    assert err == "minirt: unexpected ZeroDivisionError: division by zero (run with --debug for the traceback)\n"


CONFIGS = {
    "hidden_size": [0, -64, 2**40, 2.5, "64", None, True, float("nan"), 10**400],
    "num_hidden_layers": [0, 2**40, -1, []],
    "num_attention_heads": [0, 3, 2**40],
    "num_key_value_heads": [0, 3, -2],
    "head_dim": [0, 15, 2**40],
    "vocab_size": [0, 2**40, 1.5],
    "intermediate_size": [0, 2**40],
    "max_position_embeddings": [0, -1, 2**62, float("inf")],
    "rms_norm_eps": [float("nan"), -1, "small", float("inf")],
    "rope_parameters": [{"rope_type": "wobbly"}, {"rope_type": "yarn"}, {"rope_type": "linear", "factor": 0}, 5],
    "quantization_config": [{"quant_method": "gptq"}],
    "model_type": ["mamba", None, 5],
    "hidden_act": ["relu6"],
    "tie_word_embeddings": ["yes"],
}


@pytest.mark.parametrize("field", CONFIGS)
def test_bad_configs(field, run, copy, monkeypatch):
    """Refused by name, before anything is allocated."""
    monkeypatch.setattr("minirt.graph.Model.allocate", lambda *_: pytest.fail("allocated"))
    path = copy / "config.json"
    good = json.loads(path.read_text())
    for value in CONFIGS[field]:
        path.write_text(json.dumps({**good, field: value}))
        refused(run("generate", "-m", copy, *CACHE, "hello"), "config.json", field.split("_")[0])
        refused(run("plan", "-m", copy, "--device", "cpu"), "config.json")


def test_missing_files(run, copy, tmp_path):
    base = ("generate", *CACHE, "hello", "-m")
    refused(run(*base, tmp_path / "nowhere"), "nowhere")
    refused(run(*base, copy / "config.json"), "folder")
    refused(run(*base, "no-such-model"), "no-such-model", "Qwen2.5-7B")
    refused(run(*base, ""), "empty")
    (copy / "model.safetensors").unlink()
    refused(run(*base, copy), "safetensors")
    (copy / "config.json").unlink()
    refused(run(*base, copy), "config.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe{}", b"[" * 100_000], ids=lambda c: str(c[:3]))
def test_damaged_json(name, content, run, copy):
    (copy / name).write_bytes(content)
    refused(run("generate", "-m", copy, *CACHE, "hello"), name.partition(".")[0])


def test_damaged_shards(run, hf_folder, tmp_path):
    folder = add_tokenizer(hf_folder("Llama", shard="40KB"))
    base = ("generate", "-m", folder, *CACHE, "hello")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name, shard = next(iter(content["weight_map"].items()))
    shutil.copy(folder / shard, tmp_path / shard)
    for outside in (f"../{tmp_path.name}/{shard}", str(tmp_path / shard), "..", "", "a\\b.safetensors", 5):
        index.write_text(json.dumps({"weight_map": {**content["weight_map"], name: outside}}))
        refused(run(*base), "index.json")
    index.write_text(json.dumps(content))
    (folder / shard).write_bytes((tmp_path / shard).read_bytes()[:-9])
    refused(run(*base), shard)
    (folder / shard).unlink()
    refused(run(*base), shard)


def test_damaged_tensors(run, copy):
    base = ("generate", "-m", copy, *CACHE, "hello")
    path, name = copy / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    good = {k: v.clone() for k, v in load_file(path).items()}
    for value in (good[name][:-1].clone(), good[name].double(), good[name].to(torch.int8)):
        save_file({**good, name: value}, path)
        refused(run(*base), name, "expected", "found")
    save_file({**good, "surplus.weight": torch.ones(2)}, path)
    refused(run(*base), "surplus.weight")
    save_file({k: v for k, v in good.items() if k != name}, path)
    refused(run(*base), name)
    good[name][2, 3] = float("inf")
    save_file(good, path)
    refused(run(*base, "--check-weights"), name, "1 NaN or Inf")


def test_nan_logits(run, copy):
    path, name = copy / "model.safetensors", "model.norm.weight"
    save_file({**load_file(path), name: torch.full((64,), float("nan"))}, path)
    refused(run("generate", "-m", copy, *CACHE, "hello"), "NaN", "--check-weights")


# Processes


def start(*arguments, **options):
    """`python -m minirt.cli …`, Ctrl-C not ignored even if it is here (as under nohup)."""
    command = [sys.executable, "-P", "-m", "minirt.cli", *map(str, arguments)]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    default = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    return subprocess.Popen(command, preexec_fn=default, **{**streams, **options})


@pytest.fixture(scope="module")
def endless(hf_folder):
    """A model with room for far more tokens than a test waits for."""
    return add_tokenizer(hf_folder("Llama", max_position_embeddings=1 << 18))


def test_help_is_light():
    code = "import sys; from minirt import cli\ntry: cli.main(['generate', '--help'])\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    heavy = {"torch", "triton", "numpy", "tokenizers", "safetensors", "huggingface_hub", "jinja2", "rich", "transformers"}
    assert "--prompt-file" in done.stdout
    assert not heavy & set(done.stdout.split("\n")[-2].split())


def test_control_c_ends_a_generation(endless):
    with start("generate", "-m", endless, *CACHE, "--ignore-eos", "--max-tokens", 10**6, "hello") as process:
        assert process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip() == b""


def test_a_reader_that_goes_away(endless):
    with start("generate", "-m", endless, *CACHE, "--ignore-eos", "--max-tokens", 10**6, "hello") as process:
        assert process.stdout.read(5)
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 1
    assert err == b""


def test_control_c_at_the_prompt_leaves_the_terminal_clean(folder):
    terminal, side = pty.openpty()
    before = termios.tcgetattr(terminal)
    with start("chat", "-m", folder, *CACHE, stdin=side, stdout=side) as process:
        shown = b""
        while not shown.endswith(b"> "):
            shown += os.read(terminal, 100)
        os.write(terminal, b"/clear\n")
        while shown.count(b"> ") < 2:
            shown += os.read(terminal, 100)
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
    after = termios.tcgetattr(terminal)
    os.close(terminal)
    os.close(side)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert after == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk():
    with open("/dev/full", "wb") as full, start("env", stdout=full) as process:
        err = process.stderr.read()
    assert process.returncode == 1
    assert err == b"minirt: stdout: cannot write the output: No space left on device\n"


def test_closed_streams():
    command = f"'{sys.executable}' -P -m minirt.cli plan -m SmolLM2-135M >&- 2>&-"
    assert subprocess.run(["sh", "-c", command]).returncode == 0

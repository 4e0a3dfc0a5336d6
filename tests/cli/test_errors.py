"""Bad input on the command line: an exit code, no output on stdout, and one clear line on stderr."""

import io
import os
import re
import subprocess
import sys
import threading

import pytest
import torch
from support.cli import CACHE, refused

import minirt
from minirt.cli import app as cli
from minirt.cli import files
from minirt.cli.settings import token_count
from minirt.errors import InputError
from minirt.generator import Generator
from minirt.sizes import format_size, parse_size


def test_usage(run, folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    for arguments in (
        ["generate", "-m", folder], ["generate", "-m", folder, "x", "--max-tokens", "many"], ["no-such-command"],
        ["generate", "x", "--kv-cache-memory", "x"], ["generate", "x", "--no-such-flag"], ["plan", "extra"],
    ):  # fmt: skip
        refused(run(*arguments), " --help)", code=2)


def test_an_abbreviated_command_is_suggested(run):
    refused(run("gen"), "no such command 'gen'", "Did you mean 'generate'?", code=2)
    refused(run("e", "x"), "'env' or 'eval'", code=2)
    refused(run(""), "no such command ''", code=2)


@pytest.mark.parametrize(("arguments", "words"), [
    ("serve --tensor-parallel-size 2", "vLLM's name; here --tensor-parallel)"),
    ("serve -pp 2 m", "no such option '-pp' (not supported"), ("serve --enable-lora", "not needed: --lora NAME=FOLDER"),
    ("serve --trust-remote-code", "not needed: minirt never runs code"), ("generate -ngl=99 x", "no such option '-ngl'"),
    ("generate --load-format dummy", "vLLM's name; here --random-weights"), ("generate --quantization fp8", "here --quantize)"),
    ("generate --max-new-tokens 3", "transformers' name; here --max-tokens)"), ("generate --temp 0", "here --temperature)"),
    ("bench throughput --num-iters 3", "vLLM's name; here --repeats)"), ("generate -c 128 x", "here --max-model-len)"),
    ("models --quantization fp8", "no such option '--quantization' (see"),
    ("bench -p 512 -n 128", "here minirt bench speed -p 512 -n 128)"),
    ("bench throughput -p 32 -n 16", "no such option '-p' (llama-bench's name; here minirt bench speed -p"),
    ("bench speed -d 4096", "llama-bench's name; here minirt bench speed -c)"), ("bench speed -r 3", "here --repeats)"),
    ("generate -b 512 x", "llama.cpp's name; here --max-num-batched-tokens of tokens, --max-num-seqs of sequences)"),
    ("serve -ub 512", "llama.cpp's name; here --max-num-batched-tokens)"),
    ("generate -hf a/b x", "no such option '-hf' (llama.cpp's name; here --model)"), ("generate -t 4 x", "here --threads)"),
    ("serve --n-gpu-layers 99", "a model is wholly on one GPU"), ("serve -ngl 99", "no such option '-ngl' (not needed"),
    ("serve -c 128", "here --max-model-len)"), ("serve --alias x", "here --served-model-name)"), ("serve --jinja", "always on"),
    ("generate -s 3 x", "here --seed)"), ("serve --embeddings", "minirt generates text)"), ("generate -cnv", "minirt chat is"),
    ("bench throughput -b 3", "no such option '-b' (llama.cpp's name; here --max-num-batched-tokens of tokens"),
    ("generate -p x", "here PROMPT, without an option)"), ("plan -p x", "no such option '-p' (see minirt plan"),
])  # fmt: skip
def test_options_of_other_programs(arguments, words, run):
    """They were answered with options that look alike, or with the first letter of -tp. `models` has nothing to quantize with."""
    refused(run(*arguments.split()), words, code=2)


@pytest.mark.parametrize(("arguments", "words"), [
    ("score --speculate ngram", "'--speculate' (an option of minirt chat, minirt generate"),
    ("plan --host x", "'--host' (an option of minirt serve) (see minirt plan"),
    ("bench kernels --input-len 3", "(an option of minirt bench patch, minirt bench speed and minirt profile)"),
    ("bench speed --speculate ngram", "random tokens, where drafts are seldom right; minirt bench speculate"),
    ("bench serve --speculate ngram", "(an option of the server: minirt serve --speculate)"),
    ("serve --spec ngram", "(did you mean --speculate or --speculative-config?)"),
    ("plan -z 3", "no such option '-z' (see"),
    ("generate --temperatur 1", "(did you mean --temperature?)"), ("generate --tempo 1", "no such option '--tempo' (see"),
    ("plan --modle x", "(did you mean --model?)"),
])  # fmt: skip
def test_options_of_other_commands_and_spellings(arguments, words, run):
    """`bench speed --speculate` was answered with `--repeats`, `serve --spec` with `--dtype`: click compares the dashes too."""
    refused(run(*arguments.split()), words, code=2)


@pytest.mark.parametrize(("arguments", "words"), [
    ("run x", "'run' (minirt chat --model MODEL is a conversation, minirt generate PROMPT"),
    ("complete x", "(here minirt generate"), ("pull x", "downloads the model"), ("decode", "(here minirt bench speed -p 0)"),
    ("perplexity", "(here minirt eval perplexity)"), ("version", "(here minirt --version;"),
    ("help generate", "(here minirt --help, and minirt COMMAND --help)"),
    ("benchmark", "Did you mean 'bench'?"), ("launch", "no such command 'launch' (see minirt --help)"),
    ("bench throughp", "Did you mean 'throughput'?"), ("bench latency", "(here minirt bench throughput with one length"),
    ("bench prefill", "(here minirt bench speed -n 0)"), ("bench run", "no such command 'run' (see minirt bench --help)"),
])  # fmt: skip
def test_commands_of_other_programs_and_of_groups(arguments, words, run):
    """`complete` was answered with `compare`, `launch` with `plan`, and `run` with nothing."""
    refused(run(*arguments.split()), words, code=2)


@pytest.mark.parametrize(("arguments", "words"), [
    ("--model x generate hi", "no such option '--model' (options follow the command, as in minirt generate --model)"),
    ("bench --batch-size 3 speed", "as in minirt bench speed --batch-size)"), ("--temperature 0", "as in minirt chat --temp"),
    ("bench --num-prompts 3", "as in minirt bench "), ("-c 128 generate hi", "no such option '-c' (see minirt --help)"),
])  # fmt: skip
def test_options_before_the_command(arguments, words, run):
    """`minirt --model x generate` was asked whether it meant --help. No command is advised that lacks the option."""
    refused(run(*arguments.split()), words, code=2)


def test_an_option_without_its_value_names_the_command(run):
    """click's error does not name the command, so that the message pointed to `minirt --help`."""
    refused(run("chat", "--stop"), "option '--stop' requires an argument (see minirt chat --help)", code=2)
    refused(run("bench", "speed", "-b"), "(see minirt bench speed --help)", code=2)


def test_the_table_of_other_names_is_true():
    """Each option that it advises exists, and so does each Python argument. No option of minirt is listed for its command."""
    from inspect import signature

    from minirt import SamplingParams, foreign_names
    from minirt.loading.options import LoadOptions

    options = {name for command in commands() for own in command.params for name in own.opts + own.secondary_opts}
    arguments = {*LoadOptions.__dataclass_fields__, *signature(Generator.generate).parameters}
    sampling = set(SamplingParams.__dataclass_fields__)
    for name, entry in foreign_names.names().items():
        if isinstance(entry, str):
            continue
        _, option, python = entry
        assert set(re.findall("--[a-z-]+", option or "")) <= options, name
        match = re.match(r"(SamplingParams\()?([a-z_]+)=|minirt\.([A-Za-z]+)\b", python or "x=")
        if python is not None:
            assert match, name
            found = match[3] in minirt.__all__ if match[3] else match[2] in (sampling if match[1] else arguments)
            assert found, name
    assert set(foreign_names.table("short").values()) <= foreign_names.names().keys()


def commands(group=cli.cli):
    for command in group.commands.values():
        yield from commands(command) if hasattr(command, "commands") else [command]


def test_names_of_other_libraries_are_hints_at_import():
    """`from minirt import LLM` only said that the name cannot be imported. Other names stay an AttributeError, for hasattr."""
    with pytest.raises(ImportError, match=r"no LLM \(vLLM's name; here minirt.Generator\)"):
        from minirt import LLM  # noqa: F401
    assert not hasattr(minirt, "Nothing")


def test_a_model_that_is_given_as_an_argument(run, folder, monkeypatch):
    """`vllm serve MODEL` has it in this form. Where PROMPT is an argument, or nothing, the message says how to name a model."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setenv("MINIRT_MODEL", "nowhere/at/all")
    assert run("chat", folder, *CACHE)[0] == 0
    refused(run("chat", folder, "-m", folder), "two models", code=2)
    refused(run("plan", "Qwen3-4B"), "unexpected extra argument (Qwen3-4B): the model is an option, --model MODEL", code=2)


@pytest.mark.parametrize(("text", "value"), [
    ("32k", 32_000), ("32K", 32_768), ("1.5k", 1500), ("2m", 2_000_000), ("1M", 1 << 20), ("8192", 8192), ("0", 0), ("-1", -1),
])  # fmt: skip
def test_numbers_of_tokens(text, value):
    """vLLM's `--max-model-len 32k` was "not a valid integer"."""
    assert token_count(text) == value


@pytest.mark.parametrize("text", ["", "k", "32kk", "32g", "1.5", "1e3", "-1.5k", "٣", "32 k"])
def test_bad_numbers_of_tokens(text, run):
    with pytest.raises(ValueError, match="examples are 32768 and 32k"):
        token_count(text)
    refused(run("generate", "--max-model-len", text, "x"), "minirt: --max-model-len: ", "or auto", code=2)


def test_numbers_of_tokens_reach_the_model(run, folder):
    refused(run("generate", "-m", folder, *CACHE, "--max-model-len", "1k", "x"), "found 1000", code=2)
    refused(run("plan", "-m", folder, "--max-num-batched-tokens", "0"), "--max-num-batched-tokens: ", "from 1 to", code=2)
    assert run("generate", "-m", folder, *CACHE, "--max-model-len", "auto", "--max-tokens", 1, "x")[0] == 0


def test_a_text_in_place_of_a_file_names_the_option(run, folder, tmp_path):
    """`--grammar TEXT` said only that TEXT cannot be read. A JSON schema may be given itself."""
    for option in ("--json-schema", "--grammar", "--prompt-file", "--warm-prompt", "--prompts"):
        refused(run("generate", "-m", folder, *CACHE, option, "a text", *(["x"] * (option != "--prompts"))),
                "a text: cannot be read", f"{option} takes the name of a file")  # fmt: skip
    refused(run("eval", "perplexity", "-m", folder, "--text", "a text"), "--text takes the name of a file")
    refused(run("generate", "-m", folder, *CACHE, "--json-schema", '{"type": 5}', "x"), "--json-schema", code=2)


def test_a_preset_without_files_takes_token_ids_before_it_is_loaded(run, monkeypatch):
    """It was sized and filled with random weights before the prompt was looked at."""
    monkeypatch.setattr("minirt.generator.load", lambda *_: pytest.fail("loaded"))
    model = ("-m", "Qwen3-0.6B", "--random-weights")
    refused(run("generate", *model, "hi"), "Qwen3-0.6B: the model has no tokenizer, so a prompt must be token ids")
    refused(run("score", *model, "hi", "1"), "must be token ids")
    refused(run("generate", *model, "--chat", "hi"), "no tokenizer for a conversation")
    refused(run("chat", *model), "no tokenizer for a conversation")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("4GiB", 4 << 30), ("4gib", 4 << 30), ("1.5 MiB", 3 << 19), ("2kB", 2000), ("3G", 3 * 10**9), ("7B", 7),
     (" 1TiB ", 1 << 40)],
)  # fmt: skip
def test_sizes(text, value):
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "nan", "inf", "1e9", "4XB", "GiB", "4 4", "1" * 99, "0.1", "٣"])
def test_bad_sizes(text):
    with pytest.raises(InputError, match="4GiB"):
        parse_size(text)


@pytest.mark.parametrize("count", [1, 7, 1023, 1024, 1536 << 10, 4 << 30, (4 << 30) + 1, 290_925_834_240, 3 << 50, 2**62 - 1])
def test_sizes_in_messages_are_sizes_that_options_take(count):
    assert " " not in format_size(count)
    assert parse_size(format_size(count)) == pytest.approx(count, rel=0.005)
    assert count <= parse_size(format_size(count, up=True)) <= 1.01 * count + 1


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--temperature", "nan"), ("--temperature", "-1"), ("--temperature", "inf"), ("--top-p", "nan"), ("--top-p", "0"),
     ("--top-p", "1.1"), ("--min-p", "-0.1"), ("--top-k", "-2"), ("--seed", "-1"), ("--seed", str(2**64)),
     ("--max-tokens", "0"), ("--max-tokens", "-3"), ("--stop", ""), ("--device", "tpu"), ("--dtype", "int4"),
     ("--impl", "foo"), ("--impl", "layers.99.*=eager"), ("--impl", "layers.*="), ("--max-model-len", "0"),
     ("--max-model-len", "257"), ("--kv-cache-memory", "100"), ("--revision", "main")],
)  # fmt: skip
def test_bad_values(flag, value, run, folder):
    refused(run("generate", "-m", folder, "--device", "cpu", flag, value, "hello"), f"minirt: {flag}", code=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the case without a GPU")
def test_cuda_without_a_gpu(run, folder):
    refused(run("generate", "-m", folder, "--device", "cuda", "hello"), "--device cuda", "--device cpu", code=2)


def test_out_of_memory(run, folder, monkeypatch):
    for module in ("minirt.device", "minirt.loading.memory"):
        monkeypatch.setattr(f"{module}.free_memory", lambda device: 20 << 30)
    result = run("generate", "-m", "Qwen2.5-72B", "--random-weights", "--device", "cpu", "1 2")
    refused(result, "271.15GiB", "20GiB free", "smaller model")
    pages = ("--kv-cache-memory", "900GiB", "--max-num-seqs", 1 << 20)
    refused(run("generate", "-m", folder, *pages, "hello"), "192.", "lower --kv-cache-memory")
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to …")):
        monkeypatch.setattr(Generator, "check", lambda *_, error=error: (_ for _ in ()).throw(error))
        refused(run("generate", "-m", folder, *CACHE, "hello"), "out of memory", "--max-model-len")


def test_bad_prompts(run, folder, tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "empty").touch()
    base = ("generate", "-m", folder, *CACHE)
    refused(run(*base, ""), "empty")
    refused(run(*base, "--prompt-file", tmp_path / "empty"), f"{tmp_path / 'empty'}: the prompt is empty")
    refused(run(*base, "--prompt-file", tmp_path / "latin"), "UTF-8", "0xe9 at offset 3")
    refused(run(*base, "--prompt-file", tmp_path), "found a folder")
    refused(run(*base, "--prompt-file", "nul\0"), "cannot be read")
    refused(run(*base, "lone \udce9 surrogate"), "surrogate")
    refused(run(*base, "a" * 1_000_000), "at most 255 tokens", "--max-model-len")
    refused(run(*base, "a", ""), "PROMPT 2: the prompt is empty")
    refused(run(*base, "a", "--prompt-file", tmp_path / "empty"), f"{tmp_path / 'empty'}: the prompt is empty")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/tty"])
@pytest.mark.parametrize("flag", ["--prompt-file", "--prompts"])
def test_devices_are_not_read(device, flag, run, folder):
    refused(run("generate", "-m", folder, *CACHE, flag, device), f"{device}: cannot be read", "a file or a pipe")


def test_input_files_have_a_bound(run, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 3 << 14)
    monkeypatch.setattr(files, "_BLOCK", 1 << 14)
    path = tmp_path / "large"
    for size, words in (((3 << 14) + 1, ["too large", "1GiB"]), (3 << 14, ["at most 255 tokens"])):
        path.write_bytes(b"a" * size)
        refused(run("generate", "-m", folder, *CACHE, "--prompt-file", path), *words)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
        refused(run("generate", "-m", folder, *CACHE, "--prompt-file", "-"), *words)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(open("/dev/zero", "rb")))  # noqa: SIM115
    refused(run("generate", "-m", folder, *CACHE, "--prompts", "-"), "stdin: is too large")


def test_a_pipe_is_read(run, folder, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=[b"caf\xe9"])
    writer.start()
    refused(run("generate", "-m", folder, *CACHE, "--prompt-file", pipe), "UTF-8", "0xe9 at offset 3")
    writer.join()


@pytest.mark.parametrize("value", [10**24, 2 << 20])
@pytest.mark.parametrize("flag", ["--max-num-seqs", "--max-num-batched-tokens"])
def test_sizes_that_no_step_has(flag, value, run, folder):
    refused(run("generate", "-m", folder, *CACHE, flag, value, "hello"), flag, "from 1 to 1048576", code=2)


def test_debug_shows_the_cause(folder, capsys):
    with pytest.raises(Exception, match="empty"):
        cli.main(["generate", "-m", str(folder), *CACHE, "--debug", ""])


def test_unforeseen_errors_are_one_line(run, folder, monkeypatch):
    monkeypatch.setattr(Generator, "check", lambda *_: 1 / 0)
    code, out, err = run("generate", "-m", folder, *CACHE, "hello")
    assert (code, out) == (1, "")
    assert err == "minirt: unexpected ZeroDivisionError: division by zero (run with --debug for the traceback)\n"


def test_missing_files(run, copy, tmp_path):
    base = ("generate", *CACHE, "hello", "-m")
    refused(run(*base, tmp_path / "nowhere"), "nowhere")
    refused(run(*base, copy / "config.json"), "folder")
    refused(run(*base, "no-such-model"), "no-such-model", "minirt models lists the presets")
    refused(run(*base, ""), "empty")
    (copy / "model.safetensors").unlink()
    refused(run(*base, copy), "safetensors")
    (copy / "config.json").unlink()
    refused(run(*base, copy), "config.json")


FAILED = """
import atexit
from minirt.cli import app as cli
from minirt.cli import files
from minirt.cli.settings import token_count
from minirt.engine import engine
from minirt.errors import DeviceFailedError

def fails(self, deliver):
    raise DeviceFailedError("the GPU failed", found="CUDA error: …")

engine.Engine.step = fails
atexit.register(print, "the interpreter ends as always")
cli.main(["generate", "--device", "cpu", "--max-tokens", "1", "Once"])
"""


def test_a_failed_gpu_ends_the_process_at_once():
    """Freeing GPU memory would fail too, and change the exit code."""
    done = subprocess.run([sys.executable, "-P", "-c", FAILED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr[-2000:]
    assert "minirt: the GPU failed; found CUDA error" in done.stderr
    assert "interpreter ends" not in done.stdout


@pytest.mark.parametrize("arguments", [
    "--min-tokens 5 --max-tokens 4", "--max-tokens 0", "--max-tokens 0 --prompt-logprobs 1 --json --n 2",
    "--max-tokens 0 --prompt-logprobs 1 --json --regex a", "--ignore-eos --regex a", "--regex a --disable-any-whitespace",
    "--no-detokenize --stop x", "--no-detokenize --no-skip-special-tokens", "--no-detokenize --include-stop-str-in-output",
    "--truncate-prompt-tokens 0", "--logit-bias 99999=1",
])  # fmt: skip
def test_messages_name_options_and_no_python(arguments, run, folder):
    """`--max-tokens: max_tokens asks for nothing without prompt_logprobs; …` spoke of arguments that a command line has not."""
    from minirt import SamplingParams, StructuredOutputsParams

    err = run("generate", "-m", folder, *CACHE, *arguments.split(), "hello")[2]
    said, _, found = err.partition("; found ")
    names = {*SamplingParams.__dataclass_fields__, *StructuredOutputsParams.__dataclass_fields__}
    assert found
    assert {name for name in re.findall(r"\w+", said) if name in names and "_" in name} == set()
    assert "detokenize=" not in said
    options = {name for command in commands() for own in command.params for name in own.opts + own.secondary_opts}
    assert set(re.findall(r"--[a-z-]+", said)) <= options

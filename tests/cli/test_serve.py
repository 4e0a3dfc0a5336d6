"""`minirt serve` as a command: its options reach the server, from the command line, the environment and a file."""

import subprocess
import sys

import pytest
from support.cli import caller, refused

from minirt.server import run


@pytest.fixture
def call(capfd, monkeypatch):
    """Call `minirt serve …` without serving → (exit code, stdout, stderr), and the options of the last call."""
    monkeypatch.delenv("MINIRT_API_KEY", raising=False)
    seen = []
    monkeypatch.setattr(run, "serve", lambda *given: seen.append(given))
    invoke = caller(capfd, monkeypatch)

    def call(*arguments):
        result = invoke("serve", *arguments)
        return result, seen[-1] if seen else None

    return call


def test_the_options_of_the_command_line(call):
    words = "-q --model m --port 0 --host ::1 --served-model-name a --served-model-name b --api-key k --fp8 --max-num-seqs 9"
    words += " --no-prefix-cache --drain-timeout 3 --request-timeout 1.5 --allow-origin *"
    (code, out, err), (server, load, host, port) = call(*words.split())
    assert (code, out, err) == (0, "", "")
    assert (server.model, port, host, server.names, server.api_keys) == ("m", 0, "::1", ("a", "b"), ("k",))
    assert (server.drain_timeout, server.request_timeout, server.allowed_origins, server.quiet) == (3, 1.5, ("*",), True)
    assert load.items() >= {"model": "m", "quantization": "fp8", "max_num_seqs": 9, "prefix_cache": False}.items()


def test_warm_prompts_are_read_at_once(call, tmp_path):
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text(f"text of {file.name}\n")
    _, (server, *_) = call("--warm-prompt", files[0], "--warm-prompt", files[1])
    assert server.warm_prompts == tuple((str(file), f"text of {file.name}\n") for file in files)
    result, _ = call("--warm-prompt", tmp_path / "none.txt")
    refused(result, "none.txt")


def test_a_file_of_options(call, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(
        "model: m\nport: 1234\nmax_num_seqs: 5\nfp8: true\nno-fp8-head: true\napi-key: [a, b]\nimpl: eager\nquiet: true\n"
        "kv-cache-memory: 2GiB\nrequest-timeout: 2\n"
    )
    _, (server, load, _, port) = call("--config", file, "--port", 99)
    assert (server.model, port, server.api_keys, server.request_timeout) == ("m", 99, ("a", "b"), 2)
    expected = {"max_num_seqs": 5, "quantization": "fp8", "quantize_head": False, "impl": ["eager"], "kv_cache_memory": 2 << 30}
    assert load.items() >= expected.items()


@pytest.mark.parametrize(("text", "words"), [
    ("prot: 5", ["prot", "no such option"]), ("config: x", ["config"]), ("port: [1]", ["port"]),
    ("fp8: 1", ["fp8", "true or false"]), ("- 1", ["mapping"]), ("a: [", ["YAML"]), ("port:", ["port"]),
    ("model: {a: 1}", ["model"]), ("port: 1\nport: 2", ["port", "twice"]), ("api-key: [[a]]", ["api-key"]),
    ("served_model_name: a\nserved-model-name: b", ["served-model-name", "another name"]), ("port: true", ["port"]),
    ("fp8-head: true\nno-fp8-head: true", ["no-fp8-head", "another name"]), ("host: no", ["host"]),
    ("api-key: [null]", ["api-key"]), ("tensor-parallel-size: 2", ["no such option", "here --tensor-parallel"]),
    ("quantization: fp8", ["vLLM's name; here --quantize"]),
])  # fmt: skip
def test_files_of_options_that_are_wrong(call, tmp_path, text, words):
    file = tmp_path / "own.yaml"
    file.write_text(text)
    result, seen = call("--config", file)
    refused(result, str(file), *words)
    assert seen is None


def test_a_file_of_options_that_is_missing(call, tmp_path):
    """It is the user's own file, so the advice for a model's file would be wrong."""
    result, _ = call("--config", tmp_path / "none.yaml")
    refused(result, "none.yaml: cannot be read")
    assert "get the file again" not in result[2]


@pytest.mark.parametrize("arguments", [("--model", "a", "--model", "b"), ("a", "-m", "b"), ("-ma", "--model=a")])
def test_two_models_are_refused(call, arguments):
    """The last one was taken without a word."""
    result, seen = call("-q", *arguments)
    refused(result, "two models", "docs/fleets.md", code=2)
    assert seen is None


def test_a_folder_is_named_without_its_path(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given, name in ((str(tmp_path), tmp_path.name), (".", tmp_path.name), ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B")):
        assert call("-q", "--model", given)[1][0].names == (name,)


def test_files_of_implementations_reach_the_process_of_the_engine(call):
    """The front's process does not run them: it has no layers."""
    from minirt.server.front import start_message

    _, (server, load, *_) = call("-q", "--import", "a.py", "--import", "b.py")
    assert start_message(server, load).imports == ["a.py", "b.py"]


@pytest.mark.parametrize("path", ["minirt", "/minirt/", "/", "/a//b", "/a b", '/"a'])
def test_root_paths(call, path):
    assert call("-q", "--root-path", "/a/b.c")[1][0].root_path == "/a/b.c"
    refused(call("-q", "--root-path", path)[0], "--root-path: not a path", code=2)


@pytest.mark.parametrize("origin", ["localhost:3000", "a.example", "https://a.example/", "https://a.example/page", ""])
def test_origins_that_no_browser_sends(call, origin):
    result, seen = call("-q", "--allow-origin", "https://a.example:8443", "--allow-origin", origin)
    refused(result, "--allow-origin: not an origin; expected *, or scheme://host", code=2)
    assert seen is None


def test_a_value_in_the_file_that_the_option_does_not_take(call, tmp_path):
    file = tmp_path / "own.yaml"
    for text, option in (("port: 70000", "--port"), ("stream-interval: 1.5", "--stream-interval")):
        file.write_text(text)
        result, _ = call("--config", file)
        refused(result, option, code=2)
    refused(call("--port", "80x")[0], "--port: '80x' is not a valid integer (see", code=2)


def test_the_key_of_the_environment(call, monkeypatch):
    monkeypatch.setenv("MINIRT_API_KEY", "secret")
    assert call("-q")[1][0].api_keys == ("secret",)
    assert call("-q", "--api-key", "other")[1][0].api_keys == ("other",)


@pytest.mark.parametrize("arguments", [
    ("--api-key", "a\nb"), ("--api-key", " a"), ("--api-key", "a "), ("--api-key", "\udcff"), ("--request-timeout", "nan"),
    ("--drain-timeout", "nan"),
])  # fmt: skip
def test_values_that_no_server_can_use(call, arguments):
    result, seen = call("-q", *arguments)
    refused(result, arguments[0], code=2)
    assert seen is None


def test_packages_that_are_missing():
    script = (
        "import sys\n" "from importlib import util\n" "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name in ('msgspec', 'prometheus_client') else find(name, *rest)\n"
        "from minirt.cli.app import main\n" "main(['serve'])"
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "msgspec, prometheus-client" in done.stderr
    assert "pip install msgspec prometheus-client" in done.stderr

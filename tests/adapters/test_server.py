"""Adapters of a server: names of models, and clients that load and unload them."""

import json
import shutil

import pytest
import transformers
from support.adapters import greedy, write_adapter
from support.server import Server
from support.tiny import add_tokenizer
from tokenizers import Tokenizer

from minirt.errors import InputError
from minirt.server.options import ServerOptions

PROMPT = [1, 17, 5, 99]
KEY = {"authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def folders(hf_folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    folder = add_tokenizer(hf_folder("Llama", seed=3))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for i in range(3):
        write_adapter(root / "allowed" / f"a{i}", model, 4, i)
    shutil.copytree(root / "allowed" / "a0", root / "secret")
    (root / "allowed" / "link").symlink_to(root / "secret")
    paths = {None: None} | {f"a{i}": root / "allowed" / f"a{i}" for i in range(3)}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = {name: tokenizer.decode(greedy(model, path, PROMPT, 8)) for name, path in paths.items()}
    assert len(set(texts.values())) == 4
    return folder, root, texts


def test_names_and_changes(folders, tmp_path):
    """Catches an adapter that answers under no name of its own, one that is served after it was unloaded, and a path that leads
    out of the allowed folder."""
    folder, root, wanted = folders
    allowed = root / "allowed"
    options = "--dtype", "float32", "--api-key", "sesame", "--lora-folder", allowed, "--max-lora-rank", 8
    server = Server(tmp_path / "log", folder, "--served-model-name", "tiny", "--lora", f"a0={allowed / 'a0'}", *options).wait()

    def text(model):
        body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        status, answer = server.post("/v1/completions", body, **KEY)
        if status != 200:
            return status
        assert answer["model"] == model
        return answer["choices"][0]["text"]

    def change(what, expected=200, **body):
        status, answer = server.post(f"/v1/{what}_lora_adapter", body, **KEY)
        assert status == expected, answer
        return answer

    try:
        assert text("tiny") == wanted[None]
        assert text("a0") == wanted["a0"]
        assert text("a1") == 404
        assert server.post("/v1/load_lora_adapter", {"lora_name": "a1", "lora_path": "a1"})[0] == 401
        change("load", lora_name="a1", lora_path="a1")
        assert text("a1") == wanted["a1"]
        names = [card["id"] for card in json.loads(server.request("GET", "/v1/models", headers=KEY)[2])["data"]]
        assert names == ["tiny", "a0", "a1"]
        for path in ("../secret", str(root / "secret"), "link", "nothing", ".", "", "a\0b", "../allowed-too"):
            assert "below an allowed" in change("load", 400, lora_name="x", lora_path=path)["error"]["message"]
        change("load", 400, lora_name="tiny", lora_path="a1")
        change("load", 400, lora_name="a0", lora_path="a2")
        change("load", lora_name="a0", lora_path="a2", load_inplace=True)
        assert text("a0") == wanted["a2"]
        change("unload", lora_name="a1")
        change("unload", 404, lora_name="a1")
        assert text("a1") == 404
        assert server.metric("vllm:lora_requests_total") == 1
    finally:
        assert server.stop() == 0


def test_off_unless_folders_are_allowed(folders, tmp_path, monkeypatch):
    """Catches a server that reads what clients name without having been told to, and one that needs no key for it."""
    with pytest.raises(InputError, match="need a key"):
        ServerOptions("tiny", lora_folders=("/adapters",))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "adapters").mkdir()
    assert ServerOptions("tiny", lora_folders=("~/adapters",), api_keys=("sesame",)).lora_folders == ("~/adapters",)
    with pytest.raises(InputError, match="there is no such folder"):
        ServerOptions("tiny", lora_folders=("~/none",), api_keys=("sesame",))
    folder, root, _ = folders
    server = Server(tmp_path / "log", folder, "--lora", f"a0={root / 'secret'}").wait()
    try:
        for what in ("load", "unload"):
            status, answer = server.post(f"/v1/{what}_lora_adapter", {"lora_name": "a0", "lora_path": "a0"})
            assert status == 403, answer
    finally:
        server.stop()

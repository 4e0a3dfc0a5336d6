"""Finding and checking a model's files: local folders, a hand-made Hub cache read offline, and a fake Hub."""

import fnmatch
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import are_progress_bars_disabled
from support.checkpoints import no_warning

from minirt.errors import CheckpointError, ConfigError, InputError, MinirtError, ModelNotFoundError, UnsupportedError
from minirt.loading.hub import ModelFiles, find_model_files
from minirt.loading.load import find

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = json.dumps({"metadata": {}, "weight_map": {"b": SHARDS[1], "a": SHARDS[0], "c": SHARDS[1]}})
SINGLE: dict[str, str | bytes] = {"config.json": '{"model_type": "llama"}', "model.safetensors": "w"}
SHARDED = {"config.json": "{}", "model.safetensors.index.json": INDEX, SHARDS[0]: "0", SHARDS[1]: "1"}


def fill(folder: Path, files: dict[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as if online, whatever the environment of the tests."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


# --- local folders ---


FOLDERS: dict[str, tuple[dict[str, Any], bool, list[str], bool]] = {  # files, whether weights are needed, those read, an index
    "a single file": (SINGLE | {"generation_config.json": '{"eos_token_id": [1]}'}, True, ["model.safetensors"], False),
    "shards in the order of their names": (SHARDED, True, SHARDS, True),
    "beside a broken index": (SINGLE | {"model.safetensors.index.json": "broken"}, True, ["model.safetensors"], False),
    "no weights": ({"config.json": "{}", "model.safetensors.index.json": "broken"}, False, [], False),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_what_is_read_of_a_folder(case: str, tmp_path: Path) -> None:
    """Catches weights of another file, or in another order, and an index that is read though a single file wins."""
    given, weights, names, indexed = FOLDERS[case]
    files = find_model_files(fill(tmp_path / "mine", given), weights=weights)
    generation = json.loads(given["generation_config.json"]) if "generation_config.json" in given else None
    index = json.loads(INDEX)["weight_map"] if indexed else None
    paths = tuple(tmp_path / "mine" / name for name in names)
    assert files == ModelFiles("mine", tmp_path / "mine", json.loads(given["config.json"]), generation, paths, index, None)


def test_relative_and_home_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "org" / "name", SINGLE)
    monkeypatch.chdir(tmp_path)
    assert find_model_files("org/name").folder == Path("org/name")  # a folder takes precedence over a Hub id of the same name
    monkeypatch.chdir(tmp_path / "org" / "name")
    assert find_model_files(".").name == "name"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model_files("~/org/name").folder == tmp_path / "org" / "name"


MISSING = ["/no/such", "./no", "../no", "~nobody-of-this-name/x", "a/b/c", "org/name/", ".x/y", "x" * 5000 + "//"]
NO_FOLDER = [(model, "no such folder") for model in MISSING]
NO_FOLDER += [(model, "a local folder, a Hub id such as") for model in ("", "gpt2", "Qwen2.5-7B", "nul\0")]


@pytest.mark.parametrize(("model", "words"), NO_FOLDER, ids=range(len(NO_FOLDER)))
def test_path_that_is_not_there_is_not_asked_of_the_hub(model: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a download under the name of a folder that was mistyped."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=AssertionError("asked the Hub")))
    with pytest.raises(ModelNotFoundError, match=words):
        find_model_files(model)


def test_what_is_no_folder_of_a_model(tmp_path: Path) -> None:
    """A file, a folder without config.json, and a revision of a folder, which has none."""
    folder = fill(tmp_path, SINGLE)
    with pytest.raises(ModelNotFoundError, match="is a file"):
        find_model_files(f"{folder}/model.safetensors")
    with pytest.raises(InputError, match="revision"):
        find_model_files(folder, revision="main")
    with pytest.raises(ModelNotFoundError, match=r"no config\.json.*found llama\.gguf; GGUF files are not supported"):
        find_model_files(fill(tmp_path / "gguf", {"llama.gguf": ""}))


def test_gguf_is_refused_with_the_reason(tmp_path: Path) -> None:
    """A user of llama.cpp names a file, a folder, or a Hub repository with a quantization behind a colon."""
    file = tmp_path / "Qwen3-8B-Q4_K_M.gguf"
    file.touch()
    cached = fill(tmp_path / "models--Qwen--Qwen3-8B-GGUF", {"config.json": "{}"})  # the files of GGUF are not downloaded
    why = "GGUF files are not supported: there are no kernels for their block formats"
    names = (file, "./absent.gguf", "absent.gguf", "Qwen/Qwen3-8B-GGUF:Q4_K_M", tmp_path, cached)
    for name in names:
        with pytest.raises(MinirtError) as caught:
            find(str(name), None, need_weights=True)
        assert str(caught.value).count(why) == 1, name
        assert "--quantize int4" in str(caught.value)
    plain = fill(tmp_path / "gguf tools", {"config.json": "{}", "pytorch_model.bin": ""})
    with pytest.raises(MinirtError) as caught:
        find_model_files(plain)
    assert "GGUF" not in str(caught.value), "the folder holds something else"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff{}", b'{"a": 1} x', b"[" * 100_000, None])
def test_damaged_json_is_named(name: str, content: bytes | None, tmp_path: Path) -> None:
    folder = fill(tmp_path, SHARDED)
    if content is None:
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).mkdir()
    else:
        fill(tmp_path, {name: content})
    with pytest.raises(ConfigError) as caught:
        find_model_files(folder)
    assert caught.value.where == tmp_path / name


BAD_SHARDS = ["../up.safetensors", "/abs.safetensors", "sub/x.safetensors", "sub\\x.safetensors", "C:x.safetensors"]
BAD_SHARDS += ["x" * 300 + ".safetensors", "é" * 122 + ".safetensors", "\x1b[31m.safetensors", "\ud800.safetensors"]
BAD_SHARDS += ["..", "", "model.bin", "model.safetensors.bin", "nul\0.safetensors"]


@pytest.mark.parametrize("shard", BAD_SHARDS, ids=range(len(BAD_SHARDS)))
def test_shard_names_are_plain_names(shard: str, tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": SHARDS[0], "b": shard}})
    fill(tmp_path, {"up.safetensors": "there"})
    fill(tmp_path / "model" / "sub", {"x.safetensors": "there"})
    with pytest.raises(CheckpointError, match="bad shard name") as caught:
        find_model_files(fill(tmp_path / "model", SHARDED | {"model.safetensors.index.json": index}))
    assert repr(shard)[:80] in str(caught.value)
    assert len(str(caught.value)) < 500


MAP = json.loads(INDEX)["weight_map"]
BAD_INDEX = [(content, "weight_map") for content in ({}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 1}})]
BAD_INDEX += [
    ({"metadata": {"total_size": size}, "weight_map": MAP}, r"index\.json: metadata\.total_size is not a number")
    for size in ("12", True, [12], {"a": 1})
]  # fmt: skip


@pytest.mark.parametrize(("content", "words"), [*BAD_INDEX, ({"metadata": "x", "weight_map": MAP}, "metadata")])
def test_an_index_that_says_something_else(content: Any, words: str, tmp_path: Path) -> None:
    """Catches an error of Python in place of the field's name."""
    with pytest.raises(CheckpointError, match=words):
        find_model_files(fill(tmp_path, SHARDED | {"model.safetensors.index.json": json.dumps(content)}))


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [({}, None), ({"total_size": 12, "total_parameters": 6}, 12), ({"total_size": 1.5}, 1.5), (None, None)],
)
def test_metadata_of_the_index(metadata: Any, expected: Any, tmp_path: Path) -> None:
    """Catches a size that is lost, or an index without one that is refused."""
    index = json.dumps({"metadata": metadata, "weight_map": MAP})
    assert find_model_files(fill(tmp_path, SHARDED | {"model.safetensors.index.json": index})).total_size == expected


@pytest.mark.parametrize(("files", "words"), [
    ([], "only safetensors files are read"), (["pytorch_model.bin"], "found pytorch_model.bin"),
    (["a.gguf", "b.gguf", "c.gguf", "d.gguf", "e.gguf"], "found a.gguf, b.gguf, c.gguf, d.gguf …"),
    (["weights.safetensors", "pytorch_model.bin"], "if weights.safetensors is the whole model, rename it"),
    (["adapter_config.json", "adapter_model.safetensors"], "a LoRA adapter"),
    ([SHARDS[0], SHARDS[1]], f"found {SHARDS[0]}, {SHARDS[1]}"),
])  # fmt: skip
def test_no_usable_weights(files: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor") as caught:
        find_model_files(fill(tmp_path, {"config.json": "{}"} | dict.fromkeys(files, "")))
    assert words in str(caught.value)


# --- links, special files and sizes ---

JSON_FILES = ["config.json", "generation_config.json", "model.safetensors.index.json"]


def replace_by_link(path: Path, target: Path | str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", JSON_FILES)
def test_broken_links_do_not_count_as_absent(name: str, tmp_path: Path) -> None:
    """A model whose generation_config.json is a broken link would answer with other sampling values."""
    folder = fill(tmp_path, SHARDED)
    replace_by_link(tmp_path / name, tmp_path / "gone")
    with pytest.raises(ConfigError, match=f"{name}: cannot be read: the link leads nowhere"):
        find_model_files(folder)
    replace_by_link(tmp_path / name, name)  # a link to itself
    with pytest.raises(ConfigError, match=rf"{name}: cannot be read: .*symbolic links"):
        find_model_files(folder)


@pytest.mark.parametrize(("files", "name", "words"), [
    ({"config.json": "{}"}, "model.safetensors", r"model\.safetensors: is not a file, or is a broken link"),
    (SHARDED, "model.safetensors", r"model\.safetensors: is not a file, or is a broken link"),
    (SHARDED, SHARDS[1], f"1 of the 2 shards .* {SHARDS[1]} "),
])  # fmt: skip
def test_weights_that_are_a_broken_link(files: dict[str, Any], name: str, words: str, tmp_path: Path) -> None:
    """Catches shards that replace a broken single file, and advice to rename something, which would not help."""
    folder = fill(tmp_path, files)
    replace_by_link(tmp_path / name, tmp_path / "gone")
    with pytest.raises(CheckpointError, match=words):
        find_model_files(folder)


def test_links_to_files_are_taken(tmp_path: Path) -> None:
    """As in the Hub cache, also through a link to the folder."""
    fill(tmp_path / "blobs", SHARDED | {"generation_config.json": "{}"})
    (tmp_path / "model").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "model" / path.name).symlink_to(f"../blobs/{path.name}")
    (tmp_path / "again").symlink_to("model")
    files = find_model_files(str(tmp_path / "again"))
    assert [file.name for file in files.weight_files] == SHARDS
    assert files.generation_config == {}


def test_links_in_place_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are never looked up on the Hub, even if the path has the form of a Hub id."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=AssertionError("asked the Hub")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "loop").symlink_to("loop")
    (tmp_path / "org" / "broken").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "broken").symlink_to("gone")
    for model in ("org/loop", "loop", "loop/model", "org/broken", "broken"):
        words = ".*symbolic links" if "loop" in model else "the link leads nowhere"
        with pytest.raises(ModelNotFoundError, match=f"{model}: cannot be looked up: {words}"):
            find_model_files(model)


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.mkdir(folder)
    fill(Path(folder), SINGLE)
    with pytest.raises(ModelNotFoundError, match=r"caf\\udce9': the folder's name is not UTF-8") as caught:
        find_model_files(folder)
    str(caught.value).encode()
    (tmp_path / "link").symlink_to(folder)
    assert find_model_files(str(tmp_path / "link")).weight_files == (tmp_path / "link" / "model.safetensors",)
    for absent in (folder + "s", "caf\udce9", "org/caf\udce9", "\ud800", "org/\ud800"):
        with pytest.raises(ModelNotFoundError):
            find_model_files(absent)


# --- the index against the folder ---


EXTRA = "model-00003-of-00002.safetensors"


def test_shards_that_are_not_read_are_warned_about(tmp_path: Path) -> None:
    folder = fill(tmp_path / "sharded", SHARDED | {EXTRA: "2"})
    with pytest.warns(UserWarning, match=rf"sharded: 1 weight files are not read, since .*index\.json does not name .*{EXTRA}"):
        assert len(find_model_files(folder).weight_files) == 2
    folder = fill(tmp_path / "both", SINGLE | SHARDED)
    with pytest.warns(UserWarning, match=rf"both: 2 .* not read, since model\.safetensors takes .*{SHARDS[0]}.*{SHARDS[1]}"):
        assert len(find_model_files(folder).weight_files) == 1


QUIRKS = ["README.md", ".gitattributes", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "params.json"]
QUIRKS += ["adapter_model.safetensors", "pytorch_model.bin", "training_args.bin", "tekken.json", "model.safetensors.md5"]


def test_what_published_folders_hold_besides(tmp_path: Path) -> None:
    """Mistral's consolidated weights, Llama's original/ folder, an index beside a single file: nothing is said."""
    for name, files in (("single", SINGLE | {"model.safetensors.index.json": INDEX}), ("sharded", SHARDED)):
        folder = fill(tmp_path / name, files | dict.fromkeys(QUIRKS, "x"))
        fill(tmp_path / name / "original", {"consolidated.00.pth": "x", "params.json": "{", "model.safetensors": "x"})
        with no_warning():
            read = {file.name for file in find_model_files(folder).weight_files}
        assert read == ({"model.safetensors"} if name == "single" else set(SHARDS))


# --- the Hub cache, offline ---


def cache(home: Path, repo: str, files: dict[str, Any]) -> None:
    """Write models--org--name with refs, blobs and a snapshot of links, in huggingface_hub's layout."""
    root = home / "hub" / f"models--{repo.replace('/', '--')}"
    fill(root / "refs", {"main": COMMIT})
    fill(root / "blobs", {f"blob{i}": content for i, content in enumerate(files.values())})
    (root / "snapshots" / COMMIT).mkdir(parents=True)
    for i, name in enumerate(files):
        (root / "snapshots" / COMMIT / name).symlink_to(f"../../blobs/blob{i}")


OFFLINE = """
import json, sys
from minirt.errors import MinirtError
from minirt.loading.hub import find_model_files
for model, options in json.loads(sys.argv[1]):
    try:
        files = find_model_files(model, **options)
        print(json.dumps([files.name, files.revision, [file.name for file in files.weight_files], files.config]))
    except MinirtError as error:
        print(json.dumps([type(error).__name__, str(error), error.__cause__ is not None]))
"""


def test_cache_read_offline(tmp_path: Path) -> None:
    """In a separate process, because huggingface_hub reads its settings at import."""
    cache(tmp_path, "org/single", SINGLE)
    cache(tmp_path, "org/sharded", SHARDED)
    cache(tmp_path, "org/half", {name: content for name, content in SHARDED.items() if name != SHARDS[1]})
    cache(tmp_path, "org/small", {"config.json": "{}"})
    asked: list[tuple[str, dict[str, Any]]] = [
        ("org/single", {}), ("org/single", {"revision": "main", "progress": False}), ("org/single", {"revision": COMMIT}),
        ("org/sharded", {}), ("org/small", {"weights": False}), ("org/half", {}), ("org/small", {}), ("org/absent", {}),
        ("org/single", {"revision": "v2"}), ("org/sp ace", {}),
    ]  # fmt: skip
    hidden = ("HF_", "HUGGING")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", OFFLINE, json.dumps(asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    single = ["org/single", COMMIT, ["model.safetensors"], {"model_type": "llama"}]
    assert results[:3] == [single] * 3
    assert results[3] == ["org/sharded", COMMIT, SHARDS, {}]
    assert results[4] == ["org/small", COMMIT, [], {}]
    assert results[5][0] == "CheckpointError"
    assert SHARDS[1] in results[5][1]
    for kind, text, has_cause in results[6:9]:
        assert (kind, has_cause) == ("ModelNotFoundError", True)
        assert "HF_HUB_OFFLINE is set" in text
        assert "give the folder" in text
    assert results[9][0] == "ModelNotFoundError"
    assert "not a Hub id" in results[9][1]


# --- a fake Hub ---


class PretendedHub:
    """snapshot_download and hf_hub_download over a dict of files. Records the files and revisions that are fetched."""

    def __init__(self, root: Path, files: dict[str, Any]) -> None:
        self.files, self.folder = files, root / COMMIT
        self.token: str | None = "secret"
        self.fetched: list[str] = []
        self.revisions: list[str | None] = []
        self.bars_hidden: list[bool] = []

    def snapshot(self, repo: str, *, revision: str | None, token: str | None, allow_patterns: list[str]) -> str:
        names = [name for name in self.files if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns)]
        return self.fetch(names, revision, token)

    def one(self, repo: str, name: str, *, revision: str | None, token: str | None) -> str:
        if name not in self.files:
            raise errors.EntryNotFoundError(name)
        return self.fetch([name], revision, token)

    def fetch(self, names: list[str], revision: str | None, token: str | None) -> str:
        assert token == self.token
        self.fetched += names
        self.revisions.append(revision)
        self.bars_hidden.append(are_progress_bars_disabled())
        return fill(self.folder, {name: self.files[name] for name in names})

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.one)


REST = dict.fromkeys((
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja",
), "{}")  # fmt: skip
NEVER = {"pytorch_model.bin": "", "consolidated.00.pth": "", "model.gguf": "", "README.md": "", "other.safetensors": ""}
ODD = "model [1]*.safetensors"  # characters that are special in glob patterns


@pytest.mark.parametrize(("files", "weights", "expected"), [
    (SINGLE, True, ["model.safetensors"]), (SHARDED, True, SHARDS), (SHARDED | SINGLE, True, ["model.safetensors"]),
    (SHARDED | SINGLE, False, []),
    (SHARDED | {"model.safetensors.index.json": json.dumps({"weight_map": {"a": ODD}}), ODD: ""}, True, [ODD]),
], ids=["single", "sharded", "both", "no weights", "odd names"])  # fmt: skip
def test_only_needed_files_of_one_commit_are_fetched(
    files: dict, weights: bool, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = PretendedHub(tmp_path, files | REST | NEVER)
    hub.install(monkeypatch)
    before = are_progress_bars_disabled()
    model = find_model_files("org/name", revision="main", token="secret", weights=weights, progress=False)
    assert (model.name, model.revision, model.folder) == ("org/name", COMMIT, hub.folder)
    assert [file.name for file in model.weight_files] == expected
    index = ["model.safetensors.index.json"] if weights and "model.safetensors.index.json" in files else []
    assert sorted(hub.fetched) == sorted(["config.json", *REST, *index, *expected])
    assert hub.revisions == ["main", *[COMMIT] * (len(hub.revisions) - 1)]
    assert all(hub.bars_hidden)
    assert are_progress_bars_disabled() == before


def test_a_model_that_is_not_supported_is_refused_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weights were downloaded before the architecture in config.json was looked at."""
    hub = PretendedHub(tmp_path, SINGLE | REST | {"config.json": '{"model_type": "gemma3"}'})
    hub.install(monkeypatch)
    hub.token = None
    with pytest.raises(UnsupportedError, match="architecture 'gemma3' is not supported"):
        find("org/name", None, need_weights=True)
    assert "model.safetensors" not in hub.fetched


ESCAPING = json.dumps({"weight_map": {"a": "../../x.safetensors"}})


@pytest.mark.parametrize(("files", "error", "words"), [
    ({"config.json": "{}", "model.safetensors.index.json": ESCAPING}, CheckpointError, "bad shard name"),
    (NEVER, ModelNotFoundError, r"Hub model org/name: there is no config\.json"),
    (NEVER | {"config.json": "{}"}, CheckpointError, "only safetensors files are read"),
])  # fmt: skip
def test_hub_models_that_cannot_be_used(files: dict, error: Any, words: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Catches weights that are fetched first."""
    hub = PretendedHub(tmp_path, files)
    hub.install(monkeypatch)
    with pytest.raises(error, match=words):
        find_model_files("org/name", token="secret")
    assert len(hub.revisions) == 1


def refusal(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    return kind("first line\nsecond line", response=Mock(headers={}))


CAUSES = [
    (refusal(errors.GatedRepoError), ("restricted", "HF_TOKEN")),
    (refusal(errors.RepositoryNotFoundError), ("does not exist, or is private", "spelling")),
    (refusal(errors.RevisionNotFoundError), ("no revision 'v2'", "branch")),
    (refusal(errors.HfHubHTTPError), ("refused: first line", "give the folder")),
    (errors.LocalEntryNotFoundError("Got: ConnectError"), ("the Hub cannot be reached (check", "give the folder")),
    (errors.LocalEntryNotFoundError("Got: ConnectError: [Errno -2] Name or service not known"),
     ("not in the cache, and the Hub cannot be reached: Name or service not known (check",)),
    (ConnectionError("no route"), ("cannot be reached: no route", "network")),
    (TimeoutError("too slow"), ("TimeoutError: too slow", "give the folder")),
    (OSError(28, "No space left on device"), ("No space left on device", "folder")),
]


@pytest.mark.parametrize(("error", "words"), CAUSES, ids=[type(error).__name__ for error, _ in CAUSES])
def test_hub_errors_say_the_cause_and_the_remedy(error: Exception, words: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an error of the Hub's client that reaches the user as it is. Ctrl-C is let through."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=error))
    before = are_progress_bars_disabled()
    with pytest.raises(ModelNotFoundError) as caught:
        find_model_files("org/name", revision="v2", progress=False)
    assert caught.value.__cause__ is error
    assert all(word in str(caught.value) for word in ("org/name", *words))
    assert "second line" not in str(caught.value)
    assert are_progress_bars_disabled() == before
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        find_model_files("org/name")


def test_failure_after_the_first_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection fails after the small files. This must not be mistaken for "the model has no model.safetensors"."""
    PretendedHub(tmp_path, {"config.json": "{}"}).install(monkeypatch)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", Mock(side_effect=errors.LocalEntryNotFoundError("gone")))
    with pytest.raises(MinirtError, match="cannot be reached: gone"):
        find_model_files("org/name", token="secret")

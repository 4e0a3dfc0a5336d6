"""Fixtures of the server's tests: one process for all tests of a session, and one with a real chat model."""

import json
import shutil

import pytest
from support.chats import model_folders
from support.server import WARM, Server

from minirt import models

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}{% if mood is defined %} ({{ mood }}){% endif %}"
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The embedded model with a chat template, as a folder."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(models.embedded(), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def running(folder, tmp_path_factory):
    """A server of the embedded model, for up to 8 requests at once and 32 that wait."""
    warm = tmp_path_factory.mktemp("warm") / "king.txt"
    warm.write_text(WARM)
    options = ("--kv-cache-memory", "16MiB", "--max-num-seqs", 8, "--max-waiting", 32, "--served-model-name", "tiny")
    options += ("--warm-prompt", warm)
    server = Server(tmp_path_factory.mktemp("server") / "log", "--model", folder, *options).wait()
    yield server
    assert server.stop() == 0, server.log[-5000:]
    assert "Traceback" not in server.log, server.log[-5000:]


@pytest.fixture
def tiny(running):
    """`running`, which the test must leave without open requests."""
    yield running
    running.until(lambda: running.metric("vllm:num_requests_running") + running.metric("vllm:num_requests_waiting") == 0)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Template's name → the embedded model with this template; see `model_folders`."""
    return model_folders(tmp_path_factory.mktemp("models"))

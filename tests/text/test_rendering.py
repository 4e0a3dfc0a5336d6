"""Chat templates are programs of strangers: their time, memory, output and size are bounded, in any thread."""

import contextlib
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.tiny import add_tokenizer

from minirt.errors import MinirtError, TokenizerError
from minirt.text import limited_processes, rendering
from minirt.text.chat_template import MAX_TEMPLATE, ChatTemplate
from minirt.text.rendering import MAX_CPU_SECONDS, Renderer, RenderingError
from minirt.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Hi"}]
SIMPLE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"


@pytest.fixture(autouse=True)
def _few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MAX_CPU_SECONDS", 0.4)


def template(source: str, folder: Path = Path("folder")) -> ChatTemplate:
    return ChatTemplate(folder, {"chat_template": source})


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TOO_MUCH = {
    "nested ranges": ENDLESS, "a filtered loop": "{% for i in range(99999) if range(99999) | list | length < 0 %}{% endfor %}",
    "recursive calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "one endless operation": "{{ 'a' | center(messages | length) | wordwrap | length }}{{ 10 ** (10 ** 9) }}",
    "a repeated text": "{{ 'a' * 10 ** 10 }}",
    "a doubled text": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "nested lists": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "a wide format": "{{ '%10000000000d' % 1 }}", "a date": "{{ strftime_now('%Y' * 10 ** 7) }}",
    "a long output": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "lorem ipsum": "{{ lipsum(10 ** 9) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_template_without_end_is_stopped(name: str) -> None:
    chat = template(TOO_MUCH[name])
    with pytest.raises(TokenizerError, match=r"stopped after 0\.4 s|more than 1GiB|more than .* characters|Error") as caught:
        chat.render(CHAT)
    assert caught.value.where == Path("folder/tokenizer_config.json")


def test_it_is_stopped_in_other_threads_too_and_the_next_conversation_works() -> None:
    chat = template("{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}" + SIMPLE)

    def render(content: str) -> str:
        try:
            return chat.render([{"role": "user", "content": content}])
        except TokenizerError as error:
            return error.what

    contents = ["a", "loop", *(f"{i}\n{'é' * i}" for i in range(200)), "loop", "b"]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(render, contents))
    for content, answer in zip(contents, answers, strict=True):
        assert answer == (f"<|user|>{content}\n" if content != "loop" else "the chat template failed: it was stopped after 0.4 s")


def test_a_large_conversation_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 messages, one of them of 1 MB, with letters of all sizes; the output is compared in full."""
    monkeypatch.setattr(rendering, "MAX_CPU_SECONDS", MAX_CPU_SECONDS)
    chat = template(SIMPLE)
    messages = [{"role": "user", "content": f"{i} é你👧\u2028\"\\\n" * (50_000 if i == 7 else 500)} for i in range(100)]
    assert chat.render(messages) == "".join(f"<|user|>{m['content']}\n" for m in messages)


def test_a_process_serves_many_conversations() -> None:
    renderer = Renderer("{{ messages[0].content }}")
    for i in range(50):
        assert renderer.render({"messages": [{"content": str(i)}]}) == str(i)
        assert len(renderer._processes._idle) == 1
        process = renderer._processes._idle[0]
    pid = process._process.pid
    os.kill(pid, signal.SIGKILL)  # as the system does when memory is short
    process._process.wait()
    assert renderer.render({"messages": [{"content": "next"}]}) == "next"
    assert renderer._processes._idle[0]._process.pid != pid
    last = renderer._processes._idle[0]._process
    del renderer, process
    assert last.wait(timeout=60) is not None  # no process stays when the template is gone


def test_an_interrupted_wait_does_not_mix_up_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between question and answer: the next question must not get the old answer."""
    renderer = Renderer("{{ messages[0].content }}")
    assert renderer.render({"messages": [{"content": "first"}]}) == "first"

    def interrupt(line: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(limited_processes, "_value", interrupt)
        with pytest.raises(KeyboardInterrupt):
            renderer.render({"messages": [{"content": "secret"}]})
    assert renderer.render({"messages": [{"content": "next"}]}) == "next"


def test_a_fork_does_not_share_the_process() -> None:
    """Two users of one pipe would read each other's conversations."""
    renderer = Renderer("{{ messages[0].content }}")
    renderer.render({"messages": [{"content": "parent"}]})
    parents = renderer._processes._idle[0]
    parents._owner = -1  # as seen from a fork, whose own pid differs
    parents_end = os.dup(parents._process.stdin.fileno())  # type: ignore[union-attr]  # after a fork, both have the pipe open
    try:
        assert renderer.render({"messages": [{"content": "child"}]}) == "child"
        assert renderer._processes._idle[0]._process.pid != parents._process.pid
        assert parents._process.poll() is None  # left alone
    finally:
        os.close(parents_end)
        parents._process.kill()
        parents._process.wait()


def test_ctrl_c_does_not_reach_the_process() -> None:
    """A terminal sends SIGINT to the whole process group."""
    renderer = Renderer("{{ messages[0].content }}")
    renderer.render({"messages": [{"content": "x"}]})
    assert os.getpgid(renderer._processes._idle[0]._process.pid) != os.getpgid(0)


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_processes.sys, "executable", "/no/such/python")
    with pytest.raises(TokenizerError, match=r"cannot be started: .*No such file"):
        template(SIMPLE).render(CHAT)


def test_the_error_says_what_the_template_said_without_escape_sequences() -> None:
    with pytest.raises(TokenizerError, match=r"TemplateError: \\x1b\[31mno\\n") as caught:
        template("{{ raise_exception('\x1b[31mno\n' ~ messages[0].content) }}").render(CHAT)
    assert str(caught.value).isprintable()
    with pytest.raises(TokenizerError) as caught:
        template("{{ raise_exception('a' * 10 ** 6) }}").render(CHAT)
    assert len(str(caught.value)) < 1000


def test_a_template_that_renders_nothing_is_named(tmp_path: Path) -> None:
    """Not "the prompt is empty": the user's prompt is not."""
    folder = add_tokenizer(tmp_path, "{% if messages[0].role == 'nobody' %}x{% endif %}")
    tokenizer = Tokenizer.load(folder) or pytest.fail("no tokenizer")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: the chat template rendered nothing"):
        tokenizer.encode_chat(CHAT)


@pytest.mark.parametrize("size", [MAX_TEMPLATE, MAX_TEMPLATE + 1, 30 << 20])
@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_the_size_of_a_template(size: int, name: str, tmp_path: Path) -> None:
    source = "x" * size
    folder = add_tokenizer(tmp_path, None)
    (folder / name).write_text(source if name.endswith("jinja") else json.dumps({"chat_template": source}))
    if size == MAX_TEMPLATE:
        assert (Tokenizer.load(folder) or pytest.fail("no tokenizer")).render_chat(CHAT) == source
        return
    with pytest.raises(TokenizerError, match="too large") as caught:
        Tokenizer.load(folder)
    assert caught.value.where == folder / name


def test_two_default_templates_contradict() -> None:
    two = [{"name": "default", "template": "a"}, {"name": "default", "template": "b"}]
    with pytest.raises(TokenizerError, match="2 named default"):
        ChatTemplate(Path("folder"), {"chat_template": two})


def test_a_blocked_signal_does_not_disarm_the_bound() -> None:
    """Signal masks are inherited from the thread that starts the process."""
    answers: list[str] = []

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF, signal.SIGALRM])
        started = time.monotonic()
        with pytest.raises(RenderingError, match=r"stopped after 0\.4 s"):
            Renderer(ENDLESS).render({"messages": []})
        answers.append(f"{time.monotonic() - started:.1f} s")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=100)
    assert answers


@pytest.mark.parametrize("depth", [100, *range(900, 1010, 10), 5000])
def test_deep_arguments_are_rendered_or_refused(depth: int) -> None:
    """Catches a RecursionError where Python's encoder or `repr` recurses on what a caller gives."""
    deep: object = "x"
    for _ in range(depth):
        deep = [deep]
    call = {"function": {"name": "f", "arguments": {"a": deep}}}
    chat = template("{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function }}{% endfor %}{% endfor %}")
    messages = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [call]}]
    for variables, conversation in (({}, messages), ({"x": deep}, CHAT)):
        with contextlib.suppress(MinirtError):
            chat.render(conversation, variables=variables)

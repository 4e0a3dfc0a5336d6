"""`minirt bench serve` against a small server on loopback: its table, its records, its load, and how it fails.

Catches field names that differ from those of `vllm bench serve`, a load that is not what was asked for, and nameless failures.
"""

import asyncio
import csv
import io
import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from support.cli import caller, refused, start
from support.fake_server import STREAM, Asked, FakeServer, answer, chunk, completion, serve_completions

SMALL = ("-n", 12, "--input-len-range", "3:9", "--output-len-range", "2:6")
# Those of vllm bench serve that apply to text generation, without details of each request.
VLLM = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests"),
}
DETAILS = {"input_lens", "output_lens", "start_times", "ttfts", "itls", "errors", "latencies", "queue_times"}


@pytest.fixture
def run(capfd, monkeypatch):
    for name in ("MINIRT_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("minirt.bench.serve.report.commit", lambda: "abc")
    call = caller(capfd, monkeypatch)
    return lambda *arguments: call("bench", "serve", *arguments)


def test_the_table_of_one_run(run) -> None:
    with FakeServer() as server:
        code, out, err = run("--base-url", server.url, *SMALL, "--goodput", "ttft:60000", "tpot:60000", "--max-concurrency", 3)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    table = dict(line.split(":", 1) for line in lines if ":" in line)
    assert (table["Successful requests"].strip(), table["Failed requests"].strip()) == ("12", "0")
    assert table["Maximum request concurrency"].strip() == "3"
    assert float(table["Request goodput (req/s)"]) == float(table["Request throughput (req/s)"]) > 0
    for name in ("TTFT", "TPOT", "ITL", "E2EL"):
        for kind in ("Mean", "Median", "P90", "P99"):
            assert float(table[f"{kind} {name} (ms)"]) >= 0
    assert float(table["CPU headroom (%)"]) <= 100
    assert "12 requests of 3:9 random token ids below 32,000, 2:6 new tokens" in err
    assert server.most <= 3
    tokens = sum(asked.body["max_tokens"] for asked in server.asked[3:-1])  # without the facts and warm-up
    assert int(table["Total generated tokens"]) == tokens
    assert [asked.path for asked in server.asked] == ["/v1/models", "/model_info", *["/v1/completions"] * 13, "/version"]


def test_formats_have_the_fields_of_vllm(run, tmp_path) -> None:
    target, texts = tmp_path / "out", {}
    with FakeServer() as server:
        for form in ("json", "jsonl", "csv", "md"):
            base = ("--base-url", server.url + "/v1/", *SMALL, "-q", "--sweep", "500,inf", "--save-detailed")
            base += ("--output-file", target)
            code, out, _ = run(*base, "-o", form, *(("--picture", tmp_path / "a.svg") if form == "md" else ()))
            assert (code, out) == (0, "")
            texts[form] = target.read_text()
    record, lines = json.loads(texts["json"]), [json.loads(line) for line in texts["jsonl"].splitlines()]
    rows = record.pop("results")
    kinds = ("mean", "median", "std", "p90", "p99")
    metrics = {f"{kind}_{name}_ms" for kind in kinds for name in ("ttft", "tpot", "itl", "e2el")}
    for row in [record | rows[0], record | rows[1], *lines]:
        assert {*VLLM, *metrics, *DETAILS} <= set(row)
        assert (row["model_id"], row["server_version"], row["backend"], row["num_prompts"]) == ("fake", "1.2.3", "openai", 12)
        assert (row["completed"], row["failed"], row["token_counts"]) == (12, 0, "usage")
        assert len(row["ttfts"]) == len(row["input_lens"]) == 12
        assert all(len(itls) == count - 1 for itls, count in zip(row["itls"], row["output_lens"], strict=True))
        assert row["total_output_tokens"] == sum(row["output_lens"])
        assert row["benchmark"] == "serve"
        assert row["sampling"] == {"temperature": 0.0}
    assert [row["request_rate"] for row in rows] == [500.0, "inf"]
    assert rows[0]["client"]["p99_send_delay_ms"] is not None
    cells = list(csv.DictReader(io.StringIO(texts["csv"])))
    assert [cell["request_rate"] for cell in cells] == ["500.0", "inf"]
    assert cells[0]["client.processes"] == "1"
    assert texts["md"].count("\n| ") == 4
    assert texts["md"].startswith(f"fake at {server.url} (1.2.3) · 12 requests of 3:9 + 2:6 tokens")
    picture = (tmp_path / "a.svg").read_text()
    assert "time to first token" in picture


@pytest.mark.parametrize("processes", [1, 3])
def test_the_load_does_not_depend_on_the_processes(run, processes) -> None:
    options = ("--extra-body", '{"user": "me"}', "--header", "X-Test=a=b", "--api-key", "secret", "--top-p", 0.5, "--model", "m")
    sampled = ("--max-concurrency", 4, "--processes", processes, "--vocab-size", 100, "--num-warmups", 0, "--seed", 3)
    with FakeServer() as server:
        code, out, _ = run("--base-url", server.url, *SMALL, *options, *sampled, "-o", "json", "-q")
    assert code == 0
    asked = [a for a in server.asked if a.method == "POST"]
    assert len(asked) == 12
    from minirt.bench.serve.workload import Workload

    fields = {"model": "m", "temperature": 0.0, "top_p": 0.5, "ignore_eos": True, "user": "me"}
    load = Workload(12, (3, 9), (2, 6), seed=3, text=False, vocab_size=100, chat=False, fields=fields)
    expected = [load.body(i, *lengths) for i, lengths in enumerate(zip(*load.lengths(), strict=True))]
    key = json.dumps
    assert sorted(key(a.body) for a in asked) == sorted(key(json.loads(body)) for body in expected)
    assert {(a.headers["authorization"], a.headers["x-test"]) for a in asked} == {("Bearer secret", "a=b")}
    assert 1 <= server.most <= 4
    assert len({a.connection for a in asked}) <= 4
    assert "secret" not in out
    assert "a=b" not in out
    assert json.loads(out)["results"][0]["client"]["processes"] == processes


def test_the_vocabulary_that_the_server_states(run) -> None:
    async def handler(asked: Asked, reader, writer) -> None:
        if asked.path == "/model_info":
            writer.write(answer({"vocab_size": 5}))
        else:
            await serve_completions(asked, reader, writer)

    with FakeServer(handler) as server:
        assert run("--base-url", server.url, *SMALL)[0] == 0
    assert {token for a in server.asked if a.body for token in a.body["prompt"]} == {0, 1, 2, 3, 4}


def test_failed_requests_are_counted_and_shown(run) -> None:
    async def handler(asked: Asked, reader, writer) -> None:
        turn = len(server.asked)
        if turn % 5 == 0:
            writer.write(answer({"error": {"message": "queue is full"}}, "429 Too Many Requests"))
        elif turn % 7 == 0:
            writer.write(STREAM + b"".join(map(chunk, completion(5, 1)[:2])))
            writer.close()
        else:
            await serve_completions(asked, reader, writer)

    with FakeServer(handler) as server:
        sizes = ("--vocab-size", 9, "--max-concurrency", 1)
        code, out, err = run("--base-url", server.url, *SMALL, "-m", "x", *sizes, "-o", "json")
    assert code == 1
    row = json.loads(out)["results"][0]
    # Warm-up is the first request, so the run has the numbers 2 to 13.
    closed = "the server closed the connection in the middle of the response"
    assert row["error_counts"] == {"HTTP 429 Too Many Requests: queue is full": 2, closed: 1}
    assert (row["completed"], row["failed"]) == (9, 3)
    assert "2 × HTTP 429 Too Many Requests: queue is full" in err
    assert err.splitlines()[-1].startswith(f"minirt: {server.url}/v1/completions: 3 of 12 requests failed: HTTP 429")


def test_a_server_that_ends_midway_leaves_a_report(run, tmp_path) -> None:
    """The rate before its end is in the results, and so is the one after."""
    async def handler(asked: Asked, reader, writer) -> None:
        if len(server.asked) >= 1 + 12 + 6:
            server._server.close()
        if len(server.asked) > 1 + 12 + 6:
            writer.close()
        else:
            await serve_completions(asked, reader, writer)

    with FakeServer(handler) as server:
        sizes = ("--vocab-size", 9, "--max-concurrency", 1, "--sweep", "1000,inf")
        picture = tmp_path / "a.svg"
        code, out, err = run("--base-url", server.url, *SMALL, "-m", "x", *sizes, "-o", "json", "--picture", picture)
    assert code == 1
    first, second = json.loads(out)["results"]
    assert (first["completed"], first["failed"], second["completed"], second["failed"]) == (12, 0, 6, 6)
    assert "Connection refused" in second["error_counts"]
    assert err.splitlines()[-1].startswith(f"minirt: {server.url}/v1/completions: 6 of 24 requests failed: ")
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(("reply", "message"), [
    (answer({"detail": "Not Found"}, "404 Not Found"), "HTTP 404 Not Found: Not Found"),
    (answer(b"<html>", kind="text/html"), "not JSON"), (answer({"data": []}), "names no model"), (answer([]), "names no model"),
    (b"+OK\r\n", "the answer is not HTTP"),
])  # fmt: skip
def test_what_is_no_such_server(run, reply, message) -> None:
    async def handler(asked: Asked, reader, writer) -> None:
        writer.write(reply)
        writer.close()

    with FakeServer(handler) as server:
        refused(run("--base-url", server.url, "-q"), f"{server.url}/v1/models", message, "--model")
        reply = answer({"error": {"message": "loading"}}, "503 Service Unavailable")
        refused(run("--base-url", server.url, "-q"), "HTTP 503 Service Unavailable: loading (wait until the server is ready)")


def test_a_first_request_that_fails_ends_the_command(run) -> None:
    async def handler(asked: Asked, reader, writer) -> None:
        writer.write(answer({"choices": [{"text": "not streamed"}]}))

    with FakeServer(handler) as server:
        result = run("--base-url", server.url, "-m", "x", "-q", "--vocab-size", 9)
        refused(result, "/v1/completions", "no event stream but application/json", "not streamed")
    assert len(server.asked) == 1
    refused(run("--base-url", server.url, "-q"), server.url, "no connection", "refused", "start the server")
    refused(run("--base-url", "http://no-such-host.invalid:1", "-q"), "no connection", "no-such-host.invalid")


def test_bad_options_are_refused_before_anything_is_sent(run, tmp_path) -> None:
    with FakeServer() as server:
        base = ("--base-url", server.url)
        refused(run("--base-url", "localhost:8000"), "--base-url", "http://HOST:PORT", code=2)
        refused(run(*base, "--endpoint", "v1/completions"), "--endpoint", code=2)
        refused(run(*base, "--endpoint", "/v1/embeddings"), "--endpoint", "/chat/completions", code=2)
        refused(run(*base, "--header", "x"), "--header", "NAME=VALUE", code=2)
        refused(run(*base, "--header", "x=a\nb"), "--header", code=2)
        refused(run(*base, "--extra-body", "[1]"), "--extra-body", "JSON object", code=2)
        refused(run(*base, "--processes", 3, "--max-concurrency", 2), "--processes 3", code=2)
        refused(run(*base, "--prompt-type", "ids", "--endpoint", "/v1/chat/completions"), "--prompt-type", code=2)
        for limit in ("ttft", "ttft:x", "ttft:-1", "ttft:nan", "itl:5", "ttft:1,ttft:2"):
            refused(run(*base, "--goodput", limit), "--goodput", "ttft, tpot, e2el", code=2)
        for arguments in (
            ("ttft:5",), ("--request-rate", 0), ("--request-rate", "nan"), ("--request-rate", "1,2"), ("--sweep", "1,,2"),
            ("--sweep", "-1"), ("--sweep", "1,2", "--request-rate", 3), ("--metric-percentiles", "101"), ("--timeout", 0),
            ("--picture", tmp_path / "a.gif"), ("--picture", tmp_path / "none" / "a.svg"), ("-n", 0), ("--processes", 0),
            ("--output-file", tmp_path / "none" / "x"), ("-o", "xml"),
        ):  # fmt: skip
            refused(run(*base, *arguments), " --help)", code=2)
        assert server.asked == []


def test_a_lost_process_is_an_error(run, monkeypatch, capfd) -> None:
    monkeypatch.setattr("minirt.bench.serve.run.sys.executable", "/bin/false")
    with FakeServer() as server:
        refused(run("--base-url", server.url, *SMALL, "-q"), "a load process ended with code")


def test_ctrl_c_ends_the_processes() -> None:
    """They are in sessions of their own, so the terminal does not end them."""
    async def handler(asked: Asked, reader, writer) -> None:
        if asked.path == "/v1/completions" and len(server.asked) > 3:  # after the facts and warm-up
            await asyncio.sleep(600)
        await serve_completions(asked, reader, writer)

    with FakeServer(handler) as server:
        process = start("bench", "serve", "--base-url", server.url, *SMALL, "--processes", 2)
        end = time.monotonic() + 60
        while len(server.asked) < 3 + 12:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert len(children) == 2
    assert psutil.wait_procs(children, timeout=60)[1] == []


def test_it_imports_no_pytorch() -> None:
    with FakeServer() as server:
        script = (
            "import sys; from minirt.cli.app import main\n"
            f"try: main(['bench', 'serve', '--base-url', {server.url!r}, '-n', '2', '-q'])\n" "except SystemExit: pass\n"
            "print([m for m in ('torch', 'triton', 'tokenizers', 'numpy') if m in sys.modules], file=sys.stderr)"
        )  # fmt: skip
        done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
    assert "Successful requests:                     2" in done.stdout

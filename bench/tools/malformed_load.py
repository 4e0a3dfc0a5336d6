"""Inter-token latency of streams beside malformed requests: `python bench/tools/malformed_load.py`.

Three parties: `minirt serve` on a CPU; a process that reads a few streams and notes when each event comes; a client that sends
malformed requests of one class, at --rate or each as soon as the one before is answered. Windows with load alternate with windows
without.
"""

import argparse
import http.client
import json
import math
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
_MIX = "all classes without large bodies"
_LARGE = 16 << 20  # bytes of the large bodies, half of what the server takes by default
_WRONG: tuple[Any, ...] = ([[1]], {"a": {}}, -(10**15), "x" * 5000)  # for each of the fields in "types and ranges"
Request = tuple[str, bytes]


def _completion(**fields: Any) -> Request:
    return COMPLETIONS, json.dumps({"prompt": "a", "max_tokens": 1} | fields).encode()


def _filled(before: bytes, part: bytes, after: bytes) -> bytes:
    return before + part * ((_LARGE - len(before) - len(after)) // len(part)) + after


def _nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        value = {"type": "object", "properties": {"a": value}}
    return value


def classes() -> dict[str, list[Request]]:
    """Requests by what is wrong with them. The server must refuse all of them."""
    chain = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(i + j) % 300}"} for j in (1, 2)]} for i in range(300)}
    schemas = [
        {"type": "integer", "multipleOf": 9_999_991}, {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
        {"$defs": chain, "$ref": "#/$defs/d0"}, _nested(100), {"enum": ["x" * i for i in range(1000)]},
        {"allOf": [{"anyOf": [{"properties": {f"{c}{i}": {"const": 1}}} for c in "ab"]} for i in range(18)]},
        {"properties": {f"p{i}": {"oneOf": [{}, {"not": {}}]} for i in range(3000)}},
    ]  # fmt: skip
    grammars = [
        {"regex": "(a*)*b" * 10_000}, {"regex": "(" * 30_000}, {"regex": "[^" * 15_000}, {"regex": r"(a|b)*\1"},
        {"grammar": "start: A\nA: /(.*a){200}/ & /(.*b){200}/ & ~/(.*c){200}/\n"}, {"choice": ["x" * 900] * 4000},
    ]  # fmt: skip
    return {
        "types and ranges": [
            _completion(**{name: wrong})
            for name in ("temperature", "top_p", "n", "seed", "max_tokens", "stream", "logit_bias", "stop", "logprobs")
            for wrong in _WRONG
        ],
        "counts": [_completion(n=10**6), _completion(stop=["x"] * 100_000), _completion(prompt=["a"] * 100_000),
                   _completion(logit_bias={str(i): 1 for i in range(100_000)}), _completion(bad_words=["x"] * 100_000)],
        "nesting": [(COMPLETIONS, b'{"prompt": ' + b"[" * levels + b"]" * levels + b"}") for levels in (100, 900, 10_000, 10**6)]
        + [_completion(response_format=_nested(400))],
        "broken bodies": [(COMPLETIONS, body) for body in (b"", b"{", b'{"prompt": "a', b"\xff\xfe", b'{"prompt": "\xc3\x28"}',
                                                           b'{"a": NaN}', b"[]", b'{"prompt": "\\ud800"}', b"\x00" * 1000)],
        "regular expressions": [_completion(structured_outputs=own) for own in grammars],
        "schemas": [_completion(structured_outputs={"json": own}) for own in schemas],
        "long prompts": [_completion(prompt="Once " * 200_000), _completion(prompt=[5] * 500_000),
                         (CHATS, json.dumps({"messages": [{"role": "user", "content": "Once " * 200_000}]}).encode()),
                         (CHATS, json.dumps({"messages": [{"role": "user", "content": "a"}] * 20_000}).encode())],
        "large: a text": [(COMPLETIONS, _filled(b'{"prompt": "', b"Once ", b'"}'))],
        "large: token ids": [(COMPLETIONS, _filled(b'{"prompt": [', b"17,", b"1]}"))],
        "large: lists": [(COMPLETIONS, _filled(b'{"prompt": [', b"[],", b"1]}"))],
        "large: truncated": [(COMPLETIONS, _filled(b'{"prompt": [', b"[],", b"1"))],
        "large: objects": [(COMPLETIONS, _filled(b'{"prompt": "a", "n": 0, "metadata": [', b'{"a":1},', b"1]}"))],
        "large: unknown fields": [
            (COMPLETIONS, b'{"n": 0, "prompt": "a"' + b"".join(b', "%x": 1' % i for i in range(_LARGE // 13)) + b"}")
        ],
        "large: a schema": [_completion(structured_outputs={"json": {"enum": ["x" * 100] * (_LARGE // 104)}})],
        "large: a refused field": [_completion(documents=["x" * 100] * (_LARGE // 104))],
    }  # fmt: skip


def start(model: str | None, log: str) -> tuple[subprocess.Popen, str]:
    """Start a server. Returns its process and URL."""
    command = [sys.executable, "-m", "minirt", "serve", "--device", "cpu", "--port", "0", "--max-num-seqs", "8"]
    command += ["--kv-cache-memory", "64MiB", *(["--model", model] if model else [])]
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stderr=file)
    while True:
        with open(log, errors="replace") as file:
            text = file.read()
        if "on http://" in text:
            return process, "http://" + text.split("on http://", 1)[1].split()[0]
        if process.poll() is not None:
            raise RuntimeError(text)
        time.sleep(0.1)


def read_streams(url: str, count: int, ready: Connection) -> None:
    """Body of a process: reads `count` streams until it is told to end, then sends [(time of an event, gap before it)]."""
    import select

    where, gaps, last, poll = urlsplit(url), list[tuple[float, float]](), dict[int, float](), select.poll()
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    sockets: dict[int, socket.socket] = {}

    def open_one() -> None:
        own = socket.create_connection((where.hostname, where.port))
        own.sendall(head + body)
        sockets[own.fileno()] = own
        poll.register(own, select.POLLIN)

    poll.register(ready.fileno(), select.POLLIN)
    for _ in range(count):
        open_one()
    while True:
        for number, _ in poll.poll():
            if number == ready.fileno():
                ready.send(gaps)
                return
            data, now = sockets[number].recv(1 << 16), time.perf_counter()
            if not data:
                poll.unregister(number)
                sockets.pop(number).close()
                last.pop(number, None)
                open_one()
            elif b"data: " in data:
                if number in last:
                    gaps.append((now, now - last[number]))
                last[number] = now


def send(url: str, requests: list[Request], seconds: float, rate: float, draw: random.Random) -> tuple[int, set[int], float]:
    """Send at most `rate` requests a second. Returns how many, their statuses, and the longest time of an answer."""
    where, statuses, count, longest = urlsplit(url), set[int](), 0, 0.0
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=120)
    started = time.perf_counter()
    end = started + seconds
    while (begun := time.perf_counter()) < end:
        path, body = draw.choice(requests)
        try:
            if connection.sock is None:
                connection.connect()
                connection.sock.setsockopt(  # type: ignore[attr-defined]
                    socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
                )
            connection.request("POST", path, body)
            answer = connection.getresponse()
            answer.read()
            statuses.add(answer.status)
        except (ConnectionError, http.client.HTTPException):
            statuses.add(0)
            connection.close()
        count, longest = count + 1, max(longest, time.perf_counter() - begun)
        time.sleep(max(0.0, started + count / rate - time.perf_counter()))
    connection.close()
    return count, statuses, longest


def percentile(values: list[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window")
    parser.add_argument("--rate", type=float, default=math.inf, help="requests a second")
    parser.add_argument("--only", help="part of the name of a class")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--log", default="malformed_load.log", help="file for the server's log")
    options = parser.parse_args()
    kinds = classes()
    small = [request for name, own in kinds.items() if not name.startswith("large") for request in own]
    if small:
        kinds = {_MIX: small} | kinds
    if options.only is not None:
        named = {name: own for name, own in kinds.items() if options.only in name}
        if not named:
            parser.error(f"--only: no class has this in its name: {options.only!r}; expected one of {', '.join(kinds)}")
        kinds = named
    server, url = start(options.model, options.log)
    here, there = multiprocessing.Pipe()
    reader = multiprocessing.Process(target=read_streams, args=(url, options.streams, there), daemon=True)
    windows: list[tuple[str, float, float]] = []
    sent: dict[str, tuple[int, set[int], float]] = {}
    try:
        reader.start()
        time.sleep(3)
        for turn in range(options.rounds):
            draw = random.Random(turn)
            for name, requests in kinds.items():
                begun = time.perf_counter()
                time.sleep(options.seconds)
                windows.append(("without", begun, time.perf_counter()))
                begun = time.perf_counter()
                count, statuses, longest = send(url, requests, options.seconds, options.rate, draw)
                windows.append((name, begun, time.perf_counter()))
                before = sent.get(name, (0, set(), 0.0))
                sent[name] = before[0] + count, before[1] | statuses, max(before[2], longest)
        here.send(None)
        gaps = here.recv()
    finally:
        server.terminate()
        server.wait(60)
        reader.kill()
    found: dict[str, list[list[float]]] = {}
    for name, begun, end in windows:
        found.setdefault(name, []).append([gap for at, gap in gaps if begun <= at - gap <= end])
    quiet = statistics.median(percentile(own, 99) for own in found["without"] if own)
    rows = []
    for name, parts in found.items():
        p50, p99 = (statistics.median(percentile(own, percent) for own in parts if own) for percent in (50, 99))
        count, statuses, longest = sent.get(name, (0, set(), 0.0))
        rows.append({
            "class": name, "p50_ms": p50 * 1e3, "p99_ms": p99 * 1e3, "max_ms": max(map(max, filter(None, parts))) * 1e3,
            "ratio": p99 / quiet, "requests": count, "statuses": sorted(statuses), "slowest_answer_ms": longest * 1e3,
        })  # fmt: skip
        row = rows[-1]
        print(
            f"{name:34s} ITL p50 {row['p50_ms']:6.1f} p99 {row['p99_ms']:7.1f} max {row['max_ms']:8.1f} ms,",
            f"{row['ratio']:5.2f} x; {count} requests, {row['statuses']}, slowest {row['slowest_answer_ms']:.0f} ms",
            flush=True,
        )
    if options.json:
        with open(options.json, "w") as file:
            facts = {"cpus": os.cpu_count(), "streams": options.streams, "rounds": options.rounds, "window_s": options.seconds}
            json.dump(facts | {"rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()

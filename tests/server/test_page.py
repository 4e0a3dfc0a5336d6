"""The page at `/`: what the server says about it, and that it and the API agree.

The page was looked at in a browser; here its source is read. Catches a policy that blocks the page's own script, a call of an
endpoint, field or metric that does not exist, a resource of another origin, and ways in which a model's text could become markup.
"""

import asyncio
import base64
import hashlib
import json
import re

import pytest
from support.package import ROOT
from support.server import answered, events, front, message

from minirt import SamplingParams
from minirt.errors import InputError
from minirt.server import page

PAGE = (ROOT / "minirt" / "server" / "page.html").read_text(encoding="utf-8")
SCRIPT = PAGE.split("<script>")[1].split("</script>")[0]
STYLE = PAGE.split("<style>")[1].split("</style>")[0]


def test_it_is_served(tiny):
    status, headers, body = tiny.request("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert body.decode() == PAGE
    status, headers, body = tiny.request("HEAD", "/")
    assert (status, body, int(headers["content-length"])) == (200, b"", len(PAGE.encode()))
    for method in ("POST", "PUT", "DELETE"):
        assert tiny.request(method, "/")[0] == 405
    assert tiny.request("GET", "/index.html")[0] == 404


def test_the_policy_allows_the_page_and_nothing_else(tiny):
    headers = tiny.request("GET", "/")[1]
    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))

    def only(text):
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert policy["default-src"] == "'none'"
    assert (policy["script-src"], policy["style-src"], policy["connect-src"]) == (only(SCRIPT), only(STYLE), "'self'")
    assert (policy["base-uri"], policy["form-action"], policy["frame-ancestors"]) == ("'none'", "'none'", "'none'")
    assert "unsafe" not in str(policy)
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert PAGE.count("<script") == PAGE.count("<style") == 1
    # A hash does not cover attributes, so the browser would ignore these.
    assert not re.search(r"<[^>]*\s(style|on\w+)=", PAGE.replace(SCRIPT, "").replace(STYLE, ""))


def test_the_page_below_a_path():
    """Its calls are relative to the path, also if the browser has the path without a slash. The policy allows that base."""
    data, headers = page.content("/a")
    assert data.decode() == PAGE.replace("<head>", '<head>\n<base href="/a/">')
    assert b"base-uri 'self'" in dict(headers)[b"content-security-policy"]


def test_it_needs_no_key_and_the_api_does():
    async def work():
        async with front(None, api_keys=("sesame",), metrics_need_key=True) as (_, _, ask):
            found = {}
            for path in ("/", "/v1/models", "/metrics", "/model_info"):
                found[path] = (await answered(ask(message(b"", path, "GET"))))[0]
            assert found == {"/": 200, "/v1/models": 401, "/metrics": 401, "/model_info": 401}

    asyncio.run(work())


def test_it_calls_documented_endpoints():
    table = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").partition("## Endpoints")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`(?:GET |POST )?(/[^` ]*)`", table))
    called = set(re.findall(r"""["'`](/[\w/]*)["'`$?]""", SCRIPT))
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics"} <= called
    assert called <= documented
    assert "/" in documented
    assert SCRIPT.count("fetch(") == 1  # in the one function that adds the key
    assert not re.search(r"XMLHttpRequest|WebSocket|EventSource|sendBeacon|import\(", SCRIPT)


def test_it_uses_nothing_of_another_origin():
    assert re.findall(r"(?:https?:)?//\w[^\s\"']*", PAGE) == []
    assert re.findall(r"@import|url\(|\bsrc=|srcset=|@font-face", PAGE.replace(SCRIPT, "")) == []
    assert re.findall(r"<link[^>]*>", PAGE) == ['<link rel="icon" href="data:,">']


@pytest.mark.parametrize("sink", [
    "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "srcdoc", "setHTML", "eval(", "Function(",
    "localStorage", "document.cookie", "createContextualFragment",
])  # fmt: skip
def test_texts_of_the_model_cannot_become_markup_and_nothing_outlives_the_tab(sink):
    assert sink not in SCRIPT


def test_its_ids_exist():
    settings = re.search(r"SAMPLING = \[(.*?)\]", SCRIPT)[1]
    used = set(re.findall(r'\$\("([\w-]+)"\)', SCRIPT)) | set(re.findall(r'"(\w+)"', settings))
    assert len(used) > 20
    assert used <= set(re.findall(r'\sid="([\w-]+)"', PAGE))
    labelled = re.findall(r"<label>[^<]*<(?:input|textarea) id", PAGE)
    fields = re.findall(r"<(?:input|textarea)[^>]*>", PAGE.replace(SCRIPT, ""))
    assert len(labelled) + sum("aria-label=" in field for field in fields) == len(fields)


def test_the_metrics_that_it_reads_exist(tiny):
    text = tiny.request("GET", "/metrics")[2].decode()
    read = set(re.findall(r"\bnow\.(\w+)", SCRIPT))
    assert len(read) == 6
    assert {name for name in read if f"\nvllm:{name}{{" not in text} == set()


@pytest.mark.parametrize(("path", "content"), [
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"prompt": "Once upon a time"}),
])  # fmt: skip
def test_the_api_takes_its_requests_and_answers_as_it_expects(tiny, path, content):
    body = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for field in body:
        assert re.search(rf"\b{field}\b", SCRIPT)
    body |= {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "max_tokens": 4, "seed": 1} | content
    status, _, data = tiny.request("POST", path, body)
    assert status == 200
    *pieces, done = events(data)
    assert done == "[DONE]"
    counts = [piece["usage"]["completion_tokens"] for piece in pieces if "usage" in piece]  # a chat's first event has none
    assert len(counts) >= 4
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert pieces[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    text = [piece["choices"][0].get("text") or piece["choices"][0].get("delta", {}).get("content") for piece in pieces[:-1]]
    assert "".join(filter(None, text))
    assert pieces[-2]["choices"][0]["finish_reason"] == "length"
    status, _, data = tiny.request("POST", path, body | {"temperature": -1})
    assert status == 400
    assert b'"message":' in data


def number_fields():
    """Name of a setting → attributes of its field."""
    fields = re.findall(r"<input ([^>]*type=\"number\"[^>]*)>", PAGE)
    found = [dict(re.findall(r'([\w-]+)="([^"]*)"', field)) for field in fields]
    return {field["id"]: field for field in found}


@pytest.mark.parametrize("name", re.findall(r'"(\w+)"', re.search(r"SAMPLING = \[(.*?)\]", SCRIPT)[1]))
def test_a_setting_is_marked_where_the_server_refuses_it(name):
    """Catches a field whose bounds are wider than the server's, so that a refused value has no mark, or narrower, so that a good
    one has one. A seed has fewer values, since a browser's numbers are exact only up to there."""
    field = number_fields()[name]
    assert field["data-accepts"]
    number = float if field["step"] == "any" else int
    for bound, past in (("min", -1), ("max", 1)):
        if bound not in field:
            continue
        value = number(field[bound])
        SamplingParams(**{name: value})
        if name == "seed" and bound == "max":
            assert value == 2**53 - 1
            continue
        step = 1 if number is int else 1e-6
        with pytest.raises(InputError):
            SamplingParams(**{name: value + past * step})
    if "max" not in field:
        SamplingParams(**{name: number(10**6)})
    if number is int:
        with pytest.raises(InputError):
            SamplingParams(**{name: 2.5})


def test_a_refusal_of_the_server_names_the_setting_that_is_marked(tiny):
    """The page marks the setting that `error.param` names. A field that is not a number is refused before it is sent."""
    for name, value in {"temperature": -1, "top_p": 0, "top_k": -2, "max_tokens": 0, "seed": 1 << 64}.items():
        body = {"prompt": "Once", "max_tokens": 1, name: value}
        status, _, data = tiny.request("POST", "/v1/completions", body)
        assert status == 400
        assert json.loads(data)["error"]["param"] == name
    assert set(number_fields()) == {"temperature", "top_p", "top_k", "max_tokens", "seed"}
    assert "SAMPLING.includes(failure.param)" in SCRIPT
    assert SCRIPT.count("blocked()") == 3  # its definition, a message, another answer
    assert re.search(r'<form id="settings"[^>]* novalidate>', PAGE), "else a refused value keeps Done from closing them"

"""`minirt bench serve`: options and output. minirt.bench.serve sends the requests and measures. Imports no PyTorch."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from minirt.cli.files import check_picture
from minirt.cli.help import command
from minirt.cli.options import RANGE, filter_options
from minirt.cli.output import one_line
from minirt.cli.report import print_report, progress_of, report_options, words_of
from minirt.cli.settings import COUNT, JSON_OBJECT, Parsed, options_of
from minirt.errors import InputError, MinirtError
from minirt.sampling_params import FILTERS
from minirt.settings import setting

if TYPE_CHECKING:
    from minirt.bench.serve.client import Target
    from minirt.bench.serve.workload import Workload

_VOCAB_SIZE = 32_000  # the smallest of the well-known models


def _floats(what: str, good: Callable[[float], bool], text: str) -> tuple[float, ...]:
    """"1,2.5,inf" → (1.0, 2.5, inf)."""
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(map(good, numbers)):
        raise ValueError(f"{text!r} is no list of {what} with ',' between")
    return numbers


_RATES = Parsed("RATE,RATE,…", partial(_floats, "positive numbers or inf", lambda rate: rate > 0))  # requests per second
_PERCENTILES = Parsed("P,P,…", partial(_floats, "numbers from 0 to 100", lambda percent: 0 <= percent <= 100))


class _Options:
    base_url: str = setting("URL of the server.", "http://127.0.0.1:8000", group="Server")
    endpoint: str = setting("Path to measure: completions, or chat completions.", "/v1/completions", group="Server")
    model: str | None = setting(
        "Name of the model in requests. Default: the first one that the server lists.", option="--model -m", group="Server")
    num_prompts: int = setting("Number of requests.", 1000, option="--num-prompts -n", kind=COUNT)
    request_rate: Any = setting("Requests per second, as a Poisson process; inf: all at once. [default: inf]", kind=_RATES)
    sweep: Any = setting("Measure at several rates, one after the other: 1,2,4,inf.", kind=_RATES)
    max_concurrency: int | None = setting("Maximum number of requests in flight; further ones wait.", kind=COUNT)
    input_len_range: Any = setting("Tokens of a prompt, drawn uniformly.", "32:256", kind=RANGE)
    output_len_range: Any = setting("New tokens of each, drawn uniformly.", "32:256", kind=RANGE)
    prompt_type: str | None = setting(
        "Random token ids, or random words: about one token each. The server counts.", kind=("ids", "text"),
        shown="ids; text for chat",
    )  # fmt: skip
    vocab_size: int | None = setting(
        "Random token ids are below this.", kind=COUNT, shown=f"what the server says, else {_VOCAB_SIZE:,}")
    seed: int = setting("Seed of lengths, prompts and arrival times.", 0)
    processes: int = setting("Processes that send the requests.", 1, kind=COUNT)
    num_warmups: int = setting(
        "Requests before the run, one after the other, which are not counted. The run starts only if they succeed.", 1,
        kind=click.IntRange(0),
    )  # fmt: skip
    timeout: float = setting(
        "A request fails if nothing arrives for this many seconds.", 600.0, kind=click.FloatRange(0, min_open=True))
    goodput: str = setting(
        "Count requests within limits: ttft:200 tpot:50 e2el:3000, with spaces or commas between.", kind="several",
        metavar="METRIC:MS",
    )  # fmt: skip
    metric_percentiles: Any = setting("Percentiles besides the median.", "90,99", kind=_PERCENTILES)
    save_detailed: bool = setting("Add the values of each request to csv, json and jsonl.", False, group="Output")
    picture: str | None = setting(
        "Draw latency and throughput by rate: .png or .svg. Needs matplotlib.", metavar="FILE", group="Output")
    temperature: float = setting("Sampling temperature.", 0.0, shown="0, which is greedy", group="Sampling")
    ignore_eos: bool = setting(
        "Ask the server to continue after an end-of-sequence token, so that lengths are as asked.", True,
        option="--ignore-eos/--no-ignore-eos", group="Sampling",
    )  # fmt: skip
    extra_body: Any = setting("Further fields of each request, as a JSON object.", kind=JSON_OBJECT, group="Requests")
    headers: str = setting("Send this header too.", option="--header", kind="several", metavar="NAME=VALUE", group="Requests")
    api_key: str | None = setting(
        "Key of the server. Also from MINIRT_API_KEY or OPENAI_API_KEY. Results do not contain it.", group="Requests")


@command(short_help="Measure a server under load.")
@click.argument("more_limits", nargs=-1, metavar="[LIMIT]…")
@options_of(_Options, "", title="Measurement", api_key={"envvar": ["MINIRT_API_KEY", "OPENAI_API_KEY"]})
@filter_options
@report_options
@click.pass_context
def serve(ctx: click.Context, more_limits: tuple[str, ...], **options: Any) -> None:
    """Send requests to an OpenAI-compatible server, such as `minirt serve`, and measure what its clients see.

    Requests arrive as a Poisson process that does not wait for answers. Answers are streamed. Metrics and names are those of
    `vllm bench serve`. The report also says how busy the clients were: if they have no headroom, use more --processes.
    LIMIT is one more limit of --goodput.
    """
    goodput = _limits((*options["goodput"], *more_limits), bool(options["goodput"]))
    if options["request_rate"] is not None and options["sweep"] is not None:
        raise click.UsageError("--request-rate and --sweep exclude each other")
    if options["request_rate"] is not None and len(options["request_rate"]) > 1:
        raise click.BadParameter("expected one rate; --sweep takes several", param_hint="--request-rate")
    rates = options["sweep"] or options["request_rate"] or (math.inf,)
    if options["max_concurrency"] is not None and options["processes"] > options["max_concurrency"]:
        expected = f"at most --max-concurrency {options['max_concurrency']}"
        raise InputError("more processes than requests in flight", where=f"--processes {options['processes']}", expected=expected)
    check_picture(options["picture"])
    options["sampling"] = {name: options[name] for name in ("temperature", *FILTERS) if options[name] is not None}
    target, chat = _target(options), options["endpoint"].endswith("chat/completions")
    workload = _workload(options, chat)
    progress = progress_of(options)

    from minirt.bench.report import Report
    from minirt.bench.serve import metrics, run
    from minirt.bench.serve.report import context, draw, markdown, text
    from minirt.bench.summary import shown_range

    name = options["model"] if options["model"] is not None else run.served_model(target)["id"]
    workload = replace(workload, fields={"model": name} | workload.fields)
    if not workload.text and options["vocab_size"] is None:
        workload = replace(workload, vocab_size=run.vocab_size(target) or workload.vocab_size)
    inputs, outputs = (shown_range(ends) for ends in (workload.input_range, workload.output_range))
    kind = "words" if workload.text else f"token ids below {workload.vocab_size:,}"
    asked, url = f"{workload.num_prompts:,} requests of {inputs} random {kind}", _without_password(target.base_url)
    progress(f"{name} at {url}{target.path}: {asked}, {outputs} new tokens")
    run.warm_up(target, workload, options["num_warmups"])
    rows = []
    total_output = sum(workload.lengths()[1]) if options["ignore_eos"] else None
    for part, rate in enumerate(rates):
        if len(rates) > 1:
            progress(f"{part + 1}/{len(rates)}: {rate:g} requests/s")
        measured = run.measure(target, replace(workload, part=part), rate, options["max_concurrency"], options["processes"])
        row = metrics.result(measured, options["metric_percentiles"], goodput, options["save_detailed"])
        for warning in metrics.warnings(row, total_output):
            click.echo(f"minirt: warning: {one_line(warning)}", err=True)
        for error, count in row["error_counts"].items():
            progress(f"{count} × {error}")
        rows.append(row)
    backend = "openai-chat" if chat else "openai"
    shared = context(
        command=_without_secrets(words_of(ctx)), base_url=url, backend=backend,
        endpoint_type=backend, label=None, model_id=name, tokenizer_id=None, server_version=run.server_version(target),
        num_prompts=workload.num_prompts, input_len_range=inputs, output_len_range=outputs,
        prompt_type="text" if workload.text else "ids", seed=workload.seed, sampling=options["sampling"],
    )  # fmt: skip
    print_report(Report(shared, rows, markdown, text), options)
    if options["picture"] is not None:
        draw(shared, rows, Path(options["picture"]))
    failed, total = sum(row["failed"] for row in rows), workload.num_prompts * len(rows)
    if failed:
        first = next(error for row in rows for error in row["error_counts"])
        raise MinirtError(f"{failed:,} of {total:,} requests failed: {first}", where=target.base_url + target.path)


def _limits(words: tuple[str, ...], given: bool) -> dict[str, float]:
    """("ttft:200", "tpot:50,e2el:3000") → {"ttft": 200.0, "tpot": 50.0, "e2el": 3000.0}."""
    if words and not given:
        raise click.UsageError(f"got an unexpected argument ({words[0]}); limits follow --goodput")
    from minirt.bench.serve.metrics import LIMITS

    limits: dict[str, float] = {}
    for word in (part for text in words for part in text.split(",")):
        name, _, value = word.strip().partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in LIMITS or not 0 <= limit < math.inf or name in limits:
            expected = "METRIC:MILLISECONDS, once for a metric, of " + ", ".join(LIMITS)
            raise InputError("not a limit", where="--goodput", expected=expected, found=word)
        limits[name] = limit
    return limits


def _target(options: dict[str, Any]) -> "Target":
    """The server, with /v1 at the end of its URL removed if the endpoint begins with it, as the openai client writes URLs."""
    from minirt.bench.serve.client import Target

    endpoint = options["endpoint"]
    if not endpoint.startswith("/") or not endpoint.endswith("/completions"):
        expected = "a path that ends with /completions or /chat/completions"
        raise InputError("not a path that can be measured", where="--endpoint", expected=expected, found=endpoint)
    if not endpoint.isascii() or not endpoint.isprintable() or " " in endpoint:
        raise InputError("has a character that a URL does not take", where="--endpoint", found=endpoint)
    headers = {}
    for header in options["headers"]:
        name, equals, value = header.partition("=")
        if not equals or not name.strip():
            raise InputError("not a header", where="--header", expected="NAME=VALUE", found=name)
        headers[name.strip()] = value.strip()
    if options["api_key"]:
        headers = {"Authorization": f"Bearer {options['api_key']}"} | headers
    base_url = options["base_url"].rstrip("/")
    target = Target(base_url.removesuffix("/v1"), endpoint, headers, options["timeout"])
    try:
        target.client()
    except InputError as error:
        raise error.at("--header" if "header" in error.what else "--base-url") from error
    return target


def _workload(options: dict[str, Any], chat: bool) -> "Workload":
    """The workload of the options, without the name of the model."""
    from minirt.bench.serve.workload import Workload

    if chat and options["prompt_type"] == "ids":
        raise InputError("chat completions take no token ids", where="--prompt-type ids", expected="text")
    sampling = options["sampling"] | ({"ignore_eos": True} if options["ignore_eos"] else {})
    return Workload(
        num_prompts=options["num_prompts"], input_range=options["input_len_range"], output_range=options["output_len_range"],
        seed=options["seed"], text=chat or options["prompt_type"] == "text", vocab_size=options["vocab_size"] or _VOCAB_SIZE,
        chat=chat, fields=sampling | (options["extra_body"] or {}),
    )  # fmt: skip


def _without_password(url: str) -> str:
    host = urlsplit(url).netloc.rpartition("@")[2]
    return url.replace(urlsplit(url).netloc, host, 1)


def _without_secrets(command: list[str]) -> list[str]:
    """The command line without the values of --api-key and --header."""
    shown, secrets = list[str](), ("--api-key", "--header")
    for word in command:
        option, equals, _ = word.partition("=")
        shown.append("…" if shown[-1:] and shown[-1] in secrets else f"{option}=…" if equals and option in secrets else word)
    return shown

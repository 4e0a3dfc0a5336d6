"""`minirt serve`: the server with OpenAI's and Anthropic's APIs."""

import math
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from minirt.cli.files import read_text, shown_name
from minirt.cli.help import command, option_group
from minirt.cli.options import (
    debug_option,
    load_arguments,
    load_options,
    model_argument,
    model_name,
    prefix_cache_option,
    quiet_option,
    speculative_options,
    warm_prompt_option,
)
from minirt.errors import InputError, MinirtError
from minirt.files import read_text as read_bounded_text
from minirt.foreign_names import option_hint
from minirt.text.reply_format import AUTO, FORMATS, NONE, TEMPLATE

_PACKAGES = {"uvicorn": "uvicorn", "httptools": "httptools", "msgspec": "msgspec", "prometheus_client": "prometheus-client"}
_MAX_CONFIG = 1 << 20  # bytes


def _read_config(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Take the values of options from a YAML file. Options of the command line come first."""
    if value is None:
        return
    import yaml

    try:
        text = read_bounded_text(Path(value), limit=_MAX_CONFIG, error=InputError)
        content, tree = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except InputError as error:  # its hint is that for a file of a model
        raise InputError(error.what, where=value, expected=error.expected, found=error.found) from error
    except yaml.YAMLError as error:
        raise InputError(f"is not YAML: {' '.join(str(error).split())}", where=value) from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise InputError("is not a mapping of options to values", where=value, found=type(content).__name__)
    keys = [key.value for key, _ in tree.value] if tree is not None else []
    if twice := [key for i, key in enumerate(keys) if key in keys[:i]]:
        raise InputError("is there twice", where=f"{value}: {str(twice[0])[:80]}")
    known: dict[str, tuple[click.Option, bool]] = {}
    for own in context.command.params:
        if isinstance(own, click.Option):
            known |= {name.lstrip("-"): (own, name in own.secondary_opts) for name in own.opts + own.secondary_opts}
    defaults: dict[str, Any] = {}
    for key, given in content.items():
        name = str(key).replace("_", "-")
        if name not in known or name in ("config", "help"):
            hint = option_hint(f"--{name}", {f"--{own}" for own in known}) or "minirt serve --help lists them"
            raise InputError("there is no such option", where=f"{value}: {str(key)[:80]}", hint=hint)
        option, negative = known[name]
        if option.is_flag and not isinstance(given, bool):
            raise InputError("not an acceptable value", where=f"{value}: {key}", expected="true or false", found=repr(given)[:80])
        if (option.name or "") in defaults:
            raise InputError("sets an option that another name has set", where=f"{value}: {key}")
        if option.is_flag:
            defaults[option.name or ""] = given is not negative
            continue
        several = given if isinstance(given, list) and option.multiple else [given]
        if any(own is None or isinstance(own, dict | list | bool) for own in several):
            raise InputError("not an acceptable value", where=f"{value}: {key}", found=repr(given)[:80])
        texts = [str(own) for own in several]  # so that they are read as on the command line
        defaults[option.name or ""] = texts if option.multiple else texts[0]
    context.default_map = {**(context.default_map or {}), **defaults}


@command(short_help="Serve the model over HTTP: OpenAI's, Anthropic's APIs.")
@model_argument
@load_options
@prefix_cache_option
@speculative_options
@warm_prompt_option
@option_group(
    "Server",
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is every IPv4 address."),
    click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."),
    click.option("--served-model-name", multiple=True, help="Name under which clients ask for the model (repeatable)."),
    click.option("--root-path", default="", metavar="PATH", help="Path under which a reverse proxy serves this server: /minirt."),
    click.option("--api-key", multiple=True, help="Key that clients must send (repeatable). Also from MINIRT_API_KEY."),
    click.option("--metrics-need-key", is_flag=True, help="/metrics needs the API key, too."),
    click.option(
        "--allow-origin", multiple=True, metavar="ORIGIN", help="Web pages of this origin may use the API (repeatable); * is all."
    ),
    click.option("--request-timeout", type=click.FloatRange(0, min_open=True), help="Seconds after which a request is aborted."),
    click.option(
        "--drain-timeout", type=click.FloatRange(0), default=60.0, show_default=True,
        help="Seconds that running requests get to end after SIGTERM.",
    ),
    click.option(
        "--stream-interval", type=click.IntRange(1), default=1, show_default=True,
        help="Tokens of a stream that are sent together; the first one is sent at once.",
    ),
    click.option(
        "--max-body-size", type=click.IntRange(1024), default=32 << 20, show_default=True, help="Bytes of the largest request."
    ),
    click.option(
        "--tool-call-parser", type=click.Choice((AUTO, NONE, TEMPLATE, *FORMATS)), default=AUTO, show_default=True,
        help="Format of the tool calls in answers; auto takes it from the tokenizer's files.",
    ),
    click.option("--log-prompts", is_flag=True, help="Write the prompts of requests to the log."),
    click.option(
        "--config", metavar="FILE", callback=_read_config, is_eager=True, expose_value=False,
        help="A YAML file with values of these options. Those of the command line take precedence.",
    ),
)
@quiet_option
@debug_option
def serve(quiet: bool, **options: Any) -> None:
    """Serve the model over HTTP with OpenAI's APIs, /v1/chat/completions, /v1/responses and /v1/completions, and
    Anthropic's /v1/messages.

    SIGTERM or Ctrl-C lets running requests end; a second one ends at once.
    """
    missing = [name for module, name in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        what = f"minirt serve needs packages that are not installed: {', '.join(missing)}"
        raise MinirtError(what, hint=f"pip install {' '.join(missing)}")
    from minirt.server.front import ServerOptions
    from minirt.server.run import serve as run

    warm = tuple((shown_name(file), read_text(file, "--warm-prompt")) for file in options["warm_prompts"])
    name = model_name(options, quiet)
    keys = options["api_key"] or tuple(filter(None, [os.environ.get("MINIRT_API_KEY")]))
    for origin in options["allow_origin"]:
        if origin not in ("*", "null") and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin) is None:
            expected = "*, or scheme://host or scheme://host:port, as browsers send it: without a path or a slash at its end"
            raise InputError("not an origin", where="--allow-origin", expected=expected, found=origin)
    if options["root_path"] and re.fullmatch(r"(/[\w.~-]+)+", options["root_path"], re.ASCII) is None:
        expected = "a path such as /minirt, without a slash at its end"
        raise InputError("not a path", where="--root-path", expected=expected, found=options["root_path"])
    for key in keys:
        if not key or key != key.strip() or not key.isprintable():
            what = "is empty" if not key else "begins or ends with white space, or has a character that no header can have"
            raise InputError(what, where="--api-key")
    for option in ("request_timeout", "drain_timeout"):
        if options[option] is not None and math.isnan(options[option]):
            raise InputError("not a number", where=f"--{option.replace('_', '-')}", found="nan")
    server = ServerOptions(
        model=name, served_model_names=options["served_model_name"], api_keys=keys,
        metrics_need_key=options["metrics_need_key"], allowed_origins=options["allow_origin"], root_path=options["root_path"],
        request_timeout=options["request_timeout"], drain_timeout=options["drain_timeout"],
        stream_interval=options["stream_interval"], max_body_size=options["max_body_size"],
        log_prompts=options["log_prompts"], tool_call_parser=options["tool_call_parser"], warm_prompts=warm,
        imports=options["imports"], quiet=quiet,
    )  # fmt: skip
    run(server, load_arguments(options, name), options["host"], options["port"])

"""`minirt serve`: the server with OpenAI's and Anthropic's APIs."""

import os
from importlib.util import find_spec
from typing import Any

import click

from minirt.cli import options as shared
from minirt.cli.files import read_text, shown_name
from minirt.cli.help import command, option_group
from minirt.cli.settings import given, options_of
from minirt.cli.suggestions import option_hint
from minirt.errors import InputError, MinirtError
from minirt.loading.options import LoadOptions
from minirt.server.options import ServerOptions

_PACKAGES = {"uvicorn": "uvicorn", "httptools": "httptools", "msgspec": "msgspec", "prometheus_client": "prometheus-client"}


def _read_config(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Take the values of options from a YAML file. Options of the command line come first."""
    if value is None:
        return
    import yaml

    text = read_text(value, "--config")
    try:
        content, tree = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise InputError(f"is not YAML: {' '.join(str(error).split())}", where=value) from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise InputError("is not a mapping of options to values", where=value, found=type(content).__name__)
    keys = [key.value for key, _ in tree.value] if tree is not None else []
    if twice := [key for i, key in enumerate(keys) if key in keys[:i]]:
        raise InputError("is there twice", where=f"{value}: {str(twice[0])[:80]}")
    known: dict[str, tuple[click.Option, bool]] = {}
    for option in context.command.params:
        if isinstance(option, click.Option):
            known |= {name.lstrip("-"): (option, name in option.secondary_opts) for name in option.opts + option.secondary_opts}
    defaults: dict[str, Any] = {}
    for key, stated in content.items():
        name, place = str(key).replace("_", "-"), f"{value}: {str(key)[:80]}"
        if name not in known or name in ("config", "help"):
            hint = option_hint(f"--{name}", {f"--{option}" for option in known}) or "minirt serve --help lists them"
            raise InputError("there is no such option", where=place, hint=hint)
        option, negative = known[name]
        if option.name in defaults:
            raise InputError("sets an option that another name has set", where=place)
        several = stated if isinstance(stated, list) and option.multiple else [stated]
        if any(isinstance(one, dict | list | None) or isinstance(one, bool) != option.is_flag for one in several):
            expected = "true or false" if option.is_flag else None
            raise InputError("not an acceptable value", where=place, expected=expected, found=repr(stated)[:80])
        texts = [str(one) for one in several]  # so that they are read as on the command line
        defaults[str(option.name)] = stated is not negative if option.is_flag else texts if option.multiple else texts[0]
    context.default_map = {**(context.default_map or {}), **defaults}


@command(short_help="Serve the model over HTTP: OpenAI's, Anthropic's APIs.")
@shared.model_argument
@shared.serving_options
@shared.warm_prompt_option
@option_group(
    "Server",
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is every IPv4 address."),
    click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."),
    options_of(ServerOptions, "", title="Server"),
    click.option(
        "--config", metavar="FILE", callback=_read_config, is_eager=True, expose_value=False,
        help="A YAML file with values of these options. Those of the command line take precedence.",
    ),
)
@shared.general_options
def serve(quiet: bool, **options: Any) -> None:
    """Serve the model over HTTP with OpenAI's APIs, /v1/chat/completions, /v1/responses and /v1/completions, and
    Anthropic's /v1/messages.

    SIGTERM or Ctrl-C lets running requests end; a second one ends at once.
    """
    if missing := [name for module, name in _PACKAGES.items() if find_spec(module) is None]:
        what = f"minirt serve needs packages that are not installed: {', '.join(missing)}"
        raise MinirtError(what, hint=f"pip install {' '.join(missing)}")
    from minirt.server.run import serve as run

    options["warm_prompts"] = tuple((shown_name(file), read_text(file, "--warm-prompt")) for file in options["warm_prompts"])
    options["api_keys"] = options["api_keys"] or tuple(filter(None, [os.environ.get("MINIRT_API_KEY")]))
    name = shared.model_name(options, quiet)
    server = ServerOptions(**given(ServerOptions, options) | {"model": name, "quiet": quiet})
    arguments = shared.load_arguments(options, name)
    LoadOptions(**arguments)  # checks them before the engine's process starts
    run(server, arguments, options["host"], options["port"])

"""`ServerOptions`: the options of `minirt serve` that are about neither loading nor the address."""

import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from minirt.errors import InputError, MinirtError, quoted
from minirt.settings import Integer, Settings, setting, settings_of


def _parsers() -> Sequence[str]:
    # Imported here, so that --help of other commands stays fast.
    from minirt.text.reply_format import NAMES

    return NAMES


def _origins(values: Any, place: str, error: type[MinirtError], hint: str | None = None) -> tuple[str, ...]:
    for origin in values:
        if origin not in ("*", "null") and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin) is None:
            expected = "*, or scheme://host or scheme://host:port, as browsers send it: without a path or a slash at its end"
            raise error("not an origin", where=place, expected=expected, found=origin)
    return tuple(values)


def _path(value: Any, place: str, error: type[MinirtError], hint: str | None = None) -> str:
    if value and re.fullmatch(r"(/[\w.~-]+)+", value, re.ASCII) is None:
        raise error("not a path", where=place, expected="a path such as /minirt, without a slash at its end", found=value)
    return value


def _keys(values: Any, place: str, error: type[MinirtError], hint: str | None = None) -> tuple[str, ...]:
    for key in values:
        if not key or key != key.strip() or not key.isprintable():
            what = "is empty" if not key else "begins or ends with white space, or has a character that no header can have"
            raise error(what, where=place)
    return tuple(values)


def _seconds(value: Any, place: str, error: type[MinirtError], hint: str | None = None, may_be_0: bool = True) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value > 0 or (value == 0 and may_be_0)):
        expected = "a number >= 0" if may_be_0 else "a number above 0"
        raise error("not a number of seconds", where=place, expected=expected, found=quoted(value, 80))
    return value


class ServerOptions(Settings, kw_only=False):
    """The options of a server.

    Raises:
        InputError: a value is not acceptable.
    """

    _unnamed = 1

    # fmt: off
    model: str = setting("The model: a folder, Hub id or preset.", "", option="")
    served_model_names: tuple[str, ...] = setting(
        "Name under which clients ask for the model.", (), option="--served-model-name", kind="several",
        elsewhere={"llama.cpp": "alias"})
    root_path: str = setting("Path under which a reverse proxy serves this server: /minirt.", "", check=_path, metavar="PATH")
    api_keys: tuple[str, ...] = setting(
        "Key that clients must send.", (), check=_keys, option="--api-key", kind="several",
        option_help="Key that clients must send. Also from MINIRT_API_KEY.")
    metrics_need_key: bool = setting("/metrics needs the API key, too.", False)
    allowed_origins: tuple[str, ...] = setting(
        "Web pages of this origin may use the API; * is all.", (), check=_origins, option="--allow-origin", kind="several",
        metavar="ORIGIN", elsewhere={"vLLM": "allowed_origins"})
    request_timeout: float | None = setting("Seconds after which a request is aborted.", check=partial(_seconds, may_be_0=False))
    drain_timeout: float = setting("Seconds that running requests get to end after SIGTERM.", 60.0, check=_seconds)
    stream_interval: int = setting(
        "Tokens of a stream that are sent together; the first one is sent at once.", 1, check=Integer(1))
    max_body_size: int = setting("Bytes of the largest request.", 32 << 20, check=Integer(1024))
    tool_call_parser: str = setting(
        "Format of the tool calls in answers; auto takes it from the tokenizer's files.", "auto", kind=_parsers)
    log_prompts: bool = setting("Write the prompts of requests to the log.", False)
    warm_prompts: tuple[tuple[str, str], ...] = setting("Names and texts of what is computed at load and kept.", (), option="")
    lora_folders: tuple[str, ...] = setting(
        "Clients with a key may load and unload adapters below this folder.", (), option="--lora-folder", kind="several",
        metavar="FOLDER")
    imports: tuple[str, ...] = setting("Python files that the engine's process runs before it loads the model.", (), option="")
    quiet: bool = setting("No progress and no notes.", False, option="")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_folders and not self.api_keys:
            raise InputError("clients that change adapters need a key", where="--lora-folder", expected="--api-key beside it")
        if missing := next((name for name in self.lora_folders if not os.path.isdir(os.path.expanduser(name))), None):
            raise InputError("there is no such folder", where="--lora-folder", expected="a folder", found=missing)

    @classmethod
    def _place(cls, name: str) -> str:
        return settings_of(cls)[name].option_name or name

    @property
    def model_id(self) -> str:
        """The model as answers name it: of a folder its name, without the path."""
        path = os.path.expanduser(self.model)
        return os.path.basename(os.path.abspath(path)) if os.path.isdir(path) else self.model

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which clients may ask for the model. The first one is in the answers."""
        return self.served_model_names or (self.model_id,)

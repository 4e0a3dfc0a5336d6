"""Clients load and unload adapters: off unless the server has --lora-folder, and with a key, as every path."""

import os
from pathlib import Path
from typing import Any

import msgspec

from minirt.errors import InputError, MinirtError
from minirt.sampling_params import adapter_name
from minirt.server.errors import HTTPError, bad_field
from minirt.server.exchange import Exchange
from minirt.server.front import Front
from minirt.server.protocol import decode


class LoadRequest(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadRequest(msgspec.Struct, kw_only=True):
    lora_name: str


async def load(front: Front, exchange: Exchange) -> dict[str, Any]:
    request = decode(front, exchange, await _body(front, exchange), LoadRequest)
    try:
        adapter_name(request.lora_name, "lora_name")
    except InputError as error:
        raise bad_field("lora_name", error.what, expected=error.expected, found=request.lora_name[:80]) from error
    if request.lora_name in front.options.names:
        raise bad_field("lora_name", "the server's model has this name", found=request.lora_name[:80])
    if request.lora_name in front.loras and not request.load_inplace:
        raise bad_field("lora_name", "there is an adapter of this name", hint="unload it, or set load_inplace")
    return await _change(front, request.lora_name, await front.in_thread(_folder, front, request.lora_path))


async def unload(front: Front, exchange: Exchange) -> dict[str, Any]:
    request = decode(front, exchange, await _body(front, exchange), UnloadRequest)
    if request.lora_name not in front.loras:
        raise HTTPError(404, "there is no such adapter", param="lora_name", found=request.lora_name[:80])
    return await _change(front, request.lora_name, None)


async def _body(front: Front, exchange: Exchange) -> bytes:
    if not front.options.lora_folders:
        raise HTTPError(403, "this server does not load adapters", hint="start it with --lora-folder and --api-key")
    return await front.body(exchange)


def _folder(front: Front, path: str) -> str:
    """The folder of a path below an allowed one, after links. Raises 400 for others, whether they exist or not."""
    for allowed in front.options.lora_folders:
        root = os.path.realpath(os.path.expanduser(allowed))
        folder = os.path.realpath(os.path.join(root, path)) if "\0" not in path else ""
        if folder.startswith(root + os.sep) and Path(folder).is_dir():
            return folder
    raise bad_field("lora_path", "not a folder below an allowed one", found=path[:80])


async def _change(front: Front, name: str, folder: str | None) -> dict[str, Any]:
    try:
        front.loras = await front.engine.change_adapter(name, folder)
    except MinirtError as error:
        text = str(error) if folder is None else str(error).replace(folder, "lora_path")
        raise HTTPError(400, text[:500], param="lora_path") from error
    return {"id": name, "object": "model", "loaded": folder is not None}


ROUTES = {"POST /v1/load_lora_adapter": load, "POST /v1/unload_lora_adapter": unload}

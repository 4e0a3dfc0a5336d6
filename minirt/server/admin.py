"""What clients, routers and monitors ask about the server: models, health, metrics, versions."""

import asyncio
from contextlib import suppress
from typing import Any

import minirt
from minirt.errors import MinirtError
from minirt.server.errors import HTTPError
from minirt.server.exchange import Exchange
from minirt.server.front import Front
from minirt.server.metrics import CONTENT_TYPE

_STATS_SECONDS = 5  # how long /metrics waits for the engine, which answers between two steps
_MODELS = "/v1/models/"


def _card(front: Front, name: str) -> dict[str, Any]:
    parent = front.options.names[0] if name in front.loras else None
    return {
        "id": name, "object": "model", "created": front.created, "owned_by": "minirt", "root": front.options.model_id,
        "parent": parent, "max_model_len": None if front.loaded is None else front.loaded[1].max_len,
    }  # fmt: skip


async def models(front: Front, exchange: Exchange) -> dict[str, Any]:
    front.check_ready()
    return {"object": "list", "data": [_card(front, name) for name in (*front.options.names, *front.loras)]}


async def model(front: Front, exchange: Exchange) -> dict[str, Any]:
    name = exchange.path.removeprefix(_MODELS)  # it may contain slashes
    front.check_model(name)
    return _card(front, name)


async def health(front: Front, exchange: Exchange) -> None:
    """200 while the server takes requests, else 503."""
    front.check_ready()
    await exchange.answer(b"", content_type=b"text/plain")


async def ready(front: Front, exchange: Exchange) -> dict[str, Any]:
    """As `health`, with what warm-up has still to do. It answers between two steps of the engine."""
    front.check_ready()
    try:
        stats = (await asyncio.wait_for(front.engine.ask(), _STATS_SECONDS)).stats
    except TimeoutError as error:
        raise HTTPError(503, f"the engine has not answered for {_STATS_SECONDS} seconds") from error
    return {"status": front.state, "graphs_to_capture": stats.num_graphs_to_capture}


async def version(front: Front, exchange: Exchange) -> dict[str, str]:
    return {"version": minirt.__version__}


async def metrics(front: Front, exchange: Exchange) -> None:
    stats = None
    with suppress(MinirtError, TimeoutError):  # the front's own metrics are still of use
        if front.loaded is not None:
            stats = (await asyncio.wait_for(front.engine.ask(), _STATS_SECONDS)).stats
    await exchange.answer(front.metrics.exposition(stats), content_type=CONTENT_TYPE.encode())


async def load(front: Front, exchange: Exchange) -> dict[str, int]:
    """Requests that are being answered, without this one."""
    return {"server_load": len(front.exchanges) - 1}


async def server_info(front: Front, exchange: Exchange) -> dict[str, Any]:
    (_, info), options = front.check_ready(), front.options
    return info.facts | {
        "version": minirt.__version__, "model_path": options.model_id, "served_model_name": options.names[0],
        "warm_prompts": list(info.facts.get("warm_prompts", {}).values()),
        "max_model_len": info.max_len, "max_num_seqs": info.max_num_seqs, "vocab_size": info.vocab_size,
        "stream_interval": options.stream_interval, "status": front.state,
    }  # fmt: skip


async def model_info(front: Front, exchange: Exchange) -> dict[str, Any]:
    (_, info), options = front.check_ready(), front.options
    return {
        "model_path": options.model_id, "tokenizer_path": options.model_id, "is_generation": True,
        "served_model_name": options.names[0], "max_model_len": info.max_len, "vocab_size": info.vocab_size,
        "has_chat_template": front.tokenizer is not None and front.tokenizer.has_chat_template,
    }  # fmt: skip


ROUTES = {
    "GET /v1/models": models, f"GET {_MODELS}*": model, "GET /version": version, "GET /metrics": metrics, "GET /load": load,
    "GET /ready": ready,
    **dict.fromkeys(("GET /health", "GET /ping", "POST /ping"), health),
    **dict.fromkeys(("GET /server_info", "GET /get_server_info"), server_info),
    **dict.fromkeys(("GET /model_info", "GET /get_model_info"), model_info),
}  # fmt: skip

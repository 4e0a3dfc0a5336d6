"""Well-known models by name, with the shapes of their published config.json files, from presets.json.

A row of its `models` has the name, the Hub owner, the family, the values of `columns`, what differs from the family, and what
differs in the -Instruct model. Without the last entry there is no such model. A family begins with the fields of those it is
`like`.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any


@cache
def table() -> dict[str, Any]:
    """The content of presets.json."""
    return json.loads((Path(__file__).parent / "presets.json").read_text(encoding="utf-8"))


def raw_configs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, Hub id, config.json content) of every preset."""
    known: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, owner, family, values, differs, *instruct in table()["models"]:
        raw = {"dtype": "bfloat16"} | _family(family) | dict(zip(table()["columns"], values, strict=True)) | differs
        for variant, fields in ((name, {}), *((f"{name}-Instruct", fields) for fields in instruct)):
            known[variant] = f"{owner}/{table()['hub_names'].get(variant, variant)}", raw | fields
        known |= {later: (f"{owner}/{later}", raw) for later, same in table()["same_fields"].items() if same == name}
    for name, (hub_id, raw) in known.items():
        yield name, hub_id, raw
        if name in table()["fp8_releases"]:
            yield f"{name}-FP8", f"{hub_id}-FP8", raw | table()["fp8_fields"]


def _family(name: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for like in table()["families"][name].get("like", "").split():
        fields |= _family(like)
    return fields | {key: value for key, value in table()["families"][name].items() if key != "like"}

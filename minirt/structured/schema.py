"""JSON schemas: parsing, refusals that name the keyword and its place, and schemas of all drafts in the form of one.

llguidance refuses some keywords and ignores others. Here everything that would not be enforced is refused first. Annotations,
such as "title", change nothing. `minirt.structured.contradictions` finds schemas that no value fits.
"""

import json
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import cached_property
from typing import Any
from urllib.parse import quote, unquote

from minirt.errors import InputError, MinirtError, UnsupportedError, quoted, shortened
from minirt.structured import limits
from minirt.structured.contradictions import BOUNDS, COUNTS, TYPES, check_contradictions

MAX_DEPTH = 64  # of nested subschemas
MIN_NUMBER, MAX_NUMBER = 1e-22, 1 << 53  # absolute values of bounds
_INT64_MAX = (1 << 63) - 1

_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # names to subschemas
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_ITEMS = {*_LISTS, "items"}  # "items" may be a list before draft 2020-12
_SINGLE = ("items", "additionalItems", "additionalProperties")
_ENFORCED = {
    *_MAPS, *_LISTS, *_SINGLE, *COUNTS, *BOUNDS, "$ref", "$schema", "const", "enum", "type", "required", "pattern", "format",
    "multipleOf",
}  # fmt: skip
_ANNOTATIONS = {
    "$comment", "$id", "id", "$anchor", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "contentMediaType", "contentEncoding",
}  # fmt: skip
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
# Characters that JSON writes as \u00XX only, which masks do not allow (see `ESCAPES` in grammar.py), and how patterns name them.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_CONTROL_ESCAPE = re.compile(
    r"(?<!\\)(?:\\\\)*\\(x[01][0-9a-fA-F]|x7[fF]|u00[01][0-9a-fA-F]|u007[fF]|[xu]\{0*([01]?[0-9a-fA-F]|7[fF])\}|c[A-Za-z]|[ave0])"
)
_NEGATED = re.compile(r"\[\^(?:\\.|[^\[\]\\])*\]")  # a class of characters that it excludes


def parse_schema(text: str, place: str) -> dict[str, Any] | bool:
    """The schema in a JSON text, without definitions that nothing refers to: generators write more than they use.

    Raises:
        InputError: it is not JSON, repeats a key, is nested too deeply, or is neither an object nor a bool.
    """
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise InputError("the schema repeats a key", where=place, found=quoted(twice))
        return value

    def constant(name: str) -> Any:
        raise InputError("the schema is not JSON", where=place, found=name)

    def number(digits: str) -> float:
        if math.isinf(value := float(digits)):
            what, expected = "a number of the schema is too large", "at most 1.8e308"
            raise InputError(what, where=place, expected=expected, found=shortened(digits))
        return value

    limits.check_nesting(text, place)
    try:
        schema = json.loads(text, object_pairs_hook=unique, parse_constant=constant, parse_float=number)
    except json.JSONDecodeError as error:
        shown = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise InputError("the schema is not JSON", where=place, found=shown) from error
    except MinirtError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"the schema is not acceptable JSON: {shortened(error)}", where=place) from error
    if not isinstance(schema, dict | bool):
        raise InputError("not a JSON schema", where=place, expected="an object or a bool", found=shortened(json.dumps(schema)))
    if schema is False:
        raise InputError("the schema false accepts nothing", where=place, expected="a schema that accepts something")
    return schema if isinstance(schema, bool) else without_unused(schema)


_DEFINITIONS = ("$defs", "definitions")


def without_unused(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without definitions that no "$ref" leads to. If one leads to "$anchor" or "$id", all are kept."""
    groups = {name: schema[name] for name in _DEFINITIONS if isinstance(schema.get(name), dict)}
    used = set[tuple[str, str]]()
    todo: list[Any] = [{"$ref": schema.get("$ref")}, *(value for name, value in schema.items() if name not in groups)]
    while todo and groups:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, dict):
            todo += part.values()
            reference = part.get("$ref")
            if not isinstance(reference, str) or reference == "#":
                continue
            start, *path = unquote(reference).split("/")
            if start == "#" and path[0] not in _DEFINITIONS:
                continue  # a place outside of the definitions
            if start != "#" or path[0] not in groups or len(path) < 2:
                return schema
            group, name = path[0], path[1].replace("~1", "/").replace("~0", "~")
            if name in groups[group] and (group, name) not in used:
                used.add((group, name))
                todo.append(groups[group][name])
    kept = {group: {name: part for name, part in named.items() if (group, name) in used} for group, named in groups.items()}
    return {name: kept.get(name, value) for name, value in schema.items() if name not in groups or kept[name]}


def check_schema(schema: dict[str, Any] | bool, name: str) -> None:
    """Check a schema and its subschemas. `name` names the schema; errors add the place within it, as a JSON pointer.

    Raises:
        UnsupportedError: a keyword cannot be enforced.
        InputError: a keyword has a malformed value, or the schema contradicts itself.
    """
    checked, parents, renamed = dict[int, tuple[dict[str, Any], str]](), dict[int, int](), set[int]()
    draft_4 = _is_draft_4(schema)
    for pointer, part in walk(schema, name):
        place = f"{name}, {pointer}" if pointer else name
        _check_values(part, place, draft_4)
        for what, value, expected, hint in _refusals(part):
            raise UnsupportedError(what, where=place, expected=expected, found=shortened(json.dumps(value)), hint=hint)
        checked[id(part)] = part, place
        for inner, value in subschemas(part):
            parents[id(value)] = id(part)
            if not isinstance(value, dict | bool):
                expected, shown = "an object or a bool", shortened(json.dumps(value))
                raise InputError("not a JSON schema", where=f"{name}, {pointer}/{inner}", expected=expected, found=shown)
        names = [part[keyword] for keyword in ("$id", "id") if keyword in part and part is not schema]
        if parents.get(id(part)) in renamed or not all(str(value).startswith("#") for value in names):
            renamed.add(id(part))
            if "$ref" in part:
                what, hint = '"$ref" below an "$id" within the schema is not supported', 'remove "$id": it changes what "$ref" is'
                raise UnsupportedError(what, where=place, found=shortened(json.dumps(part["$ref"])), hint=hint)
    targets = _references(schema, checked)
    heights = dict.fromkeys(checked, 1)
    for child in reversed(checked):  # children come after their parents
        if (parent := parents.get(child)) is not None:
            heights[parent] = max(heights[parent], heights[child] + 1)
    entries = {id(schema), *map(id, targets.values())}
    limits.check_levels(sum(heights.get(entry, 1) for entry in entries), 'levels of schemas that a "$ref" leads to', name)
    check_contradictions(list(checked.values()), targets.get)


def _references(root: Any, checked: Mapping[int, tuple[dict[str, Any], str]]) -> dict[str, Any]:
    """All "$ref" and their schemas.

    Raises:
        UnsupportedError: one refers to what has not been checked.
        InputError: one refers to nothing.
    """
    target, targets = References(root), dict[str, Any]()
    for part, place in checked.values():
        if "$ref" not in part or part["$ref"] in targets:
            continue
        referred = targets[part["$ref"]] = target(part["$ref"])
        shown = shortened(json.dumps(part["$ref"]))
        if referred is None:
            expected = "the place of a schema, such as #/$defs/NAME"
            raise InputError('"$ref" refers to nothing', where=place, expected=expected, found=shown)
        if not isinstance(referred, bool) and id(referred) not in checked:
            what, expected = '"$ref" to what is no schema is not supported', "the place of a schema, such as one in $defs"
            raise UnsupportedError(what, where=place, expected=expected, found=shown)
    return targets


class References:
    """What a "$ref" within the document `root`, which need not be checked, leads to. Calls give a schema, or None: nothing."""

    def __init__(self, root: Any) -> None:
        self._root = root

    @cached_property
    def _names(self) -> dict[str, Any]:
        """The schemas that have a name, by the "$ref" that refers to them."""
        schemas = [part for _, part in walk(self._root)]
        names = [(schema, schema[keyword]) for schema in schemas for keyword in ("$id", "id") if keyword in schema]
        names += [(schema, f"#{schema['$anchor']}") for schema in schemas if "$anchor" in schema]
        return {name: schema for schema, name in names if isinstance(name, str)}

    def __call__(self, reference: str) -> Any:
        if reference in self._names:
            return self._names[reference]
        pointer = unquote(reference[1:])
        part = self._root if reference.startswith("#") and pointer[:1] in ("", "/") else None
        for name in pointer.split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            if isinstance(part, list):
                part = part[int(key)] if key.isdecimal() and int(key) < len(part) else None
            else:
                part = part.get(key) if isinstance(part, dict) else None
        return part


def _is_draft_4(schema: Any) -> bool:
    return isinstance(schema, dict) and "draft-04" in str(schema.get("$schema"))


def normalized(schema: dict[str, Any], root: str = "") -> dict[str, Any]:
    """A copy of a schema with the keywords of draft 2020-12, and JSON pointers as its only references.

    "$schema", names, "items" as a list and exclusive bounds as bools are gone. What is malformed stays as it is.

    Args:
        root: the JSON pointer of the copy within a larger document.
    Raises:
        InputError: it is nested too deeply.
    """
    deque(walk(schema), 0)  # raises before the JSON library recurses too deeply
    result = json.loads(json.dumps(schema))
    copies, target = [part for _, part in walk(result)], References(result)
    referring = [(part, target(part["$ref"])) for part in copies if isinstance(part.get("$ref"), str)]
    draft_4 = _is_draft_4(schema)
    for part in copies:
        for keyword in ("$schema", "$id", "id", "$anchor"):
            if part is result or str(part.get(keyword)).startswith("#") or keyword[-2:] != "id":
                part.pop(keyword, None)  # what is left changes what "$ref" is, which `check_schema` refuses
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if draft_4 and isinstance(part.get(exclusive), bool) and part.pop(exclusive) and bound in part:
                part[exclusive] = part.pop(bound)
        others = part.pop("additionalItems", None)
        if isinstance(part.get("items"), list):
            part["prefixItems"] = part.pop("items")
            part |= {} if others is None else {"items": others}
        elif others is not None and "items" not in part:
            part["additionalItems"] = others  # is refused, unless it has no effect
    pointers = {id(part): pointer for pointer, part in walk(result)}
    for part, referred in referring:
        if id(referred) in pointers:
            part["$ref"] = "#" + quote(pointers[id(referred)], safe="/~$")  # llguidance refuses "[" and the like
        if root and part["$ref"].startswith("#"):
            part["$ref"] = f"#{root}{part['$ref'][1:]}"
    return result


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(its JSON pointer within `schema`, without the first slash, and the subschema)."""
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            yield from ((f"{keyword}/{_escaped(name)}", part) for name, part in value.items())
        elif keyword in _ITEMS and isinstance(value, list):
            yield from ((f"{keyword}/{i}", part) for i, part in enumerate(value))
        elif keyword in _SINGLE:
            yield keyword, value


def walk(schema: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all subschemas that are objects, each with its JSON pointer, before those in it. `name`: see `check_schema`.

    Raises:
        InputError: it is nested too deeply.
    """
    todo = [("", schema, 0)]
    while todo:
        pointer, part, depth = todo.pop()
        if depth > MAX_DEPTH:
            place, expected = f"{name}, {pointer}" if name else None, f"at most {MAX_DEPTH} levels"
            raise InputError("the schema is nested too deeply", where=place, expected=expected)
        if isinstance(part, dict):
            yield pointer, part
            todo += [(f"{pointer}/{inner}", value, depth + 1) for inner, value in subschemas(part)]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _refusals(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any, str | None, str | None]]:
    """What would not be enforced: what it is, the value, what is expected, and a hint."""
    union = "oneOf" in schema or "anyOf" in schema  # then OpenAPI's "discriminator" only says which property tells them apart
    for keyword in schema:
        if keyword not in _ENFORCED and keyword not in _ANNOTATIONS and not (union and keyword == "discriminator"):
            yield "the keyword is not supported", keyword, None, "remove it, or express it otherwise; nothing is ignored"
    types = schema.get("type", "string")  # the "format" of numbers, such as "int32", says nothing about their text
    if "format" in schema and schema["format"] not in FORMATS and "string" in ([types] if isinstance(types, str) else types):
        yield 'this "format" is not supported', schema["format"], f"one of {', '.join(FORMATS)}", None
    for keyword in filter(schema.__contains__, ("const", "enum", "properties", "required")):
        stated = list(schema[keyword]) if keyword == "properties" else schema[keyword]
        if any(isinstance(part, str) and _CONTROL.search(part) for part in _parts(stated)):
            hint = "only \\b, \\f, \\n, \\r and \\t are written"
            yield f'"{keyword}" with a control character is not supported', stated, None, hint
    for keyword in filter(schema.__contains__, (*BOUNDS, "const", "enum")):
        for number in _parts(schema[keyword]):
            if type(number) not in (int, float) or _is_open_end(keyword, number, schema.get("type")):
                continue
            if keyword in BOUNDS and number != 0 and not MIN_NUMBER <= abs(number) <= MAX_NUMBER:
                # llguidance rounds such a bound, cannot compile it, or crashes.
                expected = f"0, or a number whose absolute value is from {MIN_NUMBER} to 2^53"
                yield f'"{keyword}" is too large or too close to 0 to be enforced', number, expected, "round it, or remove it"
            if not _is_exact(number):
                expected = "integers up to 2^53 in absolute value, and numbers of up to 15 digits from 1e-22 to 1e22"
                what, hint = f'"{keyword}" has a number that is not enforced exactly', "round it, or state it as a text"
                yield what, number, expected, hint
    if "additionalItems" in schema and "prefixItems" in schema and "items" not in schema:
        what, hint = '"additionalItems" beside "prefixItems" is not supported', 'write "items", as draft 2020-12 does'
        yield what, schema["additionalItems"], None, hint
    for pattern in (schema.get("pattern", ""), *schema.get("patternProperties", ())):
        if _CONTROL.search(pattern) or _CONTROL_ESCAPE.search(_NEGATED.sub("", pattern)):
            yield '"pattern" with a control character is not supported', pattern, None, None
    if not str(schema.get("$ref", "#")).startswith("#"):
        yield '"$ref" to another document is not supported', schema["$ref"], 'a reference that begins with "#"', None
    if (low := schema.get("minProperties", 0)) > len(schema.get("required", ())) + 1:
        # The names of additional properties may repeat, so only required ones and one more are sure to be different.
        yield "minProperties is not supported", low, "at most the number of required properties plus 1", None


def _parts(value: Any) -> Iterator[Any]:
    """A JSON value, all values in it, and the names in its objects."""
    todo = [value]
    while todo:
        part = todo.pop()
        yield part
        if isinstance(part, dict):
            todo += [*part, *part.values()]
        elif isinstance(part, list):
            todo += part


def _is_exact(number: float) -> bool:
    """Whether llguidance reads a number as it is.

    It rounds the digits, as one integer, to a double, and multiplies or divides that by a power of ten: two roundings.
    """
    digits = Decimal(repr(number))
    if isinstance(number, int):
        digits = digits.normalize()  # of its zeros at the end
    _, figures, exponent = digits.as_tuple()
    whole = int("".join(map(str, figures)))
    if abs(int(exponent)) > 308 or (isinstance(number, int) and whole > MAX_NUMBER):
        return False
    if abs(number) > MAX_NUMBER and Decimal(repr(number)) != Decimal(number):
        return False  # the digits that are written are those of another integer
    power = float(f"1e{abs(int(exponent))}")
    return (whole * power if int(exponent) >= 0 else whole / power) == abs(number)


def _is_open_end(keyword: str, value: float, types: Any) -> bool:
    """Whether a bound allows all int64 numbers, whatever llguidance makes of it."""
    return keyword == "maximum" and types == "integer" and value >= _INT64_MAX


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value) and len(set(value)) == len(value)


# What the values of keywords have to be, and how an error says it.
_FORMS: dict[str, tuple[Callable[[Any], object], str]] = {
    **dict.fromkeys(COUNTS, (lambda value: type(value) is int and value >= 0, "an integer >= 0")),
    **dict.fromkeys(BOUNDS, (lambda value: type(value) in (int, float), "a number")),
    "multipleOf": (lambda value: type(value) in (int, float) and value > 0, "a number above 0"),
    "type": (lambda value: all(map(TYPES.__contains__, value if isinstance(value, list) else [value])),
             f"one of {', '.join(TYPES)}"),
    "enum": (lambda value: isinstance(value, list) and value, "a list that is not empty"),
    "required": (_are_names, "a list of different names"),
    **dict.fromkeys(_MAPS, (lambda value: isinstance(value, dict), "an object of schemas")),
    **dict.fromkeys(_LISTS, (lambda value: isinstance(value, list), "a list of schemas")),
    **dict.fromkeys(("pattern", "format", "$ref", "$schema"), (lambda value: isinstance(value, str), "a text")),
}


def _check_values(schema: Mapping[str, Any], place: str, draft_4: bool) -> None:
    for keyword in filter(_FORMS.__contains__, schema):
        (fits, expected), value = _FORMS[keyword], schema[keyword]
        if not (fits(value) or (draft_4 and keyword.startswith("exclusive"))):
            what, shown = f"{json.dumps(keyword)} has a malformed value", shortened(json.dumps(value))
            raise InputError(what, where=place, expected=expected, found=shown)
    if (optional := len(schema.get("properties", ())) - len(schema.get("required", ()))) > limits.MAX_ROW // 2:
        raise InputError("too many optional properties", where=place, expected="about 480", found=optional)

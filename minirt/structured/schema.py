"""JSON schemas: parsing, refusals that name the keyword and its place, and schemas of all drafts in the form of one.

llguidance refuses some keywords and ignores others. Here everything that would not be enforced is refused first. Annotations,
such as "title", change nothing. `minirt.structured.contradictions` finds schemas that no value fits.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cached_property
from typing import Any
from urllib.parse import quote, unquote

from minirt.errors import InputError, MinirtError, UnsupportedError, quoted, shortened
from minirt.structured import limits
from minirt.structured.contradictions import TYPES, check_contradictions

MAX_DEPTH = 64  # of nested subschemas
MIN_NUMBER, MAX_NUMBER = 1e-22, 1 << 53  # absolute values of bounds
_INT64_MAX = (1 << 63) - 1

_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # names to subschemas
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_ENFORCED = {
    *_MAPS, *_LISTS, *_SINGLE, "$ref", "$schema", "const", "enum", "type", "minItems", "maxItems", "required", "minProperties",
    "maxProperties", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf",
}  # fmt: skip
_ANNOTATIONS = {
    "$comment", "$id", "id", "$anchor", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "contentMediaType", "contentEncoding",
}  # fmt: skip
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NUMBERS = (*_BOUNDS, "multipleOf")
# Characters that JSON writes as \u00XX only, which masks do not allow (see `ESCAPES` in grammar.py), and how patterns name them.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_CONTROL_ESCAPE = re.compile(
    r"(?<!\\)(?:\\\\)*\\(x[01][0-9a-fA-F]|x7[fF]|u00[01][0-9a-fA-F]|u007[fF]|[xu]\{0*([01]?[0-9a-fA-F]|7[fF])\}|c[A-Za-z]|[ave0])"
)
_NEGATED = re.compile(r"\[\^(?:\\.|[^\[\]\\])*\]")  # a class of characters that it excludes


def parse_schema(text: str, where: str) -> dict[str, Any] | bool:
    """The schema in a JSON text, without definitions that nothing refers to: generators write more than they use.

    Raises:
        InputError: it is not JSON, repeats a key, is nested too deeply, or is neither an object nor a bool.
    """
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise InputError("the schema repeats a key", where=where, found=quoted(twice))
        return value

    def constant(name: str) -> Any:
        raise InputError("the schema is not JSON", where=where, found=name)

    def number(digits: str) -> float:
        if math.isinf(value := float(digits)):
            what, expected = "a number of the schema is too large", "at most 1.8e308"
            raise InputError(what, where=where, expected=expected, found=shortened(digits))
        return value

    limits.check_nesting(text, where)
    try:
        schema = json.loads(text, object_pairs_hook=unique, parse_constant=constant, parse_float=number)
    except json.JSONDecodeError as error:
        found = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise InputError("the schema is not JSON", where=where, found=found) from error
    except MinirtError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"the schema is not acceptable JSON: {shortened(error)}", where=where) from error
    if not isinstance(schema, dict | bool):
        raise InputError("not a JSON schema", where=where, expected="an object or a bool", found=shortened(json.dumps(schema)))
    if schema is False:
        raise InputError("the schema false accepts nothing", where=where, expected="a schema that accepts something")
    return schema if isinstance(schema, bool) else without_unused(schema)


_DEFINITIONS = ("$defs", "definitions")


def without_unused(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without those of its definitions that no "$ref" leads to. With "$anchor" or "$id", all are kept."""
    own = {name: schema[name] for name in _DEFINITIONS if isinstance(schema.get(name), dict)}
    used = {name: set[str]() for name in own}
    todo: list[Any] = [value for name, value in schema.items() if name not in own]
    todo.append({"$ref": schema.get("$ref")})
    while todo and own:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, dict):
            todo += part.values()
            reference = part.get("$ref")
            if isinstance(reference, str) and reference != "#":
                start, *path = unquote(reference).split("/")
                if start != "#" or path[0] not in own or len(path) < 2:
                    if start == "#" and path[0] not in _DEFINITIONS:
                        continue  # a place outside of the definitions
                    return schema
                name = path[1].replace("~1", "/").replace("~0", "~")
                if name in own[path[0]] and name not in used[path[0]]:
                    used[path[0]].add(name)
                    todo.append(own[path[0]][name])
    kept = {group: {name: part for name, part in own[group].items() if name in used[group]} for group in own}
    return {name: kept.get(name, value) for name, value in schema.items() if name not in own or kept[name]}


def check_schema(schema: dict[str, Any] | bool, where: str) -> None:
    """Check a schema and its subschemas. `where` names the schema; errors add the place within it, as a JSON pointer.

    Raises:
        UnsupportedError: a keyword cannot be enforced.
        InputError: a keyword has a malformed value, or the schema contradicts itself.
    """
    draft_4 = _is_draft_4(schema)
    todo: list[tuple[Any, str, int, bool, Any]] = [(schema, "", 0, False, None)]
    checked, parents = dict[int, tuple[dict[str, Any], str]](), dict[int, int]()
    while todo:
        own, pointer, depth, renamed, parent = todo.pop()
        place = f"{where}{', ' + pointer if pointer else ''}"
        if depth > MAX_DEPTH:
            raise InputError("the schema is nested too deeply", where=place, expected=f"at most {MAX_DEPTH} levels")
        if isinstance(own, bool):
            continue
        if not isinstance(own, dict):
            expected = "an object or a bool"
            raise InputError("not a JSON schema", where=place, expected=expected, found=shortened(json.dumps(own)))
        _check_values(own, place, draft_4)
        _check_keywords(own, place)
        checked[id(own)], parents[id(own)] = (own, place), id(parent)
        renamed |= own is not schema and any(not str(own[name]).startswith("#") for name in ("$id", "id") if name in own)
        if renamed and "$ref" in own:
            what, hint = '"$ref" below an "$id" within the schema is not supported', 'remove "$id": it changes what "$ref" is'
            raise UnsupportedError(what, where=place, found=shortened(json.dumps(own["$ref"])), hint=hint)
        todo += ((value, f"{pointer}/{name}", depth + 1, renamed, own) for name, value in subschemas(own))
    targets = _references(schema, checked)
    heights = dict.fromkeys(checked, 1)
    for child in reversed(checked):  # children come after their parents
        heights[parents[child]] = max(heights.get(parents[child], 1), heights[child] + 1)
    entries = {id(schema), *map(id, targets.values())}
    limits.check_levels(sum(heights.get(entry, 1) for entry in entries), 'levels of schemas that a "$ref" leads to', where)
    check_contradictions(list(checked.values()), targets.get)


def _references(root: Any, checked: Mapping[int, tuple[dict[str, Any], str]]) -> dict[str, Any]:
    """All "$ref" and their schemas.

    Raises:
        UnsupportedError: one refers to what has not been checked.
        InputError: one refers to nothing.
    """
    target = References(root)
    targets = dict[str, Any]()
    for own, place in checked.values():
        if "$ref" not in own or own["$ref"] in targets:
            continue
        reference = own["$ref"]
        found = targets[reference] = target(reference)
        shown = shortened(json.dumps(reference))
        if found is None:
            expected = "the place of a schema, such as #/$defs/NAME"
            raise InputError('"$ref" refers to nothing', where=place, expected=expected, found=shown)
        if not isinstance(found, bool) and id(found) not in checked:
            what, expected = '"$ref" to what is no schema is not supported', "the place of a schema, such as one in $defs"
            raise UnsupportedError(what, where=place, expected=expected, found=shown)
    return targets


def _anchors(schemas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The schemas that have a name, by the "$ref" that refers to them."""
    own = [*schemas]
    names = [(schema, schema[keyword]) for schema in own for keyword in ("$id", "id") if keyword in schema]  # before 2019-09
    names += [(schema, f"#{schema['$anchor']}") for schema in own if "$anchor" in schema]
    return {name: schema for schema, name in names if isinstance(name, str)}


class References:
    """What a "$ref" within the document `root`, which need not be checked, leads to. Calls give a schema, or None: nothing."""

    def __init__(self, root: Any) -> None:
        self._root = root

    @cached_property
    def _names(self) -> dict[str, Any]:
        todo, schemas = [self._root], dict[int, dict[str, Any]]()
        while todo:
            own = todo.pop()
            if isinstance(own, dict) and id(own) not in schemas:
                schemas[id(own)] = own
                todo += [value for _, value in subschemas(own)]
        return _anchors(schemas.values())

    def __call__(self, reference: str) -> Any:
        if reference in self._names:
            return self._names[reference]
        pointer = unquote(reference[1:])
        own = self._root if reference.startswith("#") and pointer[:1] in ("", "/") else None
        for name in pointer.split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            if isinstance(own, list):
                own = own[int(key)] if key.isdecimal() and int(key) < len(own) else None
            else:
                own = own.get(key) if isinstance(own, dict) else None
        return own


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
    copies = dict[int, dict[str, Any]]()
    own = _copied(schema, 0, copies)
    target = References(own)
    referring = [(part, target(part["$ref"])) for part in copies.values() if isinstance(part.get("$ref"), str)]
    draft_4 = _is_draft_4(schema)
    for part in copies.values():
        for keyword in ("$schema", "$id", "id", "$anchor"):
            if part is own or str(part.get(keyword)).startswith("#") or keyword[-2:] != "id":
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
    pointers, todo = dict[int, str](), [(own, "")]
    while todo:
        part, pointer = todo.pop()
        if isinstance(part, dict):
            pointers[id(part)] = pointer
            todo += [(value, f"{pointer}/{name}") for name, value in subschemas(part)]
    for part, found in referring:
        if id(found) in pointers:
            part["$ref"] = "#" + quote(pointers[id(found)], safe="/~$")  # llguidance refuses "[" and the like
        if root and part["$ref"].startswith("#"):
            part["$ref"] = f"#{root}{part['$ref'][1:]}"
    return own


def _copied(schema: Any, depth: int, copies: dict[int, dict[str, Any]]) -> Any:
    """A copy of a schema and its subschemas. Values, such as those of "enum", are shared. `copies`: all copies, in order."""
    if depth > MAX_DEPTH:
        raise InputError("the schema is nested too deeply", expected=f"at most {MAX_DEPTH} levels")
    if not isinstance(schema, dict):
        return schema
    own = dict(schema)
    copies[id(own)] = own
    for keyword, value in own.items():
        if keyword in _MAPS and isinstance(value, dict):
            own[keyword] = {name: _copied(part, depth + 1, copies) for name, part in value.items()}
        elif keyword in (*_LISTS, "items") and isinstance(value, list):
            own[keyword] = [_copied(part, depth + 1, copies) for part in value]
        elif keyword in _SINGLE:
            own[keyword] = _copied(value, depth + 1, copies)
    return own


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(its JSON pointer within `schema`, without the first slash, and the subschema)."""
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            yield from ((f"{keyword}/{_escaped(name)}", part) for name, part in value.items())
        elif keyword in (*_LISTS, "items") and isinstance(value, list):
            yield from ((f"{keyword}/{i}", part) for i, part in enumerate(value))
        elif keyword in _SINGLE:
            yield keyword, value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _check_keywords(schema: Mapping[str, Any], place: str) -> None:
    union = "oneOf" in schema or "anyOf" in schema  # then OpenAPI's "discriminator" only says which property tells them apart
    for keyword in schema:
        if keyword not in _ENFORCED and keyword not in _ANNOTATIONS and not (union and keyword == "discriminator"):
            hint = "remove it, or express it otherwise; nothing is ignored"
            what = "the keyword is not supported"
            raise UnsupportedError(what, where=place, found=shortened(json.dumps(keyword)), hint=hint)
    types = schema.get("type", "string")  # the "format" of numbers, such as "int32", says nothing about their text
    if "format" in schema and schema["format"] not in FORMATS and "string" in ([types] if isinstance(types, str) else types):
        what, expected = 'this "format" is not supported', f"one of {', '.join(FORMATS)}"
        raise UnsupportedError(what, where=place, expected=expected, found=shortened(json.dumps(schema["format"])))
    for keyword in filter(schema.__contains__, ("const", "enum", "properties", "required")):
        stated = list(schema[keyword]) if keyword == "properties" else schema[keyword]
        if _has_control(stated):
            what, hint = f'"{keyword}" with a control character is not supported', "only \\b, \\f, \\n, \\r and \\t are written"
            raise UnsupportedError(what, where=place, found=shortened(json.dumps(stated)), hint=hint)
    for keyword in filter(schema.__contains__, ("const", "enum", *_BOUNDS)):
        for number in _numbers(schema[keyword]):
            if not _is_exact(number) and not _is_open_end(keyword, number, schema.get("type")):
                what, hint = f'"{keyword}" has a number that is not enforced exactly', "round it, or state it as a text"
                expected = "integers up to 2^53 in absolute value, and numbers of up to 15 digits from 1e-22 to 1e22"
                raise UnsupportedError(what, where=place, expected=expected, found=shortened(json.dumps(number)), hint=hint)
    if "additionalItems" in schema and "prefixItems" in schema and "items" not in schema:
        what, hint = '"additionalItems" beside "prefixItems" is not supported', 'write "items", as draft 2020-12 does'
        raise UnsupportedError(what, where=place, hint=hint)
    for pattern in (schema.get("pattern", ""), *schema.get("patternProperties", ())):
        if _CONTROL.search(pattern) or _CONTROL_ESCAPE.search(_NEGATED.sub("", pattern)):
            what = '"pattern" with a control character is not supported'
            raise UnsupportedError(what, where=place, found=shortened(json.dumps(pattern)))
    if not str(schema.get("$ref", "#")).startswith("#"):
        what, expected = '"$ref" to another document is not supported', 'a reference that begins with "#"'
        raise UnsupportedError(what, where=place, expected=expected, found=shortened(json.dumps(schema["$ref"])))
    if (low := schema.get("minProperties", 0)) > len(schema.get("required", ())) + 1:
        # The names of additional properties may repeat, so only required ones and one more are sure to be different.
        what, expected = "minProperties is not supported", "at most the number of required properties plus 1"
        raise UnsupportedError(what, where=place, expected=expected, found=f'"minProperties": {low}')


def _numbers(value: Any) -> Iterator[int | float]:
    """All numbers in a JSON value."""
    todo = [value]
    while todo:
        own = todo.pop()
        if isinstance(own, int | float) and not isinstance(own, bool):
            yield own
        elif isinstance(own, dict | list):
            todo += own.values() if isinstance(own, dict) else own


def _is_exact(number: float) -> bool:
    """Whether llguidance reads a number as it is.

    It rounds the digits, as one integer, to a double, and multiplies or divides that by a power of ten: two roundings.
    """
    digits = Decimal(repr(number))
    if isinstance(number, int):
        digits = digits.normalize()  # of its zeros at the end
    _, own, exponent = digits.as_tuple()
    whole = int("".join(map(str, own)))
    if abs(int(exponent)) > 308 or (isinstance(number, int) and whole > MAX_NUMBER):
        return False
    if abs(number) > MAX_NUMBER and Decimal(repr(number)) != Decimal(number):
        return False  # the digits that are written are those of another integer
    power = float(f"1e{abs(int(exponent))}")
    return (whole * power if int(exponent) >= 0 else whole / power) == abs(number)


def _has_control(value: Any) -> bool:
    """Whether a text in a JSON value, or a name in it, has such a character."""
    todo = [value]
    while todo:
        own = todo.pop()
        if isinstance(own, str) and _CONTROL.search(own):
            return True
        if isinstance(own, dict):
            todo += [*own, *own.values()]
        elif isinstance(own, list):
            todo += own
    return False


def _check_values(schema: Mapping[str, Any], place: str, draft_4: bool) -> None:
    for keyword in filter(schema.__contains__, _COUNTS):
        value = schema[keyword]
        _expect(type(value) is int and value >= 0, keyword, "an integer >= 0", value, place)
    for keyword in filter(schema.__contains__, _NUMBERS):
        value = schema[keyword]
        if not (draft_4 and keyword.startswith("exclusive")):
            _expect(isinstance(value, int | float) and not isinstance(value, bool), keyword, "a number", value, place)
            _expect(keyword != "multipleOf" or value > 0, keyword, "a number above 0", value, place)
            if keyword != "multipleOf":
                _check_size(keyword, value, schema.get("type"), place)
    types = schema.get("type", "null")
    for name in types if isinstance(types, list) else [types]:
        _expect(name in TYPES, "type", f"one of {', '.join(TYPES)}", types, place)
    if "enum" in schema:
        _expect(isinstance(schema["enum"], list) and schema["enum"], "enum", "a list that is not empty", schema["enum"], place)
    if "required" in schema:
        names = schema["required"]
        fits = isinstance(names, list) and all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
        _expect(fits, "required", "a list of different names", names, place)
    for keyword in filter(schema.__contains__, _MAPS):
        _expect(isinstance(schema[keyword], dict), keyword, "an object of schemas", schema[keyword], place)
    for keyword in filter(schema.__contains__, _LISTS):
        _expect(isinstance(schema[keyword], list), keyword, "a list of schemas", schema[keyword], place)
    if (optional := len(schema.get("properties", ())) - len(schema.get("required", ()))) > limits.MAX_ROW // 2:
        raise InputError("too many optional properties", where=place, expected="about 480", found=optional)
    for keyword in ("pattern", "format", "$ref", "$schema"):
        _expect(isinstance(schema.get(keyword, ""), str), keyword, "a text", schema.get(keyword), place)


def _check_size(keyword: str, value: float, types: Any, place: str) -> None:
    """Refuse a number that llguidance rounds, cannot compile, or crashes with."""
    open_end = _is_open_end(keyword, value, types)
    if not math.isfinite(value) or not (value == 0 or open_end or MIN_NUMBER <= abs(value) <= MAX_NUMBER):
        what, hint = f'"{keyword}" is too large or too close to 0 to be enforced', "round it, or remove it"
        expected = f"0, or a number whose absolute value is from {MIN_NUMBER} to 2^53"
        raise UnsupportedError(what, where=place, expected=expected, found=shortened(json.dumps(value)), hint=hint)


def _is_open_end(keyword: str, value: float, types: Any) -> bool:
    """Whether a bound allows all int64 numbers, whatever llguidance makes of it."""
    return keyword == "maximum" and types == "integer" and value >= _INT64_MAX


def _expect(fits: object, keyword: str, expected: str, found: object, place: str) -> None:
    if not fits:
        what, shown = f"{json.dumps(keyword)} has a malformed value", shortened(json.dumps(found))
        raise InputError(what, where=place, expected=expected, found=shown)

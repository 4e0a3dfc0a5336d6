"""Contradictions in JSON schemas: types, bounds and constants that no value fits, and values that never end.

llguidance drops an optional property whose schema contradicts itself, and starts a text that cannot end. Here such schemas are
refused. What a value may be is compared within a schema, its "allOf" and what its "$ref" refers to; patterns are not compared.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from typing import Any, NamedTuple

from minirt.errors import InputError, UnsupportedError, shortened

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
Target = Callable[[str], Any]  # from a "$ref" to the schema that it refers to, or None
# The least and most of a length, and the type of values that it is about.
_LENGTHS = ("minLength", "maxLength", "string"), ("minItems", "maxItems", "array"), ("minProperties", "maxProperties", "object")
COUNTS = tuple(name for *names, _ in _LENGTHS for name in names)
BOUNDS = "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"
_COMPARED = {*COUNTS, *BOUNDS, "enum", "const"}  # of the schemas of one value, besides "type"
_MAX_PARTS = 32  # schemas of one value that are compared
_MAX_VISITS = 200_000  # schemas, properties and constants that are looked at, counted at each place
_GROUP_COST = 10  # visits that a group of schemas counts as


def check_contradictions(schemas: Sequence[tuple[Mapping[str, Any], str]], target: Target) -> None:
    """Check the schemas of a document, each with its place. Their keywords have acceptable values.

    Raises:
        InputError: no value fits a schema, or none without an end.
        UnsupportedError: bounds of several schemas cannot be enforced together.
    """
    for schema, place in schemas:
        _check_required(schema, place)
    todo, seen, visits = [([schema], place) for schema, place in reversed(schemas)], set[tuple[int, ...]](), 0
    known: dict[int, tuple[list[Any], frozenset[str]]] = {}  # with the list, so that no other one gets its id

    def keys(values: list[Any]) -> frozenset[str]:
        """The keys of the values of a list, computed once for a list that a schema has."""
        if id(values) not in known:
            known[id(values)] = values, frozenset(map(_key, values))
        return known[id(values)][1]

    while todo and visits < _MAX_VISITS:
        group, place = todo.pop()
        parts = _parts(group, target)
        ids = tuple(sorted(map(id, parts)))
        visits += 1
        if ids not in seen:
            seen.add(ids)
            visits += _GROUP_COST + sum(len(part.get(name, ())) for part in parts for name in ("enum", "properties", "allOf"))
            objects = "object" in _check_together(parts, place, keys) and len(parts) > 1
            names = Counter(name for part in parts if objects for name in part.get("properties", ()))
            for name in (name for name, count in names.items() if count > 1):
                same = [part["properties"][name] for part in parts if name in part.get("properties", ())]
                todo.append((same, f"{place}, property {json.dumps(name)}"))
    _check_ends(schemas, target)


def _parts(schemas: Sequence[Any], target: Target) -> list[Mapping[str, Any]]:
    """These schemas and, recursively, those of their "allOf" and "$ref". A value has to fit all of them."""
    todo, parts = list(reversed(schemas)), dict[int, Mapping[str, Any]]()
    while todo and len(parts) < _MAX_PARTS:
        part = todo.pop()
        if isinstance(part, dict) and id(part) not in parts:
            parts[id(part)] = part
            todo += [target(part["$ref"])] if "$ref" in part else []
            todo += reversed(part.get("allOf", ()))
    return list(parts.values())


def _check_together(parts: Sequence[Mapping[str, Any]], place: str, keys: Callable[..., frozenset[str]]) -> frozenset[str]:
    """Check what one value has to fit.

    Returns:
        The types that the value may have.
    """
    types = _types(parts, place)
    if all(_COMPARED.isdisjoint(part) for part in parts):
        return types
    # Bounds in one schema must not contradict each other, even if they are about another type than the schema's.
    about = types if len(parts) > 1 else frozenset(TYPES)
    lengths = dict[str, tuple[int, float]]()
    for low, high, kind in _LENGTHS:
        least = max((part[low] for part in parts if low in part), default=0)
        most = min((part[high] for part in parts if high in part), default=math.inf)
        lengths[kind] = least, most
        if least > most and kind in about:
            raise _contradiction(place, f"{low} at most {high}", f"{low} {least} and {high} {most}")
    low_bound, high_bound = _bounds(parts)
    if low_bound is not None and high_bound is not None and not about.isdisjoint(("integer", "number")):
        _check_bounds(low_bound, high_bound, parts, types, place)
        if len(parts) > 1 and "number" in types:
            _check_enforced(low_bound, high_bound, parts, place)
    values = [part["enum"] if "enum" in part else [part["const"]] for part in parts if "enum" in part or "const" in part]
    values += [[part["const"]] for part in parts if "enum" in part and "const" in part]
    if values:
        common = None if len(values) == 1 else frozenset.intersection(*map(keys, values))
        for value in values[0]:
            kind = _type(value)
            least, most = lengths.get(kind, (0, math.inf))
            fits = kind in types and (kind not in ("string", "array", "object") or least <= len(value) <= most)
            if kind in ("integer", "number"):
                fits &= _is_within(_exact(value), low_bound, high_bound)
            if fits and (common is None or _key(value) in common):
                break
        else:
            shown = json.dumps(values[0] if len(values[0]) > 1 else values[0][0])
            raise _contradiction(place, "a constant that fits the other keywords", shown)
    return types


def _types(parts: Sequence[Mapping[str, Any]], place: str) -> frozenset[str]:
    """The types that a value may have. "number" is that of numbers that are no integers."""
    types = frozenset(TYPES)
    for part in parts:
        if "type" in part:
            named = {part["type"]} if isinstance(part["type"], str) else set(part["type"])
            types &= named | ({"integer"} if "number" in named else set())
    if not types:
        stated = " and ".join(json.dumps(part["type"]) for part in parts if "type" in part)
        raise _contradiction(place, "types that have a value in common", stated)
    return types


def _type(value: Any) -> str:
    kinds = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return "integer" if isinstance(value, float) and value.is_integer() else kinds.get(type(value), "number")


def _key(value: Any) -> str:
    """The same for equal JSON values: 1.0 and 1 are equal."""

    def number(digits: str) -> float:
        value = float(digits)
        return int(value) if value.is_integer() else value

    return json.dumps(json.loads(json.dumps(value), parse_float=number), sort_keys=True)


class _Bound(NamedTuple):
    """A bound of numbers, and the keyword that states it."""

    number: Fraction
    exclusive: bool
    keyword: str
    stated: object

    def __str__(self) -> str:
        return f"{self.keyword} {self.stated}"


def _is_within(number: Fraction, low: _Bound | None, high: _Bound | None) -> bool:
    is_below = low is not None and (number, False) < (low.number, low.exclusive)
    return not is_below and (high is None or (number, high.exclusive) <= (high.number, False))


def _exact(value: float) -> Fraction:
    return Fraction(repr(value))


def _bounds(parts: Sequence[Mapping[str, Any]]) -> tuple[_Bound | None, _Bound | None]:
    """The largest lower bound and the smallest upper one. In draft 4, "exclusiveMinimum" is a bool about "minimum"."""

    def stated(keyword: str, exclusive: str) -> list[_Bound]:
        bounds = [_Bound(_exact(p[keyword]), p.get(exclusive) is True, keyword, p[keyword]) for p in parts if keyword in p]
        others = [part[exclusive] for part in parts if exclusive in part and not isinstance(part[exclusive], bool)]
        return bounds + [_Bound(_exact(value), True, exclusive, value) for value in others]

    lows, highs = stated("minimum", "exclusiveMinimum"), stated("maximum", "exclusiveMaximum")
    low = max(lows, key=lambda bound: (bound.number, bound.exclusive), default=None)
    return low, min(highs, key=lambda bound: (bound.number, not bound.exclusive), default=None)


def _check_bounds(low: _Bound, high: _Bound, parts: Sequence[Mapping[str, Any]], types: frozenset[str], place: str) -> None:
    shown = f"{low} and {high}"
    if low.number > high.number or (low.number == high.number and (low.exclusive or high.exclusive)):
        sign = "below" if low.exclusive or high.exclusive else "at most"
        raise _contradiction(place, f"{low.keyword} {sign} {high.keyword}", shown)
    steps = [_exact(part["multipleOf"]) for part in parts if "multipleOf" in part] + [Fraction(1)] * (types == {"integer"})
    if steps and types <= {"integer", "number"}:
        step = reduce(lambda a, b: Fraction(math.lcm(a.numerator, b.numerator), math.gcd(a.denominator, b.denominator)), steps)
        first = math.ceil(low.number / step) * step
        first += step if first == low.number and low.exclusive else 0
        if first > high.number or (first == high.number and high.exclusive):
            expected = "an integer between them" if step == 1 else f"a multiple of {float(step):g} between them"
            raise _contradiction(place, expected, shown)


def _check_enforced(low: _Bound, high: _Bound, parts: Sequence[Mapping[str, Any]], place: str) -> None:
    """Refuse bounds of different schemas that llguidance does not enforce together; see `enforceable`."""
    if high.number - low.number >= 1 or any({low.keyword, high.keyword} <= set(part) for part in parts):
        return  # bounds in one part are changed by `enforceable`
    if (low.exclusive and low.number >= 0 and low.number.denominator == 1) or (
        high.exclusive and high.number <= 0 and high.number.denominator == 1
    ):
        what, hint = "these bounds cannot be enforced together", "state them in one schema, without allOf and $ref"
        raise UnsupportedError(what, where=place, found=f"{low} and {high}", hint=hint)


def _check_required(schema: Mapping[str, Any], place: str) -> None:
    required = schema.get("required", ())
    if len(required) > schema.get("maxProperties", math.inf):
        shown = f"{len(required)} required properties and maxProperties {schema['maxProperties']}"
        raise _contradiction(place, "at most maxProperties required properties", shown)
    for name in required:
        known = schema.get("properties", {}).get(name, True if "patternProperties" in schema else None)
        if known is False or (known is None and schema.get("additionalProperties") is False):
            raise _contradiction(place, "required properties that are allowed", f"{json.dumps(name)}, which is not")


def _check_ends(schemas: Sequence[tuple[Mapping[str, Any], str]], target: Target) -> None:
    """Refuse a reference to what every value contains again. Only references can make a value endless."""
    places = dict[str, str]()
    for schema, place in schemas:
        if "$ref" in schema:
            places.setdefault(schema["$ref"], place)
    targets = {reference: target(reference) for reference in places}
    endless, visits = list(targets), 0

    def ends(schema: Any) -> bool:
        """Whether a value without an end fits, if all references in `endless` have none."""
        nonlocal visits
        visits += 1
        if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
            return True
        if "$ref" in schema and schema["$ref"] in open_references:
            return False
        if not all(map(ends, schema.get("allOf", ()))):
            return False
        if not all(any(map(ends, schema[keyword])) for keyword in ("anyOf", "oneOf") if schema.get(keyword)):
            return False
        return all(map(ends, _contained(schema)))

    changed = True
    while changed and visits < _MAX_VISITS:
        open_references, before = set(endless), len(endless)
        for reference in list(reversed(endless)):
            if ends(targets[reference]):
                open_references.discard(reference)
        endless = [reference for reference in reversed(endless) if reference in open_references]
        changed = len(endless) < before
    if endless and not changed:
        what, shown = "no text fits: each value contains another one, without end", f'"$ref": {json.dumps(endless[0])}'
        expected = "a value that need not contain one of its kind"
        raise InputError(what, where=places[endless[0]], expected=expected, found=shortened(shown))


def _contained(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of what each value contains, if it has to be an object or an array."""
    if schema.get("type") in ("object", ["object"]) and "patternProperties" not in schema:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        return [properties.get(name, others) for name in schema.get("required", ())]
    if schema.get("type") in ("array", ["array"]):
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):  # before draft 2020-12
            first, rest = rest, schema.get("additionalItems", True)
        count = schema.get("minItems", 0)
        return [*first[:count], *([rest] if count > len(first) else [])]
    return []


def _contradiction(place: str, expected: str, shown: str) -> InputError:
    return InputError("the schema contradicts itself", where=place, expected=expected, found=shortened(shown))

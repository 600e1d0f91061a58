"""How values, types and suggestions read in an error."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_PLAIN = {
    bool: ("true or false", "booleans"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    Path: ("a path", "paths"),
    type(None): ("null", "nulls"),
    dict: ("a mapping", "mappings"),
    list: ("a list", "lists"),
    tuple: ("a list", "lists"),
    set: ("a list", "lists"),
    frozenset: ("a list", "lists"),
}
_LISTS = (list, tuple, set, frozenset)


def shown(value: Any, width: int = 60) -> str:
    """A value as YAML would have it, on one line; whole sections by their kind."""
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        if any(isinstance(item, list | tuple | Mapping) for item in value):
            return "a list"
        text = f"[{', '.join(shown(item) for item in value)}]"
        return text if len(text) <= width else f"a list of {len(value)} items"
    if isinstance(value, float):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(value), repr(value))
    if value is None or isinstance(value, bool | int | str):
        try:
            text = json.dumps(value, ensure_ascii=False)
        except ValueError:  # an integer of thousands of digits
            return "a very large integer"
        return text if len(text) <= width else f"{text[:width]}..."
    return repr(value)


def did_you_mean(name: str, names: Iterable[str]) -> str | None:
    """The known name that this one is nearest to, if any is near."""
    folded = {known.lower().replace("-", "_"): known for known in names}
    near = difflib.get_close_matches(name.lower().replace("-", "_"), folded, n=1, cutoff=0.6)
    return folded[near[0]] if near else None


def suggestion(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest one, and all that are known."""
    names = list(names)
    near = did_you_mean(name, names)
    return (f", did you mean `{near}`? " if near else "; ") + f"known: {', '.join(names) or 'none'}"


def alternatives(annotation: Any, metadata: Iterable[Any] = ()) -> list[tuple[Any, list[Any]]]:
    """The kinds of value that an annotation accepts, each with its constraints: unions and Annotated opened."""
    constraints = list(metadata)
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return alternatives(inner, [*constraints, *extra])
    if origin in (Union, types.UnionType):
        return [pair for member in get_args(annotation) for pair in alternatives(member, constraints)]
    if hasattr(annotation, "__value__"):  # type X = ...
        return alternatives(annotation.__value__, constraints)
    return [(annotation, constraints)]


def expected(types: Iterable[tuple[Any, list[Any]]]) -> str:
    """What a value has to be: `a number greater than 0`, `one of cosine, linear`, `a list of 2 numbers or null`."""
    texts = list(dict.fromkeys(_expected_one(kind, constraints) for kind, constraints in types)) or ["a value"]
    return " or ".join(sorted(texts, key="null".__eq__))


def _expected_one(kind: Any, constraints: list[Any]) -> str:
    origin = get_origin(kind) or kind
    limits = "" if kind is type(None) else " and ".join(_limits(constraints, origin))
    if origin is Literal:
        values = [value if isinstance(value, str) else shown(value) for value in get_args(kind)]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if isinstance(origin, type) and issubclass(origin, BaseModel):
        return "a mapping"
    if origin in _LISTS and get_args(kind):
        return f"{_expected_list(origin, get_args(kind))} {limits}".rstrip()
    return f"{_PLAIN.get(origin, ('a value', ''))[0]} {limits}".rstrip()


def _expected_list(origin: Any, items: tuple[Any, ...]) -> str:
    fixed = origin is tuple and items[-1] is not Ellipsis
    number = f"{len(items)} " if fixed else ""
    plurals = {_plural(kind) for item in items if item is not Ellipsis for kind, _ in alternatives(item)}
    same = plurals.pop() if len(plurals) == 1 else ""
    return f"a list of {number}{same or 'items'}" if number or same else "a list"


def _plural(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "mappings"
    return _PLAIN.get(get_origin(kind) or kind, ("", ""))[1]


def _limits(constraints: list[Any], kind: Any) -> Iterable[str]:
    for constraint in _flat(constraints):
        match constraint:
            case annotated_types.Gt(gt=limit):
                yield f"greater than {limit}"
            case annotated_types.Ge(ge=limit):
                yield f"of at least {limit}"
            case annotated_types.Lt(lt=limit):
                yield f"less than {limit}"
            case annotated_types.Le(le=limit):
                yield f"of at most {limit}"
            case annotated_types.MultipleOf(multiple_of=number):
                yield f"divisible by {number}"
            case annotated_types.MinLen(min_length=length):
                yield f"with at least {length} {_unit(kind, length)}"
            case annotated_types.MaxLen(max_length=length):
                yield f"with at most {length} {_unit(kind, length)}"
            case _ if pattern := getattr(constraint, "pattern", None):
                yield f"matching {getattr(pattern, 'pattern', pattern)}"


def _unit(kind: Any, number: int) -> str:
    unit = "character" if kind is str else "key" if kind is dict else "item"
    return unit if number == 1 else f"{unit}s"


def _flat(constraints: Iterable[Any]) -> Iterable[Any]:
    for constraint in constraints:
        if isinstance(constraint, FieldInfo):
            yield from constraint.metadata
        else:
            yield constraint

"""Which types the config classes expect at a path of the data, for messages and suggestions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fast_llm_ssm.config.registry import Registry
from fast_llm_ssm.config.wording import alternatives, did_you_mean

Path = tuple[str | int, ...]
Type = tuple[Any, list[Any]]
"""A type and its constraints."""

_SEARCH_DEPTH = 3


def types_at(cls: type[BaseModel], data: Any, path: Path) -> list[Type]:
    """The types that the value at a path may have; none where the classes do not say."""
    types: list[Type] = [(cls, [])]
    for step in path:
        types = _below(types, data, step)
        data = child(data, step)
    return types


def keys_at(cls: type[BaseModel], data: Any, path: Path) -> dict[str, FieldInfo]:
    """The keys that the section at a path may have."""
    return _keys(types_at(cls, data, path), at(data, path))


def literals(info: FieldInfo) -> list[Any]:
    """The values that a field lists in a Literal."""
    kinds = [kind for kind, _ in alternatives(info.annotation)]
    return [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]


def tags(cls: type[BaseModel], data: Any, path: Path, key: str) -> list[str]:
    """The values by which `key` tells the sections of a union apart."""
    sections = [fields(kind) for kind, _ in types_at(cls, data, path)]
    return [str(value) for section in sections if key in section for value in literals(section[key])]


def likely_path(cls: type[BaseModel], data: Any, path: Path) -> Path | None:
    """What was meant by a key that its section does not have: a key of that name elsewhere, or a similar one here.

    Elsewhere is below the section, or beside one that contains it, reached through named sections only.
    """
    for depth in range(len(path) - 1, -1, -1):
        above = path[:depth]
        for found in _search(types_at(cls, data, above), at(data, above), str(path[-1])):
            return (*above, *found)
    near = did_you_mean(str(path[-1]), keys_at(cls, data, path[:-1]))
    return (*path[:-1], near) if near else None


def at(data: Any, path: Path) -> Any:
    """The value at a path, None where there is none."""
    for step in path:
        data = child(data, step)
    return data


def child(data: Any, step: str | int) -> Any:
    if isinstance(data, dict):
        return data.get(step)
    return data[step] if isinstance(data, list) and isinstance(step, int) and step < len(data) else None


def fields(kind: Any) -> dict[str, FieldInfo]:
    """The fields of a config class by their names in YAML; none for any other type."""
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return {}
    return {info.alias or name: info for name, info in kind.model_fields.items()}


def _keys(types: list[Type], data: Any) -> dict[str, FieldInfo]:
    return {key: info for kind, _ in _narrowed(types, data) for key, info in fields(kind).items()}


def _below(types: list[Type], data: Any, step: str | int) -> list[Type]:
    found: list[Type] = []
    for kind, _ in _narrowed(types, data):
        origin, arguments = get_origin(kind), get_args(kind)
        if (info := fields(kind).get(str(step))) is not None:
            found += alternatives(info.annotation, info.metadata)
        elif origin is dict:
            found += alternatives(arguments[1])
        elif origin in (list, tuple, set, frozenset) and isinstance(step, int):
            fixed = origin is tuple and arguments[-1] is not Ellipsis and step < len(arguments)
            found += alternatives(arguments[step if fixed else 0])
    return found


def _narrowed(types: list[Type], data: Any) -> list[Type]:
    """Of the types that a value may have, those that fit its `type:`, else all.

    A lone section may stand for a list of one.
    """
    name = data.get("type") if isinstance(data, dict) else None
    found: list[Type] = []
    for kind, constraints in types:
        registry = next((item for item in constraints if isinstance(item, Registry)), None)
        if registry is not None:
            found += [(registered, []) for registered in [registry.loaded(name)] if registered is not None]
        elif isinstance(data, dict) and get_origin(kind) in (list, tuple):
            found += _narrowed(alternatives(get_args(kind)[0]), data)
        elif name is None or "type" not in fields(kind) or name in (literals(fields(kind)["type"]) or [name]):
            found.append((kind, constraints))
    return found or types


def _search(types: list[Type], data: Any, key: str) -> Iterator[Path]:
    """Paths to a key through sections inside sections, nearest first."""
    level: list[tuple[Path, list[Type], Any]] = [((), types, data)]
    for _ in range(_SEARCH_DEPTH):
        deeper: list[tuple[Path, list[Type], Any]] = []
        for path, kinds, value in level:
            known = _keys(kinds, value)
            if key in known:
                yield (*path, key)
            for name, info in known.items():
                deeper.append(((*path, name), alternatives(info.annotation, info.metadata), child(value, name)))
        level = deeper

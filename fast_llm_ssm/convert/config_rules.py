"""Rules between the keys of a config.json and a `model:` section: written once, run both ways.

A `model:` section is plain nested data here. The first rule of a format lays out the blocks; the others fill in values
wherever the layout has a place for them, and on export collect them from there again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fast_llm_ssm.config import UserError

Json = dict[str, Any]
Place = Callable[[Json], Iterator[tuple[Json, str]]]
"""Where a value stands in a `model:` section: pairs of a mapping and a key; none if the model has no such part."""

REQUIRED = object()


class ConfigRule:
    """Answers for some keys of config.json.

    Attributes:
        keys: The keys, each with the other spellings that stand for the same: the first is what fresh files say.
    """

    keys: tuple[tuple[str, ...], ...] = ()

    def read(self, source: Json, model: Json) -> None:
        """Fill in the model from the source.

        Raises:
            UserError: The source asks for something that is not built.
        """

    def write(self, model: Json, source: Json) -> None:
        """The other way: set the first spelling of each key that the model determines.

        Raises:
            UserError: The format cannot hold such a model.
        """

    def update(self, source: Json, spellings: tuple[str, ...], value: Any) -> None:
        """Change one key of a source's own settings, under the spelling that it has there."""
        source[next((key for key in spellings if key in source), spellings[0])] = value


class Value(ConfigRule):
    """A key whose value stands at one place of the model, or at several that must agree.

    Args:
        key: The key of config.json.
        places: Where it stands.
        default: What an absent key means; a function gets the source. Without one the key is required.
        spellings: Other names of the key.
        choices: The words of config.json and ours, if they differ; others are refused.
        load, save: Functions from one to the other, if they differ.
    """

    def __init__(
        self,
        key: str,
        *places: Place,
        default: Any = REQUIRED,
        spellings: tuple[str, ...] = (),
        choices: Mapping[str, str] | None = None,
        load: Callable[[Any], Any] | None = None,
        save: Callable[[Any], Any] | None = None,
    ) -> None:
        self.key, self.places, self.default = key, places, default
        self.keys = ((key, *spellings),)
        self.choices, self.load, self.save = choices, load, save

    def read(self, source: Json, model: Json) -> None:
        value = get(source, self.keys[0], self.default)
        if self.choices is not None:
            if not isinstance(value, str) or value not in self.choices:
                raise UserError(f"{self.key} is {value!r}, expected one of {', '.join(self.choices)}")
            value = self.choices[value]
        elif self.load is not None:
            value = self.load(value)
        for place in self.places:
            for mapping, key in place(model):
                mapping[key] = value

    def write(self, model: Json, source: Json) -> None:
        values = [mapping[key] for place in self.places for mapping, key in place(model)]
        if not values:
            return
        value = one(self.key, values)
        if self.choices is not None:
            words = {ours: theirs for theirs, ours in reversed(list(self.choices.items()))}
            if value not in words:
                raise UserError(f"{self.key} cannot be {value!r}, expected one of {', '.join(words)}")
            value = words[value]
        elif self.save is not None:
            value = self.save(value)
        source[self.key] = value


class Fixed(ConfigRule):
    """A key that must have one value, because nothing else is built; an absent one means that value."""

    def __init__(self, key: str, *values: Any, spellings: tuple[str, ...] = (), fresh: bool = False) -> None:
        self.key, self.values, self.fresh = key, values, fresh
        self.keys = ((key, *spellings),)

    def read(self, source: Json, model: Json) -> None:
        value = get(source, self.keys[0], self.values[0])
        if value not in self.values:
            expected = " or ".join(map(repr, self.values))
            raise UserError(f"{self.key} is {value!r}, expected {expected}: anything else is not built")

    def write(self, model: Json, source: Json) -> None:
        if self.fresh:
            source[self.key] = self.values[0]


class Carried(ConfigRule):
    """Keys that change nothing in the model: repeated on export as they came. `fresh` is what new files say."""

    def __init__(self, *keys: str, **fresh: Any) -> None:
        self.keys = tuple((key,) for key in (*keys, *fresh))
        self.fresh = fresh

    def write(self, model: Json, source: Json) -> None:
        source.update(self.fresh)


def get(source: Json, spellings: tuple[str, ...], default: Any = REQUIRED) -> Any:
    """The value of a key under the first of its spellings that is there."""
    for key in spellings:
        if key in source:
            return source[key]
    if default is REQUIRED:
        raise UserError(f"the key {spellings[0]} is missing")
    return default(source) if callable(default) else default


def one(key: str, values: list[Any]) -> Any:
    """The value that a format has one of, collected from all places where the model has it."""
    if other := [value for value in values if value != values[0]]:
        raise UserError(f"one {key} for all layers, got {values[0]!r} and {other[0]!r}")
    return values[0]


def number(value: Any) -> float:
    """A number in any of the ways in which config.json spells infinity: Infinity, "Infinity", {"__float__": ...}."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        value = value["__float__"]
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"got {value!r}, expected a number") from None


# Places


def top(*path: str) -> Place:
    """A key of the section itself, or of a mapping in it."""

    def find(model: Json) -> Iterator[tuple[Json, str]]:
        yield from _below(model, path)

    return find


def mixer(kind: str, *path: str) -> Place:
    """A key of every mixer of a type, in blocks, shared blocks and parallel branches."""

    def find(model: Json) -> Iterator[tuple[Json, str]]:
        for config in mixers(model, kind):
            yield from _below(config, path)

    return find


def norms(*path: str) -> Place:
    """A key of every sublayer's norm, and of the final one."""

    def find(model: Json) -> Iterator[tuple[Json, str]]:
        for config in (*sublayers(model), model):
            yield from _below(config.setdefault("final_norm" if config is model else "norm", {}), path)

    return find


def sublayers(model: Json) -> Iterator[Json]:
    """Every sublayer of every block and shared block."""
    for section in ("blocks", "shared"):
        for block in model.get(section, {}).values():
            yield from block


def mixers(model: Json, kind: str) -> Iterator[Json]:
    """Every mixer of a type."""

    def within(config: Json) -> Iterator[Json]:
        if config["type"] == kind:
            yield config
        for branch in config.get("branches", ()):
            yield from within(branch)

    for sublayer in sublayers(model):
        yield from within(sublayer["mixer"])


def _below(mapping: Json, path: tuple[str, ...]) -> Iterator[tuple[Json, str]]:
    for key in path[:-1]:
        if mapping.setdefault(key, {}) is None:  # said to be absent, as a rope that a layer does without
            return
        mapping = mapping[key]
    yield mapping, path[-1]

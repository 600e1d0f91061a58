"""YAML text to a tree that remembers where every value was written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from fast_llm_ssm.config.errors import ConfigError, UserError

MAX_DEPTH = 100
MAX_VALUES = 100_000

_TAG = "tag:yaml.org,2002:"
_TRUE_FALSE = {"true": True, "false": False}
_NOT_NUMBERS_YET = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}

# The YAML 1.2 core schema: `off`, `on`, `yes` and `no` are words, `3e-4` and `1e3` are numbers; also 1_000.
SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
)


class Resolver(BaseResolver):
    """What a plain scalar means. Shared with the dumper, which so knows which text needs quotes."""


for _name, _pattern, _first in SCALARS:
    Resolver.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})$"), _first)


class _Loader(Reader, Scanner, Parser, Composer, Resolver):
    def __init__(self, text: str):
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        Resolver.__init__(self)
        self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


@dataclass(frozen=True)
class Origin:
    """Where something was written: a line of a file, or (line None) what `file` says, such as an override."""

    file: str
    line: int | None

    def error(self, path: str, message: str) -> ConfigError:
        return ConfigError(self.file, self.line, path, message)


@dataclass
class Node:
    """A value and where its key (or the list item) was written. Mappings and lists hold nodes."""

    value: Any
    origin: Origin

    def plain(self) -> Any:
        """The same without origins; every call builds new mappings and lists."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def nearest(self, path: Sequence[str | int]) -> tuple[Node, list[str | int]]:
        """The node at a path, or the deepest one on the way to it, and the path as it was written.

        A lone mapping may stand for a list of one: the index of its only item was not written.
        """
        node, where = self, list[str | int]()
        for index, step in enumerate(path):
            if isinstance(node.value, dict) and isinstance(step, int):
                continue
            where.append(step)
            if isinstance(node.value, dict) and step in node.value:
                node = node.value[step]
            elif isinstance(node.value, list) and isinstance(step, int) and step < len(node.value):
                node = node.value[step]
            else:
                return node, [*where, *path[index + 1 :]]
        return node, where


def parse(text: str, file: str, errors: list[ConfigError], override: str | None = None, path: str = "") -> Node | None:
    """Read one YAML document.

    Args:
        text: the document.
        file: its name in messages.
        errors: mistakes that leave a tree (duplicate keys, keys that are not text) are appended here.
        override: what to say in place of file and line where the document is the value of an override.
        path: of the document in the whole tree, for messages.

    Returns:
        The tree; None for an empty document.

    Raises:
        UserError: not YAML; one line with the place.
    """
    try:
        root = _Loader(text).get_single_node()
        if root is None:
            return None
        return _Converter(file, errors, override).convert(root, path, None, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise _not_yaml(file, override, mark.line + 1 if mark else None, problem) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _not_yaml(file, override, line, f"unprintable character #x{ord(text[error.position]):04x}") from None


def _not_yaml(file: str, override: str | None, line: int | None, problem: str) -> UserError:
    place = override or (file if line is None else f"{file}:{line}")
    problem = problem.replace("\n", " ").replace("\t", "\\t")
    return UserError(f"{place}: not valid YAML: {problem}")


class _Converter:
    """Composed YAML nodes to own nodes: aliases copied, merges (`<<`) applied, duplicate keys reported."""

    def __init__(self, file: str, errors: list[ConfigError], override: str | None):
        self.file = file
        self.errors = errors
        self.override = override
        self.count = 0

    def origin(self, mark: yaml.Mark) -> Origin:
        return Origin(self.override, None) if self.override else Origin(self.file, mark.line + 1)

    def convert(self, node: yaml.Node, path: str, key: yaml.Node | None, parents: tuple[yaml.Node, ...]) -> Node:
        parents = self.enter(node, parents)
        # The line of the key, but of the anchor for an alias: that is where the value has to be mended.
        aliased = key is not None and node.start_mark.index < key.start_mark.index
        origin = self.origin(node.start_mark if key is None or aliased else key.start_mark)
        if isinstance(node, yaml.MappingNode):
            return Node(self.mapping(node, path, parents), origin)
        if isinstance(node, yaml.SequenceNode):
            items = enumerate(node.value)
            return Node([self.convert(item, f"{path}.{i}".lstrip("."), None, parents) for i, item in items], origin)
        return Node(_scalar(node), origin)

    def enter(self, node: yaml.Node, parents: tuple[yaml.Node, ...]) -> tuple[yaml.Node, ...]:
        self.count += 1
        if any(node is parent for parent in parents):
            raise yaml.MarkedYAMLError(problem="an alias contains itself", problem_mark=node.start_mark)
        if self.count > MAX_VALUES:
            problem = f"aliases expand to more than {MAX_VALUES:,} values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return (*parents, node)

    def mapping(self, node: yaml.MappingNode, path: str, parents: tuple[yaml.Node, ...]) -> dict[str, Node]:
        written: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be text", problem_mark=key.start_mark)
            name = key.value
            here = f"{path}.{name}".lstrip(".")
            if name in lines:
                message = "duplicate key" if self.override else f"duplicate key, first written in line {lines[name]}"
                self.errors.append(self.origin(key.start_mark).error(here, message))
                continue
            lines[name] = key.start_mark.line + 1
            if key.tag == _TAG + "merge":
                for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if not isinstance(source, yaml.MappingNode):
                        raise yaml.MarkedYAMLError(problem="`<<` merges mappings only", problem_mark=source.start_mark)
                    merged = self.mapping(source, path, self.enter(source, parents)) | merged
            else:
                written[name] = self.convert(value, here, key, parents)
        return merged | written


def _scalar(node: yaml.Node) -> Any:
    kind, text = node.tag.removeprefix(_TAG), node.value
    try:
        if kind == "str":
            return text
        if kind == "null":
            return None
        if kind == "bool":
            return _TRUE_FALSE[text.lower()]
        if kind == "int":
            return int(text.replace("_", ""))
        if kind == "float":
            return float(_NOT_NUMBERS_YET.get(text.lower(), text.replace("_", "")))
        if kind == "merge":
            return text
    except (ValueError, KeyError):
        raise yaml.MarkedYAMLError(
            problem=f"`{text[:40]}` cannot be read as {kind}", problem_mark=node.start_mark
        ) from None
    raise yaml.MarkedYAMLError(problem=f"unsupported tag {node.tag}", problem_mark=node.start_mark)


def merge(base: Node, over: Node) -> Node:
    """`over` on top of `base`: mappings key by key, everything else replaced.

    Two mappings with different `type` describe different things: the later one replaces the earlier one whole.
    """
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    types = [node.value["type"].value for node in (base, over) if "type" in node.value]
    if len(types) == 2 and types[0] != types[1]:
        return over
    joined = dict(base.value)
    for key, child in over.value.items():
        joined[key] = merge(joined[key], child) if key in joined else child
    return Node(joined, over.origin)

"""Run files: read, extended, overridden, validated."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fast_llm_ssm.config.errors import ConfigError, ConfigErrors, UserError
from fast_llm_ssm.config.explain import explain
from fast_llm_ssm.config.registry import imports
from fast_llm_ssm.config.tree import Node, Origin, merge, parse
from fast_llm_ssm.config.wording import shown

C = TypeVar("C", bound=BaseModel)


def load(
    path: str | Path,
    cls: type[C],
    overrides: Iterable[str] = (),
    *,
    bases: Mapping[str, Callable[[str], str | Path]] | None = None,
    allow_plugins: bool = True,
) -> C:
    """Read a YAML file into a config.

    `extends: other.yaml` (or a list of files, relative to the file) puts the file on top of others: mappings are
    merged key by key, everything else is replaced, and so is a mapping whose `type` changes.

    Args:
        path: the file.
        cls: the config class.
        overrides: `a.b.0.c=value` each, the value in YAML; applied in order on top of the file.
        bases: section -> a function from the value of the section's `from` to a YAML file. The same section of that
            file becomes the base that the section is merged over.
        allow_plugins: whether the modules listed under `plugins` may be imported, and registered names looked up in
            installed packages that are not loaded yet. False for files that came with weights.

    Returns:
        The validated config.

    Raises:
        ConfigErrors: all mistakes at once.
        UserError: the file, or one it extends, cannot be read at all.
    """
    errors: list[ConfigError] = []
    return _validate(_read(Path(path), (), errors), errors, cls, overrides, bases or {}, allow_plugins)


def loads(
    text: str, cls: type[C], overrides: Iterable[str] = (), *, name: str = "<text>", allow_plugins: bool = True
) -> C:
    """The same for YAML in a string; `name` stands for the file in messages, and `extends` starts from its folder."""
    errors: list[ConfigError] = []
    return _validate(_extend(text, Path(name), (), errors), errors, cls, overrides, {}, allow_plugins)


def validate(data: Mapping[str, Any], cls: type[C], *, name: str, allow_plugins: bool = True) -> C:
    """The same for plain values that no run file holds; `name` says in messages where they are from."""
    return _validate(_tree(data, Origin(name, None)), [], cls, (), {}, allow_plugins)


def read_yaml(text: str, name: str = "<text>") -> Any:
    """Plain values of YAML in a string, read by the rules of run files: `on` is a word, `1e3` a number.

    Raises:
        ConfigErrors: duplicate keys.
        UserError: not YAML.
    """
    errors: list[ConfigError] = []
    tree = parse(text, name, errors)
    if errors:
        raise ConfigErrors(errors)
    return None if tree is None else tree.plain()


def _tree(data: Any, origin: Origin) -> Node:
    if isinstance(data, Mapping):
        return Node({str(key): _tree(value, origin) for key, value in data.items()}, origin)
    if isinstance(data, list | tuple):
        return Node([_tree(value, origin) for value in data], origin)
    return Node(data, origin)


def _read(path: Path, below: tuple[Path, ...], errors: list[ConfigError], asked_by: str = "") -> Node:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{asked_by}{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{asked_by}{path}: a folder, expected a YAML file") from None
    except OSError as error:
        raise UserError(f"{asked_by}{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        raise UserError(f"{asked_by}{path}:{line}: not a text file in UTF-8") from None
    return _extend(text, path, below, errors)


def _extend(text: str, path: Path, below: tuple[Path, ...], errors: list[ConfigError]) -> Node:
    """The tree of a file on top of those that it extends."""
    tree = parse(text, str(path), errors)
    if tree is None:
        raise UserError(f"{path}: the file is empty, expected a mapping")
    if not isinstance(tree.value, dict):
        raise UserError(f"{path}:{tree.origin.line}: expected a mapping of keys to values")
    extends = tree.value.pop("extends", None)
    if extends is None:
        return tree
    files = extends.value if isinstance(extends.value, list) else [extends]
    base: Node | None = None
    for file in files:
        if not isinstance(file.value, str):
            message = f"got {shown(file.value)}, expected a file name or a list of file names"
            raise UserError(str(file.origin.error("extends", message)))
        other = path.parent / file.value
        chain = (*below, path)
        if any(other.resolve() == earlier.resolve() for earlier in chain):
            names = " -> ".join(map(str, (*chain, other)))
            raise UserError(str(file.origin.error("extends", f"files extend each other: {names}")))
        tree_below = _read(other, chain, errors, asked_by=f"{file.origin.error('extends', '')}: ")
        base = tree_below if base is None else merge(base, tree_below)
    return tree if base is None else merge(base, tree)


def _validate(
    tree: Node,
    errors: list[ConfigError],
    cls: type[C],
    overrides: Iterable[str],
    bases: Mapping[str, Callable[[str], str | Path]],
    allow_plugins: bool,
) -> C:
    for override in overrides:
        _override(tree, override, errors)
    baseless = [section for section, find in bases.items() if not _rebase(tree, section, find, errors)]
    withheld = _import_plugins(tree, errors, allow_plugins)
    config: C | None = None
    try:
        with imports(allow_plugins):
            config = cls.model_validate(tree.plain())
    except ValidationError as error:
        with imports(allow_plugins):
            found = explain(error, cls, tree) + withheld
        # What a section lacks would have come from the base that was not found.
        errors += [e for e in found if not (e.message.startswith("missing") and e.path.split(".")[0] in baseless)]
    if config is None or errors:
        raise ConfigErrors(_in_order(errors))
    return config


def _in_order(errors: list[ConfigError]) -> list[ConfigError]:
    """File by file, each from top to bottom; overrides last."""
    files = list(dict.fromkeys(error.file for error in errors))
    return sorted(errors, key=lambda error: (error.line is None, files.index(error.file), error.line or 0))


def _override(tree: Node, text: str, errors: list[ConfigError]) -> None:
    """Set one value of the tree; sections on the way are created, unknown keys left to the validation."""
    origin = Origin(f"override '{text}'", None)
    path, equals, value = text.partition("=")
    steps = path.strip().split(".")
    if not equals or not all(steps):
        errors.append(origin.error("", "expected KEY=VALUE, the key dotted as in optim.lr=3e-4"))
        return
    try:
        new = parse(value, origin.file, errors, origin.file, path.strip()) or Node(None, origin)
    except UserError as error:
        errors.append(origin.error("", str(error).removeprefix(f"{origin.file}: ")))
        return
    node = tree
    for depth, step in enumerate(steps):
        here = ".".join(steps[:depth])
        last = depth == len(steps) - 1
        if isinstance(node.value, list):
            if not step.isdecimal() or int(step) >= len(node.value):
                wanted = f"expected an item from 0 to {len(node.value) - 1}" if node.value else "the list is empty"
                errors.append(origin.error(here, f"got item `{step}`, {wanted}"))
                return
            if last:
                node.value[int(step)] = new
            else:
                node = node.value[int(step)]
        else:
            if node.value is None:
                node.value = {}
            if not isinstance(node.value, dict):
                errors.append(origin.error(here, "is a single value, it has no keys"))
                return
            if last:
                node.value[step] = new
            else:
                node = node.value.setdefault(step, Node({}, origin))


def _rebase(tree: Node, section: str, find: Callable[[str], str | Path], errors: list[ConfigError]) -> bool:
    """Merge a section over the same section of the file that its `from` names. Returns whether there was no mistake."""
    over = tree.value.get(section)
    source = over.value.get("from") if over and isinstance(over.value, dict) else None
    if over is None or source is None or not isinstance(source.value, str):
        return True
    try:
        base = _read(Path(find(source.value)), (), errors).value.get(section)
    except UserError as error:
        errors.append(source.origin.error(f"{section}.from", str(error)))
        return False
    if base is None:
        errors.append(source.origin.error(f"{section}.from", f"`{source.value}` has no `{section}`"))
        return False
    tree.value[section] = merge(base, over)
    return True


def _import_plugins(tree: Node, errors: list[ConfigError], allowed: bool) -> list[ConfigError]:
    """Import what `plugins` lists. Returns what to say, should the validation fail, about those that were not."""
    plugins = tree.value.get("plugins")
    withheld: list[ConfigError] = []
    for index, plugin in enumerate(plugins.value if plugins and isinstance(plugins.value, list) else []):
        path = f"plugins.{index}"
        if not isinstance(plugin.value, str) or plugin.value in sys.modules:
            continue
        if not allowed:
            message = f"`{plugin.value}` was not imported, --allow-plugins permits it"
            withheld.append(plugin.origin.error(path, message))
            continue
        try:
            importlib.import_module(plugin.value)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            errors.append(plugin.origin.error(path, f"importing `{plugin.value}` failed: {reason}"))
    return withheld

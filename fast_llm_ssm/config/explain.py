"""Pydantic's findings to errors in the user's terms: place, dotted path, what was got, what is expected."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from fast_llm_ssm.config.errors import ConfigError
from fast_llm_ssm.config.tree import Node
from fast_llm_ssm.config.walk import Path, at, keys_at, likely_path, tags, types_at
from fast_llm_ssm.config.wording import expected, shown, suggestion

_RAISED = ("value_error", "assertion_error")
_TAGS = ("union_tag_invalid", "union_tag_not_found")
_KEY_FIRST = re.compile(r"([A-Za-z_][\w-]*(?:\.[\w-]+)*): ")


@dataclass
class _Finding:
    """One of pydantic's errors. `members`: those of unions that it belongs to, each with its depth in `path`."""

    kind: str
    path: Path
    text: str = ""
    members: list[tuple[int, str]] = field(default_factory=list)


def explain(error: ValidationError, cls: type[BaseModel], tree: Node) -> list[ConfigError]:
    """One error a mistake in a tree that `cls` refused."""
    data = tree.plain()
    findings = _settle_unions([_finding(detail, data) for detail in error.errors(include_url=False)])
    findings = _without_echoes(findings, cls, data)
    mistakes = [mistake for finding in findings for mistake in _mistakes(finding, cls, tree, data)]
    # An aliased section is checked at each of its uses, but was written once.
    unique = {
        (mistake.file, mistake.line, mistake.path.split(".")[-1], mistake.message): mistake
        for mistake in reversed(mistakes)
    }
    return list(reversed(unique.values()))


def _finding(detail: Any, data: Any) -> _Finding:
    """Follow pydantic's location through the data as written; a step that leads nowhere names a union's member."""
    finding = _Finding(detail["type"], (), detail["msg"])
    if finding.kind in _RAISED:
        finding.text = str(detail["ctx"]["error"])
    elif finding.kind in _TAGS:
        finding.text = detail["ctx"]["discriminator"].strip("'")
    *inner, last = detail["loc"] or [None]
    for step in inner:
        if _leads_on(data, step):
            data = data[step]
            finding.path += (step,)
        elif isinstance(step, str):
            finding.members.append((len(finding.path), step))
    if _leads_on(data, last) or isinstance(last, str) and finding.kind in ("missing", "ready"):
        finding.path += (last,)
    elif isinstance(last, str):
        finding.members.append((len(finding.path), last))
    elif finding.kind == "missing":  # an item of a list of fixed length
        finding.kind = "too_short"
    return finding


def _leads_on(data: Any, step: str | int | None) -> bool:
    if isinstance(data, dict):
        return step in data
    return isinstance(data, list) and isinstance(step, int) and step < len(data)


def _settle_unions(findings: list[_Finding]) -> list[_Finding]:
    """Keep the findings of the member that a union's value was meant to be; without such, one for the union."""
    settled: list[_Finding] = []
    unions: dict[Path, dict[str, list[_Finding]]] = {}
    for finding in findings:
        if finding.members:
            depth, member = finding.members.pop(0)
            unions.setdefault(finding.path[:depth], {}).setdefault(member, []).append(finding)
        else:
            settled.append(finding)
    for path, members in unions.items():
        meant = [group for group in members.values() if all(_is_inside(finding, path) for finding in group)]
        settled += _settle_unions(min(meant, key=len)) if meant else [_Finding("union", path)]
    return settled


def _without_echoes(findings: list[_Finding], cls: type[BaseModel], data: Any) -> list[_Finding]:
    """Leave out what another mistake brought about.

    A misspelt key makes the right one missing; a tuple whose items are wrong is also called too short.
    """
    unknown = [finding.path for finding in findings if finding.kind == "extra_forbidden"]
    meant = {likely_path(cls, data, path) for path in unknown}
    wrong_inside = {finding.path[:depth] for finding in findings for depth in range(len(finding.path))}
    echoes: dict[str, set[Any]] = {"missing": meant, "too_short": wrong_inside}
    return [finding for finding in findings if finding.path not in echoes.get(finding.kind, ())]


def _unknown_key(cls: type[BaseModel], data: Any, path: Path) -> str:
    """What to say about a key that its section does not have."""
    meant = likely_path(cls, data, path)
    if meant:
        return f"unknown key, did you mean `{meant[-1] if meant[:-1] == path[:-1] else _dotted(meant)}`?"
    names = keys_at(cls, data, path[:-1])
    return f"unknown key{suggestion(str(path[-1]), names)}" if names else "unknown key"


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))


def _is_inside(finding: _Finding, path: Path) -> bool:
    return len(finding.path) > len(path) or finding.kind in (*_RAISED, *_TAGS)


def _mistakes(finding: _Finding, cls: type[BaseModel], tree: Node, data: Any) -> Iterator[ConfigError]:
    path = finding.path

    def mistake(message: str, *below: str | int) -> ConfigError:
        node, where = tree.nearest((*path, *below))
        return node.origin.error(_dotted(where), message)

    if finding.kind == "extra_forbidden":
        yield mistake(_unknown_key(cls, data, path))
    elif finding.kind == "ready":
        yield mistake(finding.text)
    elif finding.kind in _RAISED:
        keys = keys_at(cls, data, path)
        for line in filter(None, finding.text.splitlines()):
            match = _KEY_FIRST.match(line)
            below = [int(step) if step.isdigit() else step for step in match[1].split(".")] if match else []
            if match and below[0] in keys:
                yield mistake(line[match.end() :], *below)
            else:
                yield mistake(line)
    elif finding.kind in _TAGS:
        tag, names, section = finding.text, tags(cls, data, path, finding.text), at(data, path)
        if tag not in section:
            yield mistake(f"missing key, expected one of {', '.join(names)}", tag)
        elif isinstance(section[tag], str):
            yield mistake(f"unknown {tag} `{section[tag]}`{suggestion(section[tag], names)}", tag)
        else:
            yield mistake(f"got {shown(section[tag])}, expected one of {', '.join(names)}", tag)
    else:
        wanted = expected(types_at(cls, data, path))
        if finding.kind == "finite_number":
            wanted = wanted.replace("a number", "a finite number")
        got = "missing key" if finding.kind == "missing" else f"got {shown(at(data, path))}"
        if wanted == "a value" and finding.kind != "missing":
            wanted = re.sub(r"^\w+( \w+)? should (be |have )?", "", finding.text)
        yield mistake(got if wanted == "a value" else f"{got}, expected {wanted}")

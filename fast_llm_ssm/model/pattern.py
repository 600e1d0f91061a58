"""Layer patterns: which block stands at each depth."""

from __future__ import annotations

import re
from collections.abc import Mapping

_REPEAT = re.compile(r"\(([^()]*)\)(\d+)")


def expand_pattern(pattern: str, symbols: Mapping[str, str]) -> list[str]:
    """Block names of a pattern string.

    One character a layer, blanks ignored; `(...)N` repeats. `(mmh)2 m` is m m h m m h m. A character stands for the
    block of that name, or for `symbols[character]`.

    Raises:
        ValueError: brackets that don't pair, or a group without a number.
    """
    text = re.sub(r"\s+", "", pattern)
    while match := _REPEAT.search(text):
        text = text[: match.start()] + match[1] * int(match[2]) + text[match.end() :]
    if "(" in text or ")" in text:
        raise ValueError(f"pattern {pattern!r}: brackets must pair and be followed by a number, as in (mmh)2")
    return [symbols.get(character, character) for character in text]


def fit(names: list[str], num_blocks: int | None) -> list[str]:
    """The pattern repeated, and cut, to `num_blocks` layers."""
    if num_blocks is None or not names:
        return names
    return [names[i % len(names)] for i in range(num_blocks)]

"""Layer patterns: which block stands at each depth."""

from __future__ import annotations

import re
from collections.abc import Mapping

MAX_LAYERS = 10_000
_MAX_DIGITS = 9
_REPEAT = re.compile(r"\(([^()]*)\)(\d+)")


def expand_pattern(pattern: str, symbols: Mapping[str, str]) -> list[str]:
    """Block names of a pattern string.

    One character a layer, blanks ignored; `(...)N` repeats. `(mmh)2 m` is m m h m m h m. A character stands for the
    block of that name, or for `symbols[character]`.

    Raises:
        ValueError: brackets that don't pair, a group without a number, or more than MAX_LAYERS.
    """
    text = re.sub(r"\s+", "", pattern)
    while match := _REPEAT.search(text):
        if len(match[2]) > _MAX_DIGITS or len(text) + len(match[1]) * int(match[2]) > 2 * MAX_LAYERS:
            raise ValueError(f"got {pattern!r}, expected at most {MAX_LAYERS:,} layers")
        text = text[: match.start()] + match[1] * int(match[2]) + text[match.end() :]
    if "(" in text or ")" in text:
        raise ValueError(f"got {pattern!r}, expected brackets that pair, followed by a number, as in (mmh)2")
    return [symbols.get(character, character) for character in text]


def fit(names: list[str], num_blocks: int | None) -> list[str]:
    """The pattern repeated, and cut, to `num_blocks` layers."""
    if num_blocks is None or not names:
        return names
    return [names[i % len(names)] for i in range(num_blocks)]

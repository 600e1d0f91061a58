"""From tokens to text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from fast_llm_ssm.data.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 5
"""Tokens of the prompt decoded along: a tokenizer may write a text's first token without its blank."""
_LONGEST_WAIT = 32
"""Tokens after which a character that is not finished never will be. UTF-8 takes at most four bytes a character."""


class TextStream:
    """The text of a growing list of tokens, in pieces that never need to be taken back.

    A piece ends before a character that lacks bytes, and before what may turn out to be a stop string. The pieces
    together are the text; a stop string and what follows it is no part of it.

    Args:
        tokenizer: decodes.
        prompt: the tokens before.
        stop: strings that end the text.

    Attributes:
        stopped: a stop string was found; no more text will come.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        self.stopped = False
        self._ids = list(prompt[-_CONTEXT_TOKENS:])
        # Decoding starts at `_start`, one finished piece before `_settled`, up to where all characters are complete.
        self._start, self._settled = 0, len(self._ids)
        self._shown = len(_complete(tokenizer.decode(self._ids)))  # characters since `_start` that have gone out
        self._held = ""  # perhaps the beginning of a stop string

    def push(self, token: int) -> str:
        """The text that became certain with this token, often none."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids[self._start :])
        complete = _complete(text)
        if len(self._ids) - self._settled > _LONGEST_WAIT:
            complete = text
        piece = complete[self._shown :]
        self._shown = max(self._shown, len(complete))
        if complete == text:
            self._start, self._settled = self._settled, len(self._ids)
            self._shown = len(self._tokenizer.decode(self._ids[self._start :]))
        return self._until_stop(piece)

    def finish(self) -> str:
        """The rest: no token follows."""
        text = self._tokenizer.decode(self._ids[self._start :])
        piece, self._shown = text[self._shown :], len(text)
        piece = self._until_stop(piece) + self._held
        self._held = ""
        return piece

    def _until_stop(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        found = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        wait = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - wait :]
        return text[: len(text) - wait]


def _complete(text: str) -> str:
    """The text without a character that may still be completed: three bytes of one at most, a U+FFFD each."""
    for _ in range(3):
        text = text.removesuffix(_REPLACEMENT)
    return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

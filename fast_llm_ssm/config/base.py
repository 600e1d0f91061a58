"""The base class of every config."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

# Kinds for which YAML has no own notation: a list stands for a tuple or a set, text for a path.
_WRITTEN_AS_ANOTHER_KIND = {"tuple", "set", "frozenset", "lax-or-strict"}


def _relax(schema: Any) -> None:
    if isinstance(schema, dict):
        kind = schema.get("type")  # not text: a mapping from field names, one of them `type`, to their schemas
        if isinstance(kind, str) and kind in _WRITTEN_AS_ANOTHER_KIND:
            schema["strict"] = False
        for key, value in schema.items():
            if not (isinstance(kind, str) and key in ("metadata", "default", "serialization")):
                _relax(value)
    elif isinstance(schema, list | tuple):
        for item in schema:
            _relax(item)


class Config(BaseModel):
    """A frozen, strict section of a run file: no unknown keys, no guessing of types.

    A boolean is not an integer and "3" is not a number, but an integer is fine for a number. Numbers are finite unless
    a field says allow_inf_nan. A choice of words is a Literal. Checks over several fields are pydantic validators that
    raise ValueError: a message that begins with a key, as in
    `num_heads: got 5, expected a multiple of num_kv_heads (2)`, is reported at that key; several lines in one message
    are several errors.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _relax(schema)
        return schema

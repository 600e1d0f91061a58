"""A config as YAML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import yaml
from pydantic import BaseModel

from fast_llm_ssm.config.tree import Resolver


class _Dumper(yaml.SafeDumper):
    """Quotes what our own loader would not read as text."""

    yaml_implicit_resolvers = Resolver.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Double quotes where there are line breaks, of which PyYAML loses some in other styles."""
    style = '"' if any(character in "\n\r\x85\u2028\u2029" for character in text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)


def dump(config: BaseModel) -> str:
    """YAML that `loads` reads into an equal config: every key, defaults included, but for those null by default."""
    return yaml.dump(
        _plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120
    )


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        fields = {info.alias or name: (info, getattr(value, name)) for name, info in type(value).model_fields.items()}
        return {
            key: _plain(item) for key, (info, item) in fields.items() if not (item is None and info.default is None)
        }
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value

"""Whether two model configs compute the same function, however they are written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fast_llm_ssm.layers.attention import AttentionConfig
from fast_llm_ssm.layers.base import MixerConfig
from fast_llm_ssm.layers.mamba2 import Mamba2Config
from fast_llm_ssm.model import ModelConfig

# Names, notation, and what only matters to new weights.
_NOT_COMPARED = {"name", "conversion", "expect", "init"}
_NOTATION = {"blocks", "shared", "pattern", "symbols", "num_blocks", "vocab_size", "pad_vocab_multiple"}


def differences(first: ModelConfig, second: ModelConfig) -> list[str]:
    """Where the first differs from the second: `layers.3.0.mixer.window: 5 (would become null)`; empty if nowhere."""
    return list(_differences("", _canonical(first), _canonical(second)))


def _canonical(config: ModelConfig) -> dict[str, Any]:
    """Layer by layer, defaults that depend on other values filled in, shared blocks numbered."""
    data = {key: value for key, value in config.model_dump().items() if key not in _NOT_COMPARED | _NOTATION}
    used = [config.blocks[name] for name in config.layer_names]
    shared = dict.fromkeys(name for block in used for sub in block if sub.inject for name in sub.inject.shared)
    numbers = {name: number for number, name in enumerate(shared)}
    data["layers"] = [[_sublayer(sub, config, numbers) for sub in block] for block in used]
    data["shared"] = [[_sublayer(sub, config, numbers) for sub in config.shared[name]] for name in shared]
    data["rows"] = config.num_rows
    return data


def _sublayer(sublayer: Any, config: ModelConfig, numbers: dict[str, int]) -> dict[str, Any]:
    data = sublayer.model_dump()
    data["input_size"] = sublayer.input_size or config.hidden_size
    data["mixer"] = _mixer(sublayer.mixer)
    if sublayer.inject:
        data["inject"]["shared"] = [numbers[name] for name in sublayer.inject.shared]
        if sublayer.inject.adapters:
            data["inject"]["adapters"]["targets"] = sorted(sublayer.inject.adapters.targets)
    return data


def _mixer(mixer: MixerConfig) -> dict[str, Any]:
    data = mixer.model_dump()
    if isinstance(mixer, AttentionConfig):
        scale = mixer.scale or mixer.head_dim**-0.5
        data |= {"num_kv_heads": mixer.kv_heads, "v_head_dim": mixer.value_dim, "scale": scale}
    if isinstance(mixer, Mamba2Config):
        data["gate_norm_group"] = mixer.norm_group_size
    if hasattr(mixer, "branches"):
        data["branches"] = [_mixer(branch) for branch in mixer.branches]
    data.pop("dt_init", None)
    return data


def _differences(path: str, first: Any, second: Any) -> Iterator[str]:
    if isinstance(first, dict) and isinstance(second, dict):
        for key in dict.fromkeys([*first, *second]):
            yield from _differences(f"{path}.{key}".lstrip("."), first.get(key), second.get(key))
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from _differences(f"{path}.{index}", one, other)
    elif isinstance(first, float) and isinstance(second, float | int):
        if not math.isclose(first, second, rel_tol=1e-9):
            yield f"{path}: {first} (would become {second})"
    elif first != second:
        yield f"{path}: {first} (would become {second})"

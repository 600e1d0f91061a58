"""Mamba 1 and 2 as their authors' own package, mamba_ssm, saves them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from fast_llm_ssm.checkpoint import LazyTensor
from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert import decoder, parts
from fast_llm_ssm.convert.base import Converter, register
from fast_llm_ssm.convert.config_rules import (
    Carried,
    ConfigRule,
    Fixed,
    Json,
    Place,
    Value,
    get,
    mixer,
    mixers,
    norms,
    number,
    one,
    top,
)
from fast_llm_ssm.convert.rules import Rename, TensorRule
from fast_llm_ssm.layers.mamba import MambaConfig
from fast_llm_ssm.layers.mamba2 import Mamba2Config
from fast_llm_ssm.model import ModelConfig

_KINDS = {"Mamba1": "mamba", "Mamba2": "mamba2"}
"""What `ssm_cfg.layer` may say, and our mixers."""


class _Layers(decoder.Uniform):
    """Equal layers, of the kind that `ssm_cfg.layer` names."""

    def choose(self, source: Json) -> Json:
        return {"type": _kind(_settings(source))}


def _settings(source: Json) -> Json:
    settings = source.get("ssm_cfg") or {}
    if not isinstance(settings, dict):
        raise UserError(f"ssm_cfg is {settings!r}, expected a mapping")
    return settings


def _kind(settings: Json) -> str:
    layer = settings.get("layer", "Mamba1")
    if layer not in _KINDS:
        raise UserError(f"ssm_cfg.layer is {layer!r}, expected {' or '.join(_KINDS)}: anything else is not built")
    return _KINDS[layer]


class _Option(Value):
    """A setting that is only written where it differs from the package's default."""

    def __init__(self, key: str, *places: Place, default: Any, **functions: Any) -> None:
        super().__init__(key, *places, default=default, **functions)

    def write(self, model: Json, source: Json) -> None:
        super().write(model, source)
        if source.get(self.key) == self.default:
            del source[self.key]


class _Expand(ConfigRule):
    """The inner width as a multiple of the hidden size."""

    keys = (("expand",),)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def read(self, source: Json, model: Json) -> None:
        for config in mixers(model, self.kind):
            config["d_inner"] = int(get(source, self.keys[0], 2) * model["hidden_size"])

    def write(self, model: Json, source: Json) -> None:
        ratio = one("d_inner", [config["d_inner"] for config in mixers(model, self.kind)]) / model["hidden_size"]
        if ratio != 2:
            source["expand"] = int(ratio) if ratio.is_integer() else ratio


class _Gate(ConfigRule):
    """Where Mamba 2's gate acts."""

    keys = (("rmsnorm",), ("norm_before_gate",))

    def read(self, source: Json, model: Json) -> None:
        gate = "norm_before_gate" if get(source, self.keys[1], False) else "norm_after_gate"
        for config in mixers(model, "mamba2"):
            config["gate"] = gate if get(source, self.keys[0], True) else "no_norm"

    def write(self, model: Json, source: Json) -> None:
        gate = one("gate", [config["gate"] for config in mixers(model, "mamba2")])
        source.update({"no_norm": {"rmsnorm": False}, "norm_before_gate": {"norm_before_gate": True}}.get(gate, {}))


def _both(kind: str) -> Iterator[ConfigRule]:
    yield _Expand(kind)
    yield _Option("d_conv", mixer(kind, "d_conv"), default=4)
    yield _Option("bias", mixer(kind, "proj_bias"), default=False)
    yield _Option("conv_bias", mixer(kind, "conv_bias"), default=True)
    yield _Option("dt_min", mixer(kind, "dt_init", "min"), default=0.001)
    yield _Option("dt_max", mixer(kind, "dt_init", "max"), default=0.1)
    yield _Option("dt_init_floor", mixer(kind, "dt_init", "floor"), default=1e-4)


_SETTINGS: Mapping[str, Sequence[ConfigRule]] = {
    "mamba": (
        *_both("mamba"),
        _Option("d_state", mixer("mamba", "d_state"), default=16),
        _Option("dt_rank", mixer("mamba", "dt_rank"), default="auto"),
        _Option("dt_init", mixer("mamba", "dt_init", "scheme"), default="random"),
        _Option("dt_scale", mixer("mamba", "dt_init", "scale"), default=1.0),
        Carried("layer", "use_fast_path"),
    ),
    "mamba2": (
        *_both("mamba2"),
        _Option("d_state", mixer("mamba2", "d_state"), default=128),
        _Option("headdim", mixer("mamba2", "head_dim"), default=64),
        _Option("ngroups", mixer("mamba2", "n_groups"), default=1),
        _Option("chunk_size", mixer("mamba2", "chunk_size"), default=256),
        _Option("D_has_hdim", mixer("mamba2", "D_has_hdim"), default=False),
        _Option(
            "dt_limit",
            mixer("mamba2", "dt_limit"),
            default=[0.0, math.inf],
            load=lambda bounds: [number(bound) for bound in bounds],
            save=list,
        ),
        _Gate(),
        Fixed("d_ssm", None),
        Carried("layer", "A_init_range", "conv_init", "sequence_parallel", "use_mem_eff_path"),
    ),
}
"""The settings of each mixer in `ssm_cfg`."""


class _MixerSettings(ConfigRule):
    """`ssm_cfg`: what differs from the defaults of the package's mixer."""

    keys = (("ssm_cfg",),)

    def read(self, source: Json, model: Json) -> None:
        settings = _settings(source)
        rules = _SETTINGS[_kind(settings)]
        claimed = {key for rule in rules for spellings in rule.keys for key in spellings}
        if unclaimed := [key for key in settings if key not in claimed]:
            shown = ", ".join(f"{key}: {json.dumps(settings[key])}" for key in unclaimed)
            raise UserError(f"ssm_cfg of {settings.get('layer', 'Mamba1')} does not know {shown}")
        for rule in rules:
            rule.read(settings, model)

    def write(self, model: Json, source: Json) -> None:
        kind = "mamba" if any(mixers(model, "mamba")) else "mamba2"
        source["ssm_cfg"] = settings = {} if kind == "mamba" else {"layer": "Mamba2"}
        for rule in _SETTINGS[kind]:
            rule.write(model, settings)

    def update(self, source: Json, spellings: tuple[str, ...], value: Any) -> None:
        old = _settings(source)
        carried = {key for rule in _SETTINGS[_kind(value)] if isinstance(rule, Carried) for (key,) in rule.keys}
        source["ssm_cfg"] = {**{key: old[key] for key in old if key in carried}, **value}


@register("mamba_ssm")
class MambaSsmConverter(Converter):
    """The layout of the published `state-spaces/mamba-*` and `mamba2-*`; the package reads pytorch_model.bin only."""

    weights_file = "pytorch_model.bin"
    default = False
    config_rules = (
        _Layers("n_layer", {"type": "mamba"}, {"type": "mamba2"}),
        Value("d_model", top("hidden_size")),
        Value("vocab_size", top("vocab_size")),
        Value("pad_vocab_size_multiple", top("pad_vocab_multiple"), default=8),
        Value("tie_embeddings", top("tie_embeddings"), default=True),
        Value("residual_in_fp32", top("residual_fp32"), default=True),
        Value(
            "rms_norm",
            norms("type"),
            default=True,
            load=lambda rms: "rms" if rms else "layer",
            save=lambda kind: kind == "rms",
        ),
        _MixerSettings(),
        Fixed("d_intermediate", 0),
        Fixed("attn_layer_idx", []),
        Carried("attn_cfg", fused_add_norm=True),
    )

    def matches(self, source: Json, tensors: Collection[str]) -> bool:
        ours = any(name.startswith("backbone.layers.") for name in tensors)
        return ours and "model_type" not in source and {"d_model", "n_layer"} <= source.keys()

    def tensor_rules(self, config: ModelConfig) -> list[TensorRule]:
        return tensor_rules(config, "")

    def fresh_settings(self, tensors: Mapping[str, LazyTensor], special_ids: Mapping[str, int | None]) -> Json:
        return {}  # the package refuses keys that it does not know


def tensor_rules(config: ModelConfig, prefix: str) -> list[TensorRule]:
    """The names that the package gives to the tensors of a model, after a prefix."""
    head = f"{prefix}lm_head.weight"
    embedding = f"{prefix}backbone.embedding.weight"
    rules: list[TensorRule] = (
        [Rename(embedding, "embedding.weight", (head,), repeated=True)]
        if config.tie_embeddings
        else [Rename(embedding, "embedding.weight"), Rename(head, "head.weight")]
    )
    rules += _norm(f"{prefix}backbone.norm_f", "final_norm", config)
    for i, name in enumerate(config.layer_names):
        mixer = config.blocks[name][0].mixer
        file, param = f"{prefix}backbone.layers.{i}", f"layers.{i}.0"
        rules += _norm(f"{file}.norm", f"{param}.norm", config)
        if isinstance(mixer, MambaConfig):
            rules += parts.mamba(f"{file}.mixer", f"{param}.mixer", mixer)
        else:
            assert isinstance(mixer, Mamba2Config)
            rules += parts.mamba2(f"{file}.mixer", f"{param}.mixer", mixer)
    return rules


def _norm(file: str, param: str, config: ModelConfig) -> Iterator[TensorRule]:
    return parts.linear(file, param, bias=config.final_norm.type == "layer")

"""Rules that the decoders of transformers share: which layers there are, attention heads, positions, tensor names."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert import parts
from fast_llm_ssm.convert.config_rules import ConfigRule, Json, Value, get, mixer, mixers, number, one
from fast_llm_ssm.convert.rules import Rename, TensorRule
from fast_llm_ssm.layers import MixerConfig
from fast_llm_ssm.model import ModelConfig
from fast_llm_ssm.model.config import SublayerConfig

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}
"""transformers' names of activations, and ours."""


class Stack(ConfigRule):
    """Which kinds of layers there are, in order. The first rule of a format.

    Attributes:
        blocks: The sublayers of each kind, by a letter for the pattern.
    """

    blocks: Mapping[str, list[Json]]

    def kinds(self, source: Json) -> Sequence[str]:
        """The letter of each layer."""
        raise NotImplementedError

    def write_kinds(self, kinds: Sequence[str], config: ModelConfig, source: Json) -> None:
        raise NotImplementedError

    def read(self, source: Json, model: Json) -> None:
        kinds = self.kinds(source)
        count = source.get("num_hidden_layers", len(kinds))
        if count != len(kinds):
            raise UserError(f"num_hidden_layers is {count}, but {self.keys[0][0]} gives {len(kinds)}")
        model["blocks"] = {kind: copy.deepcopy(self.blocks[kind]) for kind in dict.fromkeys(kinds)}
        model["pattern"] = "".join(kinds)
        if len(model["blocks"]) == 1:
            model["pattern"], model["num_blocks"] = kinds[0], len(kinds)

    def write(self, model: Json, source: Json) -> None:
        config = ModelConfig.model_validate(model)
        letters = {name: self._letter(name, block) for name, block in config.blocks.items()}
        kinds = [letters[name] for name in config.layer_names]
        source["num_hidden_layers"] = len(kinds)
        self.write_kinds(kinds, config, source)

    def letter(self, block: Sequence[SublayerConfig]) -> str | None:
        """The kind that has these mixers."""
        shape = [_shape(sublayer.mixer.model_dump()) for sublayer in block]
        return next((letter for letter, own in self.blocks.items() if [_shape(s["mixer"]) for s in own] == shape), None)

    def _letter(self, name: str, block: Sequence[SublayerConfig]) -> str:
        letter = self.letter(block)
        if letter is None:
            known = " or ".join(" then ".join(_shape(s["mixer"]) for s in own) for own in self.blocks.values())
            got = " then ".join(_shape(sublayer.mixer.model_dump()) for sublayer in block)
            raise UserError(f"block `{name}` is {got}, expected {known}")
        return letter


def _shape(mixer: Json) -> str:
    """parallel(attention, mamba2), or just the type."""
    inner = ", ".join(_shape(branch) for branch in mixer.get("branches", ()))
    return f"{mixer['type']}({inner})" if inner else mixer["type"]


class Uniform(ConfigRule):
    """Equal layers of one mixer each, counted by a key. The first rule of a format.

    Args:
        count: The key.
        mixers: What the layers may be: all of them one of these.
    """

    def __init__(self, count: str, *mixers: Json) -> None:
        self.keys = ((count,),)
        self.mixers = mixers

    def choose(self, source: Json) -> Json:
        """The mixer that the layers are."""
        return self.mixers[0]

    def read(self, source: Json, model: Json) -> None:
        model["blocks"] = {"m": layer(copy.deepcopy(self.choose(source)))}
        model["pattern"], model["num_blocks"] = "m", get(source, self.keys[0])

    def write(self, model: Json, source: Json) -> None:
        config = ModelConfig.model_validate(model)
        known = " or ".join(f"one {mixer['type']}" for mixer in self.mixers)
        for name in dict.fromkeys(config.layer_names):
            got = " then ".join(_shape(sublayer.mixer.model_dump()) for sublayer in config.blocks[name])
            if got not in {mixer["type"] for mixer in self.mixers}:
                raise UserError(f"block `{name}` is {got}, expected {known}")
        one("mixer", [config.blocks[name][0].mixer.type for name in config.layer_names])
        source[self.keys[0][0]] = len(config.layer_names)


def layer(*mixers: Json) -> list[Json]:
    """Sublayers of these mixers."""
    return [{"mixer": mixer} for mixer in mixers]


class Heads(ConfigRule):
    """Heads of attention; their size is the hidden size divided by their number, unless it is given."""

    keys = (("num_attention_heads",), ("num_key_value_heads",), ("head_dim", "attention_head_dim"))

    def __init__(self, default_heads: int = 32, default_kv_heads: int | None = None, default_size: int | None = None):
        self.defaults = default_heads, default_kv_heads, default_size

    def read(self, source: Json, model: Json) -> None:
        heads, kv_heads, size = (
            get(source, key, default) for key, default in zip(self.keys, self.defaults, strict=True)
        )
        for config in mixers(model, "attention"):
            config["num_heads"], config["num_kv_heads"] = heads, kv_heads or heads
            config["head_dim"] = size or source["hidden_size"] // heads

    def write(self, model: Json, source: Json) -> None:
        configs = list(mixers(model, "attention"))
        if configs:
            source["num_attention_heads"] = heads = one("num_heads", [config["num_heads"] for config in configs])
            source["num_key_value_heads"] = one("num_kv_heads", [config["num_kv_heads"] or heads for config in configs])
            source["head_dim"] = one("head_dim", [config["head_dim"] for config in configs])


class ScaledRope(ConfigRule):
    """Rotary positions of every attention that has them, and how they are scaled.

    Old files say `rope_theta` and `rope_scaling: {rope_type, factor, ...}`, new ones have all in `rope_parameters`.
    """

    keys = (("rope_theta",), ("rope_scaling",), ("rope_parameters",))
    names = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_positions",
    }
    used = {"default": (), "linear": ("factor",), "llama3": tuple(names)}

    def __init__(self, partial: float = 1.0) -> None:
        self.partial = partial  # of formats where it is no setting

    def read(self, source: Json, model: Json) -> None:
        settings = {**(source.get("rope_scaling") or {}), **(source.get("rope_parameters") or {})}
        kind = settings.pop("rope_type", settings.pop("type", "default"))
        settings.pop("type", None)
        theta = number(settings.pop("rope_theta", source.get("rope_theta", 10000.0)))
        partial = settings.pop("partial_rotary_factor", self.partial)
        if kind not in self.used:
            raise UserError(f"rope_type is {kind!r}, expected {', '.join(self.used)}: anything else is not built")
        if unknown := sorted(settings.keys() - set(self.used[kind])):
            raise UserError(f"rope type {kind} has {', '.join(unknown)}, which is not built")
        rope = {"type": kind, "theta": theta, "partial": partial, **{self.names[k]: v for k, v in settings.items()}}
        for config in mixers(model, "attention"):
            if config.get("rope") is not None:
                config["rope"] = dict(rope)

    def write(self, model: Json, source: Json) -> None:
        ropes = [config["rope"] for config in mixers(model, "attention") if config.get("rope")]
        if not ropes:
            return
        rope = one("set of rotary positions", ropes)
        if rope["type"] not in self.used:
            raise UserError(f"rope type {rope['type']}, expected {', '.join(self.used)}")
        source["rope_theta"] = rope["theta"]
        scaling = {key: rope[self.names[key]] for key in self.used[rope["type"]]}
        source["rope_scaling"] = {"rope_type": rope["type"], **scaling} if scaling else None

    def update(self, source: Json, spellings: tuple[str, ...], value: Any) -> None:
        if not source.get("rope_parameters"):
            source[spellings[0]] = value
        elif spellings[0] == "rope_theta":
            source["rope_parameters"] = {**source["rope_parameters"], "rope_theta": value}
        else:
            kept = {key: v for key, v in source["rope_parameters"].items() if key not in (*self.names, "rope_type")}
            source["rope_parameters"] = {**kept, **(value or {"rope_type": "default"})}


class StepSizeLimit(Value):
    """`time_step_limit`; left out of fresh files where it limits nothing, since infinity is not strict JSON."""

    def __init__(self) -> None:
        super().__init__("time_step_limit", mixer("mamba2", "dt_limit"), default=(0.0, math.inf), load=self._load)

    def _load(self, value: Any) -> list[float]:
        return [0.0, math.inf] if value is None else [number(bound) for bound in value]

    def write(self, model: Json, source: Json) -> None:
        super().write(model, source)
        limit = source.pop(self.key, None)
        if limit is not None and tuple(limit) != (0.0, math.inf):
            source[self.key] = list(limit)


MAMBA2: tuple[ConfigRule, ...] = (
    parts.Mamba2Heads(("mamba_n_heads",), ("mamba_d_head",), ("mamba_expand",), default_heads=128),
    Value("mamba_d_state", mixer("mamba2", "d_state"), default=256),
    Value("mamba_d_conv", mixer("mamba2", "d_conv"), default=4),
    Value("mamba_n_groups", mixer("mamba2", "n_groups"), default=1),
    Value("mamba_chunk_size", mixer("mamba2", "chunk_size"), default=256),
    Value("mamba_conv_bias", mixer("mamba2", "conv_bias"), default=True),
    Value("mamba_proj_bias", mixer("mamba2", "proj_bias"), default=False),
    StepSizeLimit(),
)
"""Mamba 2 as Bamba and its relatives spell its settings."""

MixerRules = Callable[[str, str, Any], Iterable[TensorRule]]
MIXERS: Mapping[str, MixerRules] = {"mamba2": parts.mamba2, "attention": parts.attention, "mlp": parts.mlp}


def frame(config: ModelConfig, embedding: str, norm: str) -> Iterator[TensorRule]:
    """Embedding, final norm and head; a tied head may stand in the files as a copy."""
    yield Rename(f"{embedding}.weight", "embedding.weight", ["lm_head.weight"] * config.tie_embeddings)
    yield Rename(f"{norm}.weight", "final_norm.weight")
    if not config.tie_embeddings:
        yield Rename("lm_head.weight", "head.weight")


def layers(
    config: ModelConfig,
    root: str,
    norms: Sequence[str],
    names: Mapping[str, str],
    rules: Mapping[str, MixerRules] = MIXERS,
) -> Iterator[TensorRule]:
    """Norms and mixers of every layer.

    Args:
        root: What stands before the number of the layer.
        norms: Names of the norms, one for each sublayer.
        names: Name of each type of mixer.
        rules: Tensors of each type of mixer.
    """
    for i, name in enumerate(config.layer_names):
        for j, sublayer in enumerate(config.blocks[name]):
            yield Rename(f"{root}.{i}.{norms[j]}.weight", f"layers.{i}.{j}.norm.weight")
            yield from _mixer(f"{root}.{i}", f"layers.{i}.{j}.mixer", sublayer.mixer, names, rules)


def _mixer(
    file: str, param: str, config: MixerConfig, names: Mapping[str, str], rules: Mapping[str, MixerRules]
) -> Iterator[TensorRule]:
    if config.type == "parallel":
        for b, branch in enumerate(config.branches):  # type: ignore[attr-defined]
            yield from _mixer(file, f"{param}.branches.{b}", branch, names, rules)
    else:
        yield from rules[config.type](f"{file}.{names[config.type]}", param, config)

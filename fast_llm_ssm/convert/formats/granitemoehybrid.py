"""Granite 4 hybrids without experts: Mamba 2 or attention, each followed by a gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert import decoder, parts
from fast_llm_ssm.convert.base import Converter, register
from fast_llm_ssm.convert.config_rules import (
    Carried,
    ConfigRule,
    Fixed,
    Json,
    Value,
    get,
    mixer,
    mixers,
    norms,
    one,
    sublayers,
    top,
)
from fast_llm_ssm.convert.rules import Rename, TensorRule
from fast_llm_ssm.model import ModelConfig

# Old and new words of transformers.
_MAMBA, _ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")
_MLP = {"type": "mlp", "activation": "silu"}


class _Layers(decoder.Stack):
    keys = (("layer_types", "layers_block_type"), ("num_hidden_layers",))
    blocks = {"m": decoder.layer({"type": "mamba2"}, _MLP), "a": decoder.layer({"type": "attention"}, _MLP)}

    def kinds(self, source: Json) -> Sequence[str]:
        words = get(source, self.keys[0], None) or ["mamba"] * get(source, self.keys[1], 32)
        if unknown := sorted(set(words) - {*_MAMBA, *_ATTENTION}):
            raise UserError(f"layer_types has {', '.join(unknown)}, expected {', '.join((*_MAMBA, *_ATTENTION))}")
        return ["a" if word in _ATTENTION else "m" for word in words]

    def write_kinds(self, kinds: Sequence[str], config: ModelConfig, source: Json) -> None:
        source["layer_types"] = [_ATTENTION[0] if kind == "a" else _MAMBA[0] for kind in kinds]

    def update(self, source: Json, spellings: tuple[str, ...], value: Any) -> None:
        had = source.get("layer_types") or source.get("layers_block_type") or ()
        if spellings == self.keys[0] and {_MAMBA[1], _ATTENTION[1]} & set(had):
            value = [_ATTENTION[1] if word in _ATTENTION else _MAMBA[1] for word in value]
        super().update(source, spellings, value)


class _Experts(ConfigRule):
    keys = (("num_local_experts",),)

    def read(self, source: Json, model: Json) -> None:
        count = get(source, self.keys[0], 8)
        if count:
            raise UserError(f"num_local_experts is {count}: mixtures of experts are not built")

    def write(self, model: Json, source: Json) -> None:
        source["num_local_experts"] = 0


class _Positions(ConfigRule):
    keys = (("position_embedding_type",),)

    def read(self, source: Json, model: Json) -> None:
        kind = get(source, self.keys[0], None)
        if kind not in (None, "nope", "rope"):
            raise UserError(f"position_embedding_type is {kind!r}, expected rope, nope or null")
        for config in mixers(model, "attention"):
            config["rope"] = {} if kind == "rope" else None

    def write(self, model: Json, source: Json) -> None:
        has_rope = [config["rope"] is not None for config in mixers(model, "attention")]
        if has_rope:
            source["position_embedding_type"] = "rope" if one("position_embedding_type", has_rope) else "nope"


def _inverse(value: float) -> float:
    return 1.0 / value


def _residual_multipliers(model: Json) -> Iterator[tuple[Json, str]]:
    for sublayer in sublayers(model):
        yield sublayer, "residual_multiplier"


def _mlp(file: str, param: str, config: Any) -> Iterator[TensorRule]:
    """Gate and up are one matrix, gate rows first, as ours are."""
    yield Rename(f"{file}.input_linear.weight", f"{param}.gate_up_proj.weight")
    yield Rename(f"{file}.output_linear.weight", f"{param}.down_proj.weight")


@register("granitemoehybrid")
class GraniteMoeHybridConverter(Converter):
    """Without experts, `intermediate_size`, theirs, says nothing."""

    config_rules = (
        _Layers(),
        _Experts(),
        _Positions(),
        Fixed("model_type", "granitemoehybrid", fresh=True),
        Carried(architectures=["GraniteMoeHybridForCausalLM"]),
        Value("hidden_size", top("hidden_size")),
        parts.Vocabulary(),
        Value("tie_word_embeddings", top("tie_embeddings"), default=False),
        Value("initializer_range", top("init", "std"), default=0.02),
        Value("rms_norm_eps", norms("eps"), mixer("mamba2", "gate_norm_eps"), default=1e-6),
        Value("embedding_multiplier", top("embedding_multiplier"), default=1.0),
        Value("logits_scaling", top("logits_multiplier"), default=1.0, load=_inverse, save=_inverse),
        Value("residual_multiplier", _residual_multipliers, default=1.0),
        decoder.Heads(),
        Value("attention_multiplier", mixer("attention", "scale"), default=1.0),
        Value("attention_bias", mixer("attention", "bias"), mixer("attention", "out_bias"), default=False),
        decoder.ScaledRope(),
        Value("shared_intermediate_size", mixer("mlp", "size"), default=1024),
        Fixed("hidden_act", "silu", "swish"),
        *decoder.MAMBA2,
        Fixed("attention_dropout", 0.0),
        Carried(
            "intermediate_size",
            "max_position_embeddings",
            "normalization_function",
            "num_experts_per_tok",
            "output_router_logits",
            "router_aux_loss_coef",
        ),
        parts.GENERAL,
    )

    def matches(self, source: Json, tensors: Collection[str]) -> bool:
        return source.get("model_type") == "granitemoehybrid"

    def tensor_rules(self, config: ModelConfig) -> list[TensorRule]:
        names = {"mamba2": "mamba", "attention": "self_attn", "mlp": "shared_mlp"}
        norm_names = ("input_layernorm", "post_attention_layernorm")
        rules = {**decoder.MIXERS, "mlp": _mlp}
        return [
            *decoder.frame(config, "model.embed_tokens", "model.norm"),
            *decoder.layers(config, "model.layers", norm_names, names, rules),
        ]

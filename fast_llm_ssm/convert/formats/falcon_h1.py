"""Falcon-H1: Mamba 2 and attention side by side, then a gated feed-forward layer, with multipliers everywhere."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
    top,
)
from fast_llm_ssm.convert.rules import TensorRule
from fast_llm_ssm.model import ModelConfig


class _Layers(decoder.Stack):
    keys = (("num_hidden_layers",),)
    blocks = {
        "h": decoder.layer(
            {"type": "parallel", "branches": [{"type": "mamba2"}, {"type": "attention", "rope": {}}]},
            {"type": "mlp", "activation": "silu"},
        )
    }

    def kinds(self, source: Json) -> Sequence[str]:
        return ["h"] * get(source, self.keys[0])

    def write_kinds(self, kinds: Sequence[str], config: ModelConfig, source: Json) -> None:
        pass


class _InnerWidth(parts.Mamba2Heads):
    """The inner width is `mamba_d_ssm`; the expansion factor is only read where that is missing."""

    def __init__(self) -> None:
        super().__init__(("mamba_n_heads",), ("mamba_d_head",), ("mamba_expand",), default_heads=128)
        self.keys = (*self.keys, ("mamba_d_ssm",))

    def read(self, source: Json, model: Json) -> None:
        width = get(source, ("mamba_d_ssm",), 1024)
        expand = get(source, ("mamba_expand",), 2) if width is None else width / source["hidden_size"]
        super().read({**source, "mamba_expand": expand}, model)
        (d_inner,) = {config["d_inner"] for config in mixers(model, "mamba2")}
        if width not in (None, d_inner):
            raise UserError(f"mamba_d_ssm is {width}, but heads and head size give {d_inner}")

    def write(self, model: Json, source: Json) -> None:
        super().write(model, source)
        source["mamba_d_ssm"] = source["mamba_n_heads"] * source["mamba_d_head"]
        source["mamba_expand"] = 2


class _Gate(ConfigRule):
    keys = (("mamba_rms_norm",), ("mamba_norm_before_gate",))

    def read(self, source: Json, model: Json) -> None:
        before = "norm_before_gate" if get(source, self.keys[1], True) else "norm_after_gate"
        for config in mixers(model, "mamba2"):
            config["gate"] = before if get(source, self.keys[0], False) else "no_norm"

    def write(self, model: Json, source: Json) -> None:
        gate = one("gate", [config["gate"] for config in mixers(model, "mamba2")])
        source["mamba_rms_norm"] = gate != "no_norm"
        if gate != "no_norm":
            source["mamba_norm_before_gate"] = gate == "norm_before_gate"


class _MLPMultipliers(ConfigRule):
    keys = (("mlp_multipliers",),)

    def read(self, source: Json, model: Json) -> None:
        gate, down = get(source, self.keys[0], None) or (1.0, 1.0)
        for config in mixers(model, "mlp"):
            config["gate_multiplier"], config["down_multiplier"] = gate, down

    def write(self, model: Json, source: Json) -> None:
        pairs = [[config["gate_multiplier"], config["down_multiplier"]] for config in mixers(model, "mlp")]
        source["mlp_multipliers"] = one("mlp_multipliers", pairs)


class _OutputBias(ConfigRule):
    """Input and output projection of Mamba 2 have switches of their own; here both have a bias or none."""

    keys = (("projectors_bias",),)

    def read(self, source: Json, model: Json) -> None:
        if get(source, self.keys[0], False) != get(source, ("mamba_proj_bias",), False):
            raise UserError("projectors_bias and mamba_proj_bias differ, which is not built")

    def write(self, model: Json, source: Json) -> None:
        source["projectors_bias"] = one("proj_bias", [config["proj_bias"] for config in mixers(model, "mamba2")])


def _list(value: Any) -> list[float] | None:
    return None if value is None else list(value)


@register("falcon_h1")
class FalconH1Converter(Converter):
    """The multipliers stay settings: folded into the weights they would change how these train."""

    config_rules = (
        _Layers(),
        Fixed("model_type", "falcon_h1", fresh=True),
        Carried(architectures=["FalconH1ForCausalLM"]),
        Value("hidden_size", top("hidden_size")),
        parts.Vocabulary(),
        Value("tie_word_embeddings", top("tie_embeddings"), default=False),
        Value("initializer_range", top("init", "std"), default=0.02),
        Value("rms_norm_eps", norms("eps"), mixer("mamba2", "gate_norm_eps"), default=1e-5),
        Value("embedding_multiplier", top("embedding_multiplier"), default=1.0),
        Value("lm_head_multiplier", top("logits_multiplier"), default=1.0),
        decoder.Heads(default_kv_heads=8),
        Value("attention_bias", mixer("attention", "bias"), mixer("attention", "out_bias"), default=False),
        Value("attention_in_multiplier", mixer("attention", "in_multiplier"), default=1.0),
        Value("attention_out_multiplier", mixer("attention", "out_multiplier"), default=1.0),
        Value("key_multiplier", mixer("attention", "key_multiplier"), default=1.0),
        decoder.ScaledRope(),
        Value("intermediate_size", mixer("mlp", "size"), default=14336),
        Value("mlp_bias", mixer("mlp", "bias"), default=False),
        _MLPMultipliers(),
        Fixed("hidden_act", "silu", "swish"),
        _InnerWidth(),
        _Gate(),
        *decoder.MAMBA2[1:],
        _OutputBias(),
        Value("ssm_in_multiplier", mixer("mamba2", "in_multiplier"), default=1.0),
        Value("ssm_multipliers", mixer("mamba2", "in_multipliers"), default=None, load=_list, save=_list),
        Value("ssm_out_multiplier", mixer("mamba2", "out_multiplier"), default=1.0),
        Fixed("attention_dropout", 0.0),
        Carried("max_position_embeddings", "num_logits_to_keep", "mamba_use_mlp", "use_mamba_kernels"),
        parts.GENERAL,
    )

    def matches(self, source: Json, tensors: Collection[str]) -> bool:
        return source.get("model_type") == "falcon_h1"

    def tensor_rules(self, config: ModelConfig) -> list[TensorRule]:
        names = {"mamba2": "mamba", "attention": "self_attn", "mlp": "feed_forward"}
        return [
            *decoder.frame(config, "model.embed_tokens", "model.final_layernorm"),
            *decoder.layers(config, "model.layers", ("input_layernorm", "pre_ff_layernorm"), names),
        ]

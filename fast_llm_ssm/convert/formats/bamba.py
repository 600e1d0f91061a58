"""Bamba: Mamba 2 or attention, each followed by a gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fast_llm_ssm.convert import decoder, parts
from fast_llm_ssm.convert.base import Converter, register
from fast_llm_ssm.convert.config_rules import Carried, Fixed, Json, Value, get, mixer, norms, top
from fast_llm_ssm.convert.rules import TensorRule
from fast_llm_ssm.model import ModelConfig

_MLP = {"type": "mlp", "activation": "silu"}


class _Layers(decoder.Stack):
    keys = (("attn_layer_indices",), ("num_hidden_layers",))
    blocks = {
        "m": decoder.layer({"type": "mamba2"}, _MLP),
        "a": decoder.layer({"type": "attention", "rope": {}}, _MLP),
    }

    def kinds(self, source: Json) -> Sequence[str]:
        attention = set(get(source, self.keys[0], None) or ())
        return ["a" if i in attention else "m" for i in range(get(source, self.keys[1], 32))]

    def write_kinds(self, kinds: Sequence[str], config: ModelConfig, source: Json) -> None:
        source["attn_layer_indices"] = [i for i, kind in enumerate(kinds) if kind == "a"] or None


@register("bamba")
class BambaConverter(Converter):
    """Rotary positions turn half of each head; `z_loss_coefficient`, an addition to the loss, is not used here."""

    config_rules = (
        _Layers(),
        Fixed("model_type", "bamba", fresh=True),
        Carried(architectures=["BambaForCausalLM"]),
        Value("hidden_size", top("hidden_size")),
        parts.Vocabulary(),
        Value("tie_word_embeddings", top("tie_embeddings"), default=False),
        Value("initializer_range", top("init", "std"), default=0.02),
        Value("rms_norm_eps", norms("eps"), mixer("mamba2", "gate_norm_eps"), default=1e-5),
        decoder.Heads(default_kv_heads=8),
        Value("attention_bias", mixer("attention", "bias"), mixer("attention", "out_bias"), default=False),
        decoder.ScaledRope(partial=0.5),
        Value("intermediate_size", mixer("mlp", "size"), default=14336),
        Value("mlp_bias", mixer("mlp", "bias"), default=False),
        Fixed("hidden_act", "silu", "swish"),
        *decoder.MAMBA2,
        Fixed("attention_dropout", 0.0),
        Fixed("partial_rotary_factor", 0.5),
        Carried("max_position_embeddings", "num_logits_to_keep", "use_mamba_kernels", "z_loss_coefficient"),
        parts.GENERAL,
    )

    def matches(self, source: Json, tensors: Collection[str]) -> bool:
        return source.get("model_type") == "bamba"

    def tensor_rules(self, config: ModelConfig) -> list[TensorRule]:
        names = {"mamba2": "mamba", "attention": "self_attn", "mlp": "feed_forward"}
        return [
            *decoder.frame(config, "model.embed_tokens", "model.final_layernorm"),
            *decoder.layers(config, "model.layers", ("input_layernorm", "pre_ff_layernorm"), names),
        ]

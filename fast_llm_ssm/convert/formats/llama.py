"""Llama, and what other transformers of the same build share with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fast_llm_ssm.convert import decoder, parts
from fast_llm_ssm.convert.base import Converter, register
from fast_llm_ssm.convert.config_rules import Carried, ConfigRule, Fixed, Json, Value, get, mixer, norms, top
from fast_llm_ssm.convert.rules import TensorRule
from fast_llm_ssm.model import ModelConfig


class Transformer(Converter):
    """Attention, then a gated feed-forward layer."""

    def matches(self, source: Json, tensors: Collection[str]) -> bool:
        return source.get("model_type") == self.name

    def tensor_rules(self, config: ModelConfig) -> list[TensorRule]:
        names = {"attention": "self_attn", "mlp": "mlp"}
        return [
            *decoder.frame(config, "model.embed_tokens", "model.norm"),
            *decoder.layers(config, "model.layers", ("input_layernorm", "post_attention_layernorm"), names),
        ]


COMMON: tuple[ConfigRule, ...] = (
    Value("hidden_size", top("hidden_size")),
    parts.Vocabulary(),
    Value("tie_word_embeddings", top("tie_embeddings"), default=False),
    Value("initializer_range", top("init", "std"), default=0.02),
    Value("rms_norm_eps", norms("eps"), default=1e-6),
    Value("intermediate_size", mixer("mlp", "size")),
    Value("hidden_act", mixer("mlp", "activation"), default="silu", choices=decoder.ACTIVATIONS),
    decoder.ScaledRope(),
    Fixed("attention_dropout", 0.0),
    Carried("max_position_embeddings"),
    parts.GENERAL,
)
"""Rules of all transformers here."""


class _Layers(decoder.Stack):
    keys = (("num_hidden_layers",),)
    blocks = {"t": decoder.layer({"type": "attention", "rope": {}}, {"type": "mlp"})}

    def kinds(self, source: Json) -> Sequence[str]:
        return ["t"] * get(source, self.keys[0])

    def write_kinds(self, kinds: Sequence[str], config: ModelConfig, source: Json) -> None:
        pass


@register("llama")
class LlamaConverter(Transformer):
    """Llama 1 to 3."""

    config_rules = (
        _Layers(),
        Fixed("model_type", "llama", fresh=True),
        Carried("pretraining_tp", architectures=["LlamaForCausalLM"]),
        decoder.Heads(),
        Value("attention_bias", mixer("attention", "bias"), mixer("attention", "out_bias"), default=False),
        Value("mlp_bias", mixer("mlp", "bias"), default=False),
        *COMMON,
    )

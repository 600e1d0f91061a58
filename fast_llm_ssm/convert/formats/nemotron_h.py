"""Nemotron-H: layers of one mixer each: Mamba 2, attention without positions, or feed-forward without a gate."""

from __future__ import annotations

import math
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

_WORDS = {"M": ("mamba", "linear_attention"), "*": ("attention", "full_attention"), "-": ("mlp",), "E": ("moe",)}
_LETTERS = {word: letter for letter, words in _WORDS.items() for word in words}
_NO_LIMIT = 1e-30  # stands for a lower limit of 0: transformers takes the logarithm of time_step_min


class _Layers(decoder.Stack):
    """A pattern of letters, or a list of words; a number of layers beside them is not read."""

    keys = (("hybrid_override_pattern",), ("layers_block_type", "layer_types"), ("num_hidden_layers",))
    blocks = {
        "M": decoder.layer({"type": "mamba2"}),
        "*": decoder.layer({"type": "attention"}),
        "-": decoder.layer({"type": "mlp", "gated": False}),
    }

    def kinds(self, source: Json) -> Sequence[str]:
        words = get(source, self.keys[1], None)
        letters = list(get(source, self.keys[0])) if words is None else [_LETTERS.get(word, word) for word in words]
        if "E" in letters:
            raise UserError("layers of experts (E, moe) are not built")
        if unknown := sorted(set(letters) - set(self.blocks)):
            raise UserError(f"hybrid_override_pattern has {', '.join(unknown)}, expected {', '.join(self.blocks)}")
        return letters

    def read(self, source: Json, model: Json) -> None:
        super().read({**source, "num_hidden_layers": len(self.kinds(source))}, model)

    def write_kinds(self, kinds: Sequence[str], config: ModelConfig, source: Json) -> None:
        if set(kinds) == {"M"}:
            raise UserError("only Mamba 2 layers, expected others among them; format mamba2 is for those")
        source["hybrid_override_pattern"] = "".join(kinds)

    def update(self, source: Json, spellings: tuple[str, ...], value: Any) -> None:
        had = next((key for key in self.keys[1] if source.get(key) is not None), None)
        if spellings == self.keys[0] and had is not None:
            new_words = bool({"linear_attention", "full_attention"} & set(source[had]))
            source[had] = [_WORDS[letter][-1 if new_words else 0] for letter in value]
        else:
            super().update(source, spellings, value)


class _StepSize(ConfigRule):
    """`time_step_min` is the least initial step size, and transformers' lower limit of all."""

    keys = (("time_step_min", "mamba_dt_min"),)

    def read(self, source: Json, model: Json) -> None:
        least = get(source, self.keys[0], 0.001)
        for mamba in mixers(model, "mamba2"):
            mamba["dt_limit"] = [least if least > _NO_LIMIT else 0.0, math.inf]
            if least > _NO_LIMIT:
                mamba["dt_init"] = {"min": least}

    def write(self, model: Json, source: Json) -> None:
        limits = [mamba["dt_limit"] for mamba in mixers(model, "mamba2")]
        if limits:
            limit = one("dt_limit", limits)
            if limit[1] != math.inf:
                raise UserError(f"dt_limit {list(limit)} has an upper end, expected .inf")
            source["time_step_min"] = limit[0] or _NO_LIMIT


@register("nemotron_h")
class NemotronHConverter(Converter):
    """Without experts and without layers that predict several tokens."""

    config_rules = (
        _Layers(),
        Fixed("model_type", "nemotron_h", fresh=True),
        Carried(architectures=["NemotronHForCausalLM"]),
        Value("hidden_size", top("hidden_size")),
        parts.Vocabulary(),
        Value("tie_word_embeddings", top("tie_embeddings"), default=False),
        Value("residual_in_fp32", top("residual_fp32"), default=False),
        Value("initializer_range", top("init", "std"), default=0.02),
        Value("layer_norm_epsilon", norms("eps"), mixer("mamba2", "gate_norm_eps"), default=1e-5),
        decoder.Heads(default_kv_heads=8, default_size=128),
        Fixed("attention_bias", False),
        Fixed("sliding_window", None),
        Value("intermediate_size", mixer("mlp", "size"), default=21504),
        Value("mlp_hidden_act", mixer("mlp", "activation"), default="relu2", choices=decoder.ACTIVATIONS),
        Value("mlp_bias", mixer("mlp", "bias"), default=False),
        parts.Mamba2Heads(("mamba_num_heads",), ("mamba_head_dim",), ("expand", "mamba_expand"), default_heads=128),
        Value("ssm_state_size", mixer("mamba2", "d_state"), default=128),
        Value("n_groups", mixer("mamba2", "n_groups"), default=8, spellings=("mamba_n_groups",)),
        Value("conv_kernel", mixer("mamba2", "d_conv"), default=4, spellings=("mamba_d_conv",)),
        Value("use_conv_bias", mixer("mamba2", "conv_bias"), default=True, spellings=("mamba_conv_bias",)),
        Value("use_bias", mixer("mamba2", "proj_bias"), default=False),
        Value("chunk_size", mixer("mamba2", "chunk_size"), default=128, spellings=("mamba_chunk_size",)),
        Fixed("mamba_hidden_act", "silu", "swish"),
        _StepSize(),
        Value("time_step_max", mixer("mamba2", "dt_init", "max"), default=0.1, spellings=("mamba_dt_max",)),
        Value("time_step_floor", mixer("mamba2", "dt_init", "floor"), default=1e-4, spellings=("mamba_dt_init_floor",)),
        Fixed("attention_dropout", 0.0),
        Fixed("hidden_dropout", 0.0),
        Fixed("num_nextn_predict_layers", 0),
        # transformers reads none of these in models without experts, or nothing that changes the function.
        Carried(
            "mamba_dt_limit",
            "mamba_proj_bias",
            "mamba_ssm_cache_dtype",
            "max_position_embeddings",
            "moe_intermediate_size",
            "moe_latent_size",
            "moe_shared_expert_intermediate_size",
            "moe_shared_expert_overlap",
            "mtp_hybrid_override_pattern",
            "mtp_layers_block_type",
            "n_group",
            "n_routed_experts",
            "n_shared_experts",
            "norm_topk_prob",
            "num_experts_per_tok",
            "num_logits_to_keep",
            "num_query_groups",
            "output_router_logits",
            "rescale_prenorm_residual",
            "rms_norm_eps",
            "rope_theta",
            "routed_scaling_factor",
            "time_step_limit",
            "time_step_rank",
            "topk_group",
            "use_mamba_kernels",
        ),
        parts.GENERAL,
    )

    def matches(self, source: Json, tensors: Collection[str]) -> bool:
        return source.get("model_type") == "nemotron_h"

    def remarks(self, config: ModelConfig) -> list[str]:
        limits = {config["dt_limit"] for config in mixers(config.model_dump(), "mamba2")}
        return [
            f"step sizes (dt_limit) stay within {list(limit)}, as in transformers' prefill, here in decoding too; "
            "for the authors' code, which has no limit, import with mamba2.dt_limit=[0.0,.inf]"
            for limit in sorted(limits)
        ]

    def tensor_rules(self, config: ModelConfig) -> list[TensorRule]:
        names = dict.fromkeys(("mamba2", "attention", "mlp"), "mixer")
        return [
            *decoder.frame(config, "backbone.embeddings", "backbone.norm_f"),
            *decoder.layers(config, "backbone.layers", ("norm",), names),
        ]

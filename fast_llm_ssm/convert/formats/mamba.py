"""Mamba 1 as transformers saves it (`MambaForCausalLM`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

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
from fast_llm_ssm.convert.rules import Rename, TensorRule
from fast_llm_ssm.layers.mamba import MambaConfig
from fast_llm_ssm.model import ModelConfig


class _Width(ConfigRule):
    """The inner width; `expand` only stands for it where it is not said (some files say another factor)."""

    keys = (("intermediate_size",), ("expand",))

    def read(self, source: Json, model: Json) -> None:
        width = get(source, self.keys[0], None)
        if width is None:
            width = int(get(source, self.keys[1], 2) * source["hidden_size"])
        for config in mixers(model, "mamba"):
            config["d_inner"] = width

    def write(self, model: Json, source: Json) -> None:
        source["intermediate_size"] = width = one("d_inner", [config["d_inner"] for config in mixers(model, "mamba")])
        ratio = width / model["hidden_size"]
        source["expand"] = int(ratio) if ratio.is_integer() else ratio


@register("mamba")
class MambaConverter(Converter):
    """transformers' Mamba 1. Old files also repeat keys of the authors' layout, which nothing reads."""

    config_rules: ClassVar[Sequence[ConfigRule]] = (
        decoder.Uniform("num_hidden_layers", {"type": "mamba"}),
        Fixed("model_type", "mamba", fresh=True),
        Carried(architectures=["MambaForCausalLM"]),
        Value("hidden_size", top("hidden_size")),
        parts.Vocabulary(),
        Value("tie_word_embeddings", top("tie_embeddings"), default=True),
        Value("residual_in_fp32", top("residual_fp32"), default=True),
        Value("initializer_range", top("init", "std"), default=0.1),
        Value("layer_norm_epsilon", norms("eps"), default=1e-5),
        _Width(),
        Value("state_size", mixer("mamba", "d_state"), default=16),
        Value("conv_kernel", mixer("mamba", "d_conv"), default=4),
        Value("time_step_rank", mixer("mamba", "dt_rank"), default="auto"),
        Value("use_bias", mixer("mamba", "proj_bias"), default=False),
        Value("use_conv_bias", mixer("mamba", "conv_bias"), default=True),
        Value("time_step_min", mixer("mamba", "dt_init", "min"), default=0.001),
        Value("time_step_max", mixer("mamba", "dt_init", "max"), default=0.1),
        Value("time_step_floor", mixer("mamba", "dt_init", "floor"), default=1e-4),
        Value("time_step_scale", mixer("mamba", "dt_init", "scale"), default=1.0),
        Value("time_step_init_scheme", mixer("mamba", "dt_init", "scheme"), default="random"),
        Fixed("hidden_act", "silu", "swish"),
        Carried("rescale_prenorm_residual", "use_associative_scan", "use_falcon_mambapy", "use_mambapy"),
        Carried("d_inner", "d_model", "fused_add_norm", "n_layer", "pad_vocab_size_multiple", "rms_norm", "ssm_cfg"),
        parts.GENERAL,
    )

    def matches(self, source: Json, tensors: Collection[str]) -> bool:
        return source.get("model_type") == "mamba" and any(name.startswith("backbone.layers.") for name in tensors)

    def tensor_rules(self, config: ModelConfig) -> list[TensorRule]:
        tied = ("lm_head.weight",) if config.tie_embeddings else ()
        # The authors' files say `embedding`; otherwise the layouts are the same.
        rules: list[TensorRule] = [
            Rename("backbone.embeddings.weight", "embedding.weight", (*tied, "backbone.embedding.weight")),
            Rename("backbone.norm_f.weight", "final_norm.weight"),
        ]
        if not config.tie_embeddings:
            rules.append(Rename("lm_head.weight", "head.weight"))
        for i, name in enumerate(config.layer_names):
            mamba = config.blocks[name][0].mixer
            assert isinstance(mamba, MambaConfig)
            file, param = f"backbone.layers.{i}", f"layers.{i}.0"
            rules.append(Rename(f"{file}.norm.weight", f"{param}.norm.weight"))
            rules += parts.mamba(f"{file}.mixer", f"{param}.mixer", mamba)
        return rules

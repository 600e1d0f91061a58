"""Mamba 2 as transformers saves it (`Mamba2ForCausalLM`)."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert import parts
from fast_llm_ssm.convert.base import Converter, register
from fast_llm_ssm.convert.config_rules import Carried, ConfigRule, Fixed, Json, Value, get, mixer, norms, number, top
from fast_llm_ssm.convert.rules import Rename, TensorRule
from fast_llm_ssm.layers.mamba2 import Mamba2Config
from fast_llm_ssm.model import ModelConfig


class _Layers(ConfigRule):
    """A stack of equal Mamba 2 layers."""

    keys = (("num_hidden_layers",),)

    def read(self, source: Json, model: Json) -> None:
        model["blocks"] = {"m": [{"mixer": {"type": "mamba2"}}]}
        model["pattern"] = "m"
        model["num_blocks"] = get(source, self.keys[0])

    def write(self, model: Json, source: Json) -> None:
        config = ModelConfig.model_validate(model)
        for name in dict.fromkeys(config.layer_names):
            kinds = [sublayer.mixer.type for sublayer in config.blocks[name]]
            if kinds != ["mamba2"]:
                raise UserError(f"block `{name}` is {' + '.join(kinds)}, expected one mamba2")
        source["num_hidden_layers"] = len(config.layer_names)


class _StepSizeLimit(Value):
    """`time_step_limit`; left out of fresh files where it limits nothing, since infinity is not strict JSON."""

    def __init__(self) -> None:
        super().__init__("time_step_limit", mixer("mamba2", "dt_limit"), default=(0.0, math.inf), load=self._load)

    def _load(self, value: Any) -> list[float]:
        return [number(bound) for bound in value]

    def write(self, model: Json, source: Json) -> None:
        super().write(model, source)
        if tuple(source[self.key]) == (0.0, math.inf):
            del source[self.key]
        else:
            source[self.key] = list(source[self.key])


@register("mamba2")
class Mamba2Converter(Converter):
    """transformers' Mamba 2. `norm_before_gate`, which some files have, is not read there either: the gate is first."""

    config_rules = (
        _Layers(),
        Fixed("model_type", "mamba2", fresh=True),
        Carried(architectures=["Mamba2ForCausalLM"]),
        Value("hidden_size", top("hidden_size")),
        parts.Vocabulary(),
        Value("tie_word_embeddings", top("tie_embeddings"), default=False),
        Value("residual_in_fp32", top("residual_fp32"), default=True),
        Value("initializer_range", top("init", "std"), default=0.1),
        Value("layer_norm_epsilon", norms("eps"), mixer("mamba2", "gate_norm_eps"), default=1e-5),
        parts.Mamba2Heads(("num_heads",), ("head_dim",), ("expand",), default_heads=128),
        Value("state_size", mixer("mamba2", "d_state"), default=128),
        Value("conv_kernel", mixer("mamba2", "d_conv"), default=4),
        Value("n_groups", mixer("mamba2", "n_groups"), default=8),
        Value("chunk_size", mixer("mamba2", "chunk_size"), default=256),
        Value("use_bias", mixer("mamba2", "proj_bias"), default=False),
        Value("use_conv_bias", mixer("mamba2", "conv_bias"), default=True),
        Value("time_step_min", mixer("mamba2", "dt_init", "min"), default=0.001),
        Value("time_step_max", mixer("mamba2", "dt_init", "max"), default=0.1),
        Value("time_step_floor", mixer("mamba2", "dt_init", "floor"), default=1e-4),
        _StepSizeLimit(),
        Fixed("hidden_act", "silu", "swish"),
        Fixed("rms_norm", True),
        Carried(
            "intermediate_size",
            "norm_before_gate",
            "rescale_prenorm_residual",
            "time_step_init_scheme",
            "time_step_rank",
            "time_step_scale",
            "use_mambapy",
        ),
        parts.GENERAL,
    )

    def matches(self, source: Json, tensors: Collection[str]) -> bool:
        return source.get("model_type") == "mamba2" and any(name.startswith("backbone.layers.") for name in tensors)

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
            assert isinstance(mamba, Mamba2Config)
            file, param = f"backbone.layers.{i}", f"layers.{i}.0"
            rules.append(Rename(f"{file}.norm.weight", f"{param}.norm.weight"))
            rules += parts.mamba2(f"{file}.mixer", f"{param}.mixer", mamba)
        return rules

"""Codestral Mamba as its publisher saves it: the layout of mamba_ssm's Mamba 2, with settings in params.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fast_llm_ssm.checkpoint import LazyTensor
from fast_llm_ssm.convert import decoder
from fast_llm_ssm.convert.base import Converter, register
from fast_llm_ssm.convert.config_rules import Carried, Fixed, Json, Value, get, mixer, mixers, top
from fast_llm_ssm.convert.formats import mamba_ssm
from fast_llm_ssm.convert.rules import TensorRule
from fast_llm_ssm.model import ModelConfig


class _Layers(decoder.Uniform):
    """Mamba 2 layers, whose sizes are those that mamba_ssm takes by default."""

    def read(self, source: Json, model: Json) -> None:
        super().read(source, model)
        for config in mixers(model, "mamba2"):
            config["d_inner"] = 2 * get(source, ("dim",))


@register("codestral")
class CodestralConverter(Converter):
    """The layout that mistral-inference reads. The same model in transformers' layout has format mamba2."""

    config_file = "params.json"
    weights_file = "consolidated.safetensors"
    default = False
    config_rules = (
        _Layers("n_layers", {"type": "mamba2"}),
        Fixed("model_type", "mamba", fresh=True),
        Value("dim", top("hidden_size")),
        Value("vocab_size", top("vocab_size")),
        Value("pad_vocab_size_multiple", top("pad_vocab_multiple"), default=1),
        Value("tie_embeddings", top("tie_embeddings"), default=False),
        Value("residual_in_fp32", top("residual_fp32"), default=True),
        Value("n_groups", mixer("mamba2", "n_groups"), default=1),
        Fixed("rms_norm", True, fresh=True),
        Carried(fused_add_norm=True),
    )

    def matches(self, source: Json, tensors: Collection[str]) -> bool:
        return "dim" in source and any(name.startswith("model.backbone.layers.") for name in tensors)

    def tensor_rules(self, config: ModelConfig) -> list[TensorRule]:
        return mamba_ssm.tensor_rules(config, "model.")

    def fresh_settings(self, tensors: Mapping[str, LazyTensor], special_ids: Mapping[str, int | None]) -> Json:
        return {}  # the reader refuses keys that it does not know

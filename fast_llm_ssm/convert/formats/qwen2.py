"""Qwen 2: biases on q, k and v; the upper layers may have a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert import decoder
from fast_llm_ssm.convert.base import register
from fast_llm_ssm.convert.config_rules import Carried, Fixed, Json, get, one
from fast_llm_ssm.convert.formats.llama import COMMON, Transformer
from fast_llm_ssm.model import ModelConfig
from fast_llm_ssm.model.config import SublayerConfig

_FULL, _WINDOW = "full_attention", "sliding_attention"


class Layers(decoder.Stack):
    """Layers with and without a window.

    Args:
        attention: What attention has beyond the settings.
    """

    keys = (
        ("layer_types",),
        ("num_hidden_layers",),
        ("use_sliding_window",),
        ("sliding_window",),
        ("max_window_layers",),
    )

    def __init__(self, attention: Mapping[str, object]) -> None:
        mixer = {"type": "attention", "rope": {}, **attention}
        self.blocks = {kind: decoder.layer(dict(mixer), {"type": "mlp"}) for kind in "tw"}

    def kinds(self, source: Json) -> Sequence[str]:
        count = get(source, self.keys[1])
        windowed = self._window(source) is not None
        first = source.get("max_window_layers", 28)
        default = [_WINDOW if windowed and i >= first else _FULL for i in range(count)]
        words = source.get("layer_types") or default
        if unknown := sorted(set(words) - {_FULL, _WINDOW}):
            raise UserError(f"layer_types has {', '.join(unknown)}, expected {_FULL} or {_WINDOW}")
        if _WINDOW in words and not windowed:
            raise UserError(f"layer_types has {_WINDOW}, but use_sliding_window or sliding_window is off")
        return ["w" if word == _WINDOW else "t" for word in words]

    def _window(self, source: Json) -> int | None:
        return get(source, ("sliding_window",), 4096) if source.get("use_sliding_window") else None

    def read(self, source: Json, model: Json) -> None:
        super().read(source, model)
        if "w" in model["blocks"]:
            model["blocks"]["w"][0]["mixer"]["window"] = self._window(source)

    def letter(self, block: Sequence[SublayerConfig]) -> str | None:
        known = super().letter(block)
        return "w" if known and getattr(block[0].mixer, "window", None) else known

    def write_kinds(self, kinds: Sequence[str], config: ModelConfig, source: Json) -> None:
        source["layer_types"] = [_WINDOW if kind == "w" else _FULL for kind in kinds]
        source["use_sliding_window"] = "w" in kinds
        windows = [config.blocks[name][0].mixer.window for name in config.layer_names]  # type: ignore[attr-defined]
        if "w" in kinds:
            source["sliding_window"] = one("window", [window for window in windows if window])


@register("qwen2")
class Qwen2Converter(Transformer):
    """Qwen 2 and 2.5 without experts."""

    config_rules = (
        Layers({"bias": True}),
        Fixed("model_type", "qwen2", fresh=True),
        Carried(architectures=["Qwen2ForCausalLM"]),
        decoder.Heads(default_kv_heads=32),
        *COMMON,
    )

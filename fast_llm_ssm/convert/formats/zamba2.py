"""Zamba 2: transformers' layout (`zamba2`), and that of the first uploads (`zamba2_blocks`).

Mamba 2 layers; some of them first add the output of a shared transformer block, which reads the hidden state and the
embedding side by side. The first hybrid layers hold the shared blocks' tensors, all uses' adapters included.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert import parts
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
from fast_llm_ssm.convert.rules import Carry, Rename, TensorRule
from fast_llm_ssm.layers.mamba2 import Mamba2Config
from fast_llm_ssm.layers.mlp import MLPConfig
from fast_llm_ssm.model import ModelConfig

# Old and new words of transformers, and those of the first uploads.
_PLAIN, _HYBRID = ("mamba", "linear_attention", "m"), ("hybrid", "g")
_NO_LIMIT = 1e-30  # stands for a lower limit of 0: transformers takes the logarithm of time_step_min
_BLOCKS_LAYOUT = ("model.mamba_layers.", "model.linear_layers.", "model.blocks.")


class _Layers(ConfigRule):
    """Which layers are hybrid, and what they use."""

    keys = (
        ("layers_block_type", "layer_types"),
        ("num_hidden_layers",),
        ("hybrid_layer_ids",),
        ("num_mem_blocks",),
        ("use_shared_attention_adapter", "use_shared_attention_lora"),
        ("adapter_rank", "lora_rank"),
        ("use_mem_rope",),
    )

    def read(self, source: Json, model: Json) -> None:
        kinds = get(source, self.keys[0])
        if unknown := sorted({str(kind) for kind in kinds if kind not in (*_PLAIN, *_HYBRID)}):
            raise UserError(f"layers_block_type has {', '.join(unknown)}, expected {', '.join((*_PLAIN, *_HYBRID))}")
        hybrids = [i for i, kind in enumerate(kinds) if kind in _HYBRID]
        for key, expected in (("num_hidden_layers", len(kinds)), ("hybrid_layer_ids", hybrids)):
            if source.get(key) not in (None, expected):
                raise UserError(f"{key} is {source[key]}, but layers_block_type gives {expected}")
        model["blocks"] = {"m": [{"mixer": {"type": "mamba2"}}]}
        model["pattern"] = "".join("h" if kind in _HYBRID else "m" for kind in kinds)
        if not hybrids:
            return
        names = [chr(ord("A") + b) for b in range(min(get(source, self.keys[3], 1), len(hybrids)))]
        targets = ["q", "k", "v", "gate_up"] if get(source, self.keys[4], False) else ["gate_up"]
        adapters = {"rank": get(source, self.keys[5], 128), "targets": targets}
        model["blocks"]["h"] = [{"mixer": {"type": "mamba2"}, "inject": {"shared": names, "adapters": adapters}}]
        has_rope = get(source, self.keys[6], False)
        model["shared"] = {
            name: [
                {
                    "mixer": {"type": "attention", "rope": {} if has_rope else None},
                    "input_size": 2 * source["hidden_size"],
                    "residual": False,
                },
                {"mixer": {"type": "mlp"}, "residual": False},
            ]
            for name in names
        }

    def write(self, model: Json, source: Json) -> None:
        config = ModelConfig.model_validate(model)
        for name, block in config.blocks.items():
            if [sublayer.mixer.type for sublayer in block] != ["mamba2"]:
                raise UserError(f"block `{name}` is not one mamba2")
        for name, block in config.shared.items():
            if [sublayer.mixer.type for sublayer in block] != ["attention", "mlp"]:
                raise UserError(f"shared block `{name}` is not attention and mlp")
        hybrid = [config.blocks[name][0].inject is not None for name in config.layer_names]
        source["layers_block_type"] = [_HYBRID[0] if is_hybrid else _PLAIN[0] for is_hybrid in hybrid]
        source["num_hidden_layers"] = len(hybrid)
        source["hybrid_layer_ids"] = [i for i, is_hybrid in enumerate(hybrid) if is_hybrid]
        uses = [block[0].inject for block in config.blocks.values() if block[0].inject]
        if uses:
            inject = one("set of shared blocks", uses)
            adapters = inject.adapters
            if adapters is None:
                raise UserError("inject has no adapters")
            source["num_mem_blocks"] = len(inject.shared)
            source["use_shared_attention_adapter"] = "q" in adapters.targets
            source["adapter_rank"] = adapters.rank
            ropes = [attention["rope"] is not None for attention in mixers(model, "attention")]
            source["use_mem_rope"] = one("use_mem_rope", ropes)


class _Attention(ConfigRule):
    """Heads of the shared attention: twice as wide as the hidden state, scaled as if they were not."""

    keys = (
        ("num_attention_heads",),
        ("num_key_value_heads",),
        ("attention_head_dim", "head_dim"),
        ("attention_hidden_size",),
    )

    def read(self, source: Json, model: Json) -> None:
        heads, width = get(source, self.keys[0], 32), 2 * source["hidden_size"]
        head_dim = get(source, self.keys[2], width // heads)
        if source.get("attention_hidden_size") not in (None, width):
            raise UserError(f"attention_hidden_size is {source['attention_hidden_size']}, expected {width}")
        for attention in mixers(model, "attention"):
            attention.update(
                num_heads=heads,
                num_kv_heads=get(source, self.keys[1], None) or heads,
                head_dim=head_dim,
                scale=(head_dim / 2) ** -0.5,
            )

    def write(self, model: Json, source: Json) -> None:
        configs = list(mixers(model, "attention"))
        if configs:
            source["num_attention_heads"] = heads = one("num_heads", [config["num_heads"] for config in configs])
            source["num_key_value_heads"] = one("num_kv_heads", [config["num_kv_heads"] or heads for config in configs])
            source["attention_head_dim"] = one("head_dim", [config["head_dim"] for config in configs])
            source["attention_hidden_size"] = 2 * model["hidden_size"]


class _StepSize(ConfigRule):
    """`time_step_min` is the least initial step size, and transformers' lower limit of all."""

    keys = (("time_step_min",),)

    def read(self, source: Json, model: Json) -> None:
        least = get(source, self.keys[0], 0.001)
        for mamba in mixers(model, "mamba2"):
            mamba["dt_limit"] = [least if least > _NO_LIMIT else 0.0, math.inf]
            if least > _NO_LIMIT:
                mamba["dt_init"] = {"min": least}

    def write(self, model: Json, source: Json) -> None:
        limit = one("dt_limit", [mamba["dt_limit"] for mamba in mixers(model, "mamba2")])
        if limit[1] != math.inf:
            raise UserError(f"dt_limit {list(limit)} has an upper end, expected .inf")
        source["time_step_min"] = limit[0] or _NO_LIMIT


def _config_rules(step_size: ConfigRule) -> tuple[ConfigRule, ...]:
    return (
        _Layers(),
        Fixed("model_type", "zamba2", fresh=True),
        Carried(architectures=["Zamba2ForCausalLM"]),
        Value("hidden_size", top("hidden_size")),
        parts.Vocabulary(),
        Value("tie_word_embeddings", top("tie_embeddings"), default=True),
        Value("initializer_range", top("init", "std"), default=0.02),
        Value("rms_norm_eps", norms("eps"), default=1e-5),
        parts.Mamba2Heads(
            ("n_mamba_heads",), ("mamba_headdim",), ("mamba_expand", "expansion_factor"), default_heads=8
        ),
        Value("mamba_d_state", mixer("mamba2", "d_state"), default=64, spellings=("state_size",)),
        Value("mamba_d_conv", mixer("mamba2", "d_conv"), default=4, spellings=("conv_dimension",)),
        Value("mamba_ngroups", mixer("mamba2", "n_groups"), default=1),
        Value("chunk_size", mixer("mamba2", "chunk_size"), default=256),
        step_size,
        Value("time_step_max", mixer("mamba2", "dt_init", "max"), default=0.1),
        Value("time_step_floor", mixer("mamba2", "dt_init", "floor"), default=1e-4),
        Value("add_bias_linear", mixer("mamba2", "proj_bias"), mixer("mlp", "bias"), default=False),
        _Attention(),
        parts.Rope(),
        Value("intermediate_size", mixer("mlp", "size"), default=_four_times, spellings=("ffn_hidden_size",)),
        Value(
            "hidden_act",
            mixer("mlp", "activation"),
            default="gelu",
            choices={"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "silu": "silu"},
        ),
        Fixed("gated_linear_unit", True),
        Fixed("use_shared_block_lora", True),
        Fixed("attention_dropout", 0.0),
        # transformers reads none of these, or nothing that changes the function.
        Carried(
            "ft_lora",
            "kv_channels",
            "max_position_embeddings",
            "num_logits_to_keep",
            "num_query_groups",
            "sliding_window",
            "time_step_limit",
            "use_conv_bias",
            "use_long_context",
            "use_mamba_kernels",
            "use_mem_eff_path",
            "use_shared_mlp_adapter",
        ),
        parts.GENERAL,
    )


def _four_times(source: Json) -> int:
    return 4 * source["hidden_size"]


@register("zamba2")
class Zamba2Converter(Converter):
    """transformers' layout. Older files repeat the shared blocks under every hybrid layer that uses them."""

    config_rules = _config_rules(_StepSize())
    feed_forward = ("gate_up_proj", "down_proj")

    def matches(self, source: Json, tensors: Collection[str]) -> bool:
        return source.get("model_type") == "zamba2" and any(name.startswith("model.layers.") for name in tensors)

    def superseded(self, tensors: Collection[str]) -> set[str]:
        return {name for name in tensors if name.startswith(_BLOCKS_LAYOUT)}

    def remarks(self, config: ModelConfig) -> list[str]:
        limits = {_mamba(config, name).dt_limit for name in config.layer_names}
        return [
            f"step sizes (dt_limit) stay within {list(limit)}, as in transformers' prefill, here in decoding too; "
            "for the authors' code, which has no limit, import with mamba2.dt_limit=[0.0,.inf]"
            for limit in sorted(limits)
        ]

    def tensor_rules(self, config: ModelConfig) -> list[TensorRule]:
        hybrids = [i for i, name in enumerate(config.layer_names) if config.blocks[name][0].inject]
        rules: list[TensorRule] = [
            Rename("model.embed_tokens.weight", "embedding.weight", ["lm_head.weight"] * config.tie_embeddings),
            Rename("model.final_layernorm.weight", "final_norm.weight"),
        ]
        if not config.tie_embeddings:
            rules.append(Rename("lm_head.weight", "head.weight"))
        for i, name in enumerate(config.layer_names):
            file, param = self.mamba_layer(i, i in hybrids), f"layers.{i}.0"
            rules.append(Rename(f"{file}.input_layernorm.weight", f"{param}.norm.weight"))
            rules += parts.mamba2(f"{file}.mamba", f"{param}.mixer", _mamba(config, name))
        for use, i in enumerate(hybrids):
            rules.append(Rename(self.use_linear(i, use), f"layers.{i}.0.inject.linear.weight"))
        for b, name in enumerate(_shared_names(config)):
            rules += self._shared_block(self.homes(b, hybrids[b :: len(_shared_names(config))]), name, config)
        for use, i in enumerate(hybrids):
            rules += self._adapters(use, i, hybrids, config)
        return rules

    def _shared_block(self, homes: list[str], name: str, config: ModelConfig) -> Iterator[TensorRule]:
        mlp = config.shared[name][1].mixer
        assert isinstance(mlp, MLPConfig)
        names = {"input_layernorm.weight": "0.norm.weight", "pre_ff_layernorm.weight": "1.norm.weight"}
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            names[f"self_attn.{part}.weight"] = f"0.mixer.{part}.weight"
        for theirs, ours in zip(self.feed_forward, ("gate_up_proj", "down_proj"), strict=True):
            for kind in ("weight", "bias") if mlp.bias else ("weight",):
                names[f"feed_forward.{theirs}.{kind}"] = f"1.mixer.{ours}.{kind}"
        for file, param in names.items():
            yield _rename(homes, file, f"shared.{name}.{param}")

    def _adapters(self, use: int, layer: int, hybrids: list[int], config: ModelConfig) -> Iterator[TensorRule]:
        inject = config.blocks[config.layer_names[layer]][0].inject
        assert inject is not None and inject.adapters is not None
        count = len(inject.shared)
        for target in inject.adapters.targets:
            param = f"layers.{layer}.0.inject.adapters.{int(target == 'gate_up')}.{target}"
            for file, part in zip(self.adapter(target, use), ("down", "up"), strict=True):
                for b in range(count):
                    homes = self.homes(b, hybrids[b::count])
                    if b == use % count:
                        yield _rename(homes, file, f"{param}.{part}.weight")
                    else:  # the first uploads have adapters for uses of the other blocks, too
                        yield from (Carry(f"{home}.{file}") for home in homes)

    # How this layout names things

    def mamba_layer(self, layer: int, hybrid: bool) -> str:
        return f"model.layers.{layer}.mamba_decoder" if hybrid else f"model.layers.{layer}"

    def use_linear(self, layer: int, use: int) -> str:
        return f"model.layers.{layer}.linear.weight"

    def homes(self, block: int, layers: list[int]) -> list[str]:
        """Where a shared block stands, and where it may stand again."""
        return [f"model.layers.{layer}.shared_transformer" for layer in layers]

    def adapter(self, target: str, use: int) -> tuple[str, str]:
        """The two factors, the one applied first coming first."""
        part = "feed_forward.gate_up_proj" if target == "gate_up" else f"self_attn.linear_{target}"
        return f"{part}_adapter_list.{use}.0.weight", f"{part}_adapter_list.{use}.1.weight"


@register("zamba2_blocks")
class Zamba2BlocksConverter(Zamba2Converter):
    """The layout of the first uploads: shared blocks apart from the layers, each with adapters for all uses."""

    # The code that came with these files does not limit step sizes.
    config_rules = _config_rules(Value("time_step_min", mixer("mamba2", "dt_init", "min"), default=0.001))
    feed_forward = ("linear_fc1", "linear_fc2")
    fresh = False

    def matches(self, source: Json, tensors: Collection[str]) -> bool:
        return (
            source.get("model_type") == "zamba2"
            and any(name.startswith(_BLOCKS_LAYOUT) for name in tensors)
            and not super().matches(source, tensors)
        )

    def superseded(self, tensors: Collection[str]) -> set[str]:
        return set()

    def remarks(self, config: ModelConfig) -> list[str]:
        return []

    def mamba_layer(self, layer: int, hybrid: bool) -> str:
        return f"model.mamba_layers.{layer}"

    def use_linear(self, layer: int, use: int) -> str:
        return f"model.linear_layers.{use}.weight"

    def homes(self, block: int, layers: list[int]) -> list[str]:
        return [f"model.blocks.{block}"]

    def adapter(self, target: str, use: int) -> tuple[str, str]:
        part = "feed_forward.linear_fc1" if target == "gate_up" else f"self_attn.linear_{target}"
        return f"{part}_lora_A_list.{use}.weight", f"{part}_lora_B_list.{use}.weight"


def _rename(homes: list[str], file: str, param: str) -> Rename:
    first, *others = (f"{home}.{file}" for home in homes)
    return Rename(first, param, others)


def _shared_names(config: ModelConfig) -> list[str]:
    """The shared blocks, in the order of their first use."""
    injects = [config.blocks[name][0].inject for name in config.layer_names]
    return list(dict.fromkeys(name for inject in injects if inject for name in inject.shared))


def _mamba(config: ModelConfig, block: str) -> Mamba2Config:
    mixer_config = config.blocks[block][0].mixer
    assert isinstance(mixer_config, Mamba2Config)
    return mixer_config

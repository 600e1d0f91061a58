"""Hymba: attention and Mamba side by side behind meta tokens; most layers have a window, some reuse keys and values.

Not part of transformers; its own code, which comes with the checkpoints, is carried along and never imported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

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
from fast_llm_ssm.convert.rules import Depthwise, Rename, Split, TensorRule
from fast_llm_ssm.layers import AttentionConfig, MambaConfig, ParallelConfig
from fast_llm_ssm.model import ModelConfig
from fast_llm_ssm.model.config import SublayerConfig


class _Layers(decoder.Stack):
    """Global layers (g), layers with a window and keys of their own (l), and those that reuse keys (r)."""

    keys = (
        ("global_attn_idx",),
        ("num_hidden_layers",),
        ("kv_reuse_group",),
        ("sliding_window",),
        ("num_memory_tokens",),
        ("layer_type",),
    )
    blocks = {
        kind: decoder.layer(
            {
                "type": "parallel",
                "branches": [
                    {"type": "attention", "rope": {}, "kv": "reuse_previous" if kind == "r" else "own"},
                    {"type": "mamba", "inner_norm": {}},
                ],
                "branch_norm": {},
                "fused_out_proj": True,
                "combine": "mean",
            },
            {"type": "mlp"},
        )
        for kind in "glr"
    }

    def kinds(self, source: Json) -> Sequence[str]:
        count = get(source, self.keys[1])
        if set(get(source, self.keys[5], ["h"])) != {"h"}:
            raise UserError(f"layer_type is {source['layer_type']}, expected h for all: anything else is not built")
        if get(source, self.keys[3], None) is None:
            kinds = ["g"] * count
        else:
            everywhere = set(get(source, self.keys[0], None) or ())
            kinds = ["g" if i in everywhere else "l" for i in range(count)]
        groups = get(source, self.keys[2], None) or []
        for _, *users in groups:
            for i in users:
                if kinds[i] != "l":
                    raise UserError(f"kv_reuse_group has the global layer {i}, which is not built")
                kinds[i] = "r"
        if sorted(map(list, groups)) != _groups(kinds):
            raise UserError(f"kv_reuse_group is {groups}, expected each group to reuse the nearest earlier layer's")
        return kinds

    def read(self, source: Json, model: Json) -> None:
        super().read(source, model)
        model["meta_tokens"] = get(source, self.keys[4], 0)
        for kind, block in model["blocks"].items():
            if kind != "g":
                attention = block[0]["mixer"]["branches"][0]
                attention["window"] = source["sliding_window"] + 1  # theirs is the largest distance
                attention["prefix"] = model["meta_tokens"]

    def letter(self, block: Sequence[SublayerConfig]) -> str | None:
        if super().letter(block) is None:
            return None
        attention = _branches(block)[0]
        return "r" if attention.reuses_kv else "g" if attention.window is None else "l"

    def write_kinds(self, kinds: Sequence[str], config: ModelConfig, source: Json) -> None:
        windows = [_branches(config.blocks[name])[0].window for name in config.layer_names]
        source["global_attn_idx"] = [i for i, kind in enumerate(kinds) if kind == "g"]
        source["kv_reuse_group"] = _groups(kinds)
        source["sliding_window"] = one("window", [window - 1 for window in windows if window] or [None])
        source["num_memory_tokens"] = config.meta_tokens
        source["layer_type"] = ["h"] * len(kinds)


def _groups(kinds: Sequence[str]) -> list[list[int]]:
    """Each layer whose keys are reused, with those that do."""
    groups: list[list[int]] = []
    for i, kind in enumerate(kinds):
        if kind == "r" and groups:
            groups[-1].append(i)
        elif kind != "r":
            groups.append([i])
    return [group for group in groups if len(group) > 1]


def _branches(block: Sequence[SublayerConfig]) -> tuple[AttentionConfig, MambaConfig]:
    parallel = block[0].mixer
    assert isinstance(parallel, ParallelConfig)
    attention, mamba = parallel.branches
    assert isinstance(attention, AttentionConfig) and isinstance(mamba, MambaConfig)
    return attention, mamba


class _Sizes(ConfigRule):
    """Heads of attention, and the inner width, which is Mamba's and that of all heads' values."""

    keys = (("num_attention_heads",), ("num_key_value_heads",), ("mamba_expand",), ("mamba_dt_rank",), ("v_head_dim",))

    def read(self, source: Json, model: Json) -> None:
        size, heads = source["hidden_size"], get(source, self.keys[0])
        d_inner = int(get(source, self.keys[2], 2) * size)
        rank = get(source, self.keys[3], "auto")
        for config in mixers(model, "attention"):
            # v_head_dim is not read: the original overwrites it.
            config.update(
                num_heads=heads,
                num_kv_heads=get(source, self.keys[1], None) or heads,
                head_dim=size // heads,
                v_head_dim=d_inner // heads,
            )
        for config in mixers(model, "mamba"):
            config.update(d_inner=d_inner, dt_rank=-(-size // 16) if rank == "auto" else rank)

    def write(self, model: Json, source: Json) -> None:
        attentions, mambas = list(mixers(model, "attention")), list(mixers(model, "mamba"))
        source["num_attention_heads"] = heads = one("num_heads", [config["num_heads"] for config in attentions])
        source["num_key_value_heads"] = one("num_kv_heads", [config["num_kv_heads"] or heads for config in attentions])
        d_inner = one("d_inner", [config["d_inner"] for config in mambas])
        source["mamba_expand"] = d_inner // model["hidden_size"]
        source["mamba_dt_rank"] = one("dt_rank", [config["dt_rank"] for config in mambas])
        source["v_head_dim"] = d_inner // heads


class _Rope(ConfigRule):
    keys = (
        ("rope_theta",),
        ("rope_type",),
        ("rope",),
        ("max_position_embeddings",),
        ("orig_max_position_embeddings",),
    )

    def read(self, source: Json, model: Json) -> None:
        kind = get(source, self.keys[1], None) or "default"
        if kind not in ("ntk", "default"):
            raise UserError(f"rope_type is {kind!r}, expected ntk or default: anything else is not built")
        rope = {"theta": get(source, self.keys[0], 10000.0)}
        if kind == "ntk":
            maximum, original = (get(source, key) for key in self.keys[3:])
            rope |= {"type": "hymba_ntk", "max_positions": maximum, "original_max_positions": original}
        for config in mixers(model, "attention"):
            config["rope"] = dict(rope) if get(source, self.keys[2], True) else None

    def write(self, model: Json, source: Json) -> None:
        rope = one("rope", [config["rope"] for config in mixers(model, "attention")])
        source["rope"] = rope is not None
        if rope is not None:
            source["rope_theta"] = rope["theta"]
            source["rope_type"] = "ntk" if rope["type"] == "hymba_ntk" else None
            if rope["type"] == "hymba_ntk":
                source["max_position_embeddings"] = rope["max_positions"]
                source["orig_max_position_embeddings"] = rope["original_max_positions"]


@register("hymba")
class HymbaConverter(Converter):
    """Decoding follows the rule of training: the original's cache holds one key fewer than its window."""

    config_rules = (
        _Layers(),
        Fixed("model_type", "hymba", fresh=True),
        Carried(architectures=["HymbaForCausalLM"]),
        Value("hidden_size", top("hidden_size")),
        parts.Vocabulary(),
        Value("tie_word_embeddings", top("tie_embeddings"), default=True),
        Value("initializer_range", top("init", "std"), default=0.02),
        Value(
            "rms_norm_eps",
            norms("eps"),
            mixer("parallel", "branch_norm", "eps"),
            mixer("mamba", "inner_norm", "eps"),
            default=1e-6,
        ),
        _Sizes(),
        _Rope(),
        Value("intermediate_size", mixer("mlp", "size")),
        Value("mlp_hidden_act", mixer("mlp", "activation"), default="silu", choices=decoder.ACTIVATIONS),
        Value("mamba_d_state", mixer("mamba", "d_state"), default=16),
        Value("mamba_d_conv", mixer("mamba", "d_conv"), default=4),
        Value("mamba_conv_bias", mixer("mamba", "conv_bias"), default=True),
        Fixed("mamba_proj_bias", False),
        Fixed("mamba_inner_layernorms", True, fresh=True),
        Fixed("hidden_act", "silu", "swish", fresh=True),
        Fixed("attention_dropout", 0.0),
        Fixed("attn_hidden_size", -1, fresh=True),
        Fixed("kq_head_dim", -1, fresh=True),
        Fixed("kq_norm", "none", None, fresh=True),
        Fixed("kv_reuse_every_i_layer", -1, fresh=True),
        Fixed("kv_weight_reuse", False),
        Fixed("memory_tokens_interspersed_every", 0, fresh=True),
        Fixed("num_experts", 1, fresh=True),
        Fixed("num_experts_per_tok", 1, fresh=True),
        Fixed("num_mamba", 1, fresh=True),
        Carried(
            "attn_implementation",
            "calc_logits_for_entire_prompt",
            "chunk_size_feed_forward",
            "conv_dim",
            "id2label",
            "is_encoder_decoder",
            "label2id",
            "output_router_logits",
            "router_aux_loss_coef",
            "seq_length",
            "use_mamba_kernels",
            attn_implementation_new="flex",
        ),
        parts.GENERAL,
    )

    def matches(self, source: Json, tensors: Collection[str]) -> bool:
        return source.get("model_type") == "hymba"

    def tensor_rules(self, config: ModelConfig) -> list[TensorRule]:
        rules = list(decoder.frame(config, "model.embed_tokens", "model.final_layernorm"))
        if config.meta_tokens:
            rules.append(Rename("model.memory_tokens", "meta_tokens"))
        for i, name in enumerate(config.layer_names):
            file, param = f"model.layers.{i}", f"layers.{i}"
            rules.append(Rename(f"{file}.input_layernorm.weight", f"{param}.0.norm.weight"))
            rules += _mixer(f"{file}.mamba", f"{param}.0.mixer", *_branches(config.blocks[name]))
            rules.append(Rename(f"{file}.pre_moe_layernorm.weight", f"{param}.1.norm.weight"))
            rules += decoder.MIXERS["mlp"](f"{file}.moe.experts.0", f"{param}.1.mixer", config.blocks[name][1].mixer)
        return rules


def _mixer(file: str, param: str, attention: AttentionConfig, mamba: MambaConfig) -> Iterator[TensorRule]:
    attend, scan = f"{param}.branches.0", f"{param}.branches.1"
    heads, key_size, value_size = attention.kv_shape
    rows = {f"{attend}.q_proj.weight": attention.num_heads * key_size}
    if not attention.reuses_kv:
        rows |= {f"{attend}.k_proj.weight": heads * key_size, f"{attend}.v_proj.weight": heads * value_size}
    rows[f"{scan}.in_proj.weight"] = 2 * mamba.d_inner
    yield Split(f"{file}.in_proj.weight", list(rows), list(rows.values()))
    yield Rename(f"{file}.pre_avg_layernorm1.weight", f"{param}.branch_norms.0.weight")
    yield Rename(f"{file}.pre_avg_layernorm2.weight", f"{param}.branch_norms.1.weight")
    yield Rename(f"{file}.out_proj.weight", f"{param}.out_proj.weight")
    yield Depthwise(f"{file}.conv1d.weight", f"{scan}.conv_weight")
    if mamba.conv_bias:
        yield Rename(f"{file}.conv1d.bias", f"{scan}.conv_bias")
    yield Rename(f"{file}.x_proj.0.weight", f"{scan}.x_proj.weight")
    yield Rename(f"{file}.dt_proj.0.weight", f"{scan}.dt_proj.weight")
    yield Rename(f"{file}.dt_proj.0.bias", f"{scan}.dt_bias")
    for name in ("A_log", "D"):
        yield Rename(f"{file}.{name}.0", f"{scan}.{name}")
    for name in ("dt", "B", "C"):
        yield Rename(f"{file}.{name}_layernorm.weight", f"{scan}.{name}_norm.weight")

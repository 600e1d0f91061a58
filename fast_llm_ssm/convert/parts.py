"""Rules that many families share: for tensors (prefixes end without a dot), and for config keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert.config_rules import Carried, ConfigRule, Json, get, mixers, number, one
from fast_llm_ssm.convert.rules import Depthwise, Join, Rename, TensorRule
from fast_llm_ssm.layers.attention import AttentionConfig
from fast_llm_ssm.layers.mamba import MambaConfig
from fast_llm_ssm.layers.mamba2 import Mamba2Config
from fast_llm_ssm.layers.mlp import MLPConfig


def linear(file: str, param: str, bias: bool = False) -> Iterator[TensorRule]:
    """A matrix, and its bias if it has one."""
    yield Rename(f"{file}.weight", f"{param}.weight")
    if bias:
        yield Rename(f"{file}.bias", f"{param}.bias")


def mamba2(file: str, param: str, config: Mamba2Config) -> Iterator[TensorRule]:
    """Mamba 2 as transformers, and the authors' own code, name its tensors."""
    yield from linear(f"{file}.in_proj", f"{param}.in_proj", config.proj_bias)
    yield Depthwise(f"{file}.conv1d.weight", f"{param}.conv_weight")
    if config.conv_bias:
        yield Rename(f"{file}.conv1d.bias", f"{param}.conv_bias")
    for name in ("dt_bias", "A_log", "D"):
        yield Rename(f"{file}.{name}", f"{param}.{name}")
    if config.gate != "no_norm":
        yield Rename(f"{file}.norm.weight", f"{param}.norm.weight")
    yield from linear(f"{file}.out_proj", f"{param}.out_proj", config.proj_bias)


def mamba(file: str, param: str, config: MambaConfig) -> Iterator[TensorRule]:
    """Mamba 1 as transformers, and the authors' own code, name its tensors."""
    yield from linear(f"{file}.in_proj", f"{param}.in_proj", config.proj_bias)
    yield Depthwise(f"{file}.conv1d.weight", f"{param}.conv_weight")
    if config.conv_bias:
        yield Rename(f"{file}.conv1d.bias", f"{param}.conv_bias")
    for name in ("x_proj.weight", "dt_proj.weight", "A_log", "D"):
        yield Rename(f"{file}.{name}", f"{param}.{name}")
    yield Rename(f"{file}.dt_proj.bias", f"{param}.dt_bias")
    yield from linear(f"{file}.out_proj", f"{param}.out_proj", config.proj_bias)


def attention(file: str, param: str, config: AttentionConfig) -> Iterator[TensorRule]:
    """Attention with separate q, k and v, as most of transformers names its tensors."""
    for name in ("q_proj", "k_proj", "v_proj"):
        yield from linear(f"{file}.{name}", f"{param}.{name}", config.bias)
    yield from linear(f"{file}.o_proj", f"{param}.o_proj", config.out_bias)
    if config.qk_norm is not None and config.qk_norm.weight:
        yield Rename(f"{file}.q_norm.weight", f"{param}.q_norm.weight")
        yield Rename(f"{file}.k_norm.weight", f"{param}.k_norm.weight")


def mlp(file: str, param: str, config: MLPConfig) -> Iterator[TensorRule]:
    """A feed-forward layer with gate and up apart, as most of transformers names its tensors."""
    for kind in ("weight", "bias") if config.bias else ("weight",):
        if config.gated:
            yield Join([f"{file}.gate_proj.{kind}", f"{file}.up_proj.{kind}"], f"{param}.gate_up_proj.{kind}")
        else:
            yield Rename(f"{file}.up_proj.{kind}", f"{param}.up_proj.{kind}")
        yield Rename(f"{file}.down_proj.{kind}", f"{param}.down_proj.{kind}")


class Mamba2Heads(ConfigRule):
    """The inner width of Mamba 2 is heads times head size, whatever the expansion factor says.

    Args:
        heads, head_dim, expand: The keys, each with its spellings.
        default_heads: Number of heads where neither heads nor head size are given.
    """

    def __init__(
        self, heads: tuple[str, ...], head_dim: tuple[str, ...], expand: tuple[str, ...], default_heads: int
    ) -> None:
        self.keys = (heads, head_dim, expand)
        self.default_heads = default_heads

    def read(self, source: Json, model: Json) -> None:
        heads, head_dim = (get(source, spellings, None) for spellings in self.keys[:2])
        if head_dim == "auto":
            head_dim = None
        width = int(get(source, self.keys[2], 2) * source["hidden_size"])
        if heads is None:
            heads = self.default_heads if head_dim is None else width // head_dim
        if head_dim is None:
            head_dim = width // heads
        for config in mixers(model, "mamba2"):
            config.update(d_inner=heads * head_dim, head_dim=head_dim)

    def write(self, model: Json, source: Json) -> None:
        if not any(mixers(model, "mamba2")):
            return
        heads, head_dim, expand = (spellings[0] for spellings in self.keys[:3])
        source[head_dim] = one(head_dim, [config["head_dim"] for config in mixers(model, "mamba2")])
        d_inner = one(heads, [config["d_inner"] for config in mixers(model, "mamba2")])
        ratio = d_inner / model["hidden_size"]
        source[heads] = d_inner // source[head_dim]
        source[expand] = int(ratio) if ratio.is_integer() else ratio


class Vocabulary(ConfigRule):
    """The rows of the embedding; here padding up to a multiple is not told apart from the vocabulary."""

    keys = (("vocab_size",),)

    def read(self, source: Json, model: Json) -> None:
        model["vocab_size"] = get(source, self.keys[0])

    def write(self, model: Json, source: Json) -> None:
        multiple = model["pad_vocab_multiple"]
        source["vocab_size"] = -(-model["vocab_size"] // multiple) * multiple


class Rope(ConfigRule):
    """The base of rotary positions, for every attention that has them.

    Old files say `rope_theta`, new ones `rope_parameters: {rope_type, rope_theta}`.
    """

    keys = (("rope_theta",), ("rope_parameters",), ("rope_scaling",))

    def __init__(self, default: float = 10000.0) -> None:
        self.default = default

    def read(self, source: Json, model: Json) -> None:
        parameters = source.get("rope_parameters") or {}
        scaling = source.get("rope_scaling") or {}
        kinds = {part.get("rope_type", part.get("type", "default")) for part in (parameters, scaling)}
        if kinds != {"default"}:
            raise UserError(f"rope scaling {', '.join(sorted(kinds - {'default'}))} is not built")
        theta = number(parameters.get("rope_theta", source.get("rope_theta", self.default)))
        for config in mixers(model, "attention"):
            if config.get("rope") is not None:
                config["rope"]["theta"] = theta

    def write(self, model: Json, source: Json) -> None:
        thetas = [config["rope"]["theta"] for config in mixers(model, "attention") if config.get("rope")]
        if thetas:
            source["rope_theta"] = one("rope_theta", thetas)

    def update(self, source: Json, spellings: tuple[str, ...], value: Any) -> None:
        parameters = source.get("rope_parameters") or {}
        if "rope_theta" in parameters:
            source["rope_parameters"] = {**parameters, "rope_theta": value}
        else:
            source["rope_theta"] = value


class _General(Carried):
    """Keys that any Hugging Face config may have and that say nothing about the model's function."""

    def read(self, source: Json, model: Json) -> None:
        for key in ("is_encoder_decoder", "add_cross_attention"):
            if source.get(key):
                raise UserError(f"{key} is {source[key]!r}, expected False: anything else is not built")


GENERAL = _General(
    *"""_attn_implementation_autoset _name_or_path add_cross_attention auto_map bad_words_ids begin_suppress_tokens
    bos_token_id chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample
    dtype early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label is_decoder is_encoder_decoder label2id length_penalty max_length
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores pad_token_id prefix problem_type pruned_heads remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p unsloth_version use_bfloat16 use_cache""".split()
)

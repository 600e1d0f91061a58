"""The `model:` section: blocks, how they repeat, and what stands around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from fast_llm_ssm.config import Config
from fast_llm_ssm.layers import AnyMixer
from fast_llm_ssm.layers.parts import NormConfig
from fast_llm_ssm.model.pattern import MAX_LAYERS, expand_pattern, fit


class AdapterConfig(Config):
    """Low-rank additions to a shared block's projections: one set for each use."""

    rank: int = Field(gt=0)
    targets: list[str] = Field(min_length=1)


class InjectConfig(Config):
    """Feeds the output of a shared block into this sublayer's input: mixer(norm(x + linear(shared(...)))).

    Use u of all uses in the model takes shared[u % len(shared)]. `input` is what the shared block reads: the hidden
    state, or [hidden, embedding] side by side.
    """

    shared: list[str] = Field(min_length=1)
    input: Literal["hidden", "concat_embedding"] = "concat_embedding"
    adapters: AdapterConfig | None = None
    out_linear: bool = True


class SublayerConfig(Config):
    """x + residual_multiplier * mixer(norm(x + injected)), or without `residual`, mixer(norm(x))."""

    mixer: AnyMixer
    norm: NormConfig = NormConfig()
    input_size: int | None = Field(default=None, gt=0)
    residual: bool = True
    residual_multiplier: float = 1.0
    inject: InjectConfig | None = None


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


# A block of one sublayer may be written without the list.
Block = Annotated[list[SublayerConfig], BeforeValidator(_as_list), Field(min_length=1)]


class ExpectConfig(Config):
    """Numbers that the model must have: a cheap guard against a wrong config."""

    layers: int | None = None
    params: int | None = None


class ConversionConfig(Config):
    """The checkpoint format that this model exports to, with the options that its converter needs."""

    format: str
    options: dict[str, Any] = Field(default_factory=dict)


class InitConfig(Config):
    """Initial weights. `std` is of embeddings and transformer matrices; mixers say the rest."""

    std: float = Field(default=0.02, gt=0)


class ModelConfig(Config):
    """A stack of blocks between an embedding and a head.

    `meta_tokens` learned vectors stand before the tokens of every document, through all layers; positions count from
    them, and they have no logits.
    """

    name: str = "model"
    hidden_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    pad_vocab_multiple: int = Field(default=1, gt=0)
    tie_embeddings: bool = True
    meta_tokens: int = Field(default=0, ge=0)
    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    residual_fp32: bool = False
    final_norm: NormConfig = NormConfig()
    shared: dict[str, Block] = Field(default_factory=dict)
    blocks: dict[str, Block] = Field(min_length=1)
    pattern: str | list[str]
    symbols: dict[str, str] = Field(default_factory=dict)
    num_blocks: int | None = Field(default=None, gt=0, le=MAX_LAYERS)
    init: InitConfig = InitConfig()
    conversion: ConversionConfig | None = None
    expect: ExpectConfig = ExpectConfig()

    @property
    def layer_names(self) -> list[str]:
        """The block name of each layer."""
        names = expand_pattern(self.pattern, self.symbols) if isinstance(self.pattern, str) else list(self.pattern)
        return fit(names, self.num_blocks)

    @property
    def num_rows(self) -> int:
        """Rows of the embedding: the vocabulary, padded."""
        return -(-self.vocab_size // self.pad_vocab_multiple) * self.pad_vocab_multiple

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        problems = [*self._pattern_problems(), *self._size_problems()]
        if not problems:
            problems = list(self._kv_problems())
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _pattern_problems(self) -> Iterator[str]:
        try:
            names = self.layer_names
        except ValueError as error:
            yield f"pattern: {error}"
            return
        if not names:
            yield "pattern: got an empty one, expected at least one layer"
        for name in dict.fromkeys(names):
            if name not in self.blocks:
                yield f"pattern: names the unknown block `{name}`, expected one of: {', '.join(self.blocks)}"
        if self.expect.layers not in (None, len(names)):
            yield f"expect.layers: got {self.expect.layers}, but the pattern gives {len(names)}"

    def _kv_problems(self) -> Iterator[str]:
        """Keys and values that a layer reuses must have been made, in the same shape."""
        for name, block in self.shared.items():
            if any(part.reuses_kv for sublayer in block for part in sublayer.mixer.parts()):
                yield f"shared.{name}: a shared block can't reuse keys and values"
        made: tuple[int, int, int] | None = None
        for i, name in enumerate(self.layer_names):
            for j, sublayer in enumerate(self.blocks[name]):
                for part in sublayer.mixer.parts():
                    if part.kv_shape is None:
                        continue
                    if part.reuses_kv and made is None:
                        yield f"blocks.{name}.{j}.mixer.kv: layer {i} has no earlier keys and values to reuse"
                    elif part.reuses_kv and made != part.kv_shape:
                        yield (
                            f"blocks.{name}.{j}.mixer.kv: layer {i} wants (heads, key size, value size) "
                            f"{part.kv_shape}, but the ones to reuse are {made}"
                        )
                    elif not part.reuses_kv:
                        made = part.kv_shape

    def _size_problems(self) -> Iterator[str]:
        for name, block in self.blocks.items():
            for j, sublayer in enumerate(block):
                where = f"blocks.{name}.{j}"
                yield from self._input_size_problems(where, sublayer)
                if sublayer.inject:
                    yield from self._inject_problems(f"{where}.inject", sublayer.inject)
        for name, block in self.shared.items():
            for j, sublayer in enumerate(block):
                if sublayer.inject:
                    yield f"shared.{name}.{j}.inject: a shared block can't use another one"
                if j:  # what the first one reads depends on its users
                    yield from self._input_size_problems(f"shared.{name}.{j}", sublayer)

    def _input_size_problems(self, where: str, sublayer: SublayerConfig) -> Iterator[str]:
        if sublayer.input_size not in (None, self.hidden_size):
            yield f"{where}.input_size: got {sublayer.input_size}, expected hidden_size ({self.hidden_size})"

    def _inject_problems(self, where: str, inject: InjectConfig) -> Iterator[str]:
        width = self.hidden_size * (2 if inject.input == "concat_embedding" else 1)
        for name in inject.shared:
            if name not in self.shared:
                known = ", ".join(self.shared) or "none is defined"
                yield f"{where}.shared: names the unknown shared block `{name}`, expected one of: {known}"
                continue
            block = self.shared[name]
            got = block[0].input_size or self.hidden_size
            if got != width:
                yield f"shared.{name}.0.input_size: got {got}, expected {width} for {where}.input {inject.input}"
            if block[0].residual and width != self.hidden_size:
                yield f"shared.{name}.0.residual: got true, expected false: its output is narrower than its input"
            targets = {t for s in block for t in s.mixer.adapter_targets(s.input_size or self.hidden_size)}
            for target in inject.adapters.targets if inject.adapters else ():
                if target not in targets:
                    known = ", ".join(sorted(targets)) or "none"
                    yield f"{where}.adapters.targets: got `{target}`, expected what shared.{name} can adapt: {known}"

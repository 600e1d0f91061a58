"""What a mixer is: its config, its duties, and the registry that YAML's `type:` looks in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from fast_llm_ssm.config import Config, Registry
from fast_llm_ssm.layers.init import Init
from fast_llm_ssm.layers.layout import Layout
from fast_llm_ssm.layers.parts import NO_ADAPTERS, Adapters

State = dict[str, Any]
"""What a mixer remembers of a batch of rows while decoding: tensors [B, ...], updated in place; nesting is allowed."""


class MixerConfig(Config):
    """Base of every mixer's config. A subclass narrows `type` to its name and builds its module."""

    type: str

    def build(self, input_size: int, output_size: int) -> Mixer:
        """The module, mapping [B, T, input_size] to [B, T, output_size]."""
        raise NotImplementedError

    @property
    def inner_size(self) -> int | None:
        """Width before the output projection, of mixers that can do without one; None of others."""
        return None

    def build_inner(self, input_size: int) -> Mixer:
        """The module without its output projection, mapping [B, T, input_size] to [B, T, inner_size]."""
        raise NotImplementedError

    def parts(self) -> Iterator[MixerConfig]:
        """This mixer and those inside it, in the order in which they run."""
        yield self

    @property
    def kv_shape(self) -> tuple[int, int, int] | None:
        """(heads, size of a key, size of a value) of what later layers can reuse, or of what this one reuses."""
        return None

    @property
    def reuses_kv(self) -> bool:
        """Whether it attends to the keys and values of the nearest earlier layer that has its own."""
        return False

    def adapter_targets(self, input_size: int) -> dict[str, tuple[int, int]]:
        """Projections that a use of a shared block may adapt: name -> (in features, out features)."""
        return {}


mixers: Registry[MixerConfig] = Registry("mixer", entry_points="fast_llm_ssm.mixers")
AnyMixer = Annotated[MixerConfig, mixers]


class Mixer(nn.Module):
    """Base of every mixer. Shapes: x [B, T, input_size] -> [B, T, output_size], in the layout's dtype.

    `forward`, `prefill` and `step` compute the same function: prefill continues a decoding state by any number of
    tokens, step by one, and both update it in place.
    """

    fp32_parameters: ClassVar[frozenset[str]] = frozenset()
    """Own parameters that stay fp32, in memory and in use."""

    no_decay_parameters: ClassVar[frozenset[str]] = frozenset()
    """Own parameters without weight decay, beside all biases and norms."""

    supports_documents: ClassVar[bool] = True
    """Whether documents packed into one row stay apart."""

    def forward(self, x: Tensor, layout: Layout, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        raise NotImplementedError

    def new_state(self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype) -> State:
        """The state of rows that have seen nothing; `max_length` tokens must fit. Stateless mixers keep the default."""
        return {}

    def prefill(self, x: Tensor, layout: Layout, state: State, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        """x [1, T, input_size]: the new tokens of all rows packed, as `layout.rows` and `layout.cu_seqlens` say."""
        raise NotImplementedError

    def step(self, x: Tensor, layout: Layout, state: State, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        """x [B, 1, input_size], one token a row; `layout.positions` [B, 1]."""
        raise NotImplementedError

    def init_weights(self, init: Init) -> None:
        """Fill every own parameter in place; norms have been set to one, biases to zero."""
        raise NotImplementedError

    def flops_per_token(self, sequence_length: int) -> float:
        """Floating-point operations of the forward pass for one token, averaged over such a document."""
        raise NotImplementedError

    def activation_size_per_token(self) -> float:
        """Numbers that the backward pass needs of one token, roughly."""
        raise NotImplementedError

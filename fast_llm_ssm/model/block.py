"""Sublayers and blocks: norm, mixer, residual, and the use of shared blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fast_llm_ssm.layers.base import Mixer, State
from fast_llm_ssm.layers.init import Init
from fast_llm_ssm.layers.layout import Layout
from fast_llm_ssm.layers.parts import NO_ADAPTERS, Adapter, Adapters, Linear, Modules
from fast_llm_ssm.model.config import AdapterConfig, InjectConfig, SublayerConfig


@dataclass
class SublayerState:
    """Decoding state of one sublayer: its mixer's, and one for each mixer of the shared block that it uses."""

    mixer: State
    shared: list[SublayerState] = field(default_factory=list)


class Block(Modules["Sublayer"]):
    """Sublayers one after the other: one layer of the model, or a shared block."""

    def __init__(self, configs: Sequence[SublayerConfig], hidden_size: int):
        super().__init__(Sublayer(config, hidden_size) for config in configs)
        self.reuses_kv = any(part.reuses_kv for config in configs for part in config.mixer.parts())

    def forward(
        self,
        x: Tensor,
        embedding: Tensor,
        layout: Layout,
        mode: str = "forward",
        state: list[SublayerState] | None = None,
        adapters: Sequence[Adapters] | None = None,
    ) -> Tensor:
        """x [B, T, input_size] -> [B, T, hidden_size]. `mode` names the mixers' method: forward, prefill or step."""
        for j, sublayer in enumerate(self):
            x = sublayer(
                x,
                embedding,
                layout,
                mode,
                state[j] if state is not None else None,
                adapters[j] if adapters is not None else NO_ADAPTERS,
            )
        return x

    def new_state(
        self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> list[SublayerState]:
        return [sublayer.new_state(batch_size, max_length, device, dtype) for sublayer in self]

    def all_sublayers(self) -> Iterator[Sublayer]:
        """Own ones, and those of each shared block that they use, once a use."""
        for sublayer in self:
            yield sublayer
            if sublayer.inject is not None:
                yield from sublayer.inject.block

    def flops_per_token(self, sequence_length: int) -> float:
        """Operations of the forward pass for one token, averaged over a document of this length."""
        uses = [sublayer.inject for sublayer in self if sublayer.inject is not None]
        own = sum(2 * parameter.numel() for use in uses for parameter in use.parameters())
        return own + sum(sublayer.mixer.flops_per_token(sequence_length) for sublayer in self.all_sublayers())

    def activation_size_per_token(self) -> float:
        """Numbers kept for the backward pass of one token: each sublayer's input, and what its mixer keeps."""
        return sum(sublayer.norm.size + sublayer.mixer.activation_size_per_token() for sublayer in self.all_sublayers())


class Sublayer(nn.Module):
    """x + multiplier * mixer(norm(x + injected))."""

    mixer: Mixer

    def __init__(self, config: SublayerConfig, hidden_size: int):
        super().__init__()
        input_size = config.input_size or hidden_size
        self.residual = config.residual
        self.residual_multiplier = config.residual_multiplier
        self.norm = config.norm.build(input_size)
        self.mixer = config.mixer.build(input_size, hidden_size)
        self.inject: Inject | None = None  # the model sets it, since it knows which use of which shared block this is

    def forward(
        self,
        x: Tensor,
        embedding: Tensor,
        layout: Layout,
        mode: str,
        state: SublayerState | None,
        adapters: Adapters,
    ) -> Tensor:
        h = x
        if self.inject is not None:
            h = x + self.inject(x, embedding, layout, mode, state.shared if state is not None else None)
        h = self.norm(h).to(layout.dtype)
        if state is None:
            y = self.mixer(h, layout, adapters=adapters)
        else:
            y = getattr(self.mixer, mode)(h, layout, state.mixer, adapters=adapters)
        if self.residual_multiplier != 1.0:
            y = y * self.residual_multiplier
        return x + y if self.residual else y

    def new_state(self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype) -> SublayerState:
        own = self.mixer.new_state(batch_size, max_length, device, dtype)
        if self.inject is None:
            return SublayerState(own)
        # Each use of a shared block remembers its own past.
        return SublayerState(own, self.inject.block.new_state(batch_size, max_length, device, dtype))


class Inject(nn.Module):
    """One use of a shared block: its adapters and its output projection, which are this use's alone."""

    def __init__(self, config: InjectConfig, block: Block, block_configs: Sequence[SublayerConfig], hidden_size: int):
        super().__init__()
        self.concat = config.input == "concat_embedding"
        # In a tuple, so that the shared parameters are registered once, under the model.
        self._block = (block,)
        self.linear = Linear(hidden_size, hidden_size) if config.out_linear else None
        self.adapters = nn.ModuleList(_adapters(config.adapters, sublayer, hidden_size) for sublayer in block_configs)

    @property
    def block(self) -> Block:
        return self._block[0]

    def forward(
        self, x: Tensor, embedding: Tensor, layout: Layout, mode: str, state: list[SublayerState] | None
    ) -> Tensor:
        h = torch.cat([x, embedding], dim=-1) if self.concat else x
        # Its keys and values belong to this use alone.
        y = self.block(h, embedding, replace(layout, kv=None), mode, state, self.adapters)
        return y if self.linear is None else self.linear(y.to(layout.dtype))

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        """Adapters are drawn like any matrix: they are base weights."""
        for module in self.modules():
            if isinstance(module, Linear):
                init.normal(module.weight)


def _adapters(config: AdapterConfig | None, sublayer: SublayerConfig, hidden_size: int) -> nn.ModuleDict:
    if config is None:
        return nn.ModuleDict()
    targets = sublayer.mixer.adapter_targets(sublayer.input_size or hidden_size)
    return nn.ModuleDict(
        {name: Adapter(*_sizes(targets[name], config.rank)) for name in config.targets if name in targets}
    )


def _sizes(target: tuple[int, int], rank: int) -> tuple[int, int, int]:
    return target[0], rank, target[1]

"""A gated short convolution as a mixer: y = out(c * conv(b * x))."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fast_llm_ssm.layers import Mixer, MixerConfig, State, mixers
from fast_llm_ssm.layers.init import Init
from fast_llm_ssm.layers.layout import Layout
from fast_llm_ssm.layers.parts import NO_ADAPTERS, Adapters, Linear
from fast_llm_ssm.ops import causal_conv1d, causal_conv1d_update


@mixers.register("short_conv")
class ShortConvConfig(MixerConfig):
    """Gated short convolution: looks back a few tokens, remembers no more."""

    type: Literal["short_conv"] = "short_conv"
    size: int = Field(gt=0)
    width: int = Field(default=4, ge=2)

    def build(self, input_size: int, output_size: int) -> ShortConv:
        return ShortConv(self, input_size, output_size)


class ShortConv(Mixer):
    """in_proj -> b, c, x; convolve b * x; gate with c; out_proj."""

    def __init__(self, config: ShortConvConfig, input_size: int, output_size: int):
        super().__init__()
        self.config = config
        self.in_proj = Linear(input_size, 3 * config.size)
        self.conv_weight = nn.Parameter(torch.empty(config.size, config.width))
        self.out_proj = Linear(config.size, output_size)

    def forward(self, x: Tensor, layout: Layout, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        c, bx = self._project(x)
        y = causal_conv1d(bx.transpose(1, 2), self.conv_weight.to(x.dtype), seq_idx=layout.seq_idx)
        return self.out_proj(c * y.transpose(1, 2))

    def new_state(self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype) -> State:
        return {"conv": torch.zeros(batch_size, self.config.size, self.config.width - 1, device=device, dtype=dtype)}

    def prefill(self, x: Tensor, layout: Layout, state: State, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        c, bx = self._project(x)
        y, conv_state = causal_conv1d(
            bx.transpose(1, 2),
            self.conv_weight.to(x.dtype),
            initial_states=state["conv"],
            return_final_states=True,
            cu_seqlens=layout.cu_seqlens,
        )
        state["conv"].copy_(conv_state)
        return self.out_proj(c * y.transpose(1, 2))

    def step(self, x: Tensor, layout: Layout, state: State, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        c, bx = self._project(x[:, 0])
        return self.out_proj(c * causal_conv1d_update(bx, state["conv"], self.conv_weight.to(x.dtype)))[:, None]

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, c, x = self.in_proj(x).chunk(3, dim=-1)
        return c, b * x

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        init.normal(self.in_proj.weight)
        init.fan_in_uniform(self.conv_weight, self.config.width)
        init.normal(self.out_proj.weight, scale=init.residual_scale)

    def flops_per_token(self, sequence_length: int) -> float:
        return 2 * sum(parameter.numel() for parameter in self.parameters())

    def activation_size_per_token(self) -> float:
        return self.in_proj.in_features + 6 * self.config.size

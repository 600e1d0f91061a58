"""Feed-forward layer, gated or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fast_llm_ssm.layers.base import Mixer, MixerConfig, State, mixers
from fast_llm_ssm.layers.init import Init
from fast_llm_ssm.layers.layout import Layout
from fast_llm_ssm.layers.parts import NO_ADAPTERS, Adapters, Linear, project, scaled


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
}


@mixers.register("mlp")
class MLPConfig(MixerConfig):
    """Feed-forward layer: down(act(up x)), or gated, down(act(gate x) * up x).

    The multipliers scale what the activation sees, and the output.
    """

    type: Literal["mlp"] = "mlp"
    size: int = Field(gt=0)
    gated: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu"
    bias: bool = False
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0

    def build(self, input_size: int, output_size: int) -> MLP:
        return MLP(self, input_size, output_size)

    def adapter_targets(self, input_size: int) -> dict[str, tuple[int, int]]:
        return {"gate_up": (input_size, 2 * self.size)} if self.gated else {"up": (input_size, self.size)}


class MLP(Mixer):
    """Gated: gate and up are one matrix, gate rows first."""

    def __init__(self, config: MLPConfig, input_size: int, output_size: int):
        super().__init__()
        self.config = config
        self.activation = ACTIVATIONS[config.activation]
        if config.gated:
            self.gate_up_proj = Linear(input_size, 2 * config.size, config.bias)
        else:
            self.up_proj = Linear(input_size, config.size, config.bias)
        self.down_proj = Linear(config.size, output_size, config.bias)

    def forward(self, x: Tensor, layout: Layout, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        c = self.config
        if c.gated:
            gate, up = project(self.gate_up_proj, x, adapters, "gate_up").chunk(2, dim=-1)
            h = self.activation(scaled(gate, c.gate_multiplier)) * up
        else:
            h = self.activation(scaled(project(self.up_proj, x, adapters, "up"), c.gate_multiplier))
        return scaled(self.down_proj(h), c.down_multiplier)

    def prefill(self, x: Tensor, layout: Layout, state: State, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        return self.forward(x, layout, adapters)

    def step(self, x: Tensor, layout: Layout, state: State, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        return self.forward(x, layout, adapters)

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        init.normal((self.gate_up_proj if self.config.gated else self.up_proj).weight)
        init.normal(self.down_proj.weight, scale=init.residual_scale)

    def flops_per_token(self, sequence_length: int) -> float:
        up = self.gate_up_proj if self.config.gated else self.up_proj
        return 2 * (up.weight.numel() + self.down_proj.weight.numel())

    def activation_size_per_token(self) -> float:
        up = self.gate_up_proj if self.config.gated else self.up_proj
        return up.in_features + up.out_features + (2 if self.config.gated else 1) * self.config.size

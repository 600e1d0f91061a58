"""Several mixers side by side on one input."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fast_llm_ssm.layers.base import AnyMixer, Mixer, MixerConfig, State, mixers
from fast_llm_ssm.layers.init import Init
from fast_llm_ssm.layers.layout import Layout
from fast_llm_ssm.layers.parts import NO_ADAPTERS, Adapters


@mixers.register("parallel")
class ParallelConfig(MixerConfig):
    """Mixers that read the same input; their outputs are summed or averaged."""

    type: Literal["parallel"] = "parallel"
    branches: list[AnyMixer] = Field(min_length=1)
    combine: Literal["sum", "mean"] = "sum"

    def build(self, input_size: int, output_size: int) -> Parallel:
        return Parallel(self, input_size, output_size)


class Parallel(Mixer):
    """Runs its branches one after the other and combines what they return."""

    def __init__(self, config: ParallelConfig, input_size: int, output_size: int):
        super().__init__()
        self.config = config
        self.branches = nn.ModuleList(branch.build(input_size, output_size) for branch in config.branches)

    def forward(self, x: Tensor, layout: Layout, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        return self._combine([branch(x, layout) for branch in self.branches])

    def new_state(self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype) -> State:
        return {
            str(i): branch.new_state(batch_size, max_length, device, dtype) for i, branch in enumerate(self.branches)
        }

    def prefill(self, x: Tensor, layout: Layout, state: State, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        return self._combine([branch.prefill(x, layout, state[str(i)]) for i, branch in enumerate(self.branches)])

    def step(self, x: Tensor, layout: Layout, state: State, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        return self._combine([branch.step(x, layout, state[str(i)]) for i, branch in enumerate(self.branches)])

    def _combine(self, outputs: list[Tensor]) -> Tensor:
        y = torch.stack(outputs).sum(0) if len(outputs) > 2 else sum(outputs[1:], outputs[0])
        return y / len(outputs) if self.config.combine == "mean" else y

    def init_weights(self, init: Init) -> None:
        for branch in self.branches:
            branch.init_weights(init)

    def flops_per_token(self, sequence_length: int) -> float:
        return sum(branch.flops_per_token(sequence_length) for branch in self.branches)

    def activation_size_per_token(self) -> float:
        return sum(branch.activation_size_per_token() for branch in self.branches)

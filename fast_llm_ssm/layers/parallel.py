"""Several mixers side by side on one input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fast_llm_ssm.layers.base import AnyMixer, Mixer, MixerConfig, State, mixers
from fast_llm_ssm.layers.init import Init
from fast_llm_ssm.layers.layout import Layout
from fast_llm_ssm.layers.parts import NO_ADAPTERS, Adapters, Linear, Modules, NormConfig


@mixers.register("parallel")
class ParallelConfig(MixerConfig):
    """Mixers that read the same input; their outputs, each normed if there is a `branch_norm`, are summed or averaged.

    With `fused_out_proj` the branches have no output projections, and one follows the combination. Input projections
    are the branches' own: one matrix for all is a way of storing them, which converters cut and join.
    """

    type: Literal["parallel"] = "parallel"
    branches: list[AnyMixer] = Field(min_length=1)
    combine: Literal["sum", "mean"] = "sum"
    branch_norm: NormConfig | None = None
    fused_out_proj: bool = False

    @model_validator(mode="after")
    def _check(self) -> ParallelConfig:
        if self.fused_out_proj:
            sizes = [branch.inner_size for branch in self.branches]
            if problems := [
                f"branches.{i}.type: {branch.type} has no output projection to leave out, as fused_out_proj asks"
                for i, branch in enumerate(self.branches)
                if branch.inner_size is None
            ]:
                raise ValueError("\n".join(problems))
            if len(set(sizes)) > 1:
                raise ValueError(f"fused_out_proj: the branches are {sizes} wide inside, expected equal widths")
        return self

    def build(self, input_size: int, output_size: int) -> Parallel:
        return Parallel(self, input_size, output_size)

    def parts(self) -> Iterator[MixerConfig]:
        yield self
        for branch in self.branches:
            yield from branch.parts()


class Parallel(Mixer):
    """Runs its branches one after the other and combines what they return."""

    def __init__(self, config: ParallelConfig, input_size: int, output_size: int):
        super().__init__()
        self.config = config
        size = output_size
        if config.fused_out_proj:
            size = config.branches[0].inner_size or output_size
            self.branches = Modules(branch.build_inner(input_size) for branch in config.branches)
        else:
            self.branches = Modules(branch.build(input_size, output_size) for branch in config.branches)
        norms = [config.branch_norm.build(size) for _ in config.branches] if config.branch_norm else []
        self.branch_norms = Modules(norms)
        self.out_proj = Linear(size, output_size) if config.fused_out_proj else None

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
        if self.branch_norms:
            outputs = [norm(output) for norm, output in zip(self.branch_norms, outputs, strict=True)]
        y = sum(outputs[1:], outputs[0])
        y = y / len(outputs) if self.config.combine == "mean" else y
        return y if self.out_proj is None else self.out_proj(y)

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        for branch in self.branches:
            branch.init_weights(init)
        if self.out_proj is not None:
            init.normal(self.out_proj.weight, scale=init.residual_scale)

    def flops_per_token(self, sequence_length: int) -> float:
        out = 2 * self.out_proj.weight.numel() if self.out_proj is not None else 0
        return out + sum(branch.flops_per_token(sequence_length) for branch in self.branches)

    def activation_size_per_token(self) -> float:
        norms = sum(norm.size for norm in self.branch_norms)
        out = self.out_proj.in_features if self.out_proj is not None else 0
        return norms + out + sum(branch.activation_size_per_token() for branch in self.branches)

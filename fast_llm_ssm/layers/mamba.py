"""Mamba 1: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv 2312.00752."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fast_llm_ssm.config import Config
from fast_llm_ssm.layers.base import Mixer, MixerConfig, State, mixers
from fast_llm_ssm.layers.init import Init
from fast_llm_ssm.layers.layout import Layout
from fast_llm_ssm.layers.parts import NO_ADAPTERS, Adapters, Linear, NormConfig, fp32_parameter
from fast_llm_ssm.ops import causal_conv1d, causal_conv1d_update, selective_scan, selective_state_update


class MambaDtInitConfig(Config):
    """Initial step sizes: exp(U(log min, log max)), at least `floor`, through the bias.

    `scale` widens dt_proj, whose weights are drawn, or all equal by `scheme: constant`.
    """

    min: float = Field(default=1e-3, gt=0)
    max: float = Field(default=0.1, gt=0)
    floor: float = Field(default=1e-4, gt=0)
    scale: float = Field(default=1.0, gt=0)
    scheme: Literal["random", "constant"] = "random"

    @model_validator(mode="after")
    def _check(self) -> MambaDtInitConfig:
        if self.min > self.max:
            raise ValueError(f"min: got {self.min}, expected at most max ({self.max})")
        return self


@mixers.register("mamba")
class MambaConfig(MixerConfig):
    """Mamba 1: input-dependent linear recurrence with a decay for each channel and state, behind a short convolution.

    `dt_rank` is the width of the step sizes' bottleneck; "auto" is a sixteenth of the input's width, rounded up.
    `inner_norm` norms the step's low-rank input, B and C (Jamba and Hymba with weights, Falcon Mamba without).
    """

    type: Literal["mamba"] = "mamba"
    d_inner: int = Field(gt=0)
    d_state: int = Field(default=16, gt=0)
    d_conv: int = Field(default=4, ge=2)
    dt_rank: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    inner_norm: NormConfig | None = None
    proj_bias: bool = False
    conv_bias: bool = True
    dt_init: MambaDtInitConfig = MambaDtInitConfig()

    def build(self, input_size: int, output_size: int) -> Mamba:
        return Mamba(self, input_size, output_size)

    @property
    def inner_size(self) -> int:
        return self.d_inner

    def build_inner(self, input_size: int) -> Mamba:
        return Mamba(self, input_size, None)


class Mamba(Mixer):
    """in_proj -> causal convolution -> x_proj gives step, B, C -> selective scan, gated -> out_proj."""

    fp32_parameters = frozenset({"A_log", "D", "dt_bias"})
    no_decay_parameters = frozenset({"A_log", "D", "dt_bias"})

    def __init__(self, config: MambaConfig, input_size: int, output_size: int | None):
        super().__init__()
        self.config = c = config
        self.dt_rank = math.ceil(input_size / 16) if c.dt_rank == "auto" else c.dt_rank
        self.in_proj = Linear(input_size, 2 * c.d_inner, c.proj_bias)  # rows: x | z
        self.conv_weight = nn.Parameter(torch.empty(c.d_inner, c.d_conv))
        self.conv_bias = nn.Parameter(torch.empty(c.d_inner)) if c.conv_bias else None
        self.x_proj = Linear(c.d_inner, self.dt_rank + 2 * c.d_state)  # rows: dt | B | C
        self.dt_norm = c.inner_norm.build(self.dt_rank) if c.inner_norm else None
        self.B_norm = c.inner_norm.build(c.d_state) if c.inner_norm else None
        self.C_norm = c.inner_norm.build(c.d_state) if c.inner_norm else None
        self.dt_proj = Linear(self.dt_rank, c.d_inner)
        self.dt_bias = fp32_parameter(c.d_inner)  # of dt_proj; added inside the scan, in fp32
        self.A_log = fp32_parameter(c.d_inner, c.d_state)
        self.D = fp32_parameter(c.d_inner)
        self.out_proj = Linear(c.d_inner, output_size, c.proj_bias) if output_size is not None else None

    def forward(self, x: Tensor, layout: Layout, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        u, z = self.in_proj(x).chunk(2, dim=-1)
        u = self._convolve(u, seq_idx=layout.seq_idx)
        return self._finish(self._scan(u, z, seq_idx=layout.seq_idx))

    def new_state(self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype) -> State:
        c = self.config
        # The recurrence accumulates over the whole text: half precision would drift.
        return {
            "ssm": torch.zeros(batch_size, c.d_inner, c.d_state, device=device, dtype=self.A_log.dtype),
            "conv": torch.zeros(batch_size, c.d_inner, c.d_conv - 1, device=device, dtype=dtype),
        }

    def prefill(self, x: Tensor, layout: Layout, state: State, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        u, z = self.in_proj(x).chunk(2, dim=-1)
        u, conv_state = self._convolve(
            u, initial_states=state["conv"], cu_seqlens=layout.cu_seqlens, return_final_states=True
        )
        y, ssm_state = self._scan(
            u, z, initial_states=state["ssm"], cu_seqlens=layout.cu_seqlens, return_last_state=True
        )
        state["conv"].copy_(conv_state)
        state["ssm"].copy_(ssm_state)
        return self._finish(y)

    def step(self, x: Tensor, layout: Layout, state: State, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        u, z = self.in_proj(x[:, 0]).chunk(2, dim=-1)
        weight, bias = self._conv_parameters(x.dtype)
        u = causal_conv1d_update(u, state["conv"], weight, bias, activation="silu")
        dt, B, C = self._select(u)
        y = selective_state_update(
            state["ssm"],
            u,
            dt,
            -self.A_log.exp(),
            B,
            C,
            D=self.D,
            z=z,
            dt_bias=self.dt_bias,
            dt_softplus=True,
        )
        return (y if self.out_proj is None else self.out_proj(y))[:, None]

    def _conv_parameters(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return self.conv_weight.to(dtype), None if self.conv_bias is None else self.conv_bias.to(dtype)

    def _convolve(self, u: Tensor, **options: Any) -> Any:
        """u [B, T, d_inner] -> [B, d_inner, T]."""
        weight, bias = self._conv_parameters(u.dtype)
        return causal_conv1d(u.transpose(1, 2), weight, bias, activation="silu", **options)

    def _select(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u [..., d_inner] -> step sizes before bias and softplus [..., d_inner], B and C [..., d_state]."""
        c = self.config
        dt, B, C = self.x_proj(u).split([self.dt_rank, c.d_state, c.d_state], dim=-1)
        if self.dt_norm is not None and self.B_norm is not None and self.C_norm is not None:
            dt, B, C = self.dt_norm(dt), self.B_norm(B), self.C_norm(C)
        return self.dt_proj(dt), B, C

    def _scan(self, u: Tensor, z: Tensor, **options: Any) -> Any:
        """u [B, d_inner, T], z [B, T, d_inner]."""
        dt, B, C = (t.transpose(1, 2) for t in self._select(u.transpose(1, 2)))
        return selective_scan(
            u,
            dt,
            -self.A_log.exp(),
            B,
            C,
            D=self.D,
            z=z.transpose(1, 2),
            delta_bias=self.dt_bias,
            delta_softplus=True,
            **options,
        )

    def _finish(self, y: Tensor) -> Tensor:
        y = y.transpose(1, 2)  # [B, d_inner, T] -> [B, T, d_inner]
        return y if self.out_proj is None else self.out_proj(y)

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        """As the authors' code: A = -(1 .. d_state), D one, step sizes log-uniform, the rest torch's fan-in default."""
        c = self.config
        for linear in (self.in_proj, self.x_proj):
            init.fan_in_uniform(linear.weight, linear.in_features)
        if self.out_proj is not None:
            init.fan_in_uniform(self.out_proj.weight, c.d_inner, scale=init.residual_scale)
        init.fan_in_uniform(self.conv_weight, c.d_conv)
        if self.conv_bias is not None:
            init.fan_in_uniform(self.conv_bias, c.d_conv)
        if c.dt_init.scheme == "constant":
            self.dt_proj.weight.fill_(c.dt_init.scale * self.dt_rank**-0.5)
        else:
            init.fan_in_uniform(self.dt_proj.weight, self.dt_rank, scale=c.dt_init.scale)
        self.A_log.copy_(torch.arange(1, c.d_state + 1).log().expand_as(self.A_log))
        self.D.fill_(1.0)
        init.uniform(self.dt_bias, math.log(c.dt_init.min), math.log(c.dt_init.max))
        dt = self.dt_bias.exp().clamp(min=c.dt_init.floor)
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus of it gives dt back

    def flops_per_token(self, sequence_length: int) -> float:
        c = self.config
        matrices = [self.in_proj.weight, self.conv_weight, self.x_proj.weight, self.dt_proj.weight]
        if self.out_proj is not None:
            matrices.append(self.out_proj.weight)
        return 2 * sum(matrix.numel() for matrix in matrices) + 7 * c.d_inner * c.d_state

    def activation_size_per_token(self) -> float:
        c = self.config
        return self.in_proj.in_features + 6 * c.d_inner + 2 * (self.dt_rank + 2 * c.d_state)

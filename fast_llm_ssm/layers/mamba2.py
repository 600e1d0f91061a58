"""Mamba 2 (SSD): Dao and Gu, "Transformers are SSMs", arXiv 2405.21060."""

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
from fast_llm_ssm.layers.parts import NO_ADAPTERS, Adapters, Linear, fp32_parameter, scaled
from fast_llm_ssm.ops import causal_conv1d, causal_conv1d_update, gated_rms_norm, selective_state_update, ssd


class DtInitConfig(Config):
    """Initial step sizes: exp(U(log min, log max)), at least `floor`; dt_bias is their inverse softplus."""

    min: float = Field(default=1e-3, gt=0)
    max: float = Field(default=0.1, gt=0)
    floor: float = Field(default=1e-4, gt=0)


StepSize = Annotated[float, Field(allow_inf_nan=True)]


@mixers.register("mamba2")
class Mamba2Config(MixerConfig):
    """Mamba 2: input-dependent linear recurrence with scalar decay per head, behind a short convolution.

    `dt_limit` clamps the step sizes, in training, prefill and decoding alike. `gate` says where silu(z) acts:
    before the norm (norm_after_gate, the published models), after it, or without a norm at all. `in_multipliers` scale
    the sections z, x, B, C, dt of the input projection, `in_multiplier` and `out_multiplier` input and output.
    """

    type: Literal["mamba2"] = "mamba2"
    d_inner: int = Field(gt=0)
    d_state: int = Field(default=128, gt=0)
    d_conv: int = Field(default=4, ge=2)
    head_dim: int = Field(default=64, gt=0)
    n_groups: int = Field(default=1, gt=0)
    chunk_size: int = Field(default=256, gt=0)
    dt_limit: tuple[StepSize, StepSize] = (0.0, math.inf)
    gate: Literal["norm_after_gate", "norm_before_gate", "no_norm"] = "norm_after_gate"
    gate_norm_eps: float = Field(default=1e-5, gt=0)
    gate_norm_group: int | None = Field(default=None, gt=0)
    D_has_hdim: bool = False
    proj_bias: bool = False
    conv_bias: bool = True
    dt_init: DtInitConfig = DtInitConfig()
    in_multiplier: float = 1.0
    in_multipliers: tuple[float, float, float, float, float] | None = None
    out_multiplier: float = 1.0

    @model_validator(mode="after")
    def _check(self) -> Mamba2Config:
        problems = []
        if self.d_inner % self.head_dim:
            problems.append(f"head_dim: got {self.head_dim}, expected a divisor of d_inner ({self.d_inner})")
        elif self.num_heads % self.n_groups:
            problems.append(f"n_groups: got {self.n_groups}, expected a divisor of the {self.num_heads} heads")
        if self.gate_norm_group and self.d_inner % self.gate_norm_group:
            problems.append(
                f"gate_norm_group: got {self.gate_norm_group}, expected a divisor of d_inner ({self.d_inner})"
            )
        low, high = self.dt_limit
        if not 0 <= low < high:
            problems.append(f"dt_limit: got {list(self.dt_limit)}, expected two rising numbers of at least 0")
        if self.dt_init.min > self.dt_init.max:
            problems.append(f"dt_init.min: got {self.dt_init.min}, expected at most max ({self.dt_init.max})")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def num_heads(self) -> int:
        return self.d_inner // self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.d_inner + 2 * self.n_groups * self.d_state

    @property
    def norm_group_size(self) -> int:
        return self.gate_norm_group or self.d_inner // self.n_groups

    @property
    def inner_size(self) -> int:
        return self.d_inner

    def build(self, input_size: int, output_size: int) -> Mamba2:
        return Mamba2(self, input_size, output_size)

    def build_inner(self, input_size: int) -> Mamba2:
        return Mamba2(self, input_size, None)


class GateNorm(nn.Module):
    """RMSNorm over groups of the inner dimension, with the gate silu(z) before or after it."""

    def __init__(self, config: Mamba2Config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.d_inner))
        self.eps = config.gate_norm_eps
        self.group_size = config.norm_group_size
        self.norm_before_gate = config.gate == "norm_before_gate"

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """y, z [..., d_inner] -> the same shape."""
        return gated_rms_norm(
            y,
            self.weight,
            z=z,
            eps=self.eps,
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
        )


class Mamba2(Mixer):
    """in_proj -> causal convolution of x, B, C -> SSD -> gated norm -> out_proj."""

    fp32_parameters = frozenset({"A_log", "D", "dt_bias"})
    no_decay_parameters = frozenset({"A_log", "D", "dt_bias"})

    def __init__(self, config: Mamba2Config, input_size: int, output_size: int | None):
        super().__init__()
        self.config = config
        num_heads = config.num_heads
        # Rows of in_proj, in order: z | x | B | C | dt.
        self.in_proj = Linear(input_size, config.d_inner + config.conv_size + num_heads, config.proj_bias)
        self.conv_weight = nn.Parameter(torch.empty(config.conv_size, config.d_conv))
        self.conv_bias = nn.Parameter(torch.empty(config.conv_size)) if config.conv_bias else None
        self.dt_bias = fp32_parameter(num_heads)
        self.A_log = fp32_parameter(num_heads)
        self.D = fp32_parameter(num_heads, config.head_dim) if config.D_has_hdim else fp32_parameter(num_heads)
        self.norm = GateNorm(config) if config.gate != "no_norm" else None
        self.out_proj = Linear(config.d_inner, output_size, config.proj_bias) if output_size is not None else None

    def forward(self, x: Tensor, layout: Layout, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        z, xbc, dt = self._project(x)
        xbc = self._convolve(xbc, seq_idx=layout.seq_idx).transpose(1, 2)
        return self._finish(self._scan(xbc, z, dt, seq_idx=layout.seq_idx), z)

    def new_state(self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype) -> State:
        c = self.config
        # The recurrence accumulates over the whole text: half precision would drift.
        return {
            "ssm": torch.zeros(batch_size, c.num_heads, c.head_dim, c.d_state, device=device, dtype=self.A_log.dtype),
            "conv": torch.zeros(batch_size, c.conv_size, c.d_conv - 1, device=device, dtype=dtype),
        }

    def prefill(self, x: Tensor, layout: Layout, state: State, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        z, xbc, dt = self._project(x)
        xbc, conv_state = self._convolve(
            xbc, initial_states=state["conv"], return_final_states=True, cu_seqlens=layout.cu_seqlens
        )
        y, ssm_state = self._scan(
            xbc.transpose(1, 2),
            z,
            dt,
            initial_states=state["ssm"],
            cu_seqlens=layout.cu_seqlens,
            return_final_states=True,
        )
        state["conv"].copy_(conv_state)
        state["ssm"].copy_(ssm_state)
        return self._finish(y, z)

    def step(self, x: Tensor, layout: Layout, state: State, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        c = self.config
        z, xbc, dt = self._project(x.squeeze(1))
        conv_weight, conv_bias = self._conv_parameters(x.dtype)
        xbc = causal_conv1d_update(xbc, state["conv"], conv_weight, conv_bias, activation="silu")
        u, B, C = self._heads(xbc)
        y = selective_state_update(
            state["ssm"],
            u,
            dt,
            -self.A_log.exp(),
            B,
            C,
            D=self.D,
            z=z.unflatten(-1, (c.num_heads, c.head_dim)) if self.norm is None else None,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            dt_limit=c.dt_limit,
        )
        return self._finish(y, z)[:, None]

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        projected = self.in_proj(scaled(x, c.in_multiplier))
        if c.in_multipliers is not None:
            groups = c.n_groups * c.d_state
            sizes = (c.d_inner, c.d_inner, groups, groups, c.num_heads)
            sections = zip(sizes, c.in_multipliers, strict=True)
            projected = projected * torch.cat([x.new_full((size,), factor) for size, factor in sections])
        z, xbc, dt = projected.split([c.d_inner, c.conv_size, c.num_heads], dim=-1)
        return z, xbc, dt

    def _conv_parameters(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return self.conv_weight.to(dtype), None if self.conv_bias is None else self.conv_bias.to(dtype)

    def _convolve(self, xbc: Tensor, **options: Any) -> Any:
        """xbc [B, T, conv_size] -> [B, conv_size, T]."""
        weight, bias = self._conv_parameters(xbc.dtype)
        return causal_conv1d(xbc.transpose(1, 2), weight, bias, activation="silu", **options)

    def _heads(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """xbc [..., conv_size] -> x [..., H, P], B and C [..., G, N]."""
        c = self.config
        groups = c.n_groups * c.d_state
        u, B, C = xbc.split([c.d_inner, groups, groups], dim=-1)
        shape = (c.n_groups, c.d_state)
        return u.unflatten(-1, (c.num_heads, c.head_dim)), B.unflatten(-1, shape), C.unflatten(-1, shape)

    def _scan(self, xbc: Tensor, z: Tensor, dt: Tensor, **options: Any) -> Any:
        c = self.config
        u, B, C = self._heads(xbc)
        return ssd(
            u,
            dt,
            -self.A_log.exp(),
            B,
            C,
            c.chunk_size,
            D=self.D,
            z=z.unflatten(-1, (c.num_heads, c.head_dim)) if self.norm is None else None,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            dt_limit=c.dt_limit,
            **options,
        )

    def _finish(self, y: Tensor, z: Tensor) -> Tensor:
        y = y.flatten(-2)  # [..., H, P] -> [..., d_inner]
        y = y if self.norm is None else self.norm(y, z)
        return scaled(y if self.out_proj is None else self.out_proj(y), self.config.out_multiplier)

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        """As the authors' code: A in [-16, -1], D one, step sizes log-uniform, the rest torch's fan-in default."""
        c = self.config
        init.fan_in_uniform(self.in_proj.weight, self.in_proj.in_features)
        if self.out_proj is not None:
            init.fan_in_uniform(self.out_proj.weight, self.out_proj.in_features, scale=init.residual_scale)
        init.fan_in_uniform(self.conv_weight, c.d_conv)
        if self.conv_bias is not None:
            init.fan_in_uniform(self.conv_bias, c.d_conv)
        init.uniform(self.A_log, 1.0, 16.0)
        self.A_log.log_()
        self.D.fill_(1.0)
        init.uniform(self.dt_bias, math.log(c.dt_init.min), math.log(c.dt_init.max))
        dt = self.dt_bias.exp().clamp(min=c.dt_init.floor)
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus of it gives dt back

    def flops_per_token(self, sequence_length: int) -> float:
        c = self.config
        matrices = [self.in_proj.weight, self.conv_weight]
        if self.out_proj is not None:
            matrices.append(self.out_proj.weight)
        projections = 2 * sum(matrix.numel() for matrix in matrices)
        chunk = min(c.chunk_size, sequence_length)
        # Inside a chunk half of the pairs are causal; across chunks each head writes and reads its P x N state.
        within = chunk * (c.n_groups * c.d_state + c.d_inner)
        across = 4 * c.d_inner * c.d_state
        return projections + within + across

    def activation_size_per_token(self) -> float:
        c = self.config
        return self.in_proj.in_features + self.in_proj.out_features + c.conv_size + 3 * c.d_inner

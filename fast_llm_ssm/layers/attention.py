"""Softmax attention with grouped keys and values."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fast_llm_ssm.layers.base import Mixer, MixerConfig, State, mixers
from fast_llm_ssm.layers.init import Init
from fast_llm_ssm.layers.layout import Layout
from fast_llm_ssm.layers.parts import NO_ADAPTERS, Adapters, Linear, NormConfig, project
from fast_llm_ssm.layers.rotary import RopeConfig, rotate
from fast_llm_ssm.ops import attention


@mixers.register("attention")
class AttentionConfig(MixerConfig):
    """Causal softmax attention: grouped keys and values, rotary positions in full, in part or not, window, scale.

    `scale` defaults to head_dim ** -0.5. `window` is the number of keys that a query sees, itself included.
    """

    type: Literal["attention"] = "attention"
    num_heads: int = Field(gt=0)
    num_kv_heads: int | None = Field(default=None, gt=0)
    head_dim: int = Field(gt=0)
    v_head_dim: int | None = Field(default=None, gt=0)
    scale: float | None = Field(default=None, gt=0)
    rope: RopeConfig | None = None
    window: int | None = Field(default=None, gt=0)
    bias: bool = False
    out_bias: bool = False
    qk_norm: NormConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> AttentionConfig:
        problems = []
        if self.num_heads % self.kv_heads:
            problems.append(
                f"num_kv_heads: got {self.num_kv_heads}, expected a divisor of num_heads ({self.num_heads})"
            )
        if self.rope is not None and (size := self.rope.rotated_size(self.head_dim)) % 2:
            key = "head_dim" if self.rope.partial == 1 else "rope.partial"
            problems.append(f"{key}: rotary positions turn {size} dimensions, expected an even number")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    def build(self, input_size: int, output_size: int) -> Attention:
        return Attention(self, input_size, output_size)

    def adapter_targets(self, input_size: int) -> dict[str, tuple[int, int]]:
        return {
            "q": (input_size, self.num_heads * self.head_dim),
            "k": (input_size, self.kv_heads * self.head_dim),
            "v": (input_size, self.kv_heads * self.value_dim),
        }


class Attention(Mixer):
    """q, k, v projections -> rotary positions -> softmax attention -> o projection."""

    def __init__(self, config: AttentionConfig, input_size: int, output_size: int):
        super().__init__()
        self.config = c = config
        self.q_proj = Linear(input_size, c.num_heads * c.head_dim, c.bias)
        self.k_proj = Linear(input_size, c.kv_heads * c.head_dim, c.bias)
        self.v_proj = Linear(input_size, c.kv_heads * c.value_dim, c.bias)
        self.o_proj = Linear(c.num_heads * c.value_dim, output_size, c.out_bias)
        self.q_norm = c.qk_norm.build(c.head_dim) if c.qk_norm else None
        self.k_norm = c.qk_norm.build(c.head_dim) if c.qk_norm else None

    def forward(self, x: Tensor, layout: Layout, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        q, k, v = self._project(x, layout.positions, adapters)
        y = attention(q, k, v, scale=self.config.scale, window=self.config.window, cu_seqlens=layout.cu_seqlens)
        return self.o_proj(y.flatten(-2))

    def new_state(self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype) -> State:
        c = self.config
        # Zeros, not empty memory: a masked key still multiplies its value by zero, and 0 * NaN is NaN.
        return {
            "k": torch.zeros(batch_size, max_length, c.kv_heads, c.head_dim, device=device, dtype=dtype),
            "v": torch.zeros(batch_size, max_length, c.kv_heads, c.value_dim, device=device, dtype=dtype),
        }

    def prefill(self, x: Tensor, layout: Layout, state: State, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        assert layout.rows is not None and layout.cu_seqlens is not None
        q, k, v = self._project(x, layout.positions, adapters)
        rows, positions, starts = layout.rows, layout.positions[0], layout.cu_seqlens[:-1].long()
        state["k"][rows, positions] = k[0]
        state["v"][rows, positions] = v[0]
        # Queries to one row per sequence again: each looks at its own row of the cache.
        index = torch.arange(rows.shape[0], device=rows.device) - starts[rows]
        shape = (starts.shape[0], int(index.max()) + 1 if len(index) else 0)
        queries = q.new_zeros(*shape, *q.shape[2:])
        queries[rows, index] = q[0]
        query_positions = positions.new_zeros(shape)
        query_positions[rows, index] = positions
        used = int(positions.max()) + 1 if len(positions) else 0
        y = attention(
            queries,
            state["k"][:, :used],
            state["v"][:, :used],
            scale=self.config.scale,
            window=self.config.window,
            positions=query_positions,
        )
        return self.o_proj(y[rows, index].flatten(-2)[None])

    def step(self, x: Tensor, layout: Layout, state: State, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        q, k, v = self._project(x, layout.positions, adapters)
        index = layout.positions[:, 0]
        rows = torch.arange(x.shape[0], device=x.device)
        state["k"][rows, index] = k[:, 0]
        state["v"][rows, index] = v[:, 0]
        y = attention(
            q,
            state["k"],
            state["v"],
            scale=self.config.scale,
            window=self.config.window,
            positions=layout.positions,
        )
        return self.o_proj(y.flatten(-2))

    def _project(self, x: Tensor, positions: Tensor, adapters: Adapters) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, input_size] -> q [B, T, Hq, D], k [B, T, Hkv, D], v [B, T, Hkv, Dv], rotated."""
        c = self.config
        q = project(self.q_proj, x, adapters, "q").unflatten(-1, (c.num_heads, c.head_dim))
        k = project(self.k_proj, x, adapters, "k").unflatten(-1, (c.kv_heads, c.head_dim))
        v = project(self.v_proj, x, adapters, "v").unflatten(-1, (c.kv_heads, c.value_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if c.rope is not None:
            q, k = rotate(q, positions, c.rope), rotate(k, positions, c.rope)
        return q, k, v

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            init.normal(linear.weight)
        init.normal(self.o_proj.weight, scale=init.residual_scale)

    def flops_per_token(self, sequence_length: int) -> float:
        c = self.config
        linears = (self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        # Causal: a query sees half of the sequence on average, or its window.
        keys = (sequence_length + 1) / 2
        if c.window is not None and c.window < sequence_length:
            keys = c.window - c.window * (c.window - 1) / (2 * sequence_length)
        return 2 * sum(linear.weight.numel() for linear in linears) + 2 * c.num_heads * keys * (
            c.head_dim + c.value_dim
        )

    def activation_size_per_token(self) -> float:
        c = self.config
        q, kv, out = c.num_heads * c.head_dim, c.kv_heads * (c.head_dim + c.value_dim), c.num_heads * c.value_dim
        return self.q_proj.in_features + q + kv + 2 * out

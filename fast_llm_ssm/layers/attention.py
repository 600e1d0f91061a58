"""Softmax attention with grouped keys and values."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fast_llm_ssm.layers.base import Mixer, MixerConfig, State, mixers
from fast_llm_ssm.layers.init import Init
from fast_llm_ssm.layers.layout import Layout
from fast_llm_ssm.layers.parts import NO_ADAPTERS, Adapters, Linear, NormConfig, project, scaled
from fast_llm_ssm.layers.rotary import RopeConfig, rotate
from fast_llm_ssm.ops import attention

_KEYS_AT_A_TIME = 512
"""Keys that PyTorch's attention takes at a time on the CPU: whole such blocks can be left out of a cache without
changing a bit of the result.
"""


@mixers.register("attention")
class AttentionConfig(MixerConfig):
    """Causal softmax attention: grouped keys and values, rotary positions in full, in part or not, window, scale.

    `scale` defaults to head_dim ** -0.5. `window` is the number of keys that a query sees, itself included; the first
    `prefix` keys are visible to all later queries all the same. With `kv: reuse_previous` it has no keys and values of
    its own and attends to those of the nearest earlier layer that has, rotated already. The multipliers scale what the
    projections read, the keys, and the output.
    """

    type: Literal["attention"] = "attention"
    num_heads: int = Field(gt=0)
    num_kv_heads: int | None = Field(default=None, gt=0)
    head_dim: int = Field(gt=0)
    v_head_dim: int | None = Field(default=None, gt=0)
    scale: float | None = Field(default=None, gt=0)
    rope: RopeConfig | None = None
    window: int | None = Field(default=None, gt=0)
    prefix: int = Field(default=0, ge=0)
    kv: Literal["own", "reuse_previous"] = "own"
    bias: bool = False
    out_bias: bool = False
    qk_norm: NormConfig | None = None
    in_multiplier: float = 1.0
    key_multiplier: float = 1.0
    out_multiplier: float = 1.0

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

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        return self.kv_heads, self.head_dim, self.value_dim

    @property
    def reuses_kv(self) -> bool:
        return self.kv == "reuse_previous"

    def build(self, input_size: int, output_size: int) -> Attention:
        return Attention(self, input_size, output_size)

    def build_inner(self, input_size: int) -> Attention:
        return Attention(self, input_size, None)

    def adapter_targets(self, input_size: int) -> dict[str, tuple[int, int]]:
        targets = {
            "q": (input_size, self.num_heads * self.head_dim),
            "k": (input_size, self.kv_heads * self.head_dim),
            "v": (input_size, self.kv_heads * self.value_dim),
        }
        return {"q": targets["q"]} if self.reuses_kv else targets


class Attention(Mixer):
    """q, k, v projections -> rotary positions -> softmax attention -> o projection."""

    def __init__(self, config: AttentionConfig, input_size: int, output_size: int | None):
        super().__init__()
        self.config = c = config
        self.q_proj = Linear(input_size, c.num_heads * c.head_dim, c.bias)
        self.q_norm = c.qk_norm.build(c.head_dim) if c.qk_norm else None
        if not c.reuses_kv:
            self.k_proj = Linear(input_size, c.kv_heads * c.head_dim, c.bias)
            self.v_proj = Linear(input_size, c.kv_heads * c.value_dim, c.bias)
            self.k_norm = c.qk_norm.build(c.head_dim) if c.qk_norm else None
        self.o_proj = Linear(c.inner_size, output_size, c.out_bias) if output_size is not None else None

    def forward(self, x: Tensor, layout: Layout, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        q = self._queries(x, layout.positions, adapters)
        k, v = self._reused(layout) if self.config.reuses_kv else self._keys_values(x, layout.positions, adapters)
        if layout.kv is not None:
            layout.kv.kv = k, v
        return self._finish(self._attend(q, k, v, cu_seqlens=layout.cu_seqlens))

    def new_state(self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype) -> State:
        if self.config.reuses_kv:
            return {}
        heads, key_size, value_size = self.config.kv_shape
        # Zeros, not empty memory: a masked key still multiplies its value by zero, and 0 * NaN is NaN.
        return {
            "k": torch.zeros(batch_size, max_length, heads, key_size, device=device, dtype=dtype),
            "v": torch.zeros(batch_size, max_length, heads, value_size, device=device, dtype=dtype),
        }

    def prefill(self, x: Tensor, layout: Layout, state: State, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        assert layout.rows is not None and layout.cu_seqlens is not None
        rows, positions, starts = layout.rows, layout.positions[0], layout.cu_seqlens[:-1].long()
        q = self._queries(x, layout.positions, adapters)
        k, v = self._cache(x, rows, layout, state, adapters)
        # Queries to one row per sequence again: each looks at its own row of the cache.
        index = torch.arange(rows.shape[0], device=rows.device) - starts[rows]
        shape = (starts.shape[0], int(index.max()) + 1 if len(index) else 0)
        queries = q.new_zeros(*shape, *q.shape[2:])
        queries[rows, index] = q[0]
        query_positions = positions.new_zeros(shape)
        query_positions[rows, index] = positions
        used = int(positions.max()) + 1 if len(positions) else 0
        y = self._attend(queries, k[:, :used], v[:, :used], positions=query_positions)
        return self._finish(y[rows, index][None])

    def step(self, x: Tensor, layout: Layout, state: State, adapters: Adapters = NO_ADAPTERS) -> Tensor:
        q = self._queries(x, layout.positions, adapters)
        k, v = self._cache(x, torch.arange(x.shape[0], device=x.device), layout, state, adapters)
        if not x.is_cuda:  # a GPU would have to wait for the number, and a captured graph could not follow it
            used = -(-(int(layout.positions.max()) + 1) // _KEYS_AT_A_TIME) * _KEYS_AT_A_TIME
            k, v = k[:, :used], v[:, :used]
        return self._finish(self._attend(q, k, v, positions=layout.positions))

    def _cache(
        self, x: Tensor, rows: Tensor, layout: Layout, state: State, adapters: Adapters
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions so far, those of the new tokens included: [rows, max_length, Hkv, D]."""
        if self.config.reuses_kv:
            return self._reused(layout)
        k, v = self._keys_values(x, layout.positions, adapters)
        positions = layout.positions.flatten()
        state["k"][rows, positions] = k.flatten(0, 1)
        state["v"][rows, positions] = v.flatten(0, 1)
        if layout.kv is not None:
            layout.kv.kv = state["k"], state["v"]
        return state["k"], state["v"]

    def _reused(self, layout: Layout) -> tuple[Tensor, Tensor]:
        assert layout.kv is not None and layout.kv.kv is not None, "the model's config checks that they exist"
        return layout.kv.kv

    def _queries(self, x: Tensor, positions: Tensor, adapters: Adapters) -> Tensor:
        """x [B, T, input_size] -> q [B, T, Hq, D], rotated."""
        c = self.config
        q = project(self.q_proj, scaled(x, c.in_multiplier), adapters, "q").unflatten(-1, (c.num_heads, c.head_dim))
        if self.q_norm is not None:
            q = self.q_norm(q)
        return q if c.rope is None else rotate(q, positions, c.rope)

    def _keys_values(self, x: Tensor, positions: Tensor, adapters: Adapters) -> tuple[Tensor, Tensor]:
        """x [B, T, input_size] -> k [B, T, Hkv, D], rotated, and v [B, T, Hkv, Dv]."""
        c = self.config
        x = scaled(x, c.in_multiplier)
        k = scaled(project(self.k_proj, x, adapters, "k"), c.key_multiplier).unflatten(-1, (c.kv_heads, c.head_dim))
        v = project(self.v_proj, x, adapters, "v").unflatten(-1, (c.kv_heads, c.value_dim))
        if self.k_norm is not None:
            k = self.k_norm(k)
        return (k if c.rope is None else rotate(k, positions, c.rope)), v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **which: Tensor | None) -> Tensor:
        c = self.config
        return attention(q, k, v, scale=c.scale, window=c.window, prefix=c.prefix, **which)  # type: ignore[arg-type]

    def _finish(self, y: Tensor) -> Tensor:
        y = y.flatten(-2)  # [B, T, Hq, Dv] -> [B, T, inner_size]
        return scaled(y if self.o_proj is None else self.o_proj(y), self.config.out_multiplier)

    def _linears(self) -> list[Linear]:
        return [module for module in self.children() if isinstance(module, Linear)]

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        for linear in self._linears():
            init.normal(linear.weight, scale=init.residual_scale if linear is self.o_proj else 1.0)

    def flops_per_token(self, sequence_length: int) -> float:
        c = self.config
        # Causal: a query sees half of the sequence on average, or its window and the prefix.
        keys = (sequence_length + 1) / 2
        if c.window is not None and c.window + c.prefix < sequence_length:
            keys = c.window - c.window * (c.window - 1) / (2 * sequence_length) + c.prefix
        matrices = sum(linear.weight.numel() for linear in self._linears())
        return 2 * matrices + 2 * c.num_heads * keys * (c.head_dim + c.value_dim)

    def activation_size_per_token(self) -> float:
        c = self.config
        kv = 0 if c.reuses_kv else c.kv_heads * (c.head_dim + c.value_dim)
        return self.q_proj.in_features + c.num_heads * c.head_dim + kv + 2 * c.inner_size

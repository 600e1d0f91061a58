"""Fixed launch configurations of the SSD kernels: no autotuning, and lengths are never part of the choice."""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Config:
    """Tile sizes and launch options for one head dim, state size and dtype."""

    chunk: int
    block_p: int
    block_n: int
    operand_dtype: torch.dtype  # what the tensor cores multiply
    precision: str
    state: dict[str, Any] = field(default_factory=dict)
    scan: dict[str, Any] = field(default_factory=dict)
    pair: dict[str, Any] = field(default_factory=dict)
    edge: dict[str, Any] = field(default_factory=dict)
    asm: bool = False

    @property
    def operand(self) -> tl.dtype:
        return tl.bfloat16 if self.operand_dtype == torch.bfloat16 else tl.float32


@functools.cache
def config_for(dim: int, state: int, dtype: torch.dtype) -> Config:
    """The configuration for a head dim, a state size and x's dtype.

    bfloat16 is multiplied as it is. float16 does not hold the powers of the decays, so it is widened and multiplied
    as tf32, which keeps its ten bits;
    float32 takes three tf32 products for each one.
    """
    block_p = min(64, max(16, triton.next_power_of_2(dim)))
    block_n = max(16, triton.next_power_of_2(state))
    if dtype == torch.bfloat16:
        return Config(
            chunk=128, block_p=block_p, block_n=block_n, operand_dtype=torch.bfloat16, precision="tf32",
            state=dict(STEP=128, NUM_STAGES=3 if block_n <= 128 else 2, num_warps=4 if block_n <= 128 else 8),
            scan=dict(ROWS=128, NUM_STAGES=3 if block_n <= 128 else 2, waves=2, num_warps=8),
            pair=dict(ROWS=64, NUM_STAGES=3, waves=16, num_warps=4),
            edge=dict(ROWS=64, NUM_STAGES=3 if block_n <= 128 else 2, waves=4, num_warps=4 if block_n <= 128 else 8),
            asm=True,
        )  # fmt: skip
    precision = "tf32" if dtype == torch.float16 else "tf32x3"
    chunk = 64 if block_n <= 128 else 32
    return Config(
        chunk=chunk, block_p=block_p, block_n=block_n, operand_dtype=torch.float32, precision=precision,
        state=dict(STEP=chunk, NUM_STAGES=1, num_warps=8),
        scan=dict(ROWS=chunk, NUM_STAGES=1, waves=4, num_warps=8),
        pair=dict(ROWS=chunk, NUM_STAGES=1, waves=2, num_warps=8),
        edge=dict(ROWS=chunk, NUM_STAGES=1, waves=2, num_warps=8),
    )  # fmt: skip

"""Small modules that mixers and the model share: linear, norm, adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fast_llm_ssm.config import Config


class NormConfig(Config):
    """A normalisation over the last dimension. The weight is multiplied in at least fp32."""

    type: Literal["rms", "layer", "none"] = "rms"
    eps: float = Field(default=1e-5, gt=0)
    weight: bool = True

    def build(self, size: int) -> Norm:
        return Norm(self, size)


class Norm(nn.Module):
    """RMSNorm, LayerNorm (weight and bias) or nothing."""

    def __init__(self, config: NormConfig, size: int):
        super().__init__()
        self.kind = config.type
        self.eps = config.eps
        self.size = size
        has_weight = config.weight and config.type != "none"
        self.weight = nn.Parameter(torch.empty(size)) if has_weight else None
        self.bias = nn.Parameter(torch.empty(size)) if has_weight and config.type == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype."""
        weight = None if self.weight is None else self.weight.to(x.dtype)
        if self.kind == "rms":
            return F.rms_norm(x, (self.size,), weight, self.eps)
        if self.kind == "layer":
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.layer_norm(x, (self.size,), weight, bias, self.eps)
        return x

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.size}, eps={self.eps}"


M = TypeVar("M", bound=nn.Module)


class Modules(nn.ModuleList, Generic[M]):
    """A ModuleList that knows the type of its members."""

    def __init__(self, modules: Iterable[M]):
        super().__init__(modules)

    def __iter__(self) -> Iterator[M]:
        return cast("Iterator[M]", super().__iter__())


class Linear(nn.Module):
    """x W^T + b, with the weights cast to x's dtype at use: parameters can stay fp32 under bf16 compute."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}"


class Adapter(nn.Module):
    """A low-rank product added to a projection: up(down(x)). No scaling, no dropout: base weights, trained as such."""

    def __init__(self, in_features: int, rank: int, out_features: int):
        super().__init__()
        self.down = Linear(in_features, rank)
        self.up = Linear(rank, out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


Adapters = Mapping[str, Adapter]
NO_ADAPTERS: Adapters = {}


def project(linear: Linear, x: Tensor, adapters: Adapters, target: str) -> Tensor:
    """The projection, plus the adapter that this use of a shared block has for it."""
    y = linear(x)
    return y + adapters[target](x) if target in adapters else y


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times a multiplier of the config; most models have none."""
    return x if factor == 1.0 else x * factor


@contextlib.contextmanager
def parameter_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Modules built inside have parameters of this dtype (None: fp32), except those that must stay fp32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def fp32_parameter(*shape: int) -> nn.Parameter:
    """A parameter that stays fp32 whatever the model's dtype (fp64 in an fp64 model)."""
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return nn.Parameter(torch.empty(*shape, dtype=dtype))

"""Causal depthwise convolution in plain PyTorch, forward and backward.

Inside, tensors are laid out [B, T, D]. The bulk runs in blocks that fit the cache, as if nothing came before a row; a
document's first W - 1 tokens, which look back at its history, are then done apart.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fast_llm_ssm.ops import documents
from fast_llm_ssm.ops.documents import Documents

_BLOCK_ELEMENTS = 1 << 18


class _Rows(NamedTuple):
    """Rows to read out of the flat inputs [B * T, D] or, where `in_history`, out of the flat histories [documents *
    (W - 1), D].
    """

    row: Tensor  # [...]
    in_history: Tensor  # [...] bool

    def read(self, x: Tensor, history: Tensor) -> Tensor:
        """Returns [..., D]."""
        return torch.where(
            self.in_history[..., None], history[self.row * self.in_history], x[self.row * ~self.in_history]
        )

    def add_to(self, x: Tensor, history: Tensor, values: Tensor) -> None:
        """Adds values [..., D] to the rows they were read from."""
        for target, chosen in ((x, ~self.in_history), (history, self.in_history)):
            part = (values * chosen[..., None]).flatten(0, -2).to(target.dtype)
            target.index_add_(0, (self.row * chosen).flatten(), part)


def _rows(packed: Documents, members: Tensor, offsets: Tensor, taps: int, device: torch.device) -> _Rows:
    """The inputs of documents `members` at `offsets` from their starts; those before the start lie in the document's
    history.
    """
    in_history = offsets < 0
    index = torch.where(in_history, (members + 1) * (taps - 1) + offsets, packed.starts[members] + offsets)
    return _Rows(index.to(device), in_history.to(device))


class _Edges(NamedTuple):
    """The first W - 1 tokens of every document."""

    tokens: Tensor  # [n], flat
    windows: _Rows  # [n, W], what their taps read


def _edges(packed: Documents, taps: int, device: torch.device) -> _Edges:
    members, offsets = (torch.arange(taps - 1) < packed.lengths[:, None]).nonzero().unbind(1)
    windows = _rows(packed, members[:, None], offsets[:, None] + torch.arange(1 - taps, 1), taps, device)
    return _Edges((packed.starts[members] + offsets).to(device), windows)


def _blocks(shape: torch.Size, taps: int) -> Iterator[tuple[slice, int, int]]:
    """Cuts [B, T, D] into pieces (rows, first token, end) that fit the cache; later tokens of a row come first."""
    batch, length, width = shape
    tokens = max(taps, 16, _BLOCK_ELEMENTS // max(width, 1))
    rows = max(1, _BLOCK_ELEMENTS // max(width * length, 1))
    for row in range(0, batch, rows):
        for start in reversed(range(0, length, tokens)):
            yield slice(row, row + rows), start, min(start + tokens, length)


def _window(x: Tensor, rows: slice, start: int, end: int, weight: Tensor) -> Tensor:
    """Tokens start - (W - 1) to end of some rows, zeros before the row: [rows, W - 1 + end - start, D]."""
    before = len(weight) - 1
    window = x[rows, max(start - before, 0) : end].to(weight.dtype)
    return F.pad(window, (0, 0, before - start, 0)) if start < before else window


def _convolve(window: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    tokens = window.shape[1] - len(weight) + 1
    value = torch.addcmul(bias, window[:, :tokens], weight[0])
    for tap in range(1, len(weight)):
        value.addcmul_(window[:, tap : tap + tokens], weight[tap])
    return value


class _Conv(torch.autograd.Function):
    """x [B, T, D], history [documents, W - 1, D]; weight [W, D] and bias [D] in the dtype to compute in."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, history: Tensor, weight: Tensor, bias: Tensor, edges: _Edges, silu: bool
    ) -> Tensor:
        y = x.new_empty(x.shape)
        for rows, start, end in _blocks(x.shape, len(weight)):
            value = _convolve(_window(x, rows, start, end, weight), weight, bias)
            y[rows, start:end] = F.silu(value, inplace=True) if silu else value
        windows = edges.windows.read(x.flatten(0, 1), history.flatten(0, 1)).to(weight.dtype)
        value = (windows * weight).sum(1) + bias
        y.view(-1, x.shape[2])[edges.tokens] = (F.silu(value) if silu else value).to(y.dtype)
        ctx.save_for_backward(x, history, weight, bias)
        ctx.edges, ctx.silu = edges, silu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, history, weight, bias = ctx.saved_tensors
        edges, before = ctx.edges, len(weight) - 1
        dx, dhistory = x.new_empty(x.shape), history.new_zeros(history.shape)
        dweight, dbias = torch.zeros_like(weight), torch.zeros_like(bias)
        inner = torch.ones(x.shape[0] * x.shape[1], 1, dtype=weight.dtype, device=x.device)
        inner[edges.tokens] = 0
        inner = inner.view(x.shape[0], x.shape[1], 1)

        later: Tensor | None = None  # what the tokens after this block give to its last ones
        for rows, start, end in _blocks(x.shape, len(weight)):
            window = _window(x, rows, start, end, weight)
            dvalue = dy[rows, start:end].to(weight.dtype)
            if ctx.silu:
                dvalue = torch.ops.aten.silu_backward(dvalue, _convolve(window, weight, bias))
            dvalue = dvalue * inner[rows, start:end]
            dwindow = torch.zeros_like(window)
            for tap in range(len(weight)):
                taken = slice(tap, tap + end - start)
                dwindow[:, taken].addcmul_(dvalue, weight[tap])
                dweight[tap] += (dvalue * window[:, taken]).sum((0, 1))
            dbias += dvalue.sum((0, 1))
            if later is not None and end < x.shape[1]:
                dwindow[:, -before:] += later
            later = dwindow[:, :before]
            dx[rows, start:end] = dwindow[:, before:]

        windows = edges.windows.read(x.flatten(0, 1), history.flatten(0, 1)).to(weight.dtype)  # [n, W, D]
        dvalue = dy.flatten(0, 1)[edges.tokens].to(weight.dtype)
        if ctx.silu:
            dvalue = torch.ops.aten.silu_backward(dvalue, (windows * weight).sum(1) + bias)
        edges.windows.add_to(dx.view(-1, x.shape[2]), dhistory.view(-1, x.shape[2]), dvalue[:, None] * weight)
        dweight += (dvalue[:, None] * windows).sum(0)
        return dx, dhistory, dweight, dbias + dvalue.sum(0), None, None


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The reference of `fast_llm_ssm.ops.causal_conv1d`, which see."""
    batch, width, length = x.shape
    taps = weight.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    if initial_states is not None:
        initial_states = initial_states.to(x.dtype)
    if length == 0:
        states = x.new_zeros(batch, width, taps - 1) if initial_states is None else initial_states
        return (x.clone(), states.clone()) if return_final_states else x.clone()
    x = x.transpose(1, 2)
    if cu_seqlens is not None:
        packed = documents.from_cu_seqlens(cu_seqlens, length)
    elif seq_idx is not None and not x.is_meta:
        packed = documents.from_seq_idx(seq_idx)
    else:
        packed = documents.whole_rows(batch, length)
    history = x.new_zeros(len(packed.starts), taps - 1, width)
    if initial_states is not None:
        initial = initial_states.transpose(1, 2)
        history = initial if cu_seqlens is not None else history.index_copy(0, packed.first.to(x.device), initial)

    bias = weight.new_zeros(width) if bias is None else bias
    y = _Conv.apply(
        x,
        history,
        weight.to(dtype).t().contiguous(),
        bias.to(dtype),
        _edges(packed, taps, x.device),
        activation is not None,
    )
    y = y.transpose(1, 2)
    if not return_final_states:
        return y
    members = torch.arange(len(packed.starts)) if cu_seqlens is not None else packed.last
    offsets = packed.lengths[members, None] + torch.arange(1 - taps, 0)
    final = _rows(packed, members[:, None], offsets, taps, x.device).read(x.flatten(0, 1), history.flatten(0, 1))
    return y, final.transpose(1, 2)


@torch.no_grad()
def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """The reference of `fast_llm_ssm.ops.causal_conv1d_update`, which see."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    window = torch.cat([conv_state, x[..., None].to(conv_state.dtype)], dim=2)  # [B, D, W]
    conv_state.copy_(window[..., 1:])
    y = (window.to(dtype) * weight.to(dtype)).sum(2)
    if bias is not None:
        y = y + bias.to(dtype)
    return (y if activation is None else F.silu(y)).to(x.dtype)

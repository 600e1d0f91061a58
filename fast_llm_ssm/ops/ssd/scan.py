"""The chunked SSD scan of one document a row, forward and backward, one chunk at a time.

Letters: M batch times groups, T tokens, L tokens of a chunk, R heads of a group, P head dim, N state size. Within a
chunk, with a the running sum of the log decay, e its last value, u = dt x and S the state before the chunk:

    y_i = sum_{j<=i} W_ij u_j + exp(a_i) S C_i          W_ij = (C_i . B_j) exp(a_i - a_j)
    S  <- exp(e) S + sum_j exp(e - a_j) u_j B_j^T

Only the states at the chunk starts are kept for the backward; everything of size L x L lives for one chunk. Memory is
linear in T.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Decay(NamedTuple):
    """A chunk's decays, [M, L, R] unless said otherwise.

    The running sum is taken in fp64 and split into `high`, its nearest number in the working precision, and a small
    rest, which is folded into what multiplies W from both sides. So a weak decay stays exact behind a strong one, and
    no difference inside W is positive.
    """

    high: Tensor
    rest: Tensor  # exp(a - high)
    inverse_rest: Tensor
    from_start: Tensor  # exp(a)
    to_end: Tensor  # exp(e - a)
    whole: Tensor  # exp(e), [M, 1, R]


def _decay(log_decay: Tensor) -> _Decay:
    dtype = log_decay.dtype
    # exp of the bound is already 0: it changes no decay, and it bounds the rest.
    bound = -128.0 if dtype == torch.float32 else -1024.0
    a = log_decay.clamp(min=bound).double().cumsum(1)
    high = a.to(dtype)
    rest = (a - high).to(dtype)
    end = a[:, -1:]
    return _Decay(high, rest.exp(), (-rest).exp(), a.exp().to(dtype), (end - a).exp().to(dtype), end.exp().to(dtype))


def _pairwise(high: Tensor) -> Tensor:
    """exp(a_i - a_j) for i >= j, and 1 above the diagonal: bounded before exp, so that nothing overflows where the
    caller masks. Returns [M, R, L, L].
    """
    high = high.transpose(1, 2)
    return (high[..., :, None] - high[..., None, :]).clamp_(max=0).exp_()


def _by_head(tensor: Tensor, factor: Tensor) -> Tensor:
    """tensor [M, L, R, P] times factor [M, L, R], as contiguous [M * R, L, P]."""
    tensor = tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return tensor.mul_(factor.transpose(1, 2)[..., None]).flatten(0, 1)


def _by_token(tensor: Tensor, factor: Tensor) -> Tensor:
    """tensor [M, L, R, P] times factor [M, L, R], as [M, L, R * P]."""
    return (tensor * factor[..., None]).flatten(2)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [M, T, R, P]
        dt: Tensor,  # [M, T, R]
        log_decay: Tensor,  # [M, T, R]
        B: Tensor,  # [M, T, N]
        C: Tensor,  # [M, T, N]
        D: Tensor,  # [M, 1, R, P or 1]
        initial: Tensor,  # [M, N, R, P]
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        rows, length, heads, dim = x.shape
        dtype = initial.dtype
        y = x.new_empty(x.shape, dtype=dtype)
        states = initial.new_empty(-(-length // chunk_size) + 1, *initial.shape)
        states[0] = initial
        for index in range(len(states) - 1):
            span = slice(index * chunk_size, (index + 1) * chunk_size)
            x_chunk, dt_chunk = x[:, span].to(dtype), dt[:, span]
            B_chunk, C_chunk = B[:, span].to(dtype), C[:, span].to(dtype)
            state = states[index]
            decay = _decay(log_decay[:, span])
            weights = _pairwise(decay.high).mul_((C_chunk @ B_chunk.mT).tril_()[:, None])
            inside = weights.flatten(0, 1) @ _by_head(x_chunk, dt_chunk * decay.inverse_rest)
            y_chunk = (C_chunk @ state.flatten(2)).unflatten(2, (heads, dim)).mul_(decay.from_start[..., None])
            y_chunk.addcmul_(inside.unflatten(0, (rows, heads)).transpose(1, 2), decay.rest[..., None])
            y[:, span] = y_chunk.addcmul_(x_chunk, D)
            added = (B_chunk.mT @ _by_token(x_chunk, dt_chunk * decay.to_end)).unflatten(2, (heads, dim))
            states[index + 1] = added.addcmul_(state, decay.whole[..., None])
        ctx.save_for_backward(x, dt, log_decay, B, C, D, states)
        ctx.chunk_size = chunk_size
        return y, states[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, log_decay, B, C, D, states = ctx.saved_tensors
        rows, _, heads, dim = x.shape
        dtype = states.dtype
        dx, ddt, dlog_decay, dB, dC = (torch.empty_like(tensor) for tensor in (x, dt, log_decay, B, C))
        dD = torch.zeros_like(D)
        for index in reversed(range(len(states) - 1)):
            span = slice(index * ctx.chunk_size, (index + 1) * ctx.chunk_size)
            x_chunk, dt_chunk, dy_chunk = x[:, span].to(dtype), dt[:, span], dy[:, span]
            B_chunk, C_chunk = B[:, span].to(dtype), C[:, span].to(dtype)
            state, dstate_flat = states[index].flatten(2), dstate.flatten(2)  # [M, N, R * P]
            decay = _decay(log_decay[:, span])
            scale_inside, scale_end = dt_chunk * decay.inverse_rest, dt_chunk * decay.to_end

            # Inside the chunk: W and its two factors.
            pairwise = _pairwise(decay.high)
            scores = (C_chunk @ B_chunk.mT).tril_()
            u, dy_head = _by_head(x_chunk, scale_inside), _by_head(dy_chunk, decay.rest)
            du = ((pairwise * scores[:, None]).flatten(0, 1).mT @ dy_head).unflatten(0, (rows, heads)).transpose(1, 2)
            dweights = (dy_head @ u.mT).unflatten(0, (rows, heads)).mul_(pairwise)  # [M, R, L, L]
            dscores = dweights.sum(1).tril_()
            dpairs = dweights.mul_(scores[:, None]).flatten(0, 1)  # gradient of a_i - a_j
            # Step k lies in a_i - a_j where j < k <= i. Only those are summed: sums of rows less sums of columns would
            # leave a rounding error that a steep decay magnifies.
            before = dpairs.new_ones(dpairs.shape[1:]).triu(1)  # [j, k]: j < k
            inside = (dpairs @ before).mul_(1 - before).sum(1).unflatten(0, (rows, heads)).transpose(1, 2)  # [M, L, R]

            # From the state before the chunk, and into the state after it.
            dy_token, u_end = _by_token(dy_chunk, decay.from_start), _by_token(x_chunk, scale_end)
            from_start = (C_chunk @ state).mul_(dy_token).unflatten(2, (heads, dim)).sum(3)
            du_end = (B_chunk @ dstate_flat).unflatten(2, (heads, dim))
            x_du_end = (x_chunk * du_end).sum(3)
            to_end = (scale_end * x_du_end).cumsum(1)
            carried = (states[index] * dstate).sum((1, 3)) * decay.whole[:, 0]  # [M, R]

            ddt[:, span] = decay.inverse_rest * (x_chunk * du).sum(3) + decay.to_end * x_du_end
            dlog_decay[:, span] = inside + from_start.flip(1).cumsum(1).flip(1) + carried[:, None]
            dlog_decay[:, span][:, 1:] += to_end[:, :-1]  # e - a_j holds the steps after j
            dx_chunk = du_end.mul_(scale_end[..., None]).addcmul_(du, scale_inside[..., None])
            dx[:, span] = dx_chunk.addcmul_(dy_chunk, D)
            if ctx.needs_input_grad[5]:
                dD += (dy_chunk * x_chunk).sum(1, keepdim=True).sum_to_size(D.shape)
            dC[:, span] = torch.baddbmm(dscores @ B_chunk, dy_token, state.mT)
            dB[:, span] = torch.baddbmm(dscores.mT @ C_chunk, u_end, dstate_flat.mT)
            dstate = torch.addcmul((C_chunk.mT @ dy_token).unflatten(2, (heads, dim)), dstate, decay.whole[..., None])
        return dx, ddt, dlog_decay, dB, dC, dD, dstate, None


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_states: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Scan rows that are one document each.

    Args:
        x: [B, T, H, P].
        dt: [B, T, H], the step as it is applied, in the dtype of `initial_states`.
        A: [H], in the dtype of `initial_states`.
        B, C: [B, T, G, N].
        D: [H] or [H, P].
        initial_states: [B, H, P, N], in the dtype to compute in.
        chunk_size: tokens handled at once.

    Returns:
        y [B, T, H, P] and the final states [B, H, P, N], in the dtype of `initial_states`.
    """
    batch, _, heads, dim = x.shape
    groups = B.shape[2]
    split = (groups, heads // groups)

    def by_group(tensor: Tensor) -> Tensor:  # [B, T, G, ...] -> [B * G, T, ...], a view for one group
        return tensor.transpose(1, 2).flatten(0, 1)

    skip = A.new_zeros(heads, 1) if D is None else D.to(A.dtype).view(heads, -1)
    state = initial_states.unflatten(1, split).permute(0, 1, 4, 2, 3).flatten(0, 1)  # [M, N, R, P]
    y, state = _Scan.apply(
        by_group(x.unflatten(2, split)),
        by_group(dt.unflatten(2, split)),
        by_group((dt * A).unflatten(2, split)),
        by_group(B),
        by_group(C),
        skip.unflatten(0, split).expand(batch, -1, -1, -1).flatten(0, 1)[:, None],
        state,
        chunk_size,
    )
    y = y.unflatten(0, (batch, groups)).transpose(1, 2).flatten(2, 3)
    state = state.unflatten(0, (batch, groups)).permute(0, 1, 3, 4, 2).flatten(1, 2)
    return y, state

"""One token of the selective state space recurrence, for decoding."""

import math

from torch import Tensor

from fast_llm_ssm.ops import backend as backends
from fast_llm_ssm.ops.checks import check_groups, check_rank, check_shape
from fast_llm_ssm.ops.state_update import reference


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    *,
    backend: backends.Backend | None = None,
) -> Tensor:
    """One step of the recurrence of `ssd` (or of Mamba 1, with a decay for each channel and state). For decoding: no
    gradients.

    With dt' = clamp(softplus(dt + dt_bias), *dt_limit) and group g = h // (H / G):

        state <- exp(dt' A) state + dt' x B^T
        y = (state C + D x) * silu(z)

    Source: arXiv:2405.21060; arguments as in mamba_ssm's `selective_state_update`, with `dt_limit`. As there, the head
    dimension may be left out of every argument at once.

    Args:
        state: [B, H, P, N], updated in place; keep it in fp32.
        x: [B, H, P].
        dt: [B, H], or [B, H, P].
        A: [H], or [H, P, N]; not positive.
        B: [B, G, N], G divides H.
        C: [B, G, N].
        D: [H] or [H, P].
        z: [B, H, P].
        dt_bias: [H] or [H, P].
        dt_softplus: apply softplus to dt + dt_bias.
        dt_limit: lowest and highest step.
        backend: "triton", "reference", or None for the best that can run here.

    Returns:
        y [B, H, P] in x's dtype. Computed in fp32 (fp64 if an input is).

    Raises:
        ValueError: shapes that do not fit.
    """
    if state.dim() == 3:  # without heads: one head
        state, x, dt, B, C = (tensor.unsqueeze(1) for tensor in (state, x, dt, B, C))
        z = None if z is None else z.unsqueeze(1)
        D, dt_bias = (None if tensor is None else tensor[None] for tensor in (D, dt_bias))
        y = selective_state_update(state, x, dt, A[None], B, C, D, z, dt_bias, dt_softplus, dt_limit, backend=backend)
        return y.squeeze(1)
    op = "selective_state_update"
    check_rank(op, "state", state, "B H P N")
    check_rank(op, "B", B, "B G N")
    batch, heads, dim, size = state.shape
    groups = B.shape[1]
    check_groups(op, "B", groups, heads)
    check_shape(op, "x", x, (batch, heads, dim))
    check_shape(op, "dt", dt, (batch, heads), (batch, heads, dim))
    check_shape(op, "A", A, (heads,), (heads, dim, size))
    check_shape(op, "B", B, (batch, groups, size))
    check_shape(op, "C", C, (batch, groups, size))
    check_shape(op, "D", D, (heads,), (heads, dim))
    check_shape(op, "z", z, (batch, heads, dim))
    check_shape(op, "dt_bias", dt_bias, (heads,), (heads, dim))
    return backends.dispatch(
        op, reference.selective_state_update, backend, x,
        state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit,
    )  # fmt: skip

"""The selective scan of Mamba 1."""

from __future__ import annotations

from torch import Tensor

from fast_llm_ssm.ops import backend as backends
from fast_llm_ssm.ops.checks import check_documents, check_groups, check_rank, check_shape
from fast_llm_ssm.ops.selective_scan import reference


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: backends.Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A linear recurrence for each channel and state, with decays that depend on the input.

    With d = softplus(delta + delta_bias), and K the channels:

        h_t = exp(d_t A) h_{t-1} + d_t u_t B_t        [K, N]
        y_t = (h_t C_t + D u_t) * silu(z_t)           [K]

    Source: Gu and Dao, arXiv:2312.00752; arguments as in mamba_ssm's `selective_scan_fn`, then those of `ssd`.

    Args:
        u: [B, K, T].
        delta: [B, K, T].
        A: [K, N], not positive.
        B: [B, N, T], or [B, G, N, T] with G groups of channels.
        C: like B.
        D: [K].
        z: [B, K, T].
        delta_bias: [K].
        delta_softplus: apply softplus.
        return_last_state: also return the states after the last token.
        initial_states: [B, K, N]; [documents, K, N] with `cu_seqlens`; with `seq_idx` they seed each row's first
            document.
        seq_idx: [B, T], numbers that never fall: tokens of equal number are one document.
        cu_seqlens: [documents + 1], bounds of documents in a batch of 1.
        backend: "triton", "reference", or None for the best that can run here.

    Returns:
        y [B, K, T] in u's dtype; with `return_last_state` also the states, fp32 (fp64 for fp64 inputs): [B, K, N], or
        [documents, K, N] with `cu_seqlens`.

    Raises:
        ValueError: shapes that do not fit, both `seq_idx` and `cu_seqlens`.
    """
    op = "selective_scan"
    check_rank(op, "u", u, "B K T")
    check_rank(op, "A", A, "K N")
    batch, channels, length = u.shape
    size = A.shape[1]
    if B.dim() == 3:
        B = B.unsqueeze(1)
    if C.dim() == 3:
        C = C.unsqueeze(1)
    check_rank(op, "B", B, "B G N T")
    groups = B.shape[1]
    check_groups(op, "B", groups, channels)
    states = check_documents(op, batch, length, seq_idx, cu_seqlens)
    check_shape(op, "delta", delta, (batch, channels, length))
    check_shape(op, "A", A, (channels, size))
    check_shape(op, "B", B, (batch, groups, size, length))
    check_shape(op, "C", C, (batch, groups, size, length))
    check_shape(op, "D", D, (channels,))
    check_shape(op, "z", z, (batch, channels, length))
    check_shape(op, "delta_bias", delta_bias, (channels,))
    check_shape(op, "initial_states", initial_states, (states, channels, size))
    return backends.dispatch(
        op, reference.selective_scan, backend, u,
        u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, initial_states, seq_idx, cu_seqlens,
    )  # fmt: skip

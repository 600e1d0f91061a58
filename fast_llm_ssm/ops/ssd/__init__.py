"""State space duality (SSD): the selective state space scan of Mamba 2."""

import math

from torch import Tensor

from fast_llm_ssm.ops import backend as backends
from fast_llm_ssm.ops.checks import can_read, check_documents, check_groups, check_rank, check_shape
from fast_llm_ssm.ops.ssd import reference


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    *,
    backend: backends.Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Selective state space scan with one decay a head (Mamba 2).

    With dt' = clamp(softplus(dt + dt_bias), *dt_limit), for each head h of group g = h // (H / G) and each token t:

        S_t = exp(dt'_t A) S_{t-1} + dt'_t x_t B_t^T                S: [P, N]
        y_t = (S_t C_t + D x_t) * silu(z_t)

    Source: Dao and Gu, "Transformers are SSMs" (2024), arXiv:2405.21060. Names, order and meaning of the arguments are
    those of mamba_ssm's `mamba_chunk_scan_combined`.

    Documents that share a row never see each other. `seq_idx` numbers the tokens' documents; the initial state then
    seeds the first document of each row, whatever its number, and the final state is that of each row's last document.
    `cu_seqlens` gives the documents of a batch of one, and each document has its own initial and final state; an empty
    document hands its initial state on.

    Args:
        x: [B, T, H, P], floating.
        dt: [B, T, H], the step before bias and softplus; used in fp32.
        A: [H], not positive.
        B: [B, T, G, N], G divides H.
        C: [B, T, G, N].
        chunk_size: tokens handled at once; the result does not depend on it.
        D: [H] or [H, P], skip connection.
        z: [B, T, H, P], gate.
        dt_bias: [H].
        initial_states: [B, H, P, N], or [documents, H, P, N] with `cu_seqlens`; None is zero.
        seq_idx: [B, T] integers, not decreasing along a row.
        cu_seqlens: [documents + 1] integers from 0 to T, not decreasing; needs B = 1.
        dt_softplus: apply softplus to dt + dt_bias.
        dt_limit: lowest and highest step; no gradient flows outside.
        return_final_states: also return the states after the last tokens.
        backend: "triton", "reference", or None for the best that can run here.

    Returns:
        y [B, T, H, P] in x's dtype; with `return_final_states` also the final states in fp32 (fp64 if an input is),
        shaped like `initial_states`.

    Raises:
        ValueError: shapes that do not fit, both kinds of documents at once, documents out of order, or (checked on the
            CPU) a positive A.
    """
    _check(x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_limit)
    return backends.dispatch(
        "ssd", reference.ssd, backend, x,
        x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens,
        dt_softplus, dt_limit, return_final_states,
    )  # fmt: skip


def _check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_limit: tuple[float, float],
) -> None:
    check_rank("ssd", "x", x, "B T H P")
    check_rank("ssd", "B", B, "B T G N")
    batch, length, heads, dim = x.shape
    groups, size = B.shape[2:]
    check_groups("ssd", "B", groups, heads)
    num_states = check_documents("ssd", batch, length, seq_idx, cu_seqlens)
    check_shape("ssd", "dt", dt, (batch, length, heads))
    check_shape("ssd", "A", A, (heads,))
    check_shape("ssd", "B", B, (batch, length, groups, size))
    check_shape("ssd", "C", C, (batch, length, groups, size))
    check_shape("ssd", "D", D, (heads,), (heads, dim))
    check_shape("ssd", "z", z, (batch, length, heads, dim))
    check_shape("ssd", "dt_bias", dt_bias, (heads,))
    check_shape("ssd", "initial_states", initial_states, (num_states, heads, dim, size))
    if chunk_size < 1:
        raise ValueError(f"ssd: chunk_size is {chunk_size}, expected at least 1")
    if not dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"ssd: dt_limit is {dt_limit}, expected lowest <= highest")
    if can_read(A) and (A > 0).any():
        raise ValueError(
            f"ssd: A is positive ({A.max().item():g}), expected at most 0: the state would grow without bound"
        )

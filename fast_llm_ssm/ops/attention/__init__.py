"""Causal attention: whole rows, packed documents, windows, and queries against a cache."""

from torch import Tensor

from fast_llm_ssm.ops import backend as backends
from fast_llm_ssm.ops.attention import reference
from fast_llm_ssm.ops.checks import can_read, check_groups, check_rank, check_shape


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    prefix: int = 0,
    cu_seqlens: Tensor | None = None,
    positions: Tensor | None = None,
    backend: backends.Backend | None = None,
) -> Tensor:
    """Causal scaled dot-product attention with grouped key-value heads.

        y_t = sum_s softmax_s(scale q_t . k_s) v_s      over the keys that query t sees

    A query at position i sees the key at position j when j <= i and (i - j < window or j < prefix). Positions count
    from the start of the document. Query head h uses key-value head h // (Hq / Hkv). Source: Vaswani et al. (2017),
    arXiv:1706.03762; Ainslie et al. (2023), arXiv:2305.13245.

    Args:
        q: [B, T, Hq, D], floating.
        k: [B, S, Hkv, D]; S = T unless `positions` is given; Hkv divides Hq.
        v: [B, S, Hkv, Dv].
        scale: positive factor on the scores; None is D ** -0.5.
        window: number of keys a query sees, itself included; None is all.
        prefix: number of first keys that every later query sees, whatever the window.
        cu_seqlens: [documents + 1] cumulative lengths over the flattened B * T tokens, row ends among them. A query
            sees only its own document.
        positions: [B, T]: k and v are a cache with the keys of positions 0 to S - 1, and query t of row b stands at
            positions[b, t].
            A query at a negative position sees nothing and gives zeros.
        backend: "reference" or None.

    Returns:
        [B, T, Hq, Dv] in q's dtype.

    Raises:
        ValueError: shapes that do not fit, a window below 1, a scale not above 0, `cu_seqlens` and `positions` at once,
            or documents out of
            order.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rank("attention", name, tensor, "B T H D")
    batch, length, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    check_groups("attention", "k", kv_heads, heads)
    check_shape("attention", "k", k, (batch, keys, kv_heads, dim))
    check_shape("attention", "v", v, (batch, keys, kv_heads, v.shape[3]))
    check_shape("attention", "positions", positions, (batch, length))
    if cu_seqlens is not None and positions is not None:
        raise ValueError(
            "attention: got both cu_seqlens (packed documents) and positions (a cache), expected one of them"
        )
    if cu_seqlens is not None and can_read(cu_seqlens):
        missing = set(range(0, batch * length + 1, length)) - set(cu_seqlens.tolist()) if length else ()
        if missing:
            raise ValueError(
                f"attention: cu_seqlens lacks the row end {min(missing)}, expected all multiples of {length}"
            )
    if positions is None and keys != length:
        raise ValueError(f"attention: k has {keys} keys for {length} queries, expected as many, or positions")
    if scale is not None and scale <= 0:  # the masked scores' -inf times it would be NaN in the fused kernels
        raise ValueError(f"attention: scale is {scale:g}, expected above 0")
    if window is not None and window < 1:
        raise ValueError(f"attention: window is {window}, expected at least 1")
    if prefix < 0:
        raise ValueError(f"attention: prefix is {prefix}, expected at least 0")
    return backends.dispatch(
        "attention", reference.attention, backend, q, q, k, v,
        scale=scale, window=window, prefix=prefix, cu_seqlens=cu_seqlens, positions=positions,
    )  # fmt: skip

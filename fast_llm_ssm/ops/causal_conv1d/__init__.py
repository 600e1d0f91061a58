"""Causal depthwise convolution over time: whole sequences, and one token at a time."""

from torch import Tensor

from fast_llm_ssm.ops import backend as backends
from fast_llm_ssm.ops.causal_conv1d import reference
from fast_llm_ssm.ops.checks import check_documents, check_rank, check_shape


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    backend: backends.Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Depthwise convolution in which a token sees itself and the W - 1 tokens before it.

        y[d, t] = activation(bias[d] + sum_w weight[d, w] x[d, t - (W - 1) + w])

    Arguments as in the causal-conv1d package's `causal_conv1d_fn`. Documents as in `ssd`: with `seq_idx` the initial
    state comes before the first document of each row, with `cu_seqlens` each document has its own; other documents
    begin with zeros.

    Args:
        x: [B, D, T], floating; any strides, fastest as the transposed view of a [B, T, D] tensor.
        weight: [D, W], W at least 2.
        bias: [D].
        seq_idx: [B, T] integers, not decreasing along a row.
        initial_states: [B, D, W - 1], or [documents, D, W - 1] with `cu_seqlens`: the inputs before the first token;
            None is zero.
        return_final_states: also return the last W - 1 inputs, initial ones among them where there were fewer tokens.
        activation: None, "silu" or its other name "swish".
        cu_seqlens: [documents + 1] integers from 0 to T, not decreasing; needs B = 1.
        backend: "triton", "reference", or None for the best that can run here.

    Returns:
        y [B, D, T] in x's dtype, laid out as [B, T, D]; with `return_final_states` also the final states in x's dtype,
        shaped like `initial_states`. Computed in fp32 (fp64 if x is).

    Raises:
        ValueError: shapes that do not fit, an unknown activation, both kinds of documents at once, or documents out of
            order.
    """
    op = "causal_conv1d"
    check_rank(op, "x", x, "B D T")
    batch, width, length = x.shape
    taps = _check_filter(op, width, weight, bias, activation)
    num_states = check_documents(op, batch, length, seq_idx, cu_seqlens)
    check_shape(op, "initial_states", initial_states, (num_states, width, taps - 1))
    return backends.dispatch(
        op, reference.causal_conv1d, backend, x,
        x, weight, bias, seq_idx, initial_states, return_final_states, activation, cu_seqlens,
    )  # fmt: skip


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    backend: backends.Backend | None = None,
) -> Tensor:
    """One token of `causal_conv1d`. For decoding: no gradients.

    Args:
        x: [B, D], the token's input.
        conv_state: [B, D, W - 1], the inputs before it; updated in place to end with x.
        weight: [D, W].
        bias: [D].
        activation: None, "silu" or "swish".
        backend: "triton", "reference", or None for the best that can run here.

    Returns:
        y [B, D] in x's dtype.

    Raises:
        ValueError: shapes that do not fit, or an unknown activation.
    """
    op = "causal_conv1d_update"
    check_rank(op, "x", x, "B D")
    batch, width = x.shape
    taps = _check_filter(op, width, weight, bias, activation)
    check_shape(op, "conv_state", conv_state, (batch, width, taps - 1))
    return backends.dispatch(op, reference.causal_conv1d_update, backend, x, x, conv_state, weight, bias, activation)


def _check_filter(op: str, width: int, weight: Tensor, bias: Tensor | None, activation: str | None) -> int:
    """Returns the number of taps, W."""
    check_rank(op, "weight", weight, "D W")
    taps = weight.shape[1]
    if taps < 2:
        raise ValueError(f"{op}: weight has {taps} taps, expected at least 2")
    check_shape(op, "weight", weight, (width, taps))
    check_shape(op, "bias", bias, (width,))
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"{op}: activation is {activation!r}, expected None, 'silu' or 'swish'")
    return taps

"""RMS normalisation with a gate, over groups of channels."""

from torch import Tensor

from fast_llm_ssm.ops import backend as backends
from fast_llm_ssm.ops.checks import check_shape
from fast_llm_ssm.ops.gated_norm import reference


def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    *,
    backend: backends.Backend | None = None,
) -> Tensor:
    """RMSNorm over each group of channels, gated by silu(z).

        norm(v) = v / sqrt(mean(v^2 over the group) + eps) * weight + bias
        y = norm(x) * silu(z)       with norm_before_gate
        y = norm(x * silu(z))       otherwise

    Source: Zhang and Sennrich (2019), arXiv:1910.07467, and the gated form of Mamba 2, arXiv:2405.21060; arguments as
    in mamba_ssm's `RMSNormGated`.

    Args:
        x: [..., D], floating; any strides.
        weight: [D].
        bias: [D].
        z: [..., D], the gate.
        eps: added to the mean square.
        group_size: channels normalised together, divides D; None is all of them.
        norm_before_gate: gate the normalised x, rather than normalise the gated x.
        backend: "triton", "reference", or None for the best that can run here.

    Returns:
        [..., D] in x's dtype. Computed in fp32 (fp64 if x is).

    Raises:
        ValueError: shapes that do not fit, or a group size that does not divide D.
    """
    width = x.shape[-1]
    check_shape("gated_rms_norm", "weight", weight, (width,))
    check_shape("gated_rms_norm", "bias", bias, (width,))
    check_shape("gated_rms_norm", "z", z, tuple(x.shape))
    if group_size is not None and (group_size < 1 or width % group_size):
        raise ValueError(f"gated_rms_norm: group_size is {group_size}, expected a divisor of {width}")
    return backends.dispatch(
        "gated_rms_norm", reference.gated_rms_norm, backend, x, x, weight, bias, z, eps, group_size, norm_before_gate
    )

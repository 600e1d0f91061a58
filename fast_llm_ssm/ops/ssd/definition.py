"""SSD token by token, straight from its formula: slow, differentiable by autograd, and what every backend is checked
against.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def ssd_definition(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor, Tensor]:
    """The recurrence of `fast_llm_ssm.ops.ssd` for one document a row, in the dtype of its arguments. Returns y [B,
    T, H, P] and the final states [B, H, P, N].
    """
    batch, length, heads, dim = x.shape
    groups, state_size = B.shape[2:]
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    dt = dt.clamp(*dt_limit)
    B = B.repeat_interleave(heads // groups, dim=2)  # [B, T, H, N]
    C = C.repeat_interleave(heads // groups, dim=2)
    state = x.new_zeros(batch, heads, dim, state_size) if initial_states is None else initial_states
    outputs = []
    for t in range(length):
        decay = torch.exp(dt[:, t] * A)  # [B, H]
        added = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]  # [B, H, P, N]
        state = decay[..., None, None] * state + added
        outputs.append((state * C[:, t, :, None, :]).sum(-1))
    y = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(x)  # [B, T, H, P]
    if D is not None:
        y = y + x * (D if D.dim() == 2 else D[:, None])
    if z is not None:
        y = y * F.silu(z)
    return y, state

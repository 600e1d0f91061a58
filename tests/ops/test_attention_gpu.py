from __future__ import annotations

import pytest
import torch

from fast_llm_ssm.ops import attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", [None, 2, 50])
@pytest.mark.parametrize("kv_heads, value_dim", [(8, 64), (2, 64), (4, 128)])
def test_packed_half_precision_equals_fp64(window, kv_heads, value_dim):
    torch.manual_seed(0)
    q = torch.randn(2, 300, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(2, 300, kv_heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    v = torch.randn(2, 300, kv_heads, value_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bounds = torch.tensor([0, 1, 129, 300, 555, 600])
    weight = torch.randn(2, 300, 8, value_dim, device="cuda")
    y = attention(q, k, v, scale=0.2, window=window, cu_seqlens=bounds.cuda())
    grads = torch.autograd.grad((y * weight).sum(), (q, k, v))
    exact_inputs = [t.detach().cpu().double().requires_grad_() for t in (q, k, v)]
    exact = attention(*exact_inputs, scale=0.2, window=window, cu_seqlens=bounds)
    exact_grads = torch.autograd.grad((exact * weight.cpu()).sum(), exact_inputs)
    for a, b in zip((y, *grads), (exact, *exact_grads), strict=True):
        assert (a.cpu().double() - b).norm() <= 1e-2 * b.norm().clamp(min=1e-3)

from __future__ import annotations

import pytest
import torch

from fast_llm_ssm.ops import selective_scan
from fast_llm_ssm.ops.selective_scan import reference


def inputs(batch=2, channels=6, size=4, length=37, groups=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    shape = (batch, size, length) if groups is None else (batch, groups, size, length)
    return {
        "u": draw(batch, channels, length),
        "delta": draw(batch, channels, length),
        "A": (-draw(channels, size).exp()).detach().requires_grad_(),
        "B": draw(*shape),
        "C": draw(*shape),
        "D": draw(channels),
        "z": draw(batch, channels, length),
        "delta_bias": draw(channels),
        "initial_states": draw(batch, channels, size),
    }


def definition(u, delta, A, B, C, D, z, delta_bias, initial_states, seq_idx=None, cu_seqlens=None):
    B, C = (t if t.dim() == 4 else t.unsqueeze(1) for t in (B, C))
    return reference.selective_scan(
        u, delta, A, B, C, D, z, delta_bias, True, True, initial_states, seq_idx, cu_seqlens, reference.recurrence
    )


def compare(arguments, **documents):
    """Values and every gradient, through y and the final states, against the definition."""
    got = selective_scan(**arguments, delta_softplus=True, return_last_state=True, **documents)
    expected = definition(**arguments, **documents)
    generator = torch.Generator().manual_seed(9)
    weights = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in expected]
    grads = []
    for outputs in (got, expected):
        loss = sum((w * t).sum() for w, t in zip(weights, outputs, strict=True))
        grads.append(torch.autograd.grad(loss, list(arguments.values())))
    for a, b in zip((*got, *grads[0]), (*expected, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [1, 2, 3, 31, 32, 33, 65, 100])
@pytest.mark.parametrize("groups", [None, 1, 3])
def test_equals_the_definition(length, groups):
    compare(inputs(length=length, groups=groups))


def test_documents_by_number():
    seq_idx = torch.tensor([[5] * 31 + [6] + [7] * 33 + [9] * 5, [0] * 32 + [1] * 38])
    compare(inputs(length=70), seq_idx=seq_idx)


def test_documents_by_bounds_have_states_of_their_own():
    arguments = inputs(batch=1, length=70)
    arguments["initial_states"] = inputs(batch=5)["initial_states"]
    compare(arguments, cu_seqlens=torch.tensor([0, 1, 32, 32, 65, 70]))


def test_documents_are_sealed():
    arguments = inputs(batch=1, length=50, dtype=torch.float32)
    seq_idx = (torch.arange(50) >= 33)[None].int()
    before = selective_scan(**arguments, delta_softplus=True, seq_idx=seq_idx)
    changed = {**arguments, "u": arguments["u"].detach().clone()}
    changed["u"][0, :, 32] += 1
    after = selective_scan(**changed, delta_softplus=True, seq_idx=seq_idx)
    assert torch.equal(before[..., 33:], after[..., 33:]) and not torch.equal(before[..., 32], after[..., 32])


def test_two_halves_equal_the_whole():
    arguments = inputs(length=45)
    whole, last = selective_scan(**arguments, delta_softplus=True, return_last_state=True)
    for cut in (1, 20, 32, 44):
        first = {k: v[..., :cut] if v.shape[-1] == 45 else v for k, v in arguments.items()}
        second = {k: v[..., cut:] if v.shape[-1] == 45 else v for k, v in arguments.items()}
        a, state = selective_scan(**first, delta_softplus=True, return_last_state=True)
        second["initial_states"] = state
        b, end = selective_scan(**second, delta_softplus=True, return_last_state=True)
        torch.testing.assert_close(torch.cat([a, b], -1), whole)
        torch.testing.assert_close(end, last)


def test_strong_decay_stays_finite():
    arguments = inputs(length=40, dtype=torch.float32)
    arguments["A"] = torch.full((6, 4), -1e6, requires_grad=True)
    y = selective_scan(**arguments, delta_softplus=True)
    grads = torch.autograd.grad(y.sum(), list(arguments.values()))
    assert y.isfinite().all() and all(g.isfinite().all() for g in grads)


def test_low_precision_inputs_are_computed_in_fp32():
    low = {k: v.detach() for k, v in inputs(dtype=torch.bfloat16).items()}
    y, state = selective_scan(**low, delta_softplus=True, return_last_state=True)
    exact = selective_scan(**{k: v.double() for k, v in low.items()}, delta_softplus=True)
    assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert (y.double() - exact).norm() <= 3e-3 * exact.norm()


def test_memory_does_not_hold_all_states():
    arguments = inputs(batch=1, channels=64, size=16, length=512, dtype=torch.float32)
    largest = 0

    def look(tensor):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(look, lambda t: t):
        selective_scan(**arguments, delta_softplus=True)
    assert 0 < largest <= 64 * 512  # never length x channels x states


@pytest.mark.parametrize(
    "change, message",
    [
        ({"delta": torch.zeros(2, 6, 36)}, "delta is"),
        ({"A": torch.zeros(5, 4)}, "A is"),
        ({"B": torch.zeros(2, 4, 4, 37)}, "B has 4"),
        ({"seq_idx": torch.tensor([[1] * 20 + [0] * 17] * 2)}, "must not decrease"),
        ({"seq_idx": torch.zeros(2, 37), "cu_seqlens": torch.tensor([0, 37])}, "both separate documents"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        selective_scan(**{**inputs(), **change})

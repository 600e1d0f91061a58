"""Clipping, and what stops a run."""

import math

import pytest
import torch
from torch import nn

from fast_llm_ssm.train.guards import clip_gradients, describe_non_finite


def with_gradients(scale: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * scale
    return model


def norm_by_hand(model: nn.Module) -> float:
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))


def test_clipping_scales_to_the_norm_and_reports_the_one_before():
    model = with_gradients(10.0)
    before = norm_by_hand(model)
    direction = model[0].weight.grad.clone()
    assert clip_gradients(model.parameters(), 1.0) == pytest.approx(before, rel=1e-5)
    assert norm_by_hand(model) == pytest.approx(1.0, rel=1e-5)
    torch.testing.assert_close(model[0].weight.grad, direction / before)


@pytest.mark.parametrize("max_norm", [None, 1e6])
def test_short_gradients_are_left_alone(max_norm):
    model = with_gradients()
    model[1].bias.grad = None
    before = model[0].weight.grad.clone()
    assert clip_gradients(model.parameters(), max_norm) == pytest.approx(norm_by_hand(model), rel=1e-5)
    assert torch.equal(model[0].weight.grad, before)


def test_the_first_gradient_that_is_not_finite_is_named():
    model = with_gradients()
    model[1].weight.grad[0, 0] = math.inf
    model[1].bias.grad[0] = math.nan
    assert clip_gradients(model.parameters(), 1.0) != clip_gradients(model.parameters(), 1.0)  # NaN
    assert describe_non_finite(model, 2.5) == "the gradient of 1.weight holds infinity, with loss 2.5"


def test_a_weight_that_is_not_finite_is_named_before_the_gradients_it_spoils():
    model = with_gradients(math.nan)
    with torch.no_grad():
        model[1].bias[1] = math.nan
    assert describe_non_finite(model, math.nan) == "the weight 1.bias holds NaN"


def test_an_overflowing_norm_of_finite_gradients():
    model = with_gradients(1e30)
    assert clip_gradients(model.parameters(), 1.0) == math.inf
    assert describe_non_finite(model, 2.5) == "the norm of the gradient overflows, with loss 2.5"

"""AdamW: who decays, and its state under names."""

import torch
from helpers.training import MODEL

from fast_llm_ssm.model import ModelConfig, build_model
from fast_llm_ssm.train.config import OptimConfig
from fast_llm_ssm.train.optimizer import build_optimizer, optimizer_tensors, parameter_groups


def tiny_model():
    shared = MODEL["shared"]["T"]
    attention = {"input_size": 32, "residual": False, "mixer": {**shared[0]["mixer"], "bias": True}}
    norm = {"type": "layer"}
    tree = {**MODEL, "shared": {"T": [attention, {**shared[1], "norm": norm}]}}
    return build_model(ModelConfig.model_validate(tree))


def test_every_parameter_is_in_exactly_one_group():
    model = tiny_model()
    members = [parameter for group in parameter_groups(model, 0.1) for parameter in group["params"]]
    assert len(members) == len({id(parameter) for parameter in members})
    assert {id(parameter) for parameter in members} == {id(parameter) for parameter in model.parameters()}


def test_weight_decay_leaves_ssm_parameters_norms_and_biases_alone():
    model = tiny_model()
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.1))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(10):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    spared = {"A_log", "D", "dt_bias", "conv_bias", "norm.weight", "norm.bias", "proj.bias"}
    seen = set()
    for name, parameter in model.named_parameters():
        kind = next((kind for kind in spared if name.endswith(kind)), None)
        if kind is not None:
            assert torch.equal(parameter, before[name]), name
            seen.add(kind)
        else:
            assert parameter.dim() == 2, name
            torch.testing.assert_close(parameter, before[name] * 0.99**10, msg=name)
            assert not torch.equal(parameter, before[name])
    assert seen == spared


def test_state_travels_by_name():
    torch.manual_seed(0)
    one, two = tiny_model(), tiny_model()
    first, second = build_optimizer(one, OptimConfig()), build_optimizer(two, OptimConfig())
    for parameter in one.parameters():
        parameter.grad = torch.randn_like(parameter)
    first.step()
    saved = optimizer_tensors(first, one)
    assert len(saved) == 3 * len(list(one.parameters()))
    for name, tensor in optimizer_tensors(second, two).items():
        tensor.copy_(saved[name])
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        theirs.data.copy_(ours.data)
        ours.grad = theirs.grad = torch.ones_like(ours)
    first.step()
    second.step()
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(ours, theirs)

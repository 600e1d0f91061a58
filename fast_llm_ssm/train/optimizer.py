"""AdamW over fp32 master parameters, and its state as named tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fast_llm_ssm.model import HybridModel
from fast_llm_ssm.train.config import OptimConfig


def parameter_groups(model: HybridModel, weight_decay: float) -> list[dict]:
    """Two groups, with and without weight decay; every parameter is in exactly one, shared and tied ones once."""
    without = model.no_decay_names()
    named = dict(model.named_parameters())
    assert without <= named.keys(), sorted(without - named.keys())
    return [
        {"params": [p for name, p in named.items() if name not in without], "weight_decay": weight_decay},
        {"params": [p for name, p in named.items() if name in without], "weight_decay": 0.0},
    ]


def build_optimizer(model: HybridModel, config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW with its state allocated, so that the state can be read into."""
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config.weight_decay), lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: HybridModel) -> dict[str, Tensor]:
    """The state by name, `PARAMETER.exp_avg` and so on; they share memory with it."""
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use this learning rate in the next update."""
    for group in optimizer.param_groups:
        group["lr"] = lr

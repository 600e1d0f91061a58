"""Parameters, operations and bytes of a model that need not exist: it is looked at on the meta device."""

from __future__ import annotations

from dataclasses import dataclass

from fast_llm_ssm.model.hybrid import HybridModel


@dataclass(frozen=True)
class Estimate:
    """Sizes of a model and of one training step; memory in bytes."""

    num_layers: int
    num_parameters: int
    flops_per_token: float
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate(
    model: HybridModel,
    sequence_length: int,
    micro_batch_size: int,
    activation_bytes: int = 2,
    recompute: bool = False,
) -> Estimate:
    """Estimate a training step with fp32 master weights and AdamW.

    Args:
        sequence_length: tokens of a row.
        micro_batch_size: rows held at a time.
        activation_bytes: of one number of an activation, 2 for bf16.
        recompute: full activation checkpointing: each layer keeps its input, and one layer at a time the rest.
    """
    count = model.num_parameters()
    tokens = sequence_length * micro_batch_size
    layers = [layer.activation_size_per_token() for layer in model.layers]
    hidden = model.config.hidden_size
    per_token = (hidden * len(layers) + max(layers)) if recompute else sum(layers)
    per_token += 3 * hidden  # embedding, final norm, its gradient
    return Estimate(
        num_layers=len(layers),
        num_parameters=count,
        flops_per_token=model.flops_per_token(sequence_length),
        weights=4 * count,
        gradients=4 * count,
        optimizer=8 * count,
        activations=int(per_token * tokens * activation_bytes),
    )

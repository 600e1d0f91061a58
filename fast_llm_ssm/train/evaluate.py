"""Validation loss, the bigram model beside it, and sample texts."""

from __future__ import annotations

import torch

from fast_llm_ssm.data import Dataset
from fast_llm_ssm.generate import SamplingOptions, generate
from fast_llm_ssm.model import HybridModel
from fast_llm_ssm.train.config import SamplesConfig

_BIGRAM_VOCABULARY = 1024
"""Up to this vocabulary a bigram model can be estimated well, and is worth comparing with."""


@torch.no_grad()
def validation_loss(model: HybridModel, dataset: Dataset, batch_size: int) -> float | None:
    """Mean cross-entropy over all validation targets, in nats; None without validation data."""
    device = model.embedding.weight.device
    total, count = 0.0, 0
    for batch in dataset.validation(batch_size):
        batch = batch.to(device)
        total += float(model.loss(batch.tokens, batch.targets, batch.cu_seqlens, reduction="sum"))
        count += batch.num_targets
    return total / count if count else None


def has_bigram(dataset: Dataset) -> bool:
    """Whether the vocabulary is small enough for a bigram model to say something."""
    return dataset.tokenizer.vocab_size <= _BIGRAM_VOCABULARY


def sample_texts(model: HybridModel, dataset: Dataset, config: SamplesConfig) -> list[str]:
    """One text for each prompt, prompt included; the same model gives the same texts."""
    tokenizer = dataset.tokenizer
    options = SamplingOptions(config.temperature, config.top_k, config.top_p, config.seed)
    prompts = [tokenizer.encode_prompt(prompt) for prompt in config.prompts]
    stop = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    rows = generate(model, prompts, config.max_new_tokens, options, stop)
    return [tokenizer.decode([*prompt, *row]) for prompt, row in zip(prompts, rows, strict=True)]

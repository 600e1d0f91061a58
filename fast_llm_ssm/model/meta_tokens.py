"""Learned vectors before the tokens of every document."""

from __future__ import annotations

import torch
from torch import Tensor


def insert(meta: Tensor, embedding: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lay documents out anew in one row, each with its own meta tokens before it.

    Args:
        meta: [M, d].
        embedding: [B, T, d].
        cu_seqlens: [documents + 1] over the flattened B * T tokens. Empty documents get meta tokens, too.

    Returns:
        The row, [1, B * T + documents * M, d]; its cu_seqlens; and where each token now stands, [B, T].
    """
    batch_size, length, size = embedding.shape
    count, documents = len(meta), len(cu_seqlens) - 1
    bounds = cu_seqlens.long()
    token = torch.arange(batch_size * length, device=bounds.device)
    document = torch.searchsorted(bounds[1:].contiguous(), token, right=True)
    places = token + (document + 1) * count
    number = torch.arange(documents, device=bounds.device)
    meta_places = (bounds[:-1] + number * count)[:, None] + torch.arange(count, device=bounds.device)
    sources = torch.cat([meta.expand(documents, -1, -1).reshape(-1, size), embedding.reshape(-1, size)])
    order = torch.empty(len(sources), dtype=torch.int64, device=bounds.device)
    order[torch.cat([meta_places.flatten(), places])] = torch.arange(len(sources), device=bounds.device)
    new_bounds = bounds + torch.arange(documents + 1, device=bounds.device) * count
    return sources[order][None], new_bounds, places.view(batch_size, length)

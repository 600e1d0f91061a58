"""One token for many rows: on a GPU as CUDA graphs, elsewhere in groups of a fixed size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_llm_ssm.model import DecodingState, HybridModel

GROUP = 16
"""Rows of a step on the CPU. A matrix product may round a row differently in a batch of another size, but (from this
size on) not in another place of the batch: with groups of one size, filled up by rows that nobody reads, a row's bits
don't depend on the others.
"""


def state_rows(slots: int, device: torch.device) -> int:
    """Rows of the state that so many requests at once need. A single one has nobody to depend on."""
    return slots if device.type == "cuda" or slots == 1 else -(-slots // GROUP) * GROUP


class DecodeStep:
    """`model.step` on the first rows of a state.

    Args:
        model: in no particular mode.
        state: its first rows are those in use; the others may be overwritten by any step.
        graphs: capture the step as a CUDA graph, once for each power of two of rows: launching hundreds of small
            kernels one by one takes longer than running them. Only on a GPU.
    """

    def __init__(self, model: HybridModel, state: DecodingState, graphs: bool = True):
        self._model = model
        self._state = state
        num_rows = len(state.lengths)
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=state.lengths.device)
        self._on_gpu = state.lengths.is_cuda
        self._sizes = _powers_of_two(num_rows)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        if self._on_gpu and graphs:
            pool = torch.cuda.graph_pool_handle()
            for size in reversed(self._sizes):  # from large to small: the smaller ones fit into the memory of the first
                self._graphs[size] = self._capture(size, pool)

    def __call__(self, tokens: list[int]) -> Tensor:
        """Continue row i by tokens[i]: logits [len(tokens), rows of the vocabulary], valid until the next call."""
        count = len(tokens)
        self._tokens[:count] = torch.tensor(tokens)
        self._state.lengths[count:] = 0  # rows without a request take part, and must not run out of room
        if not self._on_gpu:
            group = min(GROUP, len(self._tokens))
            logits = [self._step(start, start + group) for start in range(0, count, group)]
            return torch.cat(logits)[:count] if len(logits) > 1 else logits[0][:count]
        size = next(size for size in self._sizes if size >= count)
        if size not in self._graphs:
            return self._step(0, size)[:count]
        graph, static = self._graphs[size]
        graph.replay()
        return static[:count]

    def _step(self, start: int, stop: int) -> Tensor:
        return self._model.step(self._tokens[start:stop], self._state.rows(start, stop))

    def _capture(self, size: int, pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled and chosen outside of the capture
                self._state.lengths.zero_()
                self._step(0, size)
        torch.cuda.current_stream().wait_stream(stream)
        self._state.lengths.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self._step(0, size)
        return graph, logits


def _powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest itself."""
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(min(2 * sizes[-1], largest))
    return sizes

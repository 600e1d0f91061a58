"""What rows of tokens leave behind while decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fast_llm_ssm.model.block import SublayerState


@dataclass
class DecodingState:
    """What a batch of rows remembers: [B] tokens seen so far, and each layer's state. Updated in place."""

    lengths: Tensor
    layers: list[list[SublayerState]]
    max_length: int

    def rows(self, start: int, stop: int) -> DecodingState:
        """Some of the rows: a view, so that what changes there changes here."""

        def part(tensor: Tensor) -> Tensor:
            return tensor[start:stop]

        layers = [[_map(part, sublayer) for sublayer in layer] for layer in self.layers]
        return DecodingState(part(self.lengths), layers, self.max_length)

    def copy_row(self, row: int, source: DecodingState, source_row: int) -> None:
        """Overwrite a row, whatever it held, by one of a state of the same model and max_length."""
        for to, origin in zip(self.tensors(), source.tensors(), strict=True):
            to[row].copy_(origin[source_row])

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor, [B, ...] each."""
        yield self.lengths
        for layer in self.layers:
            for sublayer in layer:
                yield from _tensors(sublayer)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


def _map(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, SublayerState):
        return SublayerState(_map(function, state.mixer), [_map(function, shared) for shared in state.shared])
    return {name: _map(function, value) for name, value in state.items()}


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, SublayerState):
        yield from _tensors(state.mixer)
        for shared in state.shared:
            yield from _tensors(shared)
    else:
        for value in state.values():
            yield from _tensors(value)

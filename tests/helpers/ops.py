"""What the tests of the ops share: random inputs, gradients, errors and memory."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SSD_TENSORS = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")


def random_ssd(
    batch: int = 2,
    length: int = 20,
    heads: int = 4,
    dim: int = 3,
    groups: int = 2,
    size: int = 5,
    *,
    states: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """All of ssd's tensor arguments, each a leaf that requires grad; `states` initial states, by default one a row."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {
        "x": normal(batch, length, heads, dim),
        "dt": normal(batch, length, heads),
        "A": -torch.rand(heads, generator=generator, dtype=torch.float64) * 4,
        "B": normal(batch, length, groups, size),
        "C": normal(batch, length, groups, size),
        "D": normal(heads, dim),
        "z": normal(batch, length, heads, dim),
        "dt_bias": normal(heads) - 2,
        "initial_states": normal(batch if states is None else states, heads, dim, size),
    }
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}


def double(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values as fp64 leaves."""
    return {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}


def gradients(outputs: Tensor | Sequence[Tensor], inputs: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """Gradients of `inputs` for random gradients of `outputs`."""
    outputs = [y for y in ([outputs] if isinstance(outputs, Tensor) else outputs) if y.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs]
    found = torch.autograd.grad(outputs, list(inputs.values()), given, allow_unused=True, materialize_grads=True)
    return dict(zip(inputs, found, strict=True))


def error(got: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude, or over 1e-2 where all should be 0."""
    assert got.shape == expected.shape
    got, expected = got.detach().double(), expected.detach().double()
    if got.numel() == 0:
        return 0.0
    difference = (got - expected).abs().max()
    return float(difference / expected.abs().max().clamp(min=1e-2)) if difference > 0 else float(difference)


def assert_near(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Every tensor finite and within the relative tolerance."""
    for name, tensor in got.items():
        assert torch.isfinite(tensor).all(), f"{name} is not finite"
        assert error(tensor, expected[name]) <= tolerance, f"{name}: {error(tensor, expected[name]):.2e}"


def with_outputs(outputs: Tensor | Sequence[Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients together, by name."""
    named = [outputs] if isinstance(outputs, Tensor) else outputs
    return {f"output {i}": y for i, y in enumerate(named)} | gradients(outputs, inputs)


class MemoryMeter(TorchDispatchMode):
    """Bytes of the tensors alive that were made inside, at most, and the elements of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.largest = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self._seen:
                storage = tensor.untyped_storage()
                self._seen.add(storage)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
                self.peak = max(self.peak, self.alive)
                self.largest = max(self.largest, storage.nbytes() // tensor.element_size())
        return result

    def _free(self, size: int) -> None:
        self.alive -= size

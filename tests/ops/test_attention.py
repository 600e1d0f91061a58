"""Attention against a masked softmax: documents, windows, prefixes, caches, grouped heads."""

import math

import pytest
import torch
from helpers.ops import MemoryMeter, assert_near, double, error, with_outputs
from torch import Tensor

from fast_llm_ssm.ops import attention
from fast_llm_ssm.ops.attention import reference

BOUNDS = [
    [0, 30, 60],
    [0, 1, 30, 60],
    [0, 7, 7, 29, 30, 31, 60],
    [0, 30, 45, 46, 47, 60],
    [*range(61)],
]


def random_attention(
    batch: int = 2, length: int = 30, heads: int = 6, kv_heads: int = 2, dim: int = 8, value_dim: int = 8, keys: int = 0
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (batch, length, heads, dim),
        "k": (batch, keys or length, kv_heads, dim),
        "v": (batch, keys or length, kv_heads, value_dim),
    }
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for n, s in shapes.items()}


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    window: int | None = None,
    prefix: int = 0,
    bounds: list[int] | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Softmax over the visible keys, all scores at once."""
    batch, length, heads, dim = q.shape
    keys = k.shape[1]
    k, v = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (dim**-0.5 if scale is None else scale)
    if positions is not None:
        query, key = positions, torch.arange(keys).expand(batch, -1)
        same = torch.ones(batch, length, keys, dtype=torch.bool)
    else:
        bounds = bounds or [row * length for row in range(batch + 1)]
        spans = list(zip(bounds, bounds[1:], strict=False))
        document = torch.cat([torch.full((end - start,), i) for i, (start, end) in enumerate(spans)]).view(batch, -1)
        query = key = torch.cat([torch.arange(end - start) for start, end in spans]).view(batch, -1)
        same = document[:, :, None] == document[:, None]
    distance = query[:, :, None] - key[:, None]
    visible = same & (distance >= 0)
    if window is not None:
        visible &= (distance < window) | (key[:, None] < prefix)
    weights = scores.masked_fill(~visible[:, None], -math.inf).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, v)


@pytest.mark.parametrize("dim, value_dim", [(8, 8), (8, 5), (4, 8)])
@pytest.mark.parametrize("heads, kv_heads", [(6, 6), (6, 2), (6, 1)])
def test_causal_attention_and_its_gradients(heads: int, kv_heads: int, dim: int, value_dim: int) -> None:
    inputs = random_attention(heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim)
    assert_near(with_outputs(attention(**inputs), inputs), with_outputs(definition(**inputs), inputs), 1e-12)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("scale", [0.01, 2.0])
def test_an_explicit_scale_and_short_rows(scale: float, length: int) -> None:
    inputs = random_attention(length=length)
    assert error(attention(**inputs, scale=scale), definition(**inputs, scale=scale)) < 1e-12


@pytest.mark.parametrize("window, prefix", [(1, 0), (7, 0), (7, 3), (7, 40), (29, 2), (30, 0), (100, 5)])
@pytest.mark.parametrize("block", [4, 512])
def test_windows_and_prefixes(window: int, prefix: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_QUERY_BLOCK", block)
    inputs = random_attention()
    got = with_outputs(attention(**inputs, window=window, prefix=prefix), inputs)
    assert_near(got, with_outputs(definition(**inputs, window=window, prefix=prefix), inputs), 1e-12)


@pytest.mark.parametrize("window, prefix", [(None, 0), (5, 0), (5, 2)])
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_packed_documents_equal_separate_ones(bounds: list[int], window: int | None, prefix: int) -> None:
    inputs = random_attention()
    y = attention(**inputs, cu_seqlens=torch.tensor(bounds), window=window, prefix=prefix)
    expected = definition(**inputs, bounds=bounds, window=window, prefix=prefix)
    assert_near(with_outputs(y, inputs), with_outputs(expected, inputs), 1e-12)


@pytest.mark.parametrize("boundary", [1, 15, 29])
def test_a_document_cannot_see_another(boundary: int) -> None:
    inputs = random_attention(batch=1)
    bounds = torch.tensor([0, boundary, 30])
    y = attention(**inputs, cu_seqlens=bounds)
    changed = {name: tensor.detach().clone() for name, tensor in inputs.items()}
    for tensor in changed.values():
        tensor[:, boundary - 1] = 1e3
    assert torch.equal(attention(**changed, cu_seqlens=bounds)[:, boundary:], y[:, boundary:])
    for grad in torch.autograd.grad(y[:, boundary:].square().sum(), list(inputs.values())):
        assert not grad[:, :boundary].any()


@pytest.mark.parametrize("window, prefix", [(None, 0), (6, 0), (6, 2)])
@pytest.mark.parametrize("length", [1, 5])
def test_queries_on_a_cache_see_the_keys_up_to_their_position(length: int, window: int | None, prefix: int) -> None:
    inputs = random_attention(length=length, keys=30)
    positions = torch.tensor([[3], [20]]) + torch.arange(length)
    y = attention(**inputs, positions=positions, window=window, prefix=prefix)
    expected = definition(**inputs, positions=positions, window=window, prefix=prefix)
    assert_near(with_outputs(y, inputs), with_outputs(expected, inputs), 1e-12)


def test_a_cache_gives_what_the_whole_sequence_gives() -> None:
    inputs = random_attention()
    whole = attention(**inputs, window=9)
    pieces = [
        attention(inputs["q"][:, t : t + 1], inputs["k"], inputs["v"], window=9, positions=torch.full((2, 1), t))
        for t in range(30)
    ]
    assert error(torch.cat(pieces, 1), whole) < 1e-12


def test_a_query_at_a_negative_position_gives_zeros() -> None:
    inputs = random_attention(length=3, keys=10)
    y = attention(**inputs, positions=torch.tensor([[-1, 0, 1], [4, 5, 6]]))
    assert not y[0, 0].any()
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)])
def test_low_precision_is_near_the_definition(dtype: torch.dtype, tolerance: float) -> None:
    inputs = {name: t.detach().to(dtype).requires_grad_() for name, t in random_attention().items()}
    exact = double(inputs)
    y = attention(**inputs)
    assert y.dtype == dtype
    assert_near(with_outputs(y, inputs), with_outputs(definition(**exact), exact), tolerance)


def test_a_window_over_a_long_row_needs_no_matrix_of_all_pairs() -> None:
    inputs = {name: t.float() for name, t in random_attention(1, 4096, 1, 1).items()}
    with torch.no_grad(), MemoryMeter() as meter:
        attention(**inputs, window=64, prefix=4)
    assert meter.largest < 4096 * 4096 / 4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"window": 0}, "window is 0, expected at least 1"),
        ({"prefix": -1}, "prefix is -1"),
        ({"scale": 0.0}, "scale is 0, expected above 0"),
        ({"k": torch.zeros(2, 30, 4, 8)}, "k has 4, expected a divisor of the 6 heads"),
        ({"v": torch.zeros(2, 29, 2, 8)}, "v is"),
        ({"q": torch.zeros(2, 5, 6, 8)}, "30 keys for 5 queries"),
        ({"positions": torch.zeros(2, 3, dtype=torch.long)}, "positions is"),
        (
            {"positions": torch.zeros(2, 30, dtype=torch.long), "cu_seqlens": torch.tensor([0, 30, 60])},
            "expected one of them",
        ),
        ({"cu_seqlens": torch.tensor([0, 45, 60])}, "lacks the row end 30"),
        ({"backend": "triton"}, "attention has no Triton kernels"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(**{**random_attention(), **change})  # type: ignore[arg-type]

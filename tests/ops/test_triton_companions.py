"""The Triton kernels beside SSD against the references in float64: convolution, gated norm, one-token updates.

In Triton's interpreter on any machine, on a GPU where there is one. The interpreter must be chosen before Triton is
imported, so its cases run in one process of their own: this file, run as a script. It runs fp32; bf16 and fp16 are
checked on the GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_llm_ssm.ops import causal_conv1d, causal_conv1d_update, gated_rms_norm, selective_state_update

Case = dict[str, Any]

CASES: dict[str, Case] = {
    "conv, plain": dict(op="conv", length=37),
    "conv, one token, initial and final states": dict(op="conv", length=1, states=True),
    "conv, two tokens, three taps, states": dict(op="conv", length=2, taps=3, states=True, silu=False),
    "conv, two taps, no bias": dict(op="conv", length=9, taps=2, bias=False),
    "conv, several spans": dict(op="conv", length=131, width=2),
    "conv, numbered documents": dict(op="conv", length=134, starts=[1, 2, 127, 128, 129, 131], states=True),
    "conv, documents with own states": dict(
        op="conv", length=135, bounds=[0, 0, 1, 3, 127, 128, 132, 135], states=True
    ),
    "conv, channels first": dict(op="conv", length=20, first=True),
    "norm, gate first": dict(op="norm", width=48),
    "norm, gate last, groups": dict(op="norm", width=48, group=12, norm_first=True),
    "norm, groups, gate a strided view": dict(op="norm", width=40, group=20, view=True),
    "norm, no gate": dict(op="norm", width=33, gate=False),
    "step, one decay a head": dict(op="step"),
    "step, a decay for each channel, no skip": dict(op="step", own=True),
    "step, limits and a small step size": dict(op="step", limit=(0.01, 0.3), shift=-9.0),
    "step of the convolution": dict(op="conv step"),
}


def compute(case: Case, dtype: torch.dtype, device: str, backend: str) -> dict[str, Tensor]:
    """Outputs and every gradient."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator)
        exact = values.to(case["inputs"]).to(dtype)  # the same numbers for both sides
        return exact.to(device).requires_grad_(case["op"] in ("conv", "norm"))

    op = case["op"]
    if op == "conv":
        batch, width, taps, length = (
            1 if "bounds" in case else 2,
            case.get("width", 3),
            case.get("taps", 4),
            case["length"],
        )
        rows = len(case["bounds"]) - 1 if "bounds" in case else batch
        inputs = {"x": draw(batch, width, length) if case.get("first") else draw(batch, length, width)}
        inputs["weight"] = draw(width, taps)
        if case.get("bias", True):
            inputs["bias"] = draw(width)
        if case.get("states"):
            inputs["initial_states"] = draw(rows, width, taps - 1)
        options: Case = {"activation": "silu" if case.get("silu", True) else None, "backend": backend}
        if "starts" in case:
            marks = torch.zeros(batch, length, dtype=torch.int32)
            marks[:, case["starts"]] = 1
            options["seq_idx"] = (marks.cumsum(1, dtype=torch.int32) + 4).to(device)
        if "bounds" in case:
            options["cu_seqlens"] = torch.tensor(case["bounds"], device=device)
        given = dict(inputs) if case.get("first") else {**inputs, "x": inputs["x"].transpose(1, 2)}
        outputs = causal_conv1d(**given, **options, return_final_states=bool(case.get("states")))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    elif op == "norm":
        width = case["width"]
        inputs = {"x": draw(3, 7, width), "weight": draw(width)}
        if case.get("gate", True):
            inputs["z"] = draw(3, 7, 2 * width) if case.get("view") else draw(3, 7, width)
        given = {**inputs, "z": inputs["z"][..., width:]} if case.get("view") else inputs
        y = gated_rms_norm(
            **given,
            eps=1e-3,
            group_size=case.get("group"),
            norm_before_gate=case.get("norm_first", False),
            backend=backend,
        )
        outputs = (y,)
    elif op == "step":
        heads, dim, size = 4, 6, 5
        own = case.get("own")
        state = draw(2, heads, dim, size).float() if dtype != torch.float64 else draw(2, heads, dim, size)
        y = selective_state_update(
            state,
            draw(2, heads, dim),
            draw(2, heads, dim) if own else draw(2, heads) + case.get("shift", 0.0),
            -draw(heads, dim, size).exp() if own else -draw(heads).exp(),
            draw(2, 2, size),
            draw(2, 2, size),
            D=None if own else draw(heads),
            z=draw(2, heads, dim),
            dt_bias=draw(heads, dim) if own else draw(heads),
            dt_softplus=True,
            dt_limit=case.get("limit", (0.0, float("inf"))),
            backend=backend,
        )
        return {"y": y, "state": state}
    else:
        state = draw(2, 7, 3)
        y = causal_conv1d_update(draw(2, 7), state, draw(7, 4), draw(7), activation="silu", backend=backend)
        return {"y": y, "state": state}
    weights = [torch.randn(t.shape, generator=generator).to(device, t.dtype) for t in outputs]
    loss = sum((weight * t).sum() for weight, t in zip(weights, outputs, strict=True))
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, list(inputs.values()))
    results = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    return results | {f"d{name}": grad for name, grad in zip(inputs, grads, strict=True)}


def errors(name: str, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Relative error of each result; NaN and missing elements are never small."""
    case = {**CASES[name], "inputs": dtype}
    got = compute(case, dtype, device, "triton")
    exact = compute(case, torch.float64, "cpu", "reference")
    return {
        key: float((got[key].cpu().double() - exact[key]).norm() / exact[key].norm().clamp(min=1e-6)) for key in exact
    }


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float] | str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    result = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_equal_the_reference(name: str, interpreted: dict[str, Any]):
    pytest.importorskip("triton", reason="triton is not installed")
    found = interpreted[name]
    assert isinstance(found, dict), found
    assert all(error <= 2e-5 for error in found.values()), found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bar", [(torch.float32, 2e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_equal_the_reference(name: str, dtype: torch.dtype, bar: float):
    found = errors(name, dtype, "cuda")
    assert all(error <= bar for error in found.values()), found


@pytest.mark.gpu
def test_results_are_the_same_bits_every_time():
    for name in ("conv, numbered documents", "norm, gate last, groups"):
        case = {**CASES[name], "inputs": torch.bfloat16}
        first = compute(case, torch.bfloat16, "cuda", "triton")
        for _ in range(50):
            again = compute(case, torch.bfloat16, "cuda", "triton")
            assert all(torch.equal(first[key], again[key]) for key in first)


def main() -> None:
    """All cases in the interpreter; one line of JSON."""
    found: dict[str, Any] = {}
    for name in CASES:
        try:
            found[name] = errors(name, torch.float32, "cpu")
        except Exception as error:  # one case must not hide the others
            found[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()

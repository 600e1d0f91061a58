"""The Triton kernels of SSD against the reference in float64: in Triton's interpreter on any machine, on a GPU where
there is one.

The interpreter must be chosen before Triton is imported, so its cases run in one process of their own: this file, run
as a script. Its bf16 dot is wrong by
itself, so it runs fp32; bf16 and fp16 are checked on the GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

CASES: dict[str, dict[str, Any]] = {
    "everything at once": dict(length=70, heads=2, groups=2, gate=True, states=True),
    "a document boundary at, before and after a chunk's end, and one-token documents": dict(
        length=130, heads=2, starts=[63, 64, 65, 128], states=True
    ),
    "documents with their own states, one of them empty": dict(
        length=80, heads=2, cu_seqlens=[0, 9, 9, 10, 75, 80], states=True
    ),
    "documents by cu_seqlens without states": dict(length=70, heads=2, cu_seqlens=[0, 30, 70]),
    "a head wider than a tile, a state that fills none, D per channel": dict(
        length=20, heads=2, dim=80, state=24, skip=2
    ),
    "one token": dict(length=1, heads=2, states=True),
    "few long rows cut in pieces": dict(length=520, heads=1, states=True),
    "decays beyond fp32 range": dict(length=70, heads=2, rate=-1e4),
    "decays too strong for separate powers": dict(length=70, heads=2, rate=-12.0, step=3.0),
    "limits on the step": dict(length=40, heads=2, dt_limit=(0.3, 1.0)),
}
# The interpreter takes seconds a case: the others run with -m slow.
QUICK = {"everything at once"}
NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")


def make(case: dict[str, Any], dtype: torch.dtype, device: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    batch, length, heads, groups = case.get("batch", 1), case["length"], case["heads"], case.get("groups", 1)
    dim, state, rate = case.get("dim", 16), case.get("state", 16), case.get("rate")
    rows = len(case["cu_seqlens"]) - 1 if "cu_seqlens" in case else batch
    tensors = {
        "x": draw(batch, length, heads, dim),
        "B": draw(batch, length, groups, state),
        "C": draw(batch, length, groups, state),
    }
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors["dt"] = (draw(batch, length, heads) + case.get("step", 0.0)).to(dtype)
    tensors["A"] = -torch.rand(heads, generator=generator) * 4 - 0.1 if rate is None else torch.full((heads,), rate)
    tensors["D"] = draw(heads, dim) if case.get("skip") == 2 else draw(heads)
    tensors["dt_bias"] = draw(heads)
    if case.get("gate"):
        tensors["z"] = draw(batch, length, heads, dim).to(dtype)
    if case.get("states"):
        tensors["initial_states"] = draw(rows, heads, dim, state)
    options: dict[str, Any] = dict(
        dt_softplus=True,
        dt_limit=case.get("dt_limit", (0.0, float("inf"))),
        return_final_states=bool(case.get("states")),
    )
    if "cu_seqlens" in case:
        options["cu_seqlens"] = torch.tensor(case["cu_seqlens"], dtype=torch.int32, device=device)
    if "starts" in case:
        seq_idx = torch.full((batch, length), 5, dtype=torch.int32)  # numbers need not start at 0
        for start in case["starts"]:
            seq_idx[:, start:] += 1
        options["seq_idx"] = seq_idx.to(device)
    return {name: tensor.to(device) for name, tensor in tensors.items()}, options


def run(tensors: dict[str, Tensor], options: dict[str, Any], backend: str) -> dict[str, Tensor]:
    from fast_llm_ssm.ops import ssd

    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    x, dt, A, B, C = (leaves[name] for name in NAMES[:5])
    out = ssd(x, dt, A, B, C, 64, **{name: leaves.get(name) for name in NAMES[5:]}, **options, backend=backend)
    outs = {"y": out} if isinstance(out, Tensor) else {"y": out[0], "final_states": out[1]}
    generator = torch.Generator().manual_seed(2)
    # Numbers that bf16 holds, so that every precision gets the same.
    grads = [
        torch.randn(tensor.shape, generator=generator).bfloat16().to(tensor.device, tensor.dtype)
        for tensor in outs.values()
    ]
    torch.autograd.backward(list(outs.values()), grads)
    return {
        **{name: tensor.detach() for name, tensor in outs.items()},
        **{f"d{name}": leaf.grad for name, leaf in leaves.items()},
    }


def errors(case: dict[str, Any], dtype: torch.dtype, device: str) -> dict[str, float]:
    tensors, options = make(case, dtype, device)
    got = run(tensors, options, "triton")
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    want = run(exact, options, "reference")
    return {
        name: ((got[name].double() - want[name]).norm() / want[name].norm().clamp(min=1e-30)).item() for name in want
    }


def interpreted(name: str) -> dict[str, float]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, __file__, name], env=environment, capture_output=True, text=True)
    hint = "(Triton's interpreter needs a numpy that it knows: 2.2 for Triton 3.6)"
    assert done.returncode == 0, f"{done.stderr[-2000:]}\n{hint}"
    return json.loads(done.stdout.splitlines()[-1])


def bound(case: dict[str, Any], name: str, base: float) -> float:
    # dA of a decay that leaves nothing is itself nothing: only its size is held, through ddt.
    if name == "dA" and case.get("rate") == -1e4:
        return float("inf")
    return base * (20 if name in ("dA", "ddt_bias") else 1)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_kernels_equal_the_reference_in_the_interpreter(name: str) -> None:
    found = interpreted(name)
    assert {"y", "dx", "ddt", "dA", "dB", "dC", "dD", "ddt_bias"} <= set(found)
    assert {key: value for key, value in found.items() if not value < bound(CASES[name], key, 5e-6)} == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("dtype", "base"), [(torch.float32, 5e-6), (torch.float16, 1e-3), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_reference_on_a_gpu(name: str, dtype: torch.dtype, base: float) -> None:
    found = errors(CASES[name], dtype, "cuda")
    assert {key: value for key, value in found.items() if not value < bound(CASES[name], key, base)} == {}


if __name__ == "__main__":
    print(json.dumps(errors(CASES[sys.argv[1]], torch.float32, "cpu")))

"""Which backend runs, what is missing and why, and which names mean functions."""

import inspect
import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fast_llm_ssm import ops
from fast_llm_ssm.ops import backend, gated_rms_norm

FUNCTIONS = ["attention", "causal_conv1d", "ssd"]
IMPORTS = [
    *(f"import fast_llm_ssm.ops.{name}.reference" for name in FUNCTIONS),
    *(f"import fast_llm_ssm.ops.{name}" for name in FUNCTIONS),
    *(f"from fast_llm_ssm.ops.{name} import reference" for name in FUNCTIONS),
    *(f"from fast_llm_ssm.ops import {name}" for name in FUNCTIONS),
    "import fast_llm_ssm.ops",
    "from fast_llm_ssm.ops.documents import Documents",
    "from fast_llm_ssm.ops.ssd.definition import ssd_definition",
]


def python(code: str, *paths: Path) -> str:
    """Runs code in a fresh process, with `paths` first on the module path. Returns what it printed."""
    places = [*map(str, paths), *sys.path]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {places!r}\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_names_are_functions_whatever_is_imported_first_and_later() -> None:
    """One fresh process, with the package's modules forgotten before each order."""
    orders = [order for first in IMPORTS for order in ([first], [first, IMPORTS[0]])]
    orders += [list(pair) for pair in itertools.permutations(IMPORTS[:3] + IMPORTS[9:12], 2)]
    python(
        f"""
import inspect, torch
for order in {orders!r}:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fast_llm_ssm"]:
        del sys.modules[name]
    space = {{}}
    for line in order:
        exec(line, space)
    exec("import fast_llm_ssm.ops\\nfrom fast_llm_ssm.ops import attention, causal_conv1d, ssd", space)
    for name in {FUNCTIONS!r}:
        assert inspect.isfunction(space[name]), (order, name)
        assert getattr(space["fast_llm_ssm"].ops, name) is space[name], (order, name)
"""
    )


def test_every_public_name_is_a_function() -> None:
    assert all(inspect.isfunction(getattr(ops, name)) for name in ops.__all__)


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_a_broken_triton_leaves_the_package_usable_and_its_reason_readable(error: str, tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(f"raise {error}('libcuda.so.1 is missing')\n")
    printed = python(
        """
import torch
import fast_llm_ssm
from fast_llm_ssm.ops import backend, gated_rms_norm
gated_rms_norm(torch.ones(2, 4), torch.ones(4))
print(backend.triton_status().reason)
print([status.reason for status in backend.status() if status.name == "ssd: triton"][0])
""",
        tmp_path,
    )
    assert printed.splitlines() == [f"cannot import triton: {error}: libcuda.so.1 is missing"] * 2


def test_status_names_all_that_is_looked_up() -> None:
    names = [status.name for status in backend.status()]
    assert names[:3] == ["cuda", "triton", "causal_conv1d"]
    assert names[3:] == [f"{op}: triton" for op in backend.TRITON_MODULES]
    assert all(status.reason or status.available for status in backend.status())


class OnGpu(SimpleNamespace):
    """Stands for a tensor on a GPU where only its place is asked for."""

    is_cuda = True
    device = torch.device("cuda")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Triton kernels of the gated norm that double x, and refuse widths above 8."""

    def unsupported(op: str, x: torch.Tensor, *args: Any) -> str | None:
        return "wider than 8" if x.shape[-1] > 8 else None

    module = SimpleNamespace(gated_rms_norm=lambda x, *args: 2 * x, unsupported=unsupported)
    monkeypatch.setattr(backend, "_kernels", {"gated_rms_norm": (module, ""), "ssd": (None, "no kernels yet")})
    monkeypatch.setattr(backend, "_default", "auto")
    monkeypatch.setattr(backend, "_strict", False)
    monkeypatch.setattr(backend, "_warned", set())
    return module


def choose(op: str, requested: str | None, width: int = 4) -> str:
    return backend.choose(op, requested, OnGpu(), torch.ones(2, width))  # type: ignore[arg-type]


def test_a_gpu_tensor_gets_triton_and_a_cpu_tensor_the_reference(kernels: SimpleNamespace) -> None:
    assert choose("gated_rms_norm", None) == "triton"
    assert choose("gated_rms_norm", "reference") == "reference"
    assert backend.choose("gated_rms_norm", None, torch.ones(2, 4)) == "reference"


def test_the_kernels_run_under_the_interpreter_when_asked_for(
    kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.randn(2, 4)
    assert torch.equal(gated_rms_norm(x, torch.ones(4), backend="triton"), 2 * x)
    with pytest.raises(ValueError, match="gated_rms_norm: the triton backend cannot run: wider than 8"):
        gated_rms_norm(torch.ones(2, 9), torch.ones(9), backend="triton")


def test_triton_on_the_cpu_is_refused_with_the_reason(
    kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="the tensors are on cpu, not on a GPU"):
        gated_rms_norm(torch.ones(2, 4), torch.ones(4), backend="triton")


def test_the_reference_on_a_gpu_warns_once_with_the_reason(kernels: SimpleNamespace) -> None:
    with pytest.warns(UserWarning) as caught:
        assert [choose("ssd", None), choose("ssd", None)] == ["reference", "reference"]
        assert choose("gated_rms_norm", None, width=9) == "reference"
    assert [str(warning.message) for warning in caught] == [
        "ssd runs its slow reference on the GPU: no kernels yet",
        "gated_rms_norm runs its slow reference on the GPU: wider than 8",
    ]


def test_an_op_without_kernels_of_ours_does_not_warn(
    kernels: SimpleNamespace, recwarn: pytest.WarningsRecorder
) -> None:
    assert choose("attention", None) == "reference"
    assert not recwarn


def test_strict_refuses_the_reference_on_a_gpu_unless_the_call_asks_for_it(kernels: SimpleNamespace) -> None:
    backend.set_default("auto", strict=True)
    with pytest.raises(RuntimeError, match="no kernels yet.*strict"):
        choose("ssd", None)
    assert choose("ssd", "reference") == "reference"
    assert choose("attention", None) == "reference"


def test_the_default_backend_is_process_wide(kernels: SimpleNamespace) -> None:
    backend.set_default("triton")
    with pytest.raises(ValueError, match="no kernels yet"):
        choose("ssd", None)
    assert choose("attention", None) == "reference"
    backend.set_default("reference")
    with pytest.warns(UserWarning, match="the default backend is set to 'reference'"):
        assert choose("gated_rms_norm", None) == "reference"


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(ValueError, match="got 'cuda', expected one of auto, triton, reference"):
        backend.set_default("cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend is 'cuda'"):
        gated_rms_norm(torch.ones(2, 4), torch.ones(4), backend="cuda")  # type: ignore[arg-type]

"""What can run here, what cannot and why: the one place that looks up optional packages and picks an op's backend.

An op has a `reference` in plain PyTorch. The ops named in `TRITON_MODULES` may have Triton kernels beside it: a module
with a function of the op's name, the reference's signature, and, if it does not take everything, a function
`unsupported(op, *args, **kwargs) -> str | None` that gives the reason.
"""

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

Backend = Literal["triton", "reference"]
Default = Literal["auto", "triton", "reference"]

# Ops that are not named here have no kernels of ours: their reference already runs PyTorch's own fused kernels on a
# GPU.
TRITON_MODULES = {
    "ssd": "fast_llm_ssm.ops.ssd.triton",
    "causal_conv1d": "fast_llm_ssm.ops.causal_conv1d.triton",
    "causal_conv1d_update": "fast_llm_ssm.ops.causal_conv1d.triton",
    "gated_rms_norm": "fast_llm_ssm.ops.gated_norm.triton",
    "selective_state_update": "fast_llm_ssm.ops.state_update.triton",
}

_default: Default = "auto"
_strict = False
_warned: set[str] = set()


@dataclass(frozen=True)
class Status:
    """Whether something can be used here; `reason` says why not, or which version it is."""

    name: str
    available: bool
    reason: str


def set_default(default: Default, strict: bool | None = None) -> None:
    """Set what `backend=None` means in this process.

    Args:
        default: "auto" (Triton where it can run), "reference", or "triton" (an error where it cannot run).
        strict: refuse, rather than warn, when a tensor on a GPU would go to the reference without the call asking for
            it. None keeps the setting.
    """
    global _default, _strict
    if default not in get_args(Default):
        raise ValueError(f"default backend: got {default!r}, expected one of {', '.join(get_args(Default))}")
    _default = default
    if strict is not None:
        _strict = strict


@functools.cache
def _import_status(module: str) -> Status:
    try:
        found = importlib.import_module(module)
    except (
        Exception
    ) as error:  # a broken install raises anything: OSError from a missing library, RuntimeError without a GPU
        return Status(module, False, f"cannot import {module}: {type(error).__name__}: {error}".splitlines()[0])
    return Status(module, True, getattr(found, "__version__", "no version"))


def triton_status() -> Status:
    """Whether Triton can be imported."""
    return _import_status("triton")


def cuda_status() -> Status:
    """Whether PyTorch sees a GPU."""
    if torch.cuda.is_available():
        return Status("cuda", True, torch.cuda.get_device_name())
    built = torch.version.cuda or torch.version.hip
    return Status("cuda", False, "no GPU visible" if built else f"PyTorch {torch.__version__} is built without CUDA")


def conv_package_status() -> Status:
    """Whether the causal-conv1d package can be imported. It raises at import without CUDA, so it is tried only with a
    GPU.
    """
    if not torch.cuda.is_available():
        return Status("causal_conv1d", False, "needs a GPU: " + cuda_status().reason)
    return _import_status("causal_conv1d")


def interpreting() -> bool:
    """Whether Triton's interpreter is on, which runs kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


_kernels: dict[str, tuple[Any, str]] = {}
"""Op to its Triton module and "", or to None and the reason."""


def _load(op: str) -> None:
    """Fill `_kernels[op]`, once."""
    if op not in _kernels:
        _kernels[op] = _find(op)


# torch.compile is to run it, not to trace the import. What torch.compiler.assume_constant_result sets, which would
# import the compiler and with it Triton.
vars(_load)["_dynamo_marked_constant"] = True


def _find(op: str) -> tuple[Any, str]:
    if op not in TRITON_MODULES:
        return None, f"{op} has no Triton kernels: PyTorch's own are used"
    if not triton_status().available:
        return None, triton_status().reason
    name = TRITON_MODULES[op]
    if importlib.util.find_spec(name) is None:
        return None, f"{op} has no Triton kernels in this version"
    try:
        module = importlib.import_module(name)
    except Exception as error:
        return None, f"cannot import {name}: {type(error).__name__}: {error}".splitlines()[0]
    return (module, "") if hasattr(module, op) else (None, f"{op} has no Triton kernel in this version")


def status() -> list[Status]:
    """Everything the ops look up, and for each op with kernels whether they can run on a GPU here."""
    found = [cuda_status(), triton_status(), conv_package_status()]
    for op in TRITON_MODULES:
        _load(op)
        module, reason = _kernels[op]
        cuda = cuda_status()
        available = module is not None and (cuda.available or interpreting())
        found.append(Status(f"{op}: triton", available, reason or ("" if available else cuda.reason)))
    return found


def _triton_obstacle(op: str, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns why the op's Triton kernels cannot take this call, or ""."""
    _load(op)
    module, reason = _kernels[op]
    if module is None:
        return reason
    if not tensor.is_cuda and not interpreting():
        return f"the tensors are on {tensor.device.type}, not on a GPU"
    unsupported = getattr(module, "unsupported", None)
    return (unsupported(op, *args, **kwargs) if unsupported is not None else None) or ""


def choose(op: str, requested: str | None, tensor: Tensor, *args: Any, **kwargs: Any) -> Backend:
    """Pick the backend for one call.

    Args:
        op: name of the public function.
        requested: the call's own `backend` argument; None follows the process-wide default.
        tensor: the main input; its device decides.
        *args, **kwargs: the call's arguments, shown to the kernels' `unsupported`.

    Raises:
        ValueError: an unknown backend, or "triton" where it cannot run.
        RuntimeError: the reference would run on a GPU unasked and `set_default(..., strict=True)` is in force.
    """
    if requested not in (None, "triton", "reference"):
        raise ValueError(f"{op}: backend is {requested!r}, expected 'triton', 'reference' or None")
    if requested == "reference":
        return "reference"
    wanted = requested or _default
    if wanted == "auto" and not tensor.is_cuda:
        return "reference"
    obstacle = (
        "the default backend is set to 'reference'"
        if wanted == "reference"
        else _triton_obstacle(op, tensor, args, kwargs)
    )
    if not obstacle:
        return "triton"
    if wanted == "triton" and (requested or op in TRITON_MODULES):
        raise ValueError(f"{op}: the triton backend cannot run: {obstacle}")
    if tensor.is_cuda and op in TRITON_MODULES:
        message = f"{op} runs its slow reference on the GPU: {obstacle}"
        if _strict:
            raise RuntimeError(f"{message} (refused: strict backends)")
        if message not in _warned:
            _warned.add(message)
            warnings.warn(message, stacklevel=3)
    return "reference"


def dispatch(
    op: str, reference: Callable[..., Any], requested: str | None, tensor: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run one call on the backend that `choose` picks for it."""
    if choose(op, requested, tensor, *args, **kwargs) == "reference":
        return reference(*args, **kwargs)
    return cast(Callable[..., Any], getattr(_kernels[op][0], op))(*args, **kwargs)

"""What the device can do and how much memory is in use."""

from __future__ import annotations

import os
import resource
import sys

import torch

from fast_llm_ssm.config import UserError

# Dense bf16 FLOP/s as the makers state them. A device that is not listed has no MFU rather than a wrong one.
_PEAK_BF16 = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}


def choose_device(requested: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda`."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise UserError("train.device: got cuda, but torch finds no usable GPU; expected auto or cpu")
    gpu = requested == "cuda" or (requested == "auto" and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def choose_precision(requested: str, device: torch.device) -> torch.dtype:
    """The activations' dtype for `auto`, `fp32` or `bf16`."""
    half = requested == "bf16" or (requested == "auto" and device.type == "cuda")
    return torch.bfloat16 if half else torch.float32


def device_name(device: torch.device) -> str:
    """For people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak operations a second of a known device at bf16; None for others."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    words = torch.cuda.get_device_name(device)
    return next((peak for name, peak in _PEAK_BF16.items() if name in words), None)


def memory_used(device: torch.device) -> int:
    """Peak bytes so far: of the GPU's memory, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_total(device: torch.device) -> int:
    """Bytes of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

"""Checkpoints by torch's distributed checkpointing: complete or ignored, read without running code."""

from fast_llm_ssm.checkpoint.find import Checkpoint, damage, find, newest, steps
from fast_llm_ssm.checkpoint.folder import FileContent, clean, retain, save
from fast_llm_ssm.checkpoint.storage import LazyTensor

__all__ = ["Checkpoint", "FileContent", "LazyTensor", "clean", "damage", "find", "newest", "retain", "save", "steps"]

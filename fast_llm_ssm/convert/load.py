"""A model from a folder: a checkpoint, a run, or a Hugging Face folder."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from fast_llm_ssm import checkpoint
from fast_llm_ssm.checkpoint import Checkpoint, LazyTensor
from fast_llm_ssm.config import Config, UserError, loads
from fast_llm_ssm.convert.source import HuggingFaceFolder, has_vocabulary, is_hugging_face
from fast_llm_ssm.data.tokenizer import Tokenizer, load_tokenizer
from fast_llm_ssm.model import HybridModel, ModelConfig, build_meta

logger = logging.getLogger(__name__)

_SMALL, _MANY = 1 << 14, 1024  # elements, tensors: 64 MiB of fp32 at most


class _SavedModel(ModelConfig):
    start_from: str | None = Field(default=None, alias="from")  # where a run's weights came from


class _SavedRun(Config):
    model_config = ConfigDict(extra="ignore")

    plugins: list[str] = Field(default_factory=list)
    model: _SavedModel


def load_model(
    folder: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    allow_plugins: bool = False,
) -> HybridModel:
    """Load a model with its weights, one tensor at a time. No code of the folder runs.

    Args:
        folder: A checkpoint, a run folder (its newest complete checkpoint), or a Hugging Face folder.
        device: Where the parameters go.
        dtype: Of the parameters; None keeps each as it is stored. What must stay fp32 does.
        allow_plugins: Import the plugins that a checkpoint's config names.

    Raises:
        UserError: The folder is none of these, is broken, or is of an unknown format.
    """
    folder = Path(folder)
    if folder.is_dir() and is_hugging_face(folder):
        source = HuggingFaceFolder(folder)
        for remark in source.converter.remarks(source.config):
            logger.info("%s: %s", folder, remark)
        lazy = dict(source.parameters())
        model = _allocate(source.config, {name: tensor.dtype for name, tensor in lazy.items()}, device, dtype)
        with torch.no_grad():
            for name, parameter in model.state_dict().items():
                parameter.copy_(lazy[name].load())
        return model
    saved = checkpoint.find(folder)
    config = model_config(saved, allow_plugins)
    require_equal_names(saved.path, saved.tensor_names, build_meta(config).state_dict())
    model = _allocate(config, saved.dtypes, device, dtype)
    saved.load_into(model)
    return model


def _allocate(
    config: ModelConfig, stored: Mapping[str, torch.dtype], device: torch.device | str, dtype: torch.dtype | None
) -> HybridModel:
    """The model with memory for its parameters: of the stored dtypes, or all of one, but for what stays fp32."""
    model = build_meta(config)
    fp32 = model.fp32_names()
    memory = {}
    for name, parameter in model.state_dict().items():
        wanted = dtype or stored[name]
        if name in fp32:
            wanted = torch.promote_types(wanted, torch.float32)
        memory[name] = torch.empty(parameter.shape, dtype=wanted, device=device)
    model.load_state_dict(memory, assign=True)
    return model


def model_config(saved: Checkpoint, allow_plugins: bool = False) -> ModelConfig:
    """The model section of a checkpoint's config.

    Raises:
        UserError: It is damaged, or names a mixer of a plugin that may not be imported.
    """
    run = loads(saved.config_yaml, _SavedRun, name=str(saved.path / "config.yaml"), allow_plugins=allow_plugins)
    return ModelConfig.model_construct(**{name: getattr(run.model, name) for name in ModelConfig.model_fields})


def parameters(saved: Checkpoint) -> Iterator[tuple[str, LazyTensor]]:
    """Each parameter of a checkpoint by its name, read when asked for; the small ones together, the first time."""
    shapes, dtypes = saved.shapes, saved.dtypes
    small = dict.fromkeys([name for name in saved.tensor_names if shapes[name].numel() <= _SMALL][:_MANY])
    read: dict[str, Tensor] = {}

    def load(name: str) -> Tensor:
        if name not in small:
            return saved.read_tensors([name])[name]
        if not read:  # a call costs milliseconds, however little it reads
            read.update(saved.read_tensors(small))
        return read[name]

    for name in saved.tensor_names:
        yield name, LazyTensor(tuple(shapes[name]), dtypes[name], partial(load, name))


def require_equal_names(where: Path, stored: Collection[str], needed: Collection[str]) -> None:
    """Raises a UserError unless the weights are exactly those that the model has."""
    lines = [f"{where}: the weights lack {name}" for name in needed if name not in stored]
    lines += [f"{where}: the model has no {name}" for name in stored if name not in needed]
    if lines:
        raise UserError("\n".join(lines))


def load_tokenizer_of(folder: Path | str) -> Tokenizer | None:
    """The tokenizer that belongs to the model in a folder; None if it has none.

    Raises:
        UserError: The folder is none that `load_model` takes, or its tokenizer is broken.
    """
    folder = Path(folder)
    if folder.is_dir() and is_hugging_face(folder):
        return load_tokenizer(folder) if has_vocabulary(path.name for path in folder.iterdir()) else None
    tokenizer = checkpoint.find(folder).folder("tokenizer")
    return load_tokenizer(tokenizer) if tokenizer else None

"""A Hugging Face folder, opened: which format it is, which model it holds, and each parameter on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fast_llm_ssm.checkpoint import LazyTensor
from fast_llm_ssm.config import Config, UserError, dump, loads
from fast_llm_ssm.convert.base import converters, detect
from fast_llm_ssm.convert.config_rules import Json, mixers
from fast_llm_ssm.convert.io import WEIGHT_FILES, TensorFolder, inside
from fast_llm_ssm.convert.rules import Carry, Match, file_shapes, match
from fast_llm_ssm.layers import mixers as known_mixers
from fast_llm_ssm.model import ModelConfig, build_meta

TOKENIZER_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "merges.txt",
        "sentencepiece.bpe.model",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
_VOCABULARIES = {
    "tokenizer.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
}
WEIGHT_SUFFIXES = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors"}


class ModelFile(Config):
    """A config.yaml with nothing but a model."""

    model: ModelConfig


class HuggingFaceFolder:
    """Opened without reading a weight: everything that can be wrong is found before memory is taken.

    Args:
        folder: The folder.
        overrides: Changes to the model: `model.a.b=value`, or `TYPE.key=value` for all mixers of a type.

    Attributes:
        converter: Of the format that was recognised.
        settings: The content of its config file.
        config: The model.
        num_parameters: Of the model.
        carried: Names of tensors that the model has no use for and that travel along.
        superseded: Names of tensors of an older layout, left out.

    Raises:
        UserError: The files are broken, of no known format, or do not fit the settings.
    """

    def __init__(self, folder: Path, overrides: Sequence[str] = ()) -> None:
        self.folder = folder
        self.files = TensorFolder(folder)
        self.converter, self.settings = detect(folder, self.files.tensors)
        try:
            config = self.converter.import_config(self.settings, folder.resolve().name)
        except UserError as error:
            raise UserError("\n".join(f"{folder}/{line}" for line in str(error).splitlines())) from None
        self.config = _changed(config, overrides)
        self.superseded = self.converter.superseded(self.files.tensors)
        names = self.files.tensors.keys() - self.superseded
        self._matches = match(self.converter.tensor_rules(self.config), names, folder)
        self.carried = [name for item in self._matches if isinstance(item.rule, Carry) for name in item.files]
        model = build_meta(self.config)
        self.num_parameters = model.num_parameters()
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._fp32 = model.fp32_names()
        self._check_shapes()

    def _check_shapes(self) -> None:
        problems = []
        for item in self._matches:
            if isinstance(item.rule, Carry):
                continue
            for name, expected in zip(item.files, file_shapes(item.rule, self._shapes), strict=True):
                for stored in (name, *item.repeats):
                    shape = self.files.tensors[stored].shape
                    if shape != expected:
                        problems.append(f"{stored} has shape {list(shape)}, the settings give {list(expected)}")
        if problems:
            raise UserError("\n".join(f"{self.folder}: {problem}" for problem in problems))

    def parameters(self) -> Iterator[tuple[str, LazyTensor]]:
        """Each parameter by its name; in the dtype of the file, or fp32 where the model keeps it so."""
        for item in self._matches:
            stored = [self.files.tensors[name].dtype for name in item.files]
            for index, param in enumerate(item.rule.params):
                dtype = stored[0]
                for other in (*stored, *([torch.float32] if param in self._fp32 else [])):
                    dtype = torch.promote_types(dtype, other)
                yield param, LazyTensor(self._shapes[param], dtype, self._loader(item, index, dtype))

    def _loader(self, item: Match, index: int, dtype: torch.dtype) -> Callable[[], Tensor]:
        def load() -> Tensor:
            tensors = [self.files.read(name) for name in item.files]
            for name in item.repeats:
                if not torch.equal(self.files.read(name), tensors[0]):
                    raise UserError(
                        f"{self.folder}: {name} and {item.files[0]} differ, expected the same shared tensor"
                    )
            return item.rule.load(*tensors)[index].to(dtype)

        return load

    def side_files(self) -> tuple[dict[str, Path], list[str]]:
        """Files that travel along, and the names of those (weights not read, folders) that stay behind."""
        travelling, staying = {}, []
        for path in sorted(self.folder.iterdir()):
            if path.name in self.files.files or path.name == self.files.entry:
                continue
            ours_or_weights = path.name in RESERVED or path.suffix in WEIGHT_SUFFIXES or path.name in WEIGHT_FILES
            if ours_or_weights or not path.is_file():
                staying.append(path.name)
            else:
                travelling[path.name] = inside(self.folder, path.name)
        return travelling, staying


RESERVED = {"tensors.json", "carried.safetensors"}
"""Names in a checkpoint's `source` folder that are ours."""


def has_vocabulary(names: Iterable[str]) -> bool:
    """Whether file names include a tokenizer's."""
    return bool(_VOCABULARIES & set(names))


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder looks like one of these rather than a checkpoint of ours."""
    settings = {converters[name].config_file for name in converters.names()}
    return not (folder / "complete.json").exists() and any((folder / name).exists() for name in settings)


def _changed(config: ModelConfig, overrides: Sequence[str]) -> ModelConfig:
    if not overrides:
        return config
    expanded: list[str] = []
    for override in overrides:
        kind, _, rest = override.partition(".")
        if kind == "model" or kind not in known_mixers:
            expanded.append(override)
        else:
            places = list(_mixer_paths(config.model_dump(), kind))
            if not places:
                raise UserError(f"override '{override}': the model has no {kind}")
            expanded += [f"{place}.{rest}" for place in places]
    return loads(dump(ModelFile(model=config)), ModelFile, expanded, name="the imported model").model


def _mixer_paths(model: Json, kind: str) -> Iterator[str]:
    """Dotted paths of every mixer of a type."""
    wanted = {id(config) for config in mixers(model, kind)}

    def search(value: object, path: str) -> Iterator[str]:
        if id(value) in wanted:
            yield path
        elif isinstance(value, dict | list):
            for key, below in value.items() if isinstance(value, dict) else enumerate(value):
                yield from search(below, f"{path}.{key}")

    yield from search(model, "model")

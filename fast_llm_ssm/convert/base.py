"""What a checkpoint family's converter is, the registry of them, and which one a folder needs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from fast_llm_ssm.checkpoint import LazyTensor
from fast_llm_ssm.config import Registry, UserError, validate
from fast_llm_ssm.convert.compare import differences
from fast_llm_ssm.convert.config_rules import ConfigRule, Json
from fast_llm_ssm.convert.io import inside, read_json
from fast_llm_ssm.convert.rules import TensorRule
from fast_llm_ssm.convert.write import SINGLE_FILE
from fast_llm_ssm.model import ModelConfig


class Converter:
    """A family of checkpoints on disk: rules for its config and its tensors, each good for both directions.

    Attributes:
        name: As registered, and as `conversion.format` says it.
        config_file: The file with the model's settings.
        weights_file: Where the weights go if they are not split; other formats than the default know no splitting.
        fresh: Whether models that were never imported can be written in this layout.
        default: Whether they are, where they fit, unless another layout is asked for.
        config_rules: Together they answer for every key that the config may have. The first one lays out the blocks.
    """

    name: ClassVar[str]
    config_file: ClassVar[str] = "config.json"
    weights_file: ClassVar[str] = SINGLE_FILE
    fresh: ClassVar[bool] = True
    default: ClassVar[bool] = True
    config_rules: ClassVar[Sequence[ConfigRule]]

    def matches(self, source: Json, tensors: Collection[str]) -> bool:
        """Whether these settings and tensor names are of this family. At most one family may say so."""
        raise NotImplementedError

    def tensor_rules(self, config: ModelConfig) -> list[TensorRule]:
        """Every tensor that the files of such a model may have."""
        raise NotImplementedError

    def remarks(self, config: ModelConfig) -> list[str]:
        """What to tell someone who imports this model."""
        return []

    def superseded(self, tensors: Collection[str]) -> set[str]:
        """Tensors of an older layout that stand beside those of this one and are left out."""
        return set()

    def fresh_settings(self, tensors: Mapping[str, LazyTensor], special_ids: Mapping[str, int | None]) -> Json:
        """What fresh settings say beyond the model: the dtype of most of the weights, and the tokenizer's ids."""
        sizes: Counter[torch.dtype] = Counter()
        for tensor in tensors.values():
            sizes[tensor.dtype] += math.prod(tensor.shape)
        return {"torch_dtype": str(sizes.most_common(1)[0][0]).removeprefix("torch."), **special_ids}

    def import_config(self, source: Json, name: str) -> ModelConfig:
        """The model that the settings describe.

        Raises:
            UserError: Keys that no rule claims (all are listed), or values that are not built or make no sense.
        """
        claimed = {key for rule in self.config_rules for spellings in rule.keys for key in spellings}
        if unclaimed := [key for key in source if key not in claimed]:
            lines = [f"{self.config_file}: format {self.name} does not know {_shown(source, key)}" for key in unclaimed]
            raise UserError("\n".join(lines))
        model: Json = {"name": name, "conversion": {"format": self.name}}
        try:
            for rule in self.config_rules:
                rule.read(source, model)
        except UserError as error:
            raise UserError(f"{self.config_file}: {error}") from None
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            message = f"{self.config_file}: a value of the wrong kind for format {self.name}"
            raise UserError(f"{message} ({type(error).__name__}: {error})") from None
        return validate(model, ModelConfig, name=self.config_file)

    def export_config(self, config: ModelConfig, source: Json | None = None) -> Json:
        """Settings for a model: the source's own where they still hold, in its spelling and order.

        Args:
            config: The model.
            source: The settings that it was imported with; None for fresh ones.

        Raises:
            UserError: The format cannot hold this model; the differences are listed.
        """
        new = self._written(config)
        problems = differences(config, self.import_config(new, config.name))
        if problems:
            lines = [f"format {self.name} cannot hold {problem}" for problem in problems]
            raise UserError("\n".join(lines))
        if source is None:
            return dict(sorted(new.items()))
        old = self._written(self.import_config(source, config.name))
        result = json.loads(json.dumps(source))
        for rule in self.config_rules:
            for spellings in rule.keys:
                key = spellings[0]
                if key in new and (key not in old or new[key] != old[key]):
                    rule.update(result, spellings, new[key])
        return result

    def _written(self, config: ModelConfig) -> Json:
        model, source = config.model_dump(), Json()
        used = [sublayer for name in config.layer_names for sublayer in config.blocks[name]]
        shared = {name for sublayer in used if sublayer.inject for name in sublayer.inject.shared}
        model["blocks"] = {name: block for name, block in model["blocks"].items() if name in config.layer_names}
        model["shared"] = {name: block for name, block in model["shared"].items() if name in shared}
        try:
            for rule in self.config_rules:
                rule.write(model, source)
        except UserError as error:
            raise UserError(f"format {self.name} cannot hold this model: {error}") from None
        return source


converters: Registry[Converter] = Registry("checkpoint format", entry_points="fast_llm_ssm.converters")


def detect(folder: Path, tensors: Collection[str]) -> tuple[Converter, Json]:
    """The converter for a folder, and the settings that it found there.

    Raises:
        UserError: No family recognises the folder; the message names the keys that were seen.
    """
    seen: dict[str, Json] = {}
    for name in converters.names():
        converter = converters[name]()
        if converter.config_file not in seen and (folder / converter.config_file).exists():
            seen[converter.config_file] = read_json(inside(folder, converter.config_file))
        source = seen.get(converter.config_file)
        if source is not None and converter.matches(source, tensors):
            return converter, source
    if not seen:
        files = sorted({converters[name].config_file for name in converters.names()})
        raise UserError(f"{folder}: no {' or '.join(files)}")
    described = "; ".join(f"{file} has the keys {', '.join(source)}" for file, source in seen.items())
    kinds = [f"model_type {source['model_type']!r}" for source in seen.values() if "model_type" in source]
    raise UserError(
        f"{folder}: of no known format ({', '.join(converters.names())}): "
        f"{', '.join([*kinds, described])}; its tensors begin with {', '.join(sorted(tensors)[:3])}"
    )


def _shown(source: Json, key: str) -> str:
    text = json.dumps(source[key])
    return f"{key}: {text if len(text) < 60 else text[:56] + ' ...'}"


def register(name: str) -> Any:
    """Class decorator: `converters.register`, which also tells the class its name."""

    def add(cls: type[Converter]) -> type[Converter]:
        cls.name = name
        return converters.register(name)(cls)

    return add

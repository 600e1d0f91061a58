"""From a checkpoint to a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from fast_llm_ssm import checkpoint
from fast_llm_ssm.checkpoint import Checkpoint, LazyTensor
from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert.base import Converter, converters
from fast_llm_ssm.convert.config_rules import Json
from fast_llm_ssm.convert.importing import Say
from fast_llm_ssm.convert.io import DTYPES, TensorFolder, inside, read_json
from fast_llm_ssm.convert.load import load_tokenizer_of, model_config, parameters, require_equal_names
from fast_llm_ssm.convert.rules import Carry, TensorRule, file_shapes
from fast_llm_ssm.convert.source import RESERVED, has_vocabulary
from fast_llm_ssm.convert.write import SINGLE_FILE, new_folder, require_free, write_shards
from fast_llm_ssm.model import ModelConfig, build_meta


def export_folder(
    path: Path,
    target: Path,
    *,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    allow_plugins: bool = False,
    say: Say = print,
) -> Path:
    """Turn a checkpoint into a Hugging Face folder, one tensor in memory at a time.

    A model that was imported gets the files back that it came with: settings and small files untouched where they still
    hold, every tensor under its old name, in its old dtype and file.

    Args:
        path: A checkpoint, or a run folder (its newest complete one).
        target: The new folder.
        format: The layout; by default that of the import or of `conversion.format`, or the one that can hold the model.
        dtype: Of all tensors; by default that of the import, or as they are stored.
        allow_plugins: Import the plugins that the checkpoint's config names.
        say: Takes one line at a time about what is done.

    Returns:
        The folder.

    Raises:
        UserError: `target` is not empty, there is no complete checkpoint, or the format cannot hold the model.
    """
    require_free(target)
    saved = checkpoint.find(path)
    config = model_config(saved, allow_plugins)
    origin = _Origin(saved.folder("source"))
    name = format or origin.format or (config.conversion.format if config.conversion else None)
    if name != origin.format:
        origin = _Origin(None)
    converter, settings = _settings(config, name, origin)
    say(f"{saved.path}: format {converter.name}, {len(config.layer_names)} layers")
    tensors = _file_tensors(saved, config, converter, origin, dtype)
    if origin.folder is None:
        settings |= converter.fresh_settings(tensors, _special_ids(saved))
    elif dtype is not None:
        settings |= {key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in settings}
    with new_folder(target) as folder:
        _write_settings(folder / converter.config_file, settings, origin, say)
        _copy_side_files(saved, origin, converter, folder, say)
        files = write_shards(folder, tensors, _places(converter, origin, tensors))
    say(f"wrote {target}: {len(tensors)} tensors in {sum(not file.endswith('.json') for file in files)} files")
    return target


class _Origin:
    """What an import left in a checkpoint's `source` folder; nothing, for a model that was never imported."""

    def __init__(self, folder: Path | None) -> None:
        described = folder is not None and (folder / "tensors.json").exists()
        self.folder = folder if described else None
        content = read_json(folder / "tensors.json") if folder is not None and described else {}
        self.format: str | None = content.get("format")
        self.tensors: dict[str, dict[str, str]] = content.get("tensors", {})

    @cached_property
    def carried(self) -> TensorFolder:
        """The tensors that the model has no use for."""
        assert self.folder is not None
        return TensorFolder(self.folder)

    def names(self, rule: TensorRule) -> list[str]:
        """The names under which the tensors of a rule are written: all that the source had."""
        had = [name for name in rule.names if name in self.tensors]
        return had if had or isinstance(rule, Carry) else list(rule.names if rule.repeated else rule.files)

    def dtype(self, name: str) -> torch.dtype | None:
        return DTYPES[self.tensors[name]["dtype"]] if name in self.tensors else None

    def shards(self, tensors: Mapping[str, LazyTensor]) -> dict[str, str] | None:
        """The file of each tensor as in the source, if these are the source's tensors and its files safetensors."""
        files = {name: entry["file"] for name, entry in self.tensors.items()}
        usable = all(file.endswith(".safetensors") and Path(file).name == file for file in files.values())
        return files if usable and files.keys() == tensors.keys() else None


def _places(converter: Converter, origin: _Origin, tensors: Mapping[str, LazyTensor]) -> Mapping[str, str] | None:
    """The file of each tensor."""
    if converter.weights_file != SINGLE_FILE:
        return dict.fromkeys(tensors, converter.weights_file)
    return origin.shards(tensors)


def _settings(config: ModelConfig, name: str | None, origin: _Origin) -> tuple[Converter, Json]:
    if name is not None:
        converter = converters[name]()
        if origin.folder is None and not converter.fresh:
            raise UserError(f"format {name} is for models that were imported from it, choose another by --format")
        source = read_json(origin.folder / converter.config_file) if origin.folder else None
        return converter, converter.export_config(config, source)
    fitting: list[tuple[Converter, Json]] = []
    problems: list[str] = []
    for candidate in converters.names():
        converter = converters[candidate]()
        if converter.fresh and converter.default:
            try:
                fitting.append((converter, converter.export_config(config)))
            except UserError as error:
                problems.append(str(error))
    if not fitting:
        raise UserError("\n".join(problems))
    if len(fitting) > 1:
        names = ", ".join(converter.name for converter, _ in fitting)
        raise UserError(f"the model fits several formats ({names}), choose one by --format")
    return fitting[0]


def _file_tensors(
    saved: Checkpoint, config: ModelConfig, converter: Converter, origin: _Origin, dtype: torch.dtype | None
) -> dict[str, LazyTensor]:
    """Every tensor of the new files by its name there."""
    rules = converter.tensor_rules(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in build_meta(config).state_dict().items()}
    stored = dict(parameters(saved))
    require_equal_names(saved.path, stored, shapes)
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise UserError(f"{saved.path}: {name} has shape {list(stored[name].shape)}, the model {list(shape)}")
    assert shapes.keys() == {param for rule in rules for param in rule.params}, converter.name
    tensors: dict[str, LazyTensor] = {}
    for rule in rules:
        if isinstance(rule, Carry):
            for name in origin.names(rule):
                kept = origin.carried.tensors[name]
                load = partial(_read_carried, origin.carried, name, dtype or kept.dtype)
                tensors[name] = LazyTensor(kept.shape, dtype or kept.dtype, load)
            continue
        expected = file_shapes(rule, shapes)
        made: dict[tuple[int, torch.dtype], LazyTensor] = {}
        for index, name in enumerate(origin.names(rule)):
            index = min(index, len(rule.files) - 1)  # copies are of the only file tensor
            wanted = dtype or origin.dtype(name) or stored[rule.params[0]].dtype
            if (index, wanted) not in made:
                made[index, wanted] = LazyTensor(expected[index], wanted, _saver(rule, stored, index, wanted))
            tensors[name] = made[index, wanted]
    return tensors


def _saver(rule: TensorRule, stored: Mapping[str, LazyTensor], index: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: rule.save(*(stored[param].load() for param in rule.params))[index].to(dtype)


def _read_carried(carried: TensorFolder, name: str, dtype: torch.dtype) -> Tensor:
    return carried.read(name).to(dtype)


def _special_ids(saved: Checkpoint) -> dict[str, int | None]:
    tokenizer = load_tokenizer_of(saved.path)
    bos, eos = (tokenizer.bos_id, tokenizer.eos_id) if tokenizer else (None, None)
    return {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": None}


def _write_settings(path: Path, settings: Json, origin: _Origin, say: Say) -> None:
    source = origin.folder / path.name if origin.folder else None
    if source is not None and read_json(source) == settings:
        shutil.copyfile(source, path)  # to the byte
        return
    if source is not None:
        say(f"{path.name} differs from the source's, since the model was changed")
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def _copy_side_files(saved: Checkpoint, origin: _Origin, converter: Converter, folder: Path, say: Say) -> None:
    files = _files(origin.folder) if origin.folder else {}
    tokenizer = saved.folder("tokenizer")
    if tokenizer is not None and not has_vocabulary(files):  # the source's own, if there is one, comes back untouched
        files |= _files(tokenizer)
    copied = sorted(name for name in files if name not in RESERVED | {converter.config_file})
    for name in copied:
        shutil.copyfile(files[name], folder / name)
    if code := [name for name in copied if name.endswith(".py")]:
        say(f"code that came with the source is written back, never run: {', '.join(code)}")
    if not has_vocabulary(copied):
        say("no tokenizer that transformers knows; none is written")


def _files(folder: Path) -> dict[str, Path]:
    return {path.name: inside(folder, path.name) for path in folder.iterdir() if path.is_file()}

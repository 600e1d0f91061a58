"""From a Hugging Face folder to a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from fast_llm_ssm import checkpoint
from fast_llm_ssm.checkpoint import FileContent, LazyTensor
from fast_llm_ssm.config import dump
from fast_llm_ssm.convert.io import DTYPES
from fast_llm_ssm.convert.source import TOKENIZER_FILES, HuggingFaceFolder, ModelFile, has_vocabulary
from fast_llm_ssm.convert.write import require_free, write_safetensors

Say = Callable[[str], None]


def import_folder(source: Path, target: Path, overrides: Sequence[str] = (), say: Say = print) -> Path:
    """Turn a Hugging Face folder into a checkpoint, one tensor in memory at a time.

    The checkpoint's `source` folder keeps what an export needs to give the same files back: all small files untouched,
    and the name, dtype and file of each tensor.

    Args:
        source: The Hugging Face folder.
        target: The new checkpoint.
        overrides: Changes to the model: `model.a.b=value`, or `TYPE.key=value` for all mixers of a type.
        say: Takes one line at a time about what is done.

    Returns:
        The checkpoint.

    Raises:
        UserError: `target` is not empty, or `source` is broken, unknown or not what its settings say.
    """
    require_free(target)
    folder = HuggingFaceFolder(source, overrides)
    config = folder.config
    layers, format = len(config.layer_names), folder.converter.name
    say(f"{source}: format {format}, {layers} layers, {folder.num_parameters:,} parameters")
    for remark in folder.converter.remarks(config):
        say(remark)
    travelling, staying = folder.side_files()
    if code := [name for name in travelling if name.endswith(".py")]:
        say(f"code that came along is kept, never run: {', '.join(code)}")
    if folder.superseded:
        say(f"left out: {len(folder.superseded)} tensors of an older layout that stand beside those of {format}")
    if staying:
        say(f"left out: {', '.join(staying)}")
    tokenizer = {name: path for name, path in travelling.items() if name in TOKENIZER_FILES}
    if not has_vocabulary(tokenizer):
        tokenizer = {}
        say(f"{source} has no tokenizer; the checkpoint will have none either")
    files: dict[str, FileContent] = {**travelling, "tensors.json": _origin(folder)}
    with TemporaryDirectory(prefix="fast-llm-ssm-") as scratch:
        if folder.carried:
            carried = Path(scratch) / "carried.safetensors"
            write_safetensors(carried, _stored(folder, folder.carried))
            files[carried.name] = carried
            say(f"carried along, unused by the model: {len(folder.carried)} tensors ({folder.carried[0]}, ...)")
        checkpoint.save(
            target,
            tensors=dict(folder.parameters()),
            config_yaml=dump(ModelFile(model=config)),
            tokenizer=tokenizer or None,
            source_files=files,
        )
    say(f"wrote {target}")
    return target


def _origin(folder: HuggingFaceFolder) -> str:
    names = {dtype: name for name, dtype in DTYPES.items()}
    tensors = {
        name: {"dtype": names[tensor.dtype], "file": tensor.file}
        for name, tensor in folder.files.tensors.items()
        if name not in folder.superseded
    }
    return json.dumps({"format": folder.converter.name, "tensors": tensors}, indent=1)


def _stored(folder: HuggingFaceFolder, names: Sequence[str]) -> Mapping[str, LazyTensor]:
    stored = folder.files.tensors
    return {
        name: LazyTensor(stored[name].shape, stored[name].dtype, partial(folder.files.read, name)) for name in names
    }

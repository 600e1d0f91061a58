"""Rules between the tensors of a checkpoint's files and the parameters of a model: written once, run both ways."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fast_llm_ssm.config import UserError


class TensorRule:
    """Some tensors of the files, and the parameters that they become.

    Both directions also run on meta tensors, where they give the shapes.

    Attributes:
        files: Names of the tensors in the files.
        params: Names of the parameters.
        copies: Further names in the files under which the same tensor may stand; any one of all names is enough.
            What the source repeats is checked to be equal on import, and repeated on export.
        repeated: Whether new files have the tensor under all of its names.
    """

    files: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    repeated: bool = False

    def load(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`files` -> `params`."""
        raise NotImplementedError

    def save(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`params` -> `files`."""
        raise NotImplementedError

    @property
    def names(self) -> tuple[str, ...]:
        """Every name in the files that this rule answers for."""
        return (*self.files, *self.copies)


class Rename(TensorRule):
    """The same tensor under another name."""

    def __init__(self, file: str, param: str, copies: Iterable[str] = (), repeated: bool = False) -> None:
        self.files, self.params, self.copies = (file,), (param,), tuple(copies)
        self.repeated = repeated

    def load(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    def save(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors


class Depthwise(Rename):
    """A depthwise convolution: torch's weight [C, 1, W] and ours [C, W]."""

    def load(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (tensors[0].squeeze(1),)

    def save(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (tensors[0].unsqueeze(1),)


class Transpose(Rename):
    """A matrix that the file keeps the other way round."""

    def load(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (tensors[0].t(),)

    save = load


class Join(TensorRule):
    """Several tensors of the file stacked into one parameter, along the first dimension.

    `sizes` are their rows, equal ones if None.
    """

    def __init__(self, files: Sequence[str], param: str, sizes: Sequence[int] | None = None) -> None:
        self.files, self.params = tuple(files), (param,)
        self.sizes = sizes

    def load(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat(tensors),)

    def save(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self.sizes is None:
            return tensors[0].chunk(len(self.files))
        return tensors[0].split(list(self.sizes))


class Split(TensorRule):
    """One tensor of the file cut into several parameters, along the first dimension. `sizes` are their rows."""

    def __init__(self, file: str, params: Sequence[str], sizes: Sequence[int]) -> None:
        self.files, self.params = (file,), tuple(params)
        self.sizes = sizes

    def load(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[0].split(list(self.sizes))

    def save(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat(tensors),)


class Carry(TensorRule):
    """A tensor that the model has no use for: it travels beside the weights and is written back untouched.

    A file may lack it.
    """

    def __init__(self, file: str) -> None:
        self.files = (file,)


@dataclass(frozen=True)
class Match:
    """A rule, and the names in the files under which its tensors stand.

    `files` are one name for each of `rule.files`; `repeats` further names of the same tensor.
    """

    rule: TensorRule
    files: tuple[str, ...]
    repeats: tuple[str, ...] = ()


def match(rules: Sequence[TensorRule], names: Collection[str], where: object) -> list[Match]:
    """Find the tensors of each rule.

    Args:
        rules: Every rule of the format, for this model.
        names: Every tensor in the files.
        where: What to call the files in messages.

    Raises:
        UserError: Tensors that no rule claims, or that a rule needs and the files lack; all of them are listed.
    """
    claimed = {name for rule in rules for name in rule.names}
    problems = [f"no rule of the format claims {name}" for name in sorted(names) if name not in claimed]
    matches = []
    for rule in rules:
        present = [name for name in rule.names if name in names]
        if rule.copies and present:
            matches.append(Match(rule, (present[0],), tuple(present[1:])))
        elif len(present) == len(rule.files):
            matches.append(Match(rule, rule.files))
        elif not isinstance(rule, Carry):
            problems += [f"{name} is missing" for name in rule.files if name not in names]
    if problems:
        raise UserError("\n".join(f"{where}: {problem}" for problem in problems))
    return matches


def file_shapes(rule: TensorRule, shapes: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:
    """The shapes that a rule's tensors have in the files, by those of the parameters."""
    saved = rule.save(*(torch.empty(tuple(shapes[param]), device="meta") for param in rule.params))
    return [tuple(tensor.shape) for tensor in saved]

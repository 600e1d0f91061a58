"""What every registered converter must do, over tiny random models of its format."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import huggingface as hf
from helpers.families import CASES, ELSEWHERE, Case

from fast_llm_ssm import checkpoint
from fast_llm_ssm.checkpoint import Checkpoint
from fast_llm_ssm.convert import converters
from fast_llm_ssm.convert.exporting import export_folder
from fast_llm_ssm.convert.importing import import_folder
from fast_llm_ssm.convert.load import load_model
from fast_llm_ssm.convert.rules import Carry
from fast_llm_ssm.convert.source import HuggingFaceFolder
from fast_llm_ssm.model import HybridModel

LENGTHS = (1, 3, hf.CHUNK, hf.CHUNK + 1, 3 * hf.CHUNK + 5)


@dataclass
class Imported:
    case: Case
    reference: Any
    folder: Path
    checkpoint: Path
    said: list[str]

    @property
    def config_file(self) -> str:
        return converters[self.case.format].config_file

    def changed(self, folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> Path:
        """The folder with other tensors, and settings added."""
        config = {**hf.read_config(self.folder, self.config_file), **settings}
        return hf.write_folder(folder, config, tensors, self.config_file)

    @cached_property
    def model(self) -> HybridModel:
        """For tests that leave the parameters alone."""
        return load_model(self.checkpoint)


@pytest.fixture(scope="module", params=list(CASES))
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Imported]:
    case, root = CASES[request.param], tmp_path_factory.mktemp("contract")
    reference = case.build()
    said: list[str] = []
    folder = case.save(reference, root / "hf")
    yield Imported(case, reference, folder, import_folder(folder, root / "checkpoint", say=said.append), said)


def logits_of(reference: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return reference(ids).logits


def test_every_format_has_a_case() -> None:
    assert {case.format for case in CASES.values()} | ELSEWHERE == set(converters.names())


def test_recognised_and_counted_before_anything_else(imported: Imported) -> None:
    count = sum(parameter.numel() for parameter in imported.reference.parameters())
    assert f"format {imported.case.format}" in imported.said[0] and f" {count:,} parameters" in imported.said[0]


def test_equal_logits(imported: Imported) -> None:
    model = imported.model
    for length in LENGTHS:
        ids = hf.tokens(2, length)
        with torch.no_grad():
            ours = model(ids)
        theirs = logits_of(imported.reference, ids)
        assert theirs.std() > 0.3
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5, msg=lambda text, n=length: f"length {n}: {text}")
    with torch.no_grad():
        assert torch.equal(load_model(imported.folder)(ids), ours)  # straight from the folder, too


def test_equal_gradients(imported: Imported) -> None:
    ids = hf.tokens(2, 3 * hf.CHUNK + 5)
    reference, model = imported.reference, imported.model
    reference.zero_grad()
    F.cross_entropy(reference(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
    model.zero_grad()
    model.loss(ids, targets).backward()
    total = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
    theirs = gradients_by_file_name(imported)
    ours = dict(model.named_parameters())
    checked = 0
    for rule in HuggingFaceFolder(imported.folder).converter.tensor_rules(model.config):
        if isinstance(rule, Carry):
            continue
        for name, gradient in zip(rule.files, rule.save(*(ours[param].grad for param in rule.params)), strict=True):
            bound = 1e-5 * max(theirs[name].norm(), 1e-4 * total)
            assert (gradient - theirs[name]).norm() <= bound, name
            checked += 1
    assert checked >= len(ours)
    reference.zero_grad()


def gradients_by_file_name(imported: Imported) -> dict[str, torch.Tensor]:
    """The reference's gradients under the names that the files use: saved like weights."""
    reference = imported.reference
    with torch.no_grad():
        weights = {name: parameter.clone() for name, parameter in reference.named_parameters()}
        for parameter in reference.parameters():
            parameter.copy_(parameter.grad)
        folder = imported.case.save(reference, imported.folder.parent / "gradients")
        for name, parameter in reference.named_parameters():
            parameter.copy_(weights[name])
    return hf.read_tensors(folder)


def test_packed_documents_and_decoding(imported: Imported) -> None:
    model, ids, bounds = imported.model, hf.tokens(2, 21), [0, 5, 21, 22, 42]
    with torch.no_grad():
        packed = model(ids, torch.tensor(bounds)).flatten(0, 1)
        for first, last in zip(bounds, bounds[1:], strict=False):
            alone = model(ids.flatten()[None, first:last])[0]
            torch.testing.assert_close(packed[first:last], alone, rtol=0, atol=1e-5)
        state = model.new_state(2, 21)
        logits = [model.prefill(ids[:, :17], state), *(model.step(ids[:, t], state) for t in range(17, 21))]
        torch.testing.assert_close(torch.stack(logits, 1), model(ids)[:, 16:], rtol=0, atol=1e-5)


def test_fresh_settings_describe_the_same_model(imported: Imported, tmp_path: Path) -> None:
    converter = converters[imported.case.format]()
    if not converter.fresh:
        return
    saved = Checkpoint(imported.checkpoint)
    checkpoint.save(tmp_path / "new", tensors=saved.read_tensors(), config_yaml=saved.config_yaml)
    out = export_folder(tmp_path / "new", tmp_path / "out", format=converter.name, say=lambda line: None)
    with torch.no_grad():
        assert torch.equal(load_model(out)(hf.tokens(2, 9)), imported.model(hf.tokens(2, 9)))
    if imported.case.loads:
        assert_loads(out, logits_of(imported.reference, hf.tokens(2, 9)))


def test_export_gives_the_source_back(imported: Imported, tmp_path: Path) -> None:
    out = export_folder(imported.checkpoint, tmp_path / "out", say=lambda line: None)
    assert {path.name for path in out.iterdir()} == {path.name for path in imported.folder.iterdir()}
    assert (out / imported.config_file).read_bytes() == (imported.folder / imported.config_file).read_bytes()
    assert_equal_tensors(out, imported.folder)
    if imported.case.loads:
        assert_loads(out, logits_of(imported.reference, hf.tokens(2, 9)))


def test_export_after_a_training_step(imported: Imported, tmp_path: Path) -> None:
    model = copy.deepcopy(imported.model)
    model.zero_grad()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = hf.tokens(2, 2 * hf.CHUNK)
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    optimizer.step()
    assert any(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    saved = Checkpoint(imported.checkpoint)
    source = saved.folder("source")
    assert source is not None
    checkpoint.save(
        tmp_path / "trained",
        tensors=dict(model.named_parameters()),
        config_yaml=saved.config_yaml,
        source_files={path.name: path for path in source.iterdir()},
    )
    out = export_folder(tmp_path / "trained", tmp_path / "out", say=lambda line: None)
    assert (out / imported.config_file).read_bytes() == (imported.folder / imported.config_file).read_bytes()
    written, original = hf.read_tensors(out), hf.read_tensors(imported.folder)
    assert {n: (t.shape, t.dtype) for n, t in written.items()} == {n: (t.shape, t.dtype) for n, t in original.items()}
    with torch.no_grad():
        expected = model(hf.tokens(2, 9))
        if imported.case.loads:
            assert_loads(out, expected)
        else:
            assert torch.equal(load_model(out)(hf.tokens(2, 9)), expected)


def assert_equal_tensors(one: Path, other: Path) -> None:
    first, second = hf.read_tensors(one), hf.read_tensors(other)
    assert first.keys() == second.keys()
    for name, tensor in second.items():
        assert first[name].dtype == tensor.dtype and torch.equal(first[name], tensor), name


def assert_loads(folder: Path, expected: torch.Tensor) -> None:
    """transformers finds every tensor, none too many, and computes these logits."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    torch.testing.assert_close(logits_of(model, hf.tokens(2, 9)), expected, rtol=0, atol=1e-5)


def test_a_tensor_that_nobody_claims_is_listed(imported: Imported, tmp_path: Path) -> None:
    tensors = {**hf.read_tensors(imported.folder), "x.extra": torch.ones(2), "y.extra": torch.ones(2)}
    folder = imported.changed(tmp_path / "hf", tensors)
    with pytest.raises(ValueError, match=r"claims x\.extra\n.*claims y\.extra"):
        HuggingFaceFolder(folder)


def test_a_tensor_that_is_missing_is_listed(imported: Imported, tmp_path: Path) -> None:
    tensors = hf.read_tensors(imported.folder)
    projection = "in_proj.weight" if any(name.endswith("in_proj.weight") for name in tensors) else "o_proj.weight"
    gone = [name for name in sorted(tensors) if name.endswith(projection)][:2]
    kept = {name: tensor for name, tensor in tensors.items() if name not in gone}
    folder = imported.changed(tmp_path / "hf", kept)
    with pytest.raises(ValueError, match=rf"{gone[0]} is missing\n.*{gone[1]} is missing"):
        HuggingFaceFolder(folder)


def test_a_config_key_that_nobody_claims_is_listed(imported: Imported, tmp_path: Path) -> None:
    folder = imported.changed(tmp_path / "hf", hf.read_tensors(imported.folder), new_trick=3, other={"a": 1})
    with pytest.raises(
        ValueError, match=rf"{imported.config_file}: .* does not know new_trick: 3\n.* does not know other: "
    ):
        HuggingFaceFolder(folder)


def test_a_shape_that_does_not_fit_is_said_before_anything_is_read(imported: Imported, tmp_path: Path) -> None:
    tensors = hf.read_tensors(imported.folder)
    name = next(name for name in sorted(tensors) if name.endswith(("A_log", "norm.weight")))
    folder = imported.changed(tmp_path / "hf", {**tensors, name: torch.ones(5)})
    with pytest.raises(ValueError, match=rf"{name} has shape \[5\], the settings give"):
        HuggingFaceFolder(folder)

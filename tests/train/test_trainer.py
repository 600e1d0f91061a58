"""The training loop: what an update is, what is reported, what stops it."""

import pytest
import torch
from helpers.training import metrics, tiny_run

from fast_llm_ssm import checkpoint
from fast_llm_ssm.data import Loader
from fast_llm_ssm.train.console import Reporter
from fast_llm_ssm.train.guards import TrainingStopped
from fast_llm_ssm.train.optimizer import optimizer_tensors
from fast_llm_ssm.train.run_folder import RunFolder
from fast_llm_ssm.train.start import prepare
from fast_llm_ssm.train.trainer import Trainer, train


def one_update(folder, *overrides, change=lambda trainer: None) -> Trainer:
    """A trainer after one update."""
    config = tiny_run(folder, "optim.clip=null", *overrides)
    with RunFolder(config) as run, Reporter(run.path / "log.txt", 0) as reporter:
        trainer = Trainer(config, run, reporter, prepare(config, run), None)
        change(trainer)
        with Loader(trainer.dataset, 0, trainer.options.micro_batch) as loader:
            trainer.row = trainer.train_step(loader)
    return trainer


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Of the first update, from AdamW's first average."""
    scale = 1 - trainer.config.optim.betas[0]
    state = optimizer_tensors(trainer.optimizer, trainer.model)
    return {name: value / scale for name, value in state.items() if name.endswith("exp_avg")}


# Rows without packing hold one document each, of very different lengths: micro-batches have unequal target counts.
UNEQUAL = ("data.packing=false", "data.sequence_length=160")


def test_accumulation_weights_by_targets(tmp_path):
    whole = one_update(tmp_path, *UNEQUAL, "train.micro_batch_size=4")
    batch = whole.dataset.batch(0, 4)
    assert len({int((row != -100).sum()) for row in batch.targets}) == 4
    pieces = one_update(tmp_path, *UNEQUAL, "train.micro_batch_size=1")
    assert pieces.row["loss"] == pytest.approx(whole.row["loss"], rel=1e-6)
    assert pieces.row["grad_norm"] == pytest.approx(whole.row["grad_norm"], rel=1e-5)
    expected = gradients(whole)
    for name, gradient in gradients(pieces).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7, msg=name)


def test_the_update_follows_the_mean_loss_over_all_targets(tmp_path):
    trainer = one_update(tmp_path, *UNEQUAL)
    config = trainer.config
    with RunFolder(config) as run:
        fresh = prepare(config, run)
    batch = fresh.dataset.batch(0, 4)
    loss = fresh.model.loss(batch.tokens, batch.targets, batch.cu_seqlens)
    loss.backward()
    assert trainer.row["loss"] == pytest.approx(loss.item(), rel=1e-6)
    got = gradients(trainer)
    for name, parameter in fresh.model.named_parameters():
        torch.testing.assert_close(got[f"{name}.exp_avg"], parameter.grad, rtol=1e-4, atol=1e-7, msg=name)


def test_activation_checkpointing_changes_nothing(tmp_path):
    plain = one_update(tmp_path)
    recomputed = one_update(tmp_path, "train.activation_checkpointing=full")
    assert recomputed.model.activation_checkpointing == "full"
    assert recomputed.row["loss"] == plain.row["loss"]
    expected = gradients(plain)
    for name, gradient in gradients(recomputed).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-8, msg=name)


def test_bf16_is_of_activations_only(tmp_path):
    seen = set()

    def watch(trainer):
        trainer.model.layers[0][0].mixer.register_forward_hook(lambda module, args, output: seen.add(output.dtype))

    half = one_update(tmp_path, "train.precision=bf16", change=watch)
    assert seen == {torch.bfloat16}
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.float32}
    assert {value.dtype for value in optimizer_tensors(half.optimizer, half.model).values()} == {torch.float32}
    full = one_update(tmp_path)
    assert half.row["loss"] != full.row["loss"]
    assert half.row["loss"] == pytest.approx(full.row["loss"], rel=1e-2)


def test_a_run(tmp_path, capsys):
    run = tmp_path / "runs" / "tiny"
    samples = "samples={prompts: ['the ', 'a '], every: 5, max_new_tokens: 5}"
    assert train(tiny_run(tmp_path, "validation.every=4", samples, "log.tensorboard=true", "train.steps=12"))
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["step"] for row in rows if "val_loss" in row] == [4, 8, 12]
    assert rows[-1]["val_loss"] < rows[3]["val_loss"] - 0.5
    assert [row["tokens"] for row in rows] == [step * 4 * 24 for step in range(1, 13)]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-12", "step-9"]
    assert list((run / "tensorboard").iterdir())
    shown = capsys.readouterr().out
    assert shown == (run / "log.txt").read_text()
    for label in ("model   2 layers: 2 h (1 shared block)", "batch   96 tokens = 2 x 24 x 2", "start   at step 0"):
        assert label in shown
    assert "\nsample after step 10\nthe " in shown.replace(" \n", "\n")
    assert "step    12/12  loss " in shown and "result  validation loss " in shown and "a bigram model's " in shown
    saved = checkpoint.find(run)
    assert saved.step == 12 and saved.state["samples"] == 48
    assert saved.config["train"]["steps"] == 12 and saved.folder("tokenizer") is not None
    assert train(tiny_run(tmp_path, "train.steps=12"))
    assert "step 12 of 12 was reached before; nothing to do" in capsys.readouterr().out


def test_the_seed_decides(tmp_path):
    weights = [one_update(tmp_path, f"seed={seed}").model.embedding.weight.clone() for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("fault", ["gradient", "weight"])
def test_a_value_that_is_not_finite_stops_before_the_update(tmp_path, monkeypatch, fault):
    name = "layers.1.0.mixer.A_log"
    step = Trainer.train_step

    def spoil(trainer, loader):
        parameter = dict(trainer.model.named_parameters())[name]
        if trainer.step == 4 and fault == "gradient":
            parameter.register_hook(lambda gradient: gradient * float("nan"))
        elif trainer.step == 4:
            parameter.data[0] = float("nan")
        before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
        try:
            return step(trainer, loader)
        except TrainingStopped:
            for key, value in trainer.model.state_dict().items():
                torch.testing.assert_close(value, before[key], rtol=0, atol=0, equal_nan=True)
            raise

    monkeypatch.setattr(Trainer, "train_step", spoil)
    with pytest.raises(
        TrainingStopped, match=rf"^step 5: the {fault} (of )?{name} holds NaN.*stopped before the update"
    ):
        train(tiny_run(tmp_path, "checkpoint.every=1", "checkpoint.keep=1"))
    run = tmp_path / "runs" / "tiny"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-4"]
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]
    assert "holds NaN" in (run / "log.txt").read_text().splitlines()[-1]


def test_a_checkpoint_that_cannot_be_written_is_one_line_and_leaves_those_before(tmp_path, monkeypatch):
    save = checkpoint.save

    def fail(folder, **parts):
        if folder.name == "step-6":
            raise OSError(28, "No space left on device")
        return save(folder, **parts)

    monkeypatch.setattr(checkpoint, "save", fail)
    with pytest.raises(TrainingStopped, match="step-6: cannot be saved: .*No space left on device; earlier"):
        train(tiny_run(tmp_path))
    assert checkpoint.find(tmp_path / "runs" / "tiny").step == 3


def test_rarer_rows(tmp_path):
    train(tiny_run(tmp_path, "log.every=4"))
    assert [row["step"] for row in metrics(tmp_path / "runs" / "tiny")] == [4, 6]


def test_without_validation_data(tmp_path):
    train(tiny_run(tmp_path, "data.validation=null", "train.steps=2"))
    assert all("val_loss" not in row for row in metrics(tmp_path / "runs" / "tiny"))

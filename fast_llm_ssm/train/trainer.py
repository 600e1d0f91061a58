"""The training loop."""

from __future__ import annotations

import time

import torch

from fast_llm_ssm import checkpoint
from fast_llm_ssm.data import Loader, bigram_baseline
from fast_llm_ssm.train.card import card
from fast_llm_ssm.train.config import RunConfig, require_trainable
from fast_llm_ssm.train.console import Reporter
from fast_llm_ssm.train.evaluate import has_bigram, sample_texts, validation_loss
from fast_llm_ssm.train.guards import TrainingStopped, clip_gradients, describe_non_finite
from fast_llm_ssm.train.metrics import JsonLines, Sink, TensorBoard
from fast_llm_ssm.train.optimizer import optimizer_tensors, set_lr
from fast_llm_ssm.train.pace import Pace
from fast_llm_ssm.train.run_folder import RunFolder, checkpoint_yaml
from fast_llm_ssm.train.signals import StopSignal
from fast_llm_ssm.train.start import Start, prepare


def train(config: RunConfig, stop: StopSignal | None = None) -> bool:
    """Train as the run file says, in its run folder; goes on where an earlier process stopped.

    Args:
        config: The run file, with `data` and `train` sections.
        stop: Where signals arrive; None ignores them.

    Returns:
        Whether the last step was reached; False after a signal, with everything saved.

    Raises:
        UserError: The run file, its data, or the run folder does not allow it.
        TrainingStopped: A loss or gradient was not finite; the weights were not updated.
    """
    require_trainable(config)
    with RunFolder(config) as folder, Reporter(folder.path / "log.txt", config.log.seconds) as reporter:
        start = prepare(config, folder)
        folder.write_config(config)
        for label, text in [*card(config, start.model, start.dataset, start.device), *start.lines]:
            reporter.say(label, text)
        return Trainer(config, folder, reporter, start, stop).run()


class Trainer:
    """One run on one device.

    Attributes:
        step: Updates done.
        samples: Rows of the data consumed.
    """

    def __init__(
        self, config: RunConfig, folder: RunFolder, reporter: Reporter, start: Start, stop: StopSignal | None
    ) -> None:
        self.config, self.folder, self.reporter, self.stop = config, folder, reporter, stop
        self.data, self.options = require_trainable(config)
        self.device, self.model, self.optimizer = start.device, start.model, start.optimizer
        self.dataset, self.source_files = start.dataset, start.source_files
        self.step, self.samples = start.step, start.samples
        self.pace = Pace(config, start.model, start.device)

    def run(self) -> bool:
        """All remaining steps; see `train`."""
        steps = self.options.steps
        if self.step >= steps:
            self.reporter.say("done", f"step {self.step:,} of {steps:,} was reached before; nothing to do")
            return True
        sinks: list[Sink] = [JsonLines(self.folder.path / "metrics.jsonl", self.step)]
        if self.config.log.tensorboard:
            sinks.append(TensorBoard(self.folder.path / "tensorboard", self.step))
        try:
            with self._loader() as loader:
                stopping = False
                while self.step < steps and not stopping:
                    row = self.train_step(loader)
                    self.step, self.samples = self.step + 1, self.samples + self.options.batch_size
                    last = self.step == steps
                    if self._due(self.config.validation.every, last):
                        self._validate(row)
                    if self._due(self.config.log.every, last or "val_loss" in row):
                        for sink in sinks:
                            sink.write({"step": self.step, **row})
                    self.reporter.progress(self.pace.line(self.step, row), force=last or "val_loss" in row)
                    if self.config.samples and self._due(self.config.samples.every, last):
                        self._show_samples()
                    if last:
                        self._compare(row)
                    stopping = self.stop is not None and self.stop.received is not None
                    if self._due(self.config.checkpoint.every, last or stopping):
                        self.save()
        finally:
            for sink in sinks:
                sink.close()
        if self.step < steps:
            assert self.stop is not None
            self.reporter.say(
                "stopped", f"{self.stop.received} after step {self.step:,}, saved; the same command goes on"
            )
        return self.step >= steps

    def train_step(self, loader: Loader) -> dict[str, float]:
        """One update, from the gradient of the mean loss over all targets of the batch.

        Returns:
            What is logged of it.
        """
        begin = time.perf_counter()
        batches = [next(loader) for _ in range(self.options.num_micro_batches)]
        waited = time.perf_counter() - begin
        num_targets = max(1, sum(batch.num_targets for batch in batches))
        losses = []
        for batch in batches:
            batch = batch.to(self.device)
            loss = self.model.loss(batch.tokens, batch.targets, batch.cu_seqlens, reduction="sum") / num_targets
            loss.backward()
            losses.append(loss.detach())
        mean = float(torch.stack(losses).sum())
        norm = clip_gradients(self.model.parameters(), self.config.optim.clip)
        if not torch.tensor([mean, norm]).isfinite().all():
            raise TrainingStopped(
                f"step {self.step + 1:,}: {describe_non_finite(self.model, mean)}; "
                "stopped before the update, weights and checkpoints are untouched"
            )
        lr = self.config.optim.lr * self.config.schedule.factor(self.step + 1, self.options.steps)
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        row = {
            "loss": mean,
            "lr": lr,
            "grad_norm": norm,
            "tokens": (self.samples + self.options.batch_size) * self.data.sequence_length,
        }
        return row | self.pace.count(time.perf_counter() - begin, waited)

    def save(self) -> None:
        """Write a checkpoint of this step, and let old ones go."""
        path, options = self.folder.checkpoints / f"step-{self.step}", self.config.checkpoint
        try:
            checkpoint.save(
                path,
                tensors=self.model.state_dict(),
                optimizer=optimizer_tensors(self.optimizer, self.model),
                config_yaml=checkpoint_yaml(self.config),
                state={"step": self.step, "samples": self.samples, "data": self.dataset.parts},
                tokenizer=self.dataset.tokenizer,
                source_files=self.source_files,
                overwrite=True,
            )
            checkpoint.retain(self.folder.checkpoints, options.keep, options.permanent_every)
        except OSError as error:
            raise TrainingStopped(f"{path}: cannot be saved: {error}; earlier checkpoints are untouched") from error

    def _loader(self) -> Loader:
        return Loader(self.dataset, self.samples, self.options.micro_batch, pin_memory=self.device.type == "cuda")

    def _due(self, every: int | None, anyway: bool) -> bool:
        return anyway or (every is not None and self.step % every == 0)

    def _validate(self, row: dict[str, float]) -> None:
        batch_size = self.config.validation.batch_size or self.options.micro_batch
        loss = validation_loss(self.model, self.dataset, batch_size)
        if loss is not None:
            row["val_loss"] = loss

    def _show_samples(self) -> None:
        assert self.config.samples is not None
        for text in sample_texts(self.model, self.dataset, self.config.samples):
            self.reporter.block(f"sample after step {self.step:,}", text)

    def _compare(self, row: dict[str, float]) -> None:
        if "val_loss" not in row or not has_bigram(self.dataset):
            return
        bigram = bigram_baseline(self.dataset)
        if bigram is not None:
            gap = bigram.loss - row["val_loss"]
            self.reporter.say(
                "result",
                f"validation loss {row['val_loss']:.3f}, a bigram model's {bigram.loss:.3f}: "
                f"{abs(gap):.3f} nat {'better' if gap >= 0 else 'worse'}",
            )

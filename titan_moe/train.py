"""The training loop: it reads from top to bottom and knows no parallelism."""

import gc
import logging
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record

from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.checkpoint.folder import step_folder
from titan_moe.config import ConfigError, RunConfig, load_config
from titan_moe.config.command_line import config_and_overrides
from titan_moe.config.layout import Layout
from titan_moe.config.topology import layout_lines
from titan_moe.data import ValidationData, build_train_loader, build_validation, merge_states
from titan_moe.flops import model_flops_per_token
from titan_moe.hf.export import check_exportable, export, exported_already
from titan_moe.hf.load import load_weights
from titan_moe.mesh import Meshes
from titan_moe.metrics.logger import MetricsLogger
from titan_moe.metrics.logs import setup_logging
from titan_moe.metrics.profiling import Profiler
from titan_moe.metrics.run_folder import RunFolder
from titan_moe.optim import build_optimizer, learning_rate
from titan_moe.parallelize import parallelize
from titan_moe.recipe import load_recipe
from titan_moe.world import StopSignal, World, any_rank, gather, on_first_rank

logger = logging.getLogger(__name__)


class Trainer:
    """One run: put together by `__init__`, trained by `run`."""

    def __init__(self, config: RunConfig, world: World, stop: StopSignal) -> None:
        self.config, self.world, self.stop = config, world, stop
        self.folder = RunFolder(config.job.dump_folder, config.job.name)
        on_first_rank(lambda: self.folder.prepare(config))
        setup_logging(world.rank, self.folder.logs)

        self.meshes = meshes = Meshes.build(
            Layout.of(config.parallelism, world.size), world.device.type
        )
        self.validation: list[ValidationData] = []
        if config.validation.enable:  # before the model, so that bad data is told soon
            self.validation = build_validation(config, meshes.dp_rank, meshes.dp_degree)
        recipe = load_recipe(config.model.recipe)
        if config.checkpoint.last_save_in_hf:  # before the run, that its end may not fail of it
            check_exportable(recipe, config.model)
        self.engine = parallelize(config, recipe, meshes, world.device)
        self.optimizer = build_optimizer(self.engine.parts, config.optimizer)
        self.checkpointer = Checkpointer(
            self.folder.path / config.checkpoint.folder,
            config.checkpoint,
            self.engine.parts,
            self.optimizer,
        )
        saved = self._resume()
        self.step: int = saved["step"] if saved else 0
        self.tokens_seen: int = saved["tokens_seen"] if saved else 0
        self.loader = build_train_loader(
            config, meshes.dp_rank, meshes.dp_degree, saved["data"] if saved else None
        )
        flops_per_token = model_flops_per_token(config.model, config.training.seq_len).total
        self.profiler = Profiler(config.profiling, self.folder, world.rank, self.step)
        self.metrics = MetricsLogger(
            self.folder, config, world, flops_per_token=flops_per_token, step=self.step
        )
        on_first_rank(lambda: self.folder.record(config))
        self._introduce(flops_per_token)

    def run(self) -> None:
        """Train until the last step, or a signal to stop; either way what was learned is saved."""
        steps = self.config.training.steps
        if self.step >= steps:
            logger.info("nothing left to train: step %d of training.steps = %d", self.step, steps)
        if self.step > 0 and self._is_due(self.config.validation.freq):
            with self.metrics.paused():
                self._validate(done=on_first_rank(lambda: self.metrics.validated(self.step)))
        batches, first_step, stopping = iter(self.loader), self.step + 1, False
        gc.disable()  # so that all ranks collect at the same steps, below
        with self.profiler:
            while self.step < steps and not stopping:
                with self.metrics.waiting_for_data():
                    batch = next(batches)
                self._train_step(batch)
                if self.step == first_step:
                    self.world.shorten_timeouts(self.config.comm)
                with self.metrics.paused():
                    if self._is_due(self.config.validation.freq):
                        self._validate()
                    stopping = self._is_stopping()
                    if self._is_due(self.config.checkpoint.interval) or stopping:
                        self._save()
                    if self.step % self.config.training.gc_freq == 0:
                        gc.collect(1)
        if self.config.checkpoint.last_save_in_hf and self.step >= steps:
            self._export()
        self.close()
        if stopping:
            logger.info("stopped by %s after step %d", self.stop.reason or "a peer", self.step)
        else:
            logger.info("done: %s", self.folder.path)

    def close(self) -> None:
        """Let go of loader processes, a checkpoint still being written, open files."""
        self.loader.close()
        self.checkpointer.finish()
        self.metrics.close()
        self.folder.release()
        gc.enable()

    def _train_step(self, batch: dict[str, torch.Tensor]) -> None:
        training = self.config.training
        lr = learning_rate(
            self.tokens_seen, self.config.optimizer, self.config.lr_scheduler, training
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr

        output = self.engine.forward_backward(batch)
        grad_norm = self.engine.grad_norm()
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"step {self.step + 1}: the gradient's norm is {float(grad_norm)}, the loss "
                f"{float(output.loss)}; no weight was changed"
            )
        self.engine.clip_grads(grad_norm, training.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        counts_LE = self.engine.update_routers()

        self.step += 1
        self.tokens_seen += training.global_batch_size * training.seq_len
        self.metrics.end_step()
        self.profiler.end_step(self.step)
        if self.metrics.is_logged(self.step):
            self.metrics.log_step(
                self.step,
                loss=output.loss,
                balance_loss=output.balance_loss,
                mtp_loss=output.mtp_loss,
                grad_norm=grad_norm,
                lr=lr,
                tokens_seen=self.tokens_seen,
                counts_LE=counts_LE,
                biases_LE=self.engine.selection_biases(),
                dispatch_bytes=self.engine.dispatch_bytes(),
            )

    def _validate(self, done: Sequence[str] = ()) -> None:
        """Report every set but those done. A signal ends it: a resumed run makes up for it."""
        for data in self.validation:
            if data.name in done:
                continue
            nats_sum, tokens = 0.0, 0
            for batch in data.batches():
                if self._is_stopping():
                    return
                nats, count = self.engine.evaluate(batch)
                nats_sum += float(nats)
                tokens += int(count)
            self.metrics.log_validation(
                self.step,
                data.name,
                nats_sum=nats_sum,
                tokens=tokens,
                num_bytes=data.bytes,
                bigram_nats_per_byte=data.bigram_nats_per_byte,
            )

    def _is_due(self, freq: int) -> bool:
        """Every `freq` steps, and after the last one."""
        return self.step % freq == 0 or self.step == self.config.training.steps

    def _is_stopping(self) -> bool:
        """Whether any rank has a reason to stop."""
        return any_rank(self.stop.reason is not None)

    def _introduce(self, flops_per_token: float) -> None:
        """Say what is about to run."""
        config, training = self.config, self.config.training
        parameters = self.engine.num_parameters()
        logger.info(
            "%s: %s parameters, %.4g GFLOP per token; %s tokens per step on %d × %s; %s",
            config.job.name,
            f"{parameters:,}",
            flops_per_token / 1e9,
            f"{training.global_batch_size * training.seq_len:,}",
            self.world.size,
            self.world.device.type,
            self.folder.path,
        )
        for line in layout_lines(self.meshes.layout, config.parallelism.scale_up_size):
            logger.info("%s", line)
        if config.job.print_config and self.world.rank == 0:
            logger.info("%s", self.folder.config_file.read_text(encoding="utf-8"))

    def _resume(self) -> dict[str, Any] | None:
        """The state of the checkpoint that the run goes on from, if there is one."""
        section = self.config.checkpoint
        saved = self.checkpointer.load() if section.enable else None
        if saved is not None:
            step = saved["step"]
            logger.info(
                "resuming after step %d, from %s", step, step_folder(self.checkpointer.folder, step)
            )
        elif section.initial_load_path is not None and section.initial_load_in_hf:
            load_weights(
                self.engine.parts,
                section.initial_load_path,
                load_recipe(self.config.model.recipe),
                self.config.model,
                self.checkpointer.group,
            )
        elif section.initial_load_path is not None:
            self.checkpointer.load_weights(section.initial_load_path)
        return saved

    def _save(self) -> None:
        if not self.config.checkpoint.enable:
            return
        # Ranks that share in computing a row have read the same data, and say the same.
        states = dict(gather((self.meshes.dp_rank, self.loader.state())))
        data = merge_states([states[rank] for rank in range(self.meshes.dp_degree)])
        self.checkpointer.save(
            self.step,
            {
                "tokens_seen": self.tokens_seen,
                "data": data,
                "config": self.config.model_dump(exclude_none=True),
            },
        )

    def _export(self) -> None:
        """The last checkpoint as a Hugging Face folder, unless a relaunched run has made it."""
        self.checkpointer.finish()
        section = self.config.checkpoint
        target = step_folder(self.folder.path / section.hf_folder, self.step)
        saved, dtype = step_folder(self.checkpointer.folder, self.step), section.export_dtype
        group = self.checkpointer.group
        if on_first_rank(lambda: exported_already(saved, target, dtype), group):
            logger.info("exported already: %s", target)
            return
        export(saved, target, dtype=dtype, group=group)


def train(config: RunConfig, world: World, stop: StopSignal) -> None:
    """Train on processes that have met already. Collective."""
    torch.use_deterministic_algorithms(config.debug.deterministic)
    Trainer(config, world, stop).run()


@record
def main(arguments: Sequence[str] | None = None) -> int:
    """`CONFIG [--section.key=value ...]`, on every process that torchrun starts."""
    stop = StopSignal()
    given = sys.argv[1:] if arguments is None else arguments
    setup_logging(int(os.environ.get("RANK", "0")))
    try:
        path, overrides = config_and_overrides(given, os.environ)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        config = load_config(path, overrides, world=world_size, on_disk=True)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    world = World.join(config.comm)
    try:
        train(config, world, stop)
    except ValueError as error:  # the user's to mend, and told as such; where from is in the logs
        logger.debug("refused", exc_info=True)
        get_error_handler().record_exception(error)  # for torchrun's last word
        print(f"titan-moe: {error}", file=sys.stderr, flush=True)
        return 2
    world.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""All that a run reports while it trains: metrics.jsonl, validation.jsonl, curves, console."""

import math
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor

from titan_moe.config.sections import RunConfig
from titan_moe.metrics.balance import expert_balance
from titan_moe.metrics.console import Console
from titan_moe.metrics.jsonl import JsonLines
from titan_moe.metrics.peaks import peak_tflops
from titan_moe.metrics.run_folder import RunFolder
from titan_moe.metrics.speed import Stopwatch, device_name, memory_peak_gib

TERA = 1e12


class Place(Protocol):
    """Where this process stands among all of the run's."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


class MetricsLogger:
    """Reports of one attempt. All ranks may call everything; rank 0 alone writes.

    Keys of a step's record, in metrics.jsonl: step, attempt, loss, balance_loss, mtp_loss,
    grad_norm, lr, tokens_seen, tokens_per_second, tokens_per_second_per_device, tflops_per_device,
    mfu, mfu_peak_tflops, data_seconds, step_seconds, memory_peak_gib, moe {max_violation,
    dead_experts, entropy, bias_range}, dispatch_bytes {total, inside, across}. null: unknown, not
    finite, or not there. Speeds are means since the last logged step, without validation and
    saving; memory is rank 0's. All but times and memory is the same whenever the run is repeated.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        world: Place,
        *,
        flops_per_token: float,
        step: int,
    ) -> None:
        """
        folder: prepared, on rank 0.
        flops_per_token: model FLOPs of one token, forward and backward.
        step: the step that the run starts from; records of later ones are cut off.
        """
        training, section = config.training, config.metrics
        self._device, self._world_size, self._writes = world.device, world.size, world.rank == 0
        self._flops_per_token = flops_per_token
        self._tokens_per_step = training.global_batch_size * training.seq_len
        self._log_freq, self._last_step = section.log_freq, training.steps
        self._peak_tflops = section.peak_tflops or peak_tflops(device_name(world.device))
        self._stopwatch = Stopwatch()
        self._tensorboard: Any = None
        if self._writes:
            self._attempt = folder.attempt
            self._steps = JsonLines(folder.metrics_file)
            self._validations = JsonLines(folder.validation_file)
            self._steps.truncate(step)
            self._validations.truncate(step)
            self._console = Console(training.steps, color=not section.disable_color_printing)
            if section.enable_tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # slow, and often not wanted

                tb_folder = folder.path / section.save_tb_folder
                self._tensorboard = SummaryWriter(str(tb_folder), purge_step=step + 1)

    def is_logged(self, step: int) -> bool:
        """Whether `log_step` is due after `step`: the first, every log_freq-th, and the last."""
        return step == 1 or step % self._log_freq == 0 or step == self._last_step

    def waiting_for_data(self) -> AbstractContextManager[None]:
        """Around the call that brings the next batch."""
        return self._stopwatch.waiting_for_data()

    def paused(self) -> AbstractContextManager[None]:
        """Around what is not training: validation, saving."""
        return self._stopwatch.paused()

    def end_step(self) -> None:
        """After every step, logged or not."""
        self._stopwatch.end_step()

    def log_step(
        self,
        step: int,
        *,
        loss: Tensor | float,
        balance_loss: Tensor | float,
        grad_norm: Tensor | float,
        lr: float,
        tokens_seen: int,
        counts_LE: Tensor | None,
        biases_LE: Tensor | None,
        mtp_loss: Tensor | float | None = None,
        dispatch_bytes: dict[str, int | None] | None = None,
    ) -> None:
        """Report a step that `is_logged` and has ended.

        loss: token mean of cross-entropy alone. grad_norm: before clipping.
        counts_LE: int64, tokens that each expert received in the whole step; None without experts.
        biases_LE: their selection biases, if any.
        dispatch_bytes: what experts' tokens made all ranks send in this step, in "total", "inside"
            fast domains and "across" them; None: unknown, or without expert parallelism.
        """
        if not self._writes:
            return
        numbers = {
            "loss": float(loss),
            "balance_loss": float(balance_loss),
            "mtp_loss": None if mtp_loss is None else float(mtp_loss),
            "grad_norm": float(grad_norm),
            "lr": lr,
            "tokens_seen": tokens_seen,
        }
        record = {
            "step": step,
            "attempt": self._attempt,
            **numbers,
            **self._speed(),
            "memory_peak_gib": memory_peak_gib(self._device),
            "moe": asdict(expert_balance(counts_LE, biases_LE)),
            "dispatch_bytes": dispatch_bytes,
        }
        self._steps.append(record)
        self._console.step(record)
        self._draw(step, record)

    def log_validation(
        self,
        step: int,
        name: str,
        *,
        nats_sum: Tensor | float,
        tokens: int,
        num_bytes: int,
        bigram_nats_per_byte: float,
    ) -> None:
        """Report one validation set.

        nats_sum: cross-entropy summed over all `tokens` predicted, which spell `num_bytes` of text.
        bigram_nats_per_byte: H(next byte | byte) of the same text, the baseline to beat.
        """
        if not self._writes:
            return
        nats = float(nats_sum)
        record = {
            "step": step,
            "name": name,
            "nats_per_token": nats / tokens,
            "nats_per_byte": nats / num_bytes,
            "bits_per_byte": nats / num_bytes / math.log(2),
            "bigram_nats_per_byte": bigram_nats_per_byte,
            "tokens": tokens,
            "bytes": num_bytes,
        }
        self._validations.append(record)
        self._console.validation(record)
        self._draw(step, record, prefix=f"validation/{name}/")

    def validated(self, step: int) -> list[str]:
        """On rank 0, the sets whose validation after `step` has been reported before."""
        return self._validations.values(step, "name")

    def close(self) -> None:
        """Write out what TensorBoard still holds back."""
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _speed(self) -> dict[str, float | None]:
        pace = self._stopwatch.read()
        tokens_per_second = self._tokens_per_step / pace.step_seconds
        per_device = tokens_per_second / self._world_size
        tflops = per_device * self._flops_per_token / TERA
        return {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": per_device,
            "tflops_per_device": tflops,
            "mfu": tflops / self._peak_tflops if self._peak_tflops else None,
            "mfu_peak_tflops": self._peak_tflops,
            "data_seconds": pace.data_seconds,
            "step_seconds": pace.step_seconds,
        }

    def _draw(self, step: int, record: dict[str, Any], prefix: str = "") -> None:
        """Every number of a record as a curve; nested ones as `moe/entropy`."""
        if self._tensorboard is None:
            return
        for key, value in record.items():
            if isinstance(value, dict):
                self._draw(step, value, f"{prefix}{key}/")
            elif isinstance(value, int | float) and key != "step":
                self._tensorboard.add_scalar(prefix + key, value, step)
        self._tensorboard.flush()

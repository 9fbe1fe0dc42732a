"""This rank's stages of the model in a pipeline: micro-batches go through them, there and back.

B rows of a micro-batch, S this rank's tokens of a row, D hidden.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from titan_moe.config.schedules import micro_batches, splits_backward, stage_ranks
from titan_moe.config.sections import Parallelism, RunConfig
from titan_moe.config.words import counted
from titan_moe.mesh import Meshes
from titan_moe.parallel.whole import Batch, keywords_of
from titan_moe.stages import Stage, split_stages, stages_line

logger = logging.getLogger(__name__)


class Pipeline:
    """An engine's `Runner` on the stages of one rank. All ranks of a pipeline call it together.

    Training runs a schedule of torch's; validation, which has nothing to go back for, its own
    order: stage after stage, each over all micro-batches. Loss comes out where the head is.

    Gradients are reduced when the last micro-batch is through, over HSDP's replicas too: once per
    call, whatever the engine asks of replicas, as torch's stages switch both reductions together.
    """

    def __init__(
        self,
        parts: list[nn.Module],
        stages: Sequence[Stage],
        config: RunConfig,
        meshes: Meshes,
        device: torch.device,
    ) -> None:
        """stages: what `parts` are, in order.

        Raises:
            ValueError: weights that are freed after forward, where backward is taken in two parts:
                of the second, which asks for weights by name, gradients would be lost.
        """
        self._parts: list[Any] = list(parts)
        self._stages = stages
        self._section = section = config.parallelism
        keeps_weights = section.fsdp_reshard_after_forward != "always"
        assert keeps_weights or not splits_backward(section), "gradients would be lost"
        self._holders = stage_ranks(section)
        self._group = meshes.pipeline.get_group()
        self._rank = meshes.pipeline.get_local_rank()
        self._split = meshes.layout.tp if section.sequence_parallel else 1
        self._hidden_size = config.model.hidden_size
        self._depths = 1 + config.model.mtp_depth()
        # Under FSDP's policy all modules but routers, whose results stay inside, compute in it.
        self._dtype = getattr(torch, config.training.mixed_precision_param)
        self._device = device
        self._scale = 1.0

        count = micro_batches(config, meshes.dp_degree)
        rows = section.pipeline_parallel_microbatch_size
        tokens_BS = torch.empty(
            rows, config.training.seq_len // meshes.layout.cp, dtype=torch.int64, device="meta"
        )
        self._schedule = torch_schedule(
            section,
            [
                self._torch_stage(part, stage, tokens_BS)
                for part, stage in zip(parts, stages, strict=True)
            ],
            count,
            self._loss,
        )
        logger.info(
            "pipeline: %s, %s of %s; %s, the embedding on the first and the head on the last",
            section.pipeline_parallel_schedule_csv or section.pipeline_parallel_schedule,
            counted(count, "micro-batch"),
            counted(rows, "row"),
            stages_line(split_stages(config)),
        )

    def forward_backward(self, batch: Batch, scale: float) -> Tensor:
        self._scale = scale
        first = self._stages[0].has_embedding
        last = self._stages[-1].has_head
        losses: list[Tensor] = []
        self._schedule.step(
            *([batch["tokens"]] if first else []),
            target=batch["labels"] if last else None,
            losses=losses,
            return_outputs=False,
            **keywords_of(batch),
        )
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for of_micro_batch in losses:
            loss += of_micro_batch.detach()
        return loss

    def evaluate(self, batch: Batch, rows: int) -> Tensor:
        nats = torch.zeros((), dtype=torch.float64, device=self._device)
        size = self._section.pipeline_parallel_microbatch_size
        for begin in range(0, len(batch["tokens"]), rows):
            end = min(begin + rows, len(batch["tokens"]))
            nats += self._forward(
                [
                    {key: value[at : min(at + size, end)] for key, value in batch.items()}
                    for at in range(begin, end, size)
                ]
            )
        return nats

    def _forward(self, micros: list[Batch]) -> Tensor:
        """Nats of all micro-batches' labels, on the rank that has the head; nothing is kept.

        Two ranks send and receive in one order, by stage and micro-batch, for all that is received
        for a stage is asked for before anything of it is sent: no queue of messages stands in
        another's way.
        """
        nats = torch.zeros((), dtype=torch.float64, device=self._device)
        sent: list[tuple[Tensor, dist.Work]] = []
        inputs: list[tuple[Tensor, dist.Work | None]] = []
        for part, stage in zip(self._parts, self._stages, strict=True):
            if stage.has_embedding:
                inputs = [(micro["tokens"], None) for micro in micros]
            elif self._holders[stage.index - 1] != self._rank:
                inputs = [self._receive(micro, stage) for micro in micros]
            outputs: list[tuple[Tensor, dist.Work | None]] = []
            for (x, arrival), micro in zip(inputs, micros, strict=True):
                if arrival is not None:
                    arrival.wait()
                hidden_BSD = part(x, **keywords_of(micro))
                if stage.has_head:
                    nats += part.head.loss(hidden_BSD, micro["labels"])
                elif self._holders[stage.index + 1] == self._rank:
                    outputs.append((hidden_BSD, None))
                else:
                    sent.append(self._send(hidden_BSD, stage))
            inputs = outputs
        for _, departure in sent:
            departure.wait()
        return nats

    def _receive(self, micro: Batch, stage: Stage) -> tuple[Tensor, dist.Work | None]:
        hidden_BSD = torch.empty(
            self._hidden_shape(micro["tokens"]), dtype=self._dtype, device=self._device
        )
        source = self._holders[stage.index - 1]
        return hidden_BSD, dist.irecv(hidden_BSD, group=self._group, group_src=source)

    def _send(self, hidden_BSD: Tensor, stage: Stage) -> tuple[Tensor, dist.Work]:
        hidden_BSD = hidden_BSD.contiguous()
        target = self._holders[stage.index + 1]
        work = dist.isend(hidden_BSD, group=self._group, group_dst=target)
        assert work is not None
        return hidden_BSD, work

    def _torch_stage(self, part: nn.Module, stage: Stage, tokens_BS: Tensor) -> PipelineStage:
        """With what it takes and gives told beforehand: torch would find out by a forward more."""
        hidden_BSD = torch.empty(
            self._hidden_shape(tokens_BS), dtype=self._dtype, device="meta", requires_grad=True
        )
        # In training the part with the head gives what multi-token prediction has, too.
        of_depths = [hidden_BSD] * (self._depths if stage.has_head else 1)
        return PipelineStage(
            part,
            stage.index,
            len(self._holders),
            self._device,
            input_args=tokens_BS if stage.has_embedding else hidden_BSD,
            output_args=torch.cat(of_depths, dim=-1),
            group=self._group,
        )

    def _hidden_shape(self, tokens_BS: Tensor) -> tuple[int, int, int]:
        """Of what stages hand on."""
        rows, tokens = tokens_BS.shape
        return rows, tokens // self._split, self._hidden_size

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self._parts[-1].head.loss(hidden, labels) * self._scale
        return loss


def torch_schedule(section: Parallelism, stages: list[PipelineStage], count: int, loss: Any) -> Any:
    """torch's schedule of that name, or of that file, for this rank's stages."""
    # scale_grads would average what is already divided by the step's tokens.
    keywords = {"n_microbatches": count, "loss_fn": loss, "scale_grads": False}
    if section.pipeline_parallel_schedule_csv is not None:
        schedule = _PipelineScheduleRuntime(stages, **keywords)
        schedule._load_csv(section.pipeline_parallel_schedule_csv)
        return schedule
    kind = get_schedule_class(section.pipeline_parallel_schedule)
    if issubclass(kind, PipelineScheduleSingle):
        (only,) = stages
        return kind(only, **keywords)
    return kind(stages, **keywords)

"""One way to lay the same training over processes, and the run's config that asks for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.parity.tiny import FAMILIES, ROWS, SEQ_LEN, Family
from titan_moe.config.layout import Layout
from titan_moe.config.sections import (
    ActivationCheckpoint,
    Data,
    Debug,
    Job,
    LrScheduler,
    Optimizer,
    Parallelism,
    RunConfig,
    Source,
    Training,
)

STEPS = 3
MAX_NORM = 1.0
# Two stages, one per rank, and four micro-batches, in an order that no named schedule has.
CSV = Path(__file__).with_name("schedule.csv")


@dataclass(frozen=True)
class Case:
    """schedule: a name of `parallelism.pipeline_parallel_schedule`, or "CSV" for the file above.

    microbatch: rows that a stage computes at once. accumulation: passes per step.
    """

    family: str = "deepseek_v3"
    replicas: int = 1
    shards: int = 1
    reshard: Literal["default", "always", "never"] = "default"
    tp: int = 1
    sequence_parallel: bool = True
    loss_parallel: bool = True
    cp: int = 1
    balancer: Literal["headtail", "none"] = "headtail"
    ep: int = 1
    backend: Literal["flat", "two_tier"] = "flat"
    scale_up: int | None = None
    max_expert_tokens: int | None = None
    pp: int = 1
    schedule: str = "1F1B"
    stages_per_rank: int | None = None
    layers: tuple[int, ...] = ()
    microbatch: int = 2
    accumulation: int = 1
    recompute: Literal["none", "full"] = "none"

    @property
    def world(self) -> int:
        return self.replicas * self.shards * self.tp * self.cp * self.pp

    @property
    def of_family(self) -> Family:
        return FAMILIES[self.family]

    def __str__(self) -> str:
        words = [
            (self.pp > 1, f"pp {self.pp} {self._pipeline()}"),
            (self.replicas > 1, f"hsdp {self.replicas} × {self.shards}"),
            (self.replicas == 1 and self.shards > 1, f"fsdp {self.shards}"),
            (self.cp > 1, f"cp {self.cp}"),
            (self.balancer == "none", "in order"),
            (self.tp > 1, f"tp {self.tp}"),
            (not self.sequence_parallel, "sequence parallel off"),
            (not self.loss_parallel, "loss parallel off"),
            (self.ep > 1, f"ep {self.ep}"),
            (self.backend == "two_tier", f"two-tier, domains of {self.scale_up}"),
            (self.max_expert_tokens is not None, f"{self.max_expert_tokens} expert tokens at once"),
            (self.accumulation > 1, f"accumulation {self.accumulation}"),
            (self.recompute == "full", "recomputed"),
            (self.reshard != "default", f"resharded {self.reshard}"),
        ]
        layout = ", ".join(word for applies, word in words if applies)
        return f"{self.family}: {layout or 'one process'}"

    def _pipeline(self) -> str:
        details = [self.schedule]
        if self.stages_per_rank is not None:
            details.append(f"{self.stages_per_rank} stages per rank")
        if self.layers:
            details.append(f"blocks {'+'.join(map(str, self.layers))}")
        if self.microbatch != 2:
            details.append(f"rows {self.microbatch}")
        return f"({', '.join(details)})"


def config_of(case: Case, **training: Any) -> RunConfig:
    """The config of a run that trains as `case` says. training: other keys of `[training]`."""
    family = case.of_family
    degree = case.replicas * case.shards
    sections = {
        "local_batch_size": ROWS // degree // case.accumulation,
        "global_batch_size": ROWS,
        "seq_len": SEQ_LEN,
        "steps": STEPS,
        "mixed_precision_param": "float32",
    }
    return RunConfig(
        job=Job(name="parity"),
        model=family.model,
        training=Training(**(sections | training)),
        optimizer=Optimizer(lr=1e-3, eps=1e-5),
        lr_scheduler=LrScheduler(warmup_steps=0),
        data=Data(
            tokenizer="none.json",
            add_bos=False,
            add_eos=False,
            num_streams=ROWS,
            sources=[Source(name="none", path="none")],
        ),
        parallelism=parallelism_of(case),
        activation_checkpoint=ActivationCheckpoint(mode=case.recompute),
        debug=Debug(seed=family.seed),
    )


def parallelism_of(case: Case) -> Parallelism:
    """With the keys that the layout heeds, as the checks of a config want it."""
    keys: dict[str, Any] = {}
    if case.pp > 1:
        keys = {
            "pipeline_parallel_microbatch_size": case.microbatch,
            "pipeline_parallel_stages_per_rank": case.stages_per_rank,
            "pipeline_parallel_layers": case.layers,
        }
        if case.schedule == "CSV":
            keys["pipeline_parallel_schedule_csv"] = str(CSV)
        else:
            keys["pipeline_parallel_schedule"] = case.schedule
    return Parallelism(
        data_parallel_replicate_degree=case.replicas,
        data_parallel_shard_degree=case.shards,
        fsdp_reshard_after_forward=case.reshard,
        tensor_parallel_degree=case.tp,
        sequence_parallel=case.sequence_parallel,
        disable_loss_parallel=not case.loss_parallel,
        context_parallel_degree=case.cp,
        context_parallel_load_balancer=case.balancer,
        expert_parallel_degree=case.ep,
        expert_parallel_comm_backend=case.backend,
        scale_up_size=case.scale_up,
        max_expert_tokens=case.max_expert_tokens,
        pipeline_parallel_degree=case.pp,
        **keys,
    )


def layout_of(case: Case) -> Layout:
    return Layout.of(parallelism_of(case), case.world)

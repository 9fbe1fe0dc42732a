"""Every table of a recipe TOML but `[model]`.

Names follow torchtitan v0.2.2 where they mean the same.
"""

from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
)

from titan_moe.config.base import FilePath, Section
from titan_moe.config.model import ModelConfig
from titan_moe.config.parallelism import Parallelism as Parallelism


def _stays_inside(folder: str) -> str:
    path = PurePath(folder)
    if path.is_absolute() or ".." in path.parts or path == PurePath():
        raise ValueError("expected a folder below the run folder, without ..")
    return folder


FolderInRun = Annotated[FilePath, AfterValidator(_stays_inside)]


class Job(Section):
    """`[job]`: where the run lives: `<dump_folder>/<name>/`."""

    name: str = Field(
        min_length=1,
        max_length=255,
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$",
        description="folder of the run",
    )
    dump_folder: FilePath = Field("./outputs", description="parent of all run folders")
    description: str = Field("", description="a line for people; nothing reads it")
    print_config: bool = Field(False, description="print the resolved config at start")


class Optimizer(Section):
    """`[optimizer]`: AdamW; norms, biases and router biases are never decayed."""

    name: Literal["AdamW"] = Field("AdamW", description="optimizer")
    lr: PositiveFloat = Field(description="peak learning rate; always explicit")
    beta1: float = Field(0.9, ge=0.0, lt=1.0, description="decay of the first moment")
    beta2: float = Field(0.95, ge=0.0, lt=1.0, description="decay of the second moment")
    eps: PositiveFloat = Field(1e-8, description="added to the root of the second moment")
    weight_decay: NonNegativeFloat = Field(0.1, description="decoupled weight decay of matrices")
    implementation: Literal["fused", "foreach", "for-loop"] = Field(
        "fused", description="how torch runs the step"
    )


class LrScheduler(Section):
    """`[lr_scheduler]`: warmup, stable, decay, as a pure function of tokens seen.

    Steps count as `global_batch_size * seq_len` tokens each.
    """

    warmup_steps: NonNegativeInt = Field(200, description="linear from 0 to lr")
    total_steps: PositiveInt | None = Field(
        None, description="end of decay; absent: training.steps"
    )
    decay_ratio: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description="last share of total_steps that decays; absent: all after warmup",
    )
    decay_type: Literal["linear", "sqrt", "cosine"] = Field(
        "linear", description="shape of the decay"
    )
    min_lr_factor: float = Field(0.0, ge=0.0, le=1.0, description="final lr as a share of lr")


class DataLoader(Section):
    """`[training.dataloader]`: how batches are brought in the background."""

    num_workers: NonNegativeInt = Field(
        0, description="loader processes per rank; 0: in the trainer"
    )
    prefetch_factor: PositiveInt = Field(2, description="steps that each worker prepares ahead")
    pin_memory: bool = Field(
        False, description="page-locked host memory, for faster copies to a GPU"
    )


class Training(Section):
    """`[training]`: the batch, the length of the run, numerics."""

    local_batch_size: PositiveInt | None = Field(
        None,
        description="sequences per rank between accumulations; absent: a rank's share of the step",
    )
    global_batch_size: PositiveInt = Field(
        description="sequences per optimizer step; always explicit"
    )
    seq_len: PositiveInt = Field(description="tokens per sequence")
    steps: PositiveInt = Field(description="optimizer steps")
    max_norm: PositiveFloat = Field(
        1.0, description="gradients are clipped to this norm; 1e9: hardly ever"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="type of the stored weights"
    )
    mixed_precision_param: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="type of the weights in forward and backward"
    )
    mixed_precision_reduce: Literal["float32", "bfloat16"] = Field(
        "float32", description="type in which gradients are reduced over ranks"
    )
    document_mask: bool = Field(
        True, description="no attention across documents, positions restart at each"
    )
    loss_across_documents: bool = Field(
        False, description="whether a document's last token predicts the next document's first"
    )
    attention_backend: Literal["auto", "reference", "sdpa", "blocked", "flex"] = Field(
        "auto", description="auto: flex or sdpa on CUDA, blocked on CPU"
    )
    gc_freq: PositiveInt = Field(50, description="steps between garbage collections")
    dataloader: DataLoader = Field(DataLoader(), description="how batches are brought")

    def rows_per_pass(self, dp_degree: int) -> int:
        """Sequences that one of `dp_degree` data ranks computes between accumulations."""
        return self.local_batch_size or self.global_batch_size // dp_degree


class Source(Section):
    """`[[data.sources]]`: one corpus of the mixture."""

    name: str = Field(min_length=1, description="name in logs and in the checkpoint")
    path: FilePath = Field(
        min_length=1,
        description="hub name, local file or folder, or builtin:python-stdlib",
    )
    format: Literal["auto", "jsonl", "parquet", "arrow", "text", "hub"] = Field(
        "auto", description="auto: by ending"
    )
    subset: str | None = Field(None, description="configuration name of a hub data set")
    split: str = Field("train", description="split of a hub data set")
    text_field: str = Field("text", min_length=1, description="field that holds the document")
    weight: PositiveFloat = Field(1.0, description="share of the mixture's sequences, normalised")
    holdout_every: int = Field(
        0, ge=0, description="every n-th document is kept from training, for validation; 0: none"
    )


class Data(Section):
    """`[data]`: which tokens, in which order."""

    tokenizer: FilePath = Field("byte", description="byte, or the path of a tokenizer.json")
    add_bos: bool = Field(description="put the tokenizer's BOS before each document")
    add_eos: bool = Field(description="put the tokenizer's EOS after each document")
    bos_token: str | None = Field(None, description="needed for add_bos with a tokenizer.json")
    eos_token: str | None = Field(None, description="needed for add_eos with a tokenizer.json")
    num_streams: PositiveInt = Field(
        description="logical streams; the data-parallel degree divides it"
    )
    sources: tuple[Source, ...] = Field(
        min_length=1, strict=False, description="the mixture, one table each"
    )


class ValidationSet(Section):
    """`[[validation.sets]]`: either a source's held-out documents, or a path of its own."""

    name: str = Field(min_length=1, description="name in logs")
    holdout_of: str | None = Field(None, description="name of the data source whose holdout it is")
    path: FilePath | None = Field(None, description="as in [[data.sources]]; no training path")
    format: Literal["auto", "jsonl", "parquet", "arrow", "text", "hub"] = Field(
        "auto", description="by ending"
    )
    subset: str | None = Field(None, description="configuration name of a hub data set")
    split: str = Field("validation", description="split of a hub data set")
    text_field: str = Field("text", min_length=1, description="field that holds the document")
    max_tokens: PositiveInt = Field(description="whole documents are taken until this many tokens")


class Validation(Section):
    """`[validation]`: loss on named sets, never touching training state."""

    enable: bool = Field(False, description="validate at freq and at the end")
    freq: PositiveInt = Field(100, description="steps between validations")
    local_batch_size: PositiveInt | None = Field(
        None, description="sequences per rank at once; absent: training's"
    )
    sets: tuple[ValidationSet, ...] = Field(
        (), strict=False, description="what is validated, one table each"
    )


class ActivationCheckpoint(Section):
    """`[activation_checkpoint]`: recompute activations in backward; routing is never recomputed."""

    mode: Literal["none", "full"] = Field("none", description="full: keep only each block's input")


class Checkpoint(Section):
    """`[checkpoint]`: on and full by default."""

    enable: bool = Field(True, description="save and resume")
    folder: FolderInRun = Field("checkpoint", description="inside the run folder")
    interval: PositiveInt = Field(500, description="steps between saves")
    async_mode: Literal["disabled", "async"] = Field(
        "disabled", description="write in the background"
    )
    keep_latest_k: int = Field(3, ge=0, description="complete checkpoints kept; 0: all")
    load_step: int = Field(
        -1, ge=-1, description="step to resume from; -1: the newest complete one"
    )
    initial_load_path: FilePath | None = Field(
        None, description="checkpoint (a step-N folder) whose weights start a run that has none yet"
    )
    initial_load_in_hf: bool = Field(
        False, description="initial_load_path is a Hugging Face folder of safetensors"
    )
    last_save_in_hf: bool = Field(
        False, description="after the last step, also export to hf_folder/step-N"
    )
    hf_folder: FolderInRun = Field("hf", description="of exports, inside the run folder")
    export_dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="type of exported weights, but for those kept in fp32"
    )


class Metrics(Section):
    """`[metrics]`: what is written while training."""

    log_freq: PositiveInt = Field(
        10, description="steps between log lines (step 1 is always logged)"
    )
    enable_tensorboard: bool = Field(False, description="also write TensorBoard events")
    save_tb_folder: FolderInRun = Field("tb", description="inside the run folder")
    disable_color_printing: bool = Field(False, description="plain console")
    peak_tflops: PositiveFloat | None = Field(
        None, description="dense peak per device, for MFU; absent: from the device's name"
    )


class Profiling(Section):
    """`[profiling]`: traces and memory snapshots on request."""

    enable_profiling: bool = Field(False, description="write torch.profiler traces")
    save_traces_folder: FolderInRun = Field("profile_traces", description="inside the run folder")
    profile_freq: PositiveInt = Field(10, description="steps between traces")
    profiler_active: PositiveInt = Field(1, description="steps recorded per trace")
    profiler_warmup: NonNegativeInt = Field(3, description="steps of warm-up before each trace")
    enable_memory_snapshot: bool = Field(False, description="write CUDA memory snapshots")
    save_memory_snapshot_folder: FolderInRun = Field(
        "memory_snapshot", description="inside the run folder"
    )


class Comm(Section):
    """`[comm]`: how long to wait for others."""

    init_timeout_seconds: PositiveInt = Field(300, description="for processes to find each other")
    train_timeout_seconds: PositiveInt = Field(100, description="for one collective, after step 1")
    shutdown_timeout_seconds: PositiveInt = Field(
        120, description="between SIGTERM and SIGKILL, to finish the step and save"
    )


class Debug(Section):
    """`[debug]`: reproducibility and benchmarks."""

    seed: NonNegativeInt = Field(0, description="seed of the initial weights")
    deterministic: bool = Field(
        False, description="torch's deterministic algorithms, slower on GPUs"
    )
    moe_force_load_balance: bool = Field(
        False,
        description="for benchmarks only: route by place in a rank's micro-batch, round-robin, so "
        "that the loss depends on the layout",
    )


class PlanSection(Section):
    """`[plan]`: what titan-moe plan takes if it is not told otherwise."""

    cluster: FilePath | None = Field(
        None, description="TOML of the machine to plan for, as train_configs/clusters has them"
    )


class RunConfig(Section):
    """A whole recipe TOML. `model` is the recipe's own subclass of ModelConfig."""

    job: Job
    model: SerializeAsAny[ModelConfig]
    training: Training
    optimizer: Optimizer
    data: Data
    lr_scheduler: LrScheduler = Field(default_factory=LrScheduler)
    validation: Validation = Field(default_factory=Validation)
    parallelism: Parallelism = Field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = Field(default_factory=ActivationCheckpoint)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    metrics: Metrics = Field(default_factory=Metrics)
    profiling: Profiling = Field(default_factory=Profiling)
    comm: Comm = Field(default_factory=Comm)
    plan: PlanSection = Field(default_factory=PlanSection)
    debug: Debug = Field(default_factory=Debug)

"""What must hold between keys: one table, each row with the reason that its message gives.

A row's function yields a fault for each misfit: the key to blame, and the arithmetic. What only
one table's keys say about each other stands with that table, as a validator of its class.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import PurePath
from typing import Any

from titan_moe.config.checks_data import (
    duplicate_names,
    holdout_leaves_training_data,
    tokenizer_keys,
    validation_apart_from_training,
    validation_set_has_one_origin,
    vocabulary_covers_bytes,
)
from titan_moe.config.checks_disk import (
    LOGS,
    initial_weights_are_there,
    local_paths_exist,
    run_folder_can_be_made,
    tokenizer_fits,
)
from titan_moe.config.checks_model import (
    backend_has_windows_and_sinks,
    backend_masks_documents,
    balance_groups_are_whole,
    flex_has_documents,
    sequence_within_rotary_table,
)
from titan_moe.config.checks_parallel import (
    batch_divides,
    degrees_fill_world,
    experts_are_there,
    experts_divide,
    experts_fold,
    ranks_share_streams,
    sequence_divides,
    slices_have_masks,
    tensor_parallel_inside,
    two_tiers_are_there,
    widths_divide,
    workers_share_streams,
)
from titan_moe.config.checks_pipeline import (
    micro_batches_are_whole,
    one_plan_of_stages,
    order_can_be_run,
    pipeline_is_there,
    schedule_takes_micro_batches,
    schedule_takes_stages,
    stages_have_layers,
    weights_stay_for_both_parts,
)
from titan_moe.config.errors import Fault
from titan_moe.config.keys import path_of, toml_text
from titan_moe.config.sections import RunConfig

Faults = Iterator[Fault]

FILES_OF_THE_RUN = ("config.toml", "metrics.jsonl", "validation.jsonl")
FOLDERS_IN_THE_RUN = (
    "checkpoint.folder",
    "checkpoint.hf_folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
)


@dataclass(frozen=True)
class Check:
    """faults: (config, number of processes or None) -> what stands against it.

    on_disk: it looks for files, so that it holds only of the machine that the run starts on.
    """

    name: str
    reason: str
    faults: Callable[[RunConfig, int | None], Faults]
    on_disk: bool = False


def run_checks(config: RunConfig, world: int | None, on_disk: bool) -> list[tuple[str, str]]:
    """Every misfit as (key to blame, message): `key = value: arithmetic (reason)`."""
    return [
        (fault.key, f"{fault.key} = {_shown(config, fault.key)}: {fault.message} ({check.reason})")
        for check in CHECKS
        if on_disk or not check.on_disk
        for fault in check.faults(config, world)
    ]


def _value(config: RunConfig, key: str) -> Any:
    def step(node: Any, part: str | int) -> Any:
        return node[part] if isinstance(part, int) else getattr(node, part)

    return reduce(step, path_of(key), config)


def _shown(config: RunConfig, key: str) -> str:
    value = _value(config, key)
    return "(absent)" if value is None else toml_text(value)


def warmup_and_decay_fit(config: RunConfig, world: int | None) -> Faults:
    schedule, steps = config.lr_scheduler, config.training.steps
    total = schedule.total_steps or steps
    decay = 0 if schedule.decay_ratio is None else round(schedule.decay_ratio * total)
    if schedule.warmup_steps + decay > total:
        whole = "lr_scheduler.total_steps" if schedule.total_steps else "training.steps"
        parts = f"warmup {schedule.warmup_steps} + decay {decay}" if decay else "longer than"
        yield Fault("lr_scheduler.warmup_steps", f"{parts}{' >' if decay else ''} {whole} {total}")


def no_step_at_rate_zero(config: RunConfig, world: int | None) -> Faults:
    total, steps = config.lr_scheduler.total_steps, config.training.steps
    if total is not None and total < steps and config.lr_scheduler.min_lr_factor == 0.0:
        remedy = "raise it, or lr_scheduler.min_lr_factor above 0"
        yield Fault("lr_scheduler.total_steps", f"less than training.steps {steps}; {remedy}")


def validation_has_sets(config: RunConfig, world: int | None) -> Faults:
    if config.validation.enable and not config.validation.sets:
        yield Fault("validation.enable", "there is no [[validation.sets]]")


def loading_is_enabled(config: RunConfig, world: int | None) -> Faults:
    section = config.checkpoint
    if section.load_step != -1 and not section.enable:
        yield Fault("checkpoint.load_step", "checkpoint.enable is false")
    if section.initial_load_in_hf and section.initial_load_path is None:
        yield Fault("checkpoint.initial_load_in_hf", "checkpoint.initial_load_path is absent")


def last_step_is_saved(config: RunConfig, world: int | None) -> Faults:
    if config.checkpoint.last_save_in_hf and not config.checkpoint.enable:
        yield Fault("checkpoint.last_save_in_hf", "checkpoint.enable is false")


def profile_fits_its_period(config: RunConfig, world: int | None) -> Faults:
    section = config.profiling
    needed = section.profiler_warmup + section.profiler_active
    if section.enable_profiling and needed > section.profile_freq:
        parts = f"profiler_warmup {section.profiler_warmup} + profiler_active"
        arithmetic = f"{parts} {section.profiler_active} = {needed}"
        yield Fault("profiling.profile_freq", f"less than {arithmetic}")


def folders_are_apart(config: RunConfig, world: int | None) -> Faults:
    taken = {PurePath(LOGS): "the logs of the run"}
    for key in FOLDERS_IN_THE_RUN:
        folder = PurePath(_value(config, key))
        if folder.parts[0] in FILES_OF_THE_RUN:
            yield Fault(key, f"the run has a file {folder.parts[0]}")
        elif folder in taken:
            yield Fault(key, f"the same as {taken[folder]}")
        taken.setdefault(folder, key)


CHECKS = (
    Check(
        "degrees fill the world",
        "every process has a place in the layout",
        degrees_fill_world,
    ),
    Check(
        "experts fold",
        "the experts of a pipeline stage are laid over the ranks of one replica",
        experts_fold,
    ),
    Check(
        "experts divide",
        "each expert-parallel rank holds the same number of whole experts",
        experts_divide,
    ),
    Check(
        "experts are there",
        "it would do nothing",
        experts_are_there,
    ),
    Check(
        "widths divide",
        "each tensor-parallel rank holds an equal part of heads, inner widths and vocabulary",
        widths_divide,
    ),
    Check(
        "sequence divides",
        "ranks that share a sequence hold equal parts; routed experts see tokens split over tp",
        sequence_divides,
    ),
    Check(
        "batch divides",
        "every rank takes the same number of whole micro-batches in a step",
        batch_divides,
    ),
    Check(
        "ranks share streams",
        "each stream is served by one rank",
        ranks_share_streams,
    ),
    Check(
        "workers share streams",
        "a worker without a stream would idle",
        workers_share_streams,
    ),
    Check(
        "slices have masks",
        "its causal mask is that of whole rows, and a rank has slices of them",
        slices_have_masks,
    ),
    Check(
        "tensor parallel inside a domain",
        "it communicates in every layer, which a slow network would stall",
        tensor_parallel_inside,
    ),
    Check(
        "two tiers are there",
        "it saves on what crosses between fast domains",
        two_tiers_are_there,
    ),
    Check(
        "pipeline is there",
        "nothing would heed it",
        pipeline_is_there,
    ),
    Check(
        "one plan of stages",
        "only one of them can be followed",
        one_plan_of_stages,
    ),
    Check(
        "schedule takes stages",
        "the order of work is made for that number on each rank",
        schedule_takes_stages,
    ),
    Check(
        "stages have layers",
        "each stage has a block or more, and each block a stage",
        stages_have_layers,
    ),
    Check(
        "micro-batches are whole",
        "a stage computes equal micro-batches",
        micro_batches_are_whole,
    ),
    Check(
        "schedule takes micro-batches",
        "its order of work is made for such numbers; GPipe's takes any",
        schedule_takes_micro_batches,
    ),
    Check(
        "weights stay for both parts",
        "the second part of backward needs the weights that the first has",
        weights_stay_for_both_parts,
    ),
    Check(
        "order can be run",
        "a file with an order tells each rank what to do when, to the end",
        order_can_be_run,
        on_disk=True,
    ),
    Check(
        "sequence within the rotary table",
        "positions beyond it have no encoding",
        sequence_within_rotary_table,
    ),
    Check(
        "backend masks documents",
        "it could mask documents only with memory quadratic in the sequence",
        backend_masks_documents,
    ),
    Check(
        "backend has windows and sinks",
        "its kernels know plain causal attention alone",
        backend_has_windows_and_sinks,
    ),
    Check(
        "flex has documents",
        "plain causal attention has a kernel of its own",
        flex_has_documents,
    ),
    Check(
        "balance groups are whole",
        "a balance group lies in one micro-batch of one rank, under any layout",
        balance_groups_are_whole,
    ),
    Check(
        "warmup and decay fit",
        "the learning rate cannot rise and fall at once",
        warmup_and_decay_fit,
    ),
    Check(
        "no step at rate zero",
        "steps after the decay would train at learning rate 0",
        no_step_at_rate_zero,
    ),
    Check(
        "names differ",
        "logs and checkpoints tell them apart by name",
        duplicate_names,
    ),
    Check(
        "holdout leaves training data",
        "every n-th document is held out, so that 1 would hold out all",
        holdout_leaves_training_data,
    ),
    Check(
        "validation has sets",
        "nothing would be validated",
        validation_has_sets,
    ),
    Check(
        "validation set has one origin",
        "a set is either a source's held-out documents or a path of its own",
        validation_set_has_one_origin,
    ),
    Check(
        "validation apart from training",
        "validation must never overlap training; hold documents out with holdout_every",
        validation_apart_from_training,
    ),
    Check(
        "vocabulary covers bytes",
        "256 bytes, BOS, EOS and padding each need a row of the embedding",
        vocabulary_covers_bytes,
    ),
    Check(
        "tokenizer keys",
        "the byte tokenizer has its own BOS and EOS, a tokenizer.json must be told",
        tokenizer_keys,
    ),
    Check(
        "local paths exist",
        "paths are relative to the folder that the run starts from",
        local_paths_exist,
        on_disk=True,
    ),
    Check(
        "run folder can be made",
        "the run makes its own folder below it",
        run_folder_can_be_made,
        on_disk=True,
    ),
    Check(
        "initial weights are there",
        "a run starts from it that has no checkpoint yet",
        initial_weights_are_there,
        on_disk=True,
    ),
    Check(
        "tokenizer fits",
        "every token needs a row of the embedding, and every name a token",
        tokenizer_fits,
        on_disk=True,
    ),
    Check(
        "folders are apart",
        "each kind of file has its own place in the run folder",
        folders_are_apart,
    ),
    Check(
        "loading is enabled",
        "nothing would be loaded",
        loading_is_enabled,
    ),
    Check(
        "last step is saved",
        "an export is made from the run's last checkpoint",
        last_step_is_saved,
    ),
    Check(
        "profile fits its period",
        "a trace must end before the next begins",
        profile_fits_its_period,
    ),
)

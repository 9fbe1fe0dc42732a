"""Rows of the table of checks that concern pipelines: stages, layers, micro-batches."""

import csv
from collections.abc import Iterator

from titan_moe.config.checks_parallel import data_parallel_degree
from titan_moe.config.errors import Fault
from titan_moe.config.schedules import (
    SCHEDULES,
    micro_batches_fault,
    num_stages,
    splits_backward,
)
from titan_moe.config.sections import Parallelism, RunConfig

Faults = Iterator[Fault]

DEGREE = "parallelism.pipeline_parallel_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
CSV = "parallelism.pipeline_parallel_schedule_csv"
MICRO_BATCH = "parallelism.pipeline_parallel_microbatch_size"
PER_RANK = "parallelism.pipeline_parallel_stages_per_rank"
LAYERS = "parallelism.pipeline_parallel_layers"
LESS_LAYERS = (
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
)


def _given(section: Parallelism, *keys: str) -> Iterator[str]:
    """Those that say other than their default: a resolved config names all keys."""
    for key in keys:
        name = key.removeprefix("parallelism.")
        if getattr(section, name) != type(section).model_fields[name].default:
            yield key


def pipeline_is_there(config: RunConfig, world: int | None) -> Faults:
    if config.parallelism.pipeline_parallel_degree == 1:
        keys = (SCHEDULE, CSV, MICRO_BATCH, PER_RANK, LAYERS, *LESS_LAYERS)
        for key in _given(config.parallelism, *keys):
            yield Fault(key, f"{DEGREE} is 1; raise it, or leave this out")


def one_plan_of_stages(config: RunConfig, world: int | None) -> Faults:
    section = config.parallelism
    if section.pipeline_parallel_degree == 1:
        return
    if section.pipeline_parallel_schedule_csv is not None:
        for key in _given(section, SCHEDULE, PER_RANK):
            yield Fault(key, f"{CSV} has one of its own; leave one of them out")
    if section.pipeline_parallel_layers:
        for key in _given(section, *LESS_LAYERS):
            yield Fault(key, f"{LAYERS} tells each stage's blocks; leave one of them out")


def schedule_takes_stages(config: RunConfig, world: int | None) -> Faults:
    section = config.parallelism
    name, stages = section.pipeline_parallel_schedule, section.pipeline_parallel_stages_per_rank
    schedule = SCHEDULES[name]
    if section.pipeline_parallel_degree == 1 or section.pipeline_parallel_schedule_csv is not None:
        return
    if schedule.fixed and stages not in (None, schedule.stages_per_rank):
        yield Fault(PER_RANK, f"{name} has exactly {schedule.stages_per_rank}")


def stages_have_layers(config: RunConfig, world: int | None) -> Faults:
    if config.parallelism.pipeline_parallel_schedule_csv is not None:
        return  # read on the machine that has it
    try:
        stages = num_stages(config.parallelism)
    except ValueError:  # the schedule does not take them
        return
    yield from _layers_of(config, stages)


def _layers_of(config: RunConfig, stages: int) -> Faults:
    section, layers = config.parallelism, config.model.num_layers
    ranks, counts = section.pipeline_parallel_degree, section.pipeline_parallel_layers
    if ranks == 1:
        return
    if stages > layers:
        each = "1 stage" if stages == ranks else f"{stages / ranks:.4g} stages"
        product = f"{ranks} ranks with {each} each have {stages}"
        yield Fault(DEGREE, f"{product}, more than model.num_layers {layers}")
    if counts and len(counts) != stages:
        yield Fault(LAYERS, f"{len(counts)} numbers for {stages} stages")
    elif counts and sum(counts) != layers:
        total = " + ".join(map(str, counts))
        yield Fault(LAYERS, f"{total} = {sum(counts)}, but model.num_layers is {layers}")
    for key in () if counts else _given(section, *LESS_LAYERS):
        if getattr(section, key.removeprefix("parallelism.")) > layers:
            yield Fault(key, f"more than model.num_layers {layers}, what all blocks cost")


def micro_batches_are_whole(config: RunConfig, world: int | None) -> Faults:
    section, (rows, shown) = config.parallelism, _rows(config, world)
    if section.pipeline_parallel_degree == 1 or rows is None:
        return
    if rows % section.pipeline_parallel_microbatch_size:
        yield Fault(MICRO_BATCH, f"does not divide {shown}")


def _rows(config: RunConfig, world: int | None) -> tuple[int | None, str]:
    """Sequences that a rank computes between accumulations, if they are known, and in words."""
    training, degree = config.training, data_parallel_degree(config, world)
    if training.local_batch_size is not None:
        return training.local_batch_size, f"training.local_batch_size {training.local_batch_size}"
    if degree is None or training.global_batch_size % degree:
        return None, ""
    rows = training.rows_per_pass(degree)
    total = f"training.global_batch_size {training.global_batch_size}"
    return rows, f"{total} / {degree} data-parallel ranks = {rows}"


def schedule_takes_micro_batches(config: RunConfig, world: int | None) -> Faults:
    if config.parallelism.pipeline_parallel_schedule_csv is not None:
        return
    if config.parallelism.pipeline_parallel_microbatch_size > 1:
        key = MICRO_BATCH
    else:  # there cannot be more from so many rows
        batch = "global" if config.training.local_batch_size is None else "local"
        key = f"training.{batch}_batch_size"
    yield from _micro_batches_of(config, world, key)


def _micro_batches_of(config: RunConfig, world: int | None, key: str) -> Faults:
    section, (rows, shown) = config.parallelism, _rows(config, world)
    size = section.pipeline_parallel_microbatch_size
    if section.pipeline_parallel_degree == 1 or rows is None or rows % size:
        return
    try:
        fault = micro_batches_fault(section, rows // size)
    except ValueError:  # the schedule does not take its stages
        return
    if fault:
        yield Fault(key, f"{shown.removeprefix(key).strip()} in micro-batches of {size}: {fault}")


def weights_stay_for_both_parts(config: RunConfig, world: int | None) -> Faults:
    section = config.parallelism
    key = "parallelism.fsdp_reshard_after_forward"
    if section.fsdp_reshard_after_forward != "always":
        return
    try:
        splits = splits_backward(section)
    except (OSError, ValueError, csv.Error):  # an order that cannot be read is told as such
        return
    if splits:
        order = section.pipeline_parallel_schedule_csv or section.pipeline_parallel_schedule
        yield Fault(key, f'{order} takes backward in two parts; use "default" or "never"')


def order_can_be_run(config: RunConfig, world: int | None) -> Faults:
    section = config.parallelism
    if section.pipeline_parallel_degree == 1 or section.pipeline_parallel_schedule_csv is None:
        return
    try:
        stages = num_stages(section)
    except OSError as error:
        yield Fault(CSV, f"it cannot be read: {error.strerror}")
    except (ValueError, csv.Error) as error:
        yield Fault(CSV, str(error))
    else:
        yield from _layers_of(config, stages)
        yield from _micro_batches_of(config, world, CSV)

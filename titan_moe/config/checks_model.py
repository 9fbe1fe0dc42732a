"""Rows of the table of checks that concern what is computed: attention, positions, balance."""

from collections.abc import Iterator

from titan_moe.config.checks_parallel import data_parallel_degree
from titan_moe.config.errors import Fault
from titan_moe.config.sections import RunConfig

Faults = Iterator[Fault]


def sequence_within_rotary_table(config: RunConfig, world: int | None) -> Faults:
    if config.training.seq_len > config.model.max_seq_len:
        limit = config.model.max_seq_len
        yield Fault("training.seq_len", f"more than model.max_seq_len {limit}, the rotary limit")


def backend_masks_documents(config: RunConfig, world: int | None) -> Faults:
    if config.training.attention_backend == "sdpa" and config.training.document_mask:
        yield Fault(
            "training.attention_backend",
            'cannot go with training.document_mask = true; use "auto", "flex" or "blocked"',
        )


def backend_has_windows_and_sinks(config: RunConfig, world: int | None) -> Faults:
    training, found = config.training, _beyond_causal(config)
    # With document masks sdpa cannot go anyway, which is the row above's to tell.
    if training.attention_backend == "sdpa" and not training.document_mask and found:
        message = f'cannot go with a model that has {found}; use "auto", "flex" or "blocked"'
        yield Fault("training.attention_backend", message)


def balance_groups_are_whole(config: RunConfig, world: int | None) -> Faults:
    size, training = config.model.balance_group_size, config.training
    if size is None:
        return
    key, batch = "model.balance_group_size", training.global_batch_size
    groups, odd = divmod(batch, size)
    if odd:
        yield Fault(key, f"does not divide training.global_batch_size {batch}")
        return
    if config.data.num_streams % groups:
        message = f"its {groups} groups in a step do not divide data.num_streams"
        yield Fault(key, f"{message} {config.data.num_streams}")
    degree = data_parallel_degree(config, world)
    if degree and groups % degree:
        message = f"its {groups} groups in a step cannot be shared by {degree} data-parallel ranks"
        yield Fault(key, message)
    elif degree and training.rows_per_pass(degree) % size:
        rows = training.rows_per_pass(degree)
        yield Fault("training.local_batch_size", f"{rows} rows are no whole groups of {size}")
    section = config.parallelism
    if section.pipeline_parallel_degree > 1 and section.pipeline_parallel_microbatch_size % size:
        message = f"no whole groups of model.balance_group_size {size}"
        yield Fault("parallelism.pipeline_parallel_microbatch_size", message)


def flex_has_documents(config: RunConfig, world: int | None) -> Faults:
    training, cp = config.training, config.parallelism.context_parallel_degree
    if training.attention_backend != "flex" or training.document_mask:
        return
    # Slices of a row need a mask even without documents.
    if cp == 1 and not _beyond_causal(config):
        remedy = 'use "auto" or "sdpa"'
        message = f"cannot go with training.document_mask = false; {remedy}"
        yield Fault("training.attention_backend", message)


def _beyond_causal(config: RunConfig) -> str:
    """What of the model's attention is more than plain causal, in words; "" if nothing is."""
    shapes = [config.model.attention_shape(layer) for layer in range(config.model.num_layers)]
    windows = [shape.window for shape in shapes if shape.window is not None]
    found = ["sinks"] if any(shape.sinks for shape in shapes) else []
    if windows and min(windows) < config.training.seq_len:
        found.insert(0, f"windows of {min(windows)}")
    return " and ".join(found)

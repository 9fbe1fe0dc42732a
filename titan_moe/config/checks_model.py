"""Rows of the table of checks that concern what is computed: attention, positions, balance."""

from collections.abc import Iterator

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


def flex_has_documents(config: RunConfig, world: int | None) -> Faults:
    training, cp = config.training, config.parallelism.context_parallel_degree
    # Slices of a row need a mask even without documents.
    if training.attention_backend == "flex" and not training.document_mask and cp == 1:
        remedy = 'use "auto" or "sdpa"'
        message = f"cannot go with training.document_mask = false; {remedy}"
        yield Fault("training.attention_backend", message)

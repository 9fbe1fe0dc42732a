"""Rows of the table of checks that concern data: sources, validation sets, tokenizer."""

import os.path
from collections.abc import Iterator, Sequence

from titan_moe.config.errors import Fault
from titan_moe.config.sections import RunConfig, Source, ValidationSet

Faults = Iterator[Fault]

BYTE_TOKENIZER_SIZE = 259
BUILTINS = ("builtin:python-stdlib",)


def duplicate_names(config: RunConfig, world: int | None) -> Faults:
    tables: tuple[tuple[str, Sequence[Source | ValidationSet]], ...] = (
        ("data.sources", config.data.sources),
        ("validation.sets", config.validation.sets),
    )
    for table, entries in tables:
        names = [entry.name for entry in entries]
        for index, name in enumerate(names):
            if name in names[:index]:
                other = f"{table}.{names.index(name)}"
                yield Fault(f"{table}.{index}.name", f"{other} has the same name")


def holdout_leaves_training_data(config: RunConfig, world: int | None) -> Faults:
    for index, source in enumerate(config.data.sources):
        if source.holdout_every == 1:
            yield Fault(f"data.sources.{index}.holdout_every", "nothing is left to train on")


def validation_set_has_one_origin(config: RunConfig, world: int | None) -> Faults:
    sources = {source.name: source for source in config.data.sources}
    for index, entry in enumerate(config.validation.sets):
        key = f"validation.sets.{index}"
        if entry.holdout_of is None and entry.path is None:
            yield Fault(f"{key}.name", "it has neither holdout_of nor path")
        elif entry.holdout_of is not None and entry.path is not None:
            yield Fault(f"{key}.path", f'it also has holdout_of "{entry.holdout_of}"')
        elif entry.holdout_of is not None and entry.holdout_of not in sources:
            names = ", ".join(f'"{name}"' for name in sources)
            yield Fault(f"{key}.holdout_of", f"no data source has that name; there are {names}")
        elif entry.holdout_of is not None and not sources[entry.holdout_of].holdout_every:
            remedy = "set its holdout_every to 2 or more"
            yield Fault(f"{key}.holdout_of", f"that source holds nothing out; {remedy}")


def validation_apart_from_training(config: RunConfig, world: int | None) -> Faults:
    for index, entry in enumerate(config.validation.sets):
        for source in config.data.sources:
            if entry.path is not None and _same_documents(entry, source):
                message = f'the data source "{source.name}" trains on it'
                yield Fault(f"validation.sets.{index}.path", message)


def _same_documents(entry: ValidationSet, source: Source) -> bool:
    """Whether both name the same data. Overlapping folders are found when they are listed."""
    mine, theirs = (os.path.realpath(str(e.path)) for e in (entry, source))
    if mine != theirs:
        return False
    return (
        entry.path in BUILTINS or os.path.isfile(mine) or _part_of_it(entry) == _part_of_it(source)
    )


def _part_of_it(entry: ValidationSet | Source) -> tuple[str | None, ...]:
    """What tells apart parts of one folder or one hub data set."""
    splits = (entry.subset, entry.split) if entry.format in ("auto", "hub") else ()
    return (entry.format, *splits)


def vocabulary_covers_bytes(config: RunConfig, world: int | None) -> Faults:
    if config.data.tokenizer == "byte" and config.model.vocab_size < BYTE_TOKENIZER_SIZE:
        message = f"less than the {BYTE_TOKENIZER_SIZE} ids of the byte tokenizer"
        yield Fault("model.vocab_size", message)


def tokenizer_keys(config: RunConfig, world: int | None) -> Faults:
    data = config.data
    for name, wanted, token in (
        ("bos", data.add_bos, data.bos_token),
        ("eos", data.add_eos, data.eos_token),
    ):
        if data.tokenizer == "byte" and token is not None:
            yield Fault(f"data.{name}_token", 'leave it out with data.tokenizer = "byte"')
        if data.tokenizer != "byte" and wanted and token is None:
            yield Fault(f"data.{name}_token", f"data.add_{name} = true needs it")

"""From a config to what a data rank iterates over."""

from titan_moe.config.sections import Data, RunConfig, ValidationSet
from titan_moe.data.documents import is_held_out
from titan_moe.data.loader import StepLoader
from titan_moe.data.packing import PackingRules
from titan_moe.data.readers import Reader, open_reader
from titan_moe.data.shard import OpenSource, Shard
from titan_moe.data.state import SCHEMA, State, check_state, fresh_state
from titan_moe.data.tokenizer import (
    DocumentEncoder,
    Tokenizer,
    check_vocabulary,
    tokenizer_of,
)
from titan_moe.data.validation import ValidationData, pack_documents

# Documents that may wait in memory for their streams, in one process, over all sources.
WINDOW_BYTES = 64 << 20


def build_train_loader(
    config: RunConfig, dp_rank: int, dp_degree: int, state: State | None = None
) -> StepLoader:
    """The training data of one data rank, from the start or from a merged state.

    Raises ValueError if sources, tokenizer and sizes do not fit each other, the layout, or `state`.
    """
    data, training = config.data, config.training
    assert 0 <= dp_rank < dp_degree, f"data rank {dp_rank} of {dp_degree}"
    for key, value in (
        ("data.num_streams", data.num_streams),
        ("training.global_batch_size", training.global_batch_size),
    ):
        if value % dp_degree:
            raise ValueError(
                f"{key} = {value} is not a multiple of the data-parallel degree {dp_degree}"
            )
    tokenizer = _tokenizer(config)
    sources = open_sources(data)
    description = _describe(data, training.seq_len, tokenizer, sources)
    if state is None:
        state = fresh_state(description)
    else:
        check_state(state, description, [dp_rank, dp_degree])
    size = config.model.balance_group_size
    groups = training.global_batch_size // (size or 1)
    parts = groups if size else dp_degree
    if len(sources) > 1 and state["sequences"] % parts:
        whom = f"{groups} balance groups" if size else f"a data-parallel degree of {dp_degree}"
        raise ValueError(
            f"a mixture that stands at sequence {state['sequences']} cannot be dealt to {whom}: "
            f"{parts} does not divide it"
        )
    shard = Shard(
        sources=sources,
        encode=_encoder(data, tokenizer),
        rules=_rules(config),
        num_streams=data.num_streams,
        global_batch_size=training.global_batch_size,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
        state=state,
        window_bytes=WINDOW_BYTES,
    )
    return StepLoader(shard, training.dataloader, description, groups)


def build_validation(config: RunConfig, dp_rank: int, dp_degree: int) -> list[ValidationData]:
    """The sets of `[[validation.sets]]`, in their order.

    Raises ValueError for a set without anything to predict, or that reads what training reads.
    """
    data, training, validation = config.data, config.training, config.validation
    tokenizer = _tokenizer(config)
    sources = open_sources(data)
    rows = validation.local_batch_size or training.rows_per_pass(dp_degree)
    sets = []
    for section in validation.sets:
        reader, every = _open_set(section, sources)
        sets.append(
            pack_documents(
                section.name,
                (d for i, d in enumerate(reader.documents(None)) if is_held_out(i, every)),
                _encoder(data, tokenizer),
                _rules(config),
                max_tokens=section.max_tokens,
                rows_per_batch=rows,
                dp_rank=dp_rank,
                dp_degree=dp_degree,
            )
        )
    return sets


def _open_set(section: ValidationSet, sources: list[OpenSource]) -> tuple[Reader, int]:
    """A set's reader, and how many of its documents make one of the set."""
    where = f"validation set {section.name!r}"
    if (section.holdout_of is None) == (section.path is None):
        raise ValueError(f"{where} needs either holdout_of or path")
    if section.holdout_of is not None:
        source = next((s for s in sources if s.name == section.holdout_of), None)
        if source is None:
            raise ValueError(f"{where}: no data source {section.holdout_of!r}")
        if not source.holdout_every:
            raise ValueError(f"{where}: source {source.name!r} has holdout_every = 0")
        return source.reader, source.holdout_every
    reader = open_reader(section)
    origins = set(reader.origins())
    for source in sources:
        shared = origins.intersection(source.reader.origins())
        if shared:
            raise ValueError(
                f"{where}: {min(shared)} is read by source {source.name!r}; "
                "use holdout_of to keep some of its documents from training"
            )
    return reader, 1


def open_sources(data: Data) -> list[OpenSource]:
    """Readers of `[[data.sources]]`.

    Raises ValueError for a missing path, two equal names, or held-out documents that are read by
    another source too.
    """
    names = [section.name for section in data.sources]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"data.sources: two are named {name!r}")
    sources = [OpenSource(s.name, s.weight, s.holdout_every, open_reader(s)) for s in data.sources]
    if any(source.holdout_every for source in sources):
        _check_holdouts(sources)
    return sources


def _check_holdouts(sources: list[OpenSource]) -> None:
    """Raises ValueError if anything that is read twice, by one source or two, has a holdout: the
    documents kept back in one place would be trained on in the other."""
    read_by: dict[str, OpenSource] = {}
    for source in sources:
        for origin in source.reader.origins():
            if origin not in read_by:
                read_by[origin] = source
            elif source.holdout_every or read_by[origin].holdout_every:
                names = f"{read_by[origin].name!r} and {source.name!r}"
                raise ValueError(
                    f"data.sources: {origin} is read by {names}, and what one reading holds out "
                    "the other trains on; leave it to one source, or set holdout_every = 0"
                )


def _tokenizer(config: RunConfig) -> Tokenizer:
    tokenizer = tokenizer_of(config.data)
    check_vocabulary(tokenizer, config.model.vocab_size)
    return tokenizer


def _encoder(data: Data, tokenizer: Tokenizer) -> DocumentEncoder:
    return DocumentEncoder(tokenizer, add_bos=data.add_bos, add_eos=data.add_eos)


def _rules(config: RunConfig) -> PackingRules:
    training = config.training
    return PackingRules(training.seq_len, training.document_mask, training.loss_across_documents)


def _describe(data: Data, seq_len: int, tokenizer: Tokenizer, sources: list[OpenSource]) -> State:
    """What fixes the meaning of a state's records, in the words of the config."""
    return {
        "schema": SCHEMA,
        "identity": {
            "tokenizer": tokenizer.identity,
            "bos": tokenizer.bos_id if data.add_bos else None,
            "eos": tokenizer.eos_id if data.add_eos else None,
            "num_streams": data.num_streams,
            "seq_len": seq_len,
        },
        "sources": [
            {
                "name": section.name,
                "weight": section.weight,
                "holdout_every": section.holdout_every,
                "format": source.reader.format,
                "subset": section.subset,
                "split": section.split,
                "text_field": section.text_field,
                "files": source.reader.fingerprint(),
            }
            for section, source in zip(data.sources, sources, strict=True)
        ],
    }

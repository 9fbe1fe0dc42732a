"""The loader yields the tokens that a plain reading of the contract yields, on every layout."""

from itertools import islice
from pathlib import Path

import pytest
from torch import Tensor

from tests.data import naive
from tests.data.corpora import WRITERS, make_config, make_documents, source, write_jsonl
from titan_moe.config.sections import RunConfig
from titan_moe.data import build_train_loader

STEPS = 12


def rows_of(batch: dict[str, Tensor]) -> list[dict[str, list[int]]]:
    columns = {key: value.tolist() for key, value in batch.items()}
    count = len(columns["tokens"])
    return [{key: column[i] for key, column in columns.items()} for i in range(count)]


def expect(
    config: RunConfig, corpora: list[naive.Corpus], dp_degree: int, steps: int = STEPS
) -> list[list[list[dict[str, list[int]]]]]:
    """[rank][step][row] by the naive reference."""
    data, training = config.data, config.training
    settings = naive.Settings(
        data.num_streams,
        training.seq_len,
        data.add_bos,
        data.add_eos,
        training.document_mask,
        training.loss_across_documents,
    )
    B = training.global_batch_size
    everything = naive.sequences(corpora, settings, steps * B)
    return [
        [
            [row for stream, row in everything[k * B : (k + 1) * B] if stream % dp_degree == rank]
            for k in range(steps)
        ]
        for rank in range(dp_degree)
    ]


def check(config: RunConfig, corpora: list[naive.Corpus], dp_degree: int) -> None:
    for rank, steps in enumerate(expect(config, corpora, dp_degree)):
        loader = build_train_loader(config, rank, dp_degree)
        for k, batch in enumerate(islice(loader, len(steps))):
            assert rows_of(batch) == steps[k], f"rank {rank} of {dp_degree}, step {k}"
        loader.close()


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("dp_degree", [1, 2, 4])
def test_formats(kind: str, dp_degree: int, tmp_path: Path) -> None:
    documents = make_documents(23, longest=8)
    documents[3] = documents[11] = ""
    path = WRITERS[kind](tmp_path, documents)
    check(make_config(source(path)), [naive.Corpus(documents)], dp_degree)


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("loss_across_documents", [False, True])
def test_settings(
    add_bos: bool,
    add_eos: bool,
    document_mask: bool,
    loss_across_documents: bool,
    tmp_path: Path,
) -> None:
    documents = [*make_documents(9, longest=5), "", "x"]
    config = make_config(
        source(write_jsonl(tmp_path, documents)),
        add_bos=add_bos,
        add_eos=add_eos,
        document_mask=document_mask,
        loss_across_documents=loss_across_documents,
    )
    check(config, [naive.Corpus(documents)], 2)


@pytest.mark.parametrize("count", [1, 3, 100, 101])
def test_any_number_of_documents(count: int, tmp_path: Path) -> None:
    """Fewer documents than streams, and numbers that no degree divides."""
    documents = make_documents(count)
    config = make_config(source(write_jsonl(tmp_path, documents)), num_streams=16)
    check(config, [naive.Corpus(documents)], 2)


@pytest.mark.parametrize(("num_streams", "global_batch_size"), [(8, 4), (4, 12), (12, 8), (4, 4)])
def test_mixture(num_streams: int, global_batch_size: int, tmp_path: Path) -> None:
    corpora = [
        naive.Corpus(make_documents(20, seed=1), weight="0.5", holdout_every=3),
        naive.Corpus(make_documents(3, seed=2), weight="0.2"),
        naive.Corpus(make_documents(50, seed=3), weight="0.3", holdout_every=10),
    ]
    sources = []
    for i, corpus in enumerate(corpora):
        (tmp_path / str(i)).mkdir()
        path = write_jsonl(tmp_path / str(i), corpus.documents)
        keys = {"weight": float(corpus.weight), "holdout_every": corpus.holdout_every}
        sources.append(source(path, name=f"corpus {i}", **keys))
    config = make_config(*sources, num_streams=num_streams, global_batch_size=global_batch_size)
    for dp_degree in (1, 2, 4):
        check(config, corpora, dp_degree)


@pytest.mark.parametrize("num_sources", [1, 2])
@pytest.mark.parametrize(("group_size", "num_streams"), [(2, 8), (4, 12), (4, 2)])
def test_balance_groups_are_side_by_side(
    num_sources: int, group_size: int, num_streams: int, tmp_path: Path
) -> None:
    """Rows of one group: a remainder of the stream; on one rank, and the same whatever the ranks.

    In a mixture rows of streams are rotated, so that a step of 8 begins in the midst of them.
    """
    corpora, sources = [], []
    for i in range(num_sources):
        corpus = naive.Corpus(make_documents(40, seed=i), weight="0.5")
        (tmp_path / str(i)).mkdir()
        path = write_jsonl(tmp_path / str(i), corpus.documents)
        corpora.append(corpus)
        sources.append(source(path, name=f"corpus {i}", weight=0.5))
    config = make_config(*sources, num_streams=num_streams, balance_group_size=group_size)
    settings = naive.Settings(num_streams, config.training.seq_len, True, True, True, False)
    groups = 8 // group_size
    everything = naive.sequences(corpora, settings, STEPS * 8)
    by_group = [
        [
            [row for stream, row in everything[k * 8 : k * 8 + 8] if stream % groups == group]
            for group in range(groups)
        ]
        for k in range(STEPS)
    ]
    assert {len(group) for step in by_group for group in step} == {group_size}
    for dp_degree in (1, 2):
        for rank in range(dp_degree):
            loader = build_train_loader(config, rank, dp_degree)
            for k, batch in enumerate(islice(loader, STEPS)):
                mine = [group for j, group in enumerate(by_group[k]) if j % dp_degree == rank]
                assert rows_of(batch) == [row for group in mine for row in group]
            loader.close()


@pytest.mark.parametrize("dp_degree", [1, 2])
def test_no_token_is_lost_or_repeated(dp_degree: int, tmp_path: Path) -> None:
    """Over whole passes each training token is an input once per pass, on one rank or the other."""
    # Every document has 15 bytes and BOS: a row; 24 documents are 3 for each of 8 streams.
    documents = [f"{i:015d}" for i in range(24)]
    config = make_config(source(write_jsonl(tmp_path, documents)), add_eos=False)
    inputs: list[str] = []
    for rank in range(dp_degree):
        for batch in islice(build_train_loader(config, rank, dp_degree), 6):
            inputs += [bytes(row[1:]).decode() for row in batch["tokens"].tolist()]
    assert sorted(inputs) == sorted(documents * 2)

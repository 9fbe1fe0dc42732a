"""Validation sets: the right documents, each predicted once, on any layout."""

import hashlib
import math
from collections import Counter
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from tests.data import naive
from tests.data.corpora import WRITERS, make_config, make_documents, source, write_jsonl
from titan_moe.config.sections import RunConfig, ValidationSet
from titan_moe.data import build_train_loader, build_validation


def held_out(max_tokens: int = 10**9) -> list[ValidationSet]:
    return [ValidationSet(name="held", holdout_of="corpus", max_tokens=max_tokens)]


def all_rows(config: RunConfig, dp_degree: int) -> list[dict[str, list[int]]]:
    """The set's rows in order, put together from all ranks."""
    rows: dict[int, dict[str, list[int]]] = {}
    counts = set()
    for rank in range(dp_degree):
        [data] = build_validation(config, rank, dp_degree)
        batches = list(data.batches())
        counts.add(len(batches))
        for k, batch in enumerate(batches):
            size = len(batch["tokens"])
            assert size == config.training.local_batch_size
            for i in range(size):
                number = (k * size + i) * dp_degree + rank
                rows[number] = {key: value[i].tolist() for key, value in batch.items()}
    assert len(counts) == 1, "ranks have unequal numbers of batches"
    assert sorted(rows) == list(range(len(rows)))
    return [rows[n] for n in sorted(rows)]


def naive_rows(documents: list[str], settings: naive.Settings) -> list[dict[str, list[int]]]:
    tokens = [
        (token, i)
        for i, text in enumerate(documents)
        for token in [naive.BOS, *text.encode(), naive.EOS]
    ]
    S = settings.seq_len
    rows = []
    for first in range(0, len(tokens) - 1, S):
        window = tokens[first : first + S + 1]
        real = min(len(window), S)
        window += [(0, window[-1][1])] * (S + 1 - len(window))
        row = naive.row_of(window, settings)
        last = first + S >= len(tokens) - 1
        if last:
            for i in range(len(tokens) - 1 - first, S):
                row["labels"][i] = -100
            for i in range(real, S):
                row["positions"][i], row["document_ids"][i] = 0, -1
        rows.append(row)
    return rows


@pytest.mark.parametrize("dp_degree", [1, 2, 3])
@pytest.mark.parametrize("seq_len", [16, 61])
@pytest.mark.parametrize("document_mask", [False, True])
def test_rows(dp_degree: int, seq_len: int, document_mask: bool, tmp_path: Path) -> None:
    documents = make_documents(31)
    path = write_jsonl(tmp_path, documents)
    config = make_config(
        source(path, holdout_every=4),
        seq_len=seq_len,
        document_mask=document_mask,
        sets=held_out(),
    )
    rows = all_rows(config, dp_degree)
    settings = naive.Settings(8, seq_len, document_mask=document_mask)
    expected = naive_rows(documents[3::4], settings)
    assert rows[: len(expected)] == expected
    for row in rows[len(expected) :]:
        assert set(row["labels"]) == {-100}
        assert set(row["document_ids"]) == {-1}
    assert len(rows) - len(expected) < 2 * dp_degree


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_every_token_is_predicted_once(length: int, tmp_path: Path) -> None:
    """Sets that end before, at and after a row's end."""
    (tmp_path / "valid").mkdir()
    sets = [ValidationSet(name="own", path=str(tmp_path / "valid/v.txt"), max_tokens=99)]
    text = "".join(chr(ord("A") + i) for i in range(length - 1))
    (tmp_path / "valid" / "v.txt").write_text(text)
    config = make_config(
        source(write_jsonl(tmp_path, ["x"])), add_bos=True, add_eos=False, sets=sets
    )
    rows = all_rows(config, 1)
    labels = [label for row in rows for label in row["labels"] if label != -100]
    assert bytes(labels).decode() == text
    assert len(rows) <= 2 * math.ceil((length - 1) / 16 / 2)


def texts_of(batches: list[Tensor]) -> list[str]:
    """Documents in rows of byte tokens, split at BOS; only whole ones."""
    tokens = [t for batch in batches for t in batch.flatten().tolist()]
    texts, current = [], None
    for token in tokens:
        if token == naive.BOS:
            current = bytearray()
        elif token == naive.EOS and current is not None:
            texts.append(current.decode())
            current = None
        elif current is not None and token < 256:
            current.append(token)
    return texts


@pytest.mark.parametrize("kind", WRITERS)
def test_training_and_validation_are_disjoint(kind: str, tmp_path: Path) -> None:
    documents = make_documents(40, longest=4)
    path = WRITERS[kind](tmp_path, documents)
    # One stream in one row per step, so that documents come whole.
    config = make_config(
        source(path, holdout_every=5),
        num_streams=1,
        global_batch_size=1,
        seq_len=512,
        sets=held_out(),
    )
    loader = build_train_loader(config, 0, 1)
    trained = texts_of([batch["tokens"] for batch in islice(loader, 6)])
    [data] = build_validation(config, 0, 1)
    validated = texts_of([batch["tokens"] for batch in data.batches()])
    assert loader.state()["streams"]["corpus"]["0"]["epoch"] >= 1
    hashes = [
        {hashlib.sha256(t.encode()).digest() for t in texts} for texts in (trained, validated)
    ]
    assert not hashes[0] & hashes[1]
    assert set(trained) | set(validated) == set(documents)
    assert validated == documents[4::5]


def test_whole_documents_until_max_tokens(tmp_path: Path) -> None:
    documents = ["a" * 10, "b" * 10, "é" * 10, "d" * 10] * 2
    path = write_jsonl(tmp_path, documents)
    for max_tokens, count in ((1, 1), (12, 1), (13, 2), (24, 2), (25, 3), (999, 4)):
        config = make_config(source(path, holdout_every=2), sets=held_out(max_tokens))
        [data] = build_validation(config, 0, 1)
        taken = documents[1::2][:count]
        assert texts_of([b["tokens"] for b in data.batches()]) == taken
        assert data.bytes == sum(len(text.encode()) for text in taken)


def test_bigram_entropy(tmp_path: Path) -> None:
    """Counted by hand: pairs never cross documents, and bytes, not characters, are paired."""
    documents = ["abaab", "é", "aba", "x"]
    path = write_jsonl(tmp_path, ["unused", *documents])
    pairs = Counter(
        pair for text in documents for pair in zip(text.encode(), text.encode()[1:], strict=False)
    )
    firsts: Counter[int] = Counter()
    for (a, _), count in pairs.items():
        firsts[a] += count
    expected = sum(c * math.log(firsts[a] / c) for (a, _), c in pairs.items()) / pairs.total()
    (tmp_path / "v").mkdir()
    sets = [
        ValidationSet(name="own", path=str(write_jsonl(tmp_path / "v", documents)), max_tokens=999)
    ]
    [data] = build_validation(make_config(source(path), sets=sets), 0, 1)
    assert data.bigram_nats_per_byte == pytest.approx(expected, rel=1e-12)
    assert data.bytes == 5 + 2 + 3 + 1


def test_bigram_entropy_of_many_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting piece by piece changes nothing."""
    path = write_jsonl(tmp_path, make_documents(200))
    config = make_config(source(path, holdout_every=2), sets=held_out())
    [whole] = build_validation(config, 0, 1)
    monkeypatch.setattr("titan_moe.data.validation.PAIRS_AT_A_TIME", 7)
    [pieces] = build_validation(config, 0, 1)
    assert pieces.bigram_nats_per_byte == whole.bigram_nats_per_byte > 0.5


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("across", [False, True])
def test_bytes_are_those_that_labels_spell(add_bos: bool, across: bool, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, ["-", "éa", "-", "", "-", "bcd" * 9, "-", "é"])
    config = make_config(
        source(path, holdout_every=2),
        add_bos=add_bos,
        add_eos=False,
        loss_across_documents=across,
        sets=held_out(),
    )
    [data] = build_validation(config, 0, 1)
    labels = [label for row in all_rows(config, 1) for label in row["labels"]]
    assert data.bytes == sum(0 <= label < 256 for label in labels)


def test_certain_pairs_are_no_negative_zero(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, ["-", "abc"])
    [data] = build_validation(make_config(source(path, holdout_every=2), sets=held_out()), 0, 1)
    assert str(data.bigram_nats_per_byte) == "0.0"


@pytest.mark.parametrize("add_eos", [False, True])
def test_nothing_to_predict(add_eos: bool, tmp_path: Path) -> None:
    """Neither a label, nor labels that spell a byte."""
    path = write_jsonl(tmp_path, ["-", ""] * 3)
    config = make_config(source(path, holdout_every=2), add_eos=add_eos, sets=held_out())
    with pytest.raises(ValueError, match=f"of which {3 * add_eos} are predicted and spell 0 bytes"):
        build_validation(config, 0, 1)


def test_no_other_source_reads_a_holdout(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, ["a", "b", "c"])
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / ".." / path.name
    for every, other_every in ((2, 0), (0, 2), (2, 2)):
        sources = (
            source(path, "one", holdout_every=every),
            source(other, "two", holdout_every=other_every),
        )
        for build in (build_train_loader, build_validation):
            with pytest.raises(
                ValueError, match=r"corpus.jsonl is read by 'one' and 'two'.* leave"
            ):
                build(make_config(*sources), 0, 1)
    build_train_loader(make_config(source(path, "one"), source(other, "two")), 0, 1)
    (tmp_path / "other" / "link.jsonl").symlink_to(path)
    with pytest.raises(ValueError, match=r"corpus.jsonl is read by 'one' and 'one'"):
        build_validation(make_config(source(tmp_path, "one", holdout_every=2)), 0, 1)


def test_refusals(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, ["a", "b"])
    own = {"name": "own", "max_tokens": 9}
    for keys, holdout_every, message in (
        ({"holdout_of": "other"}, 2, "set 'own': no data source 'other'"),
        ({"holdout_of": "corpus"}, 0, "set 'own': source 'corpus' has holdout_every = 0"),
        ({"holdout_of": "corpus"}, 9, "set 'own': its documents make 0 tokens"),
        ({"path": str(path)}, 2, r"corpus.jsonl is read by source 'corpus'; use holdout_of"),
        ({"path": str(tmp_path)}, 2, r"corpus.jsonl is read by source 'corpus'; use holdout_of"),
        ({"path": "none.jsonl"}, 2, "'own': no file or folder 'none.jsonl'"),
        ({}, 2, "set 'own' needs either holdout_of or path"),
        ({"path": "a", "holdout_of": "corpus"}, 2, "set 'own' needs either holdout_of or path"),
    ):
        sets = [ValidationSet(**own, **keys)]
        config = make_config(source(path, holdout_every=holdout_every), sets=sets)
        with pytest.raises(ValueError, match=message):
            build_validation(config, 0, 1)


def test_hub_splits_are_told_apart(tmp_path: Path) -> None:
    """One folder may hold both; a set may not be the very split that is trained on."""
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    for split in ("train", "validation"):
        table = pa.table({"text": [f"{split} {i}" for i in range(3)]})
        pq.write_table(table, folder / "data" / f"{split}-0.parquet")
    for split in ("train", "validation"):
        sets = [ValidationSet(name="own", path=str(folder), split=split, max_tokens=9999)]
        config = make_config(source(folder), sets=sets, seq_len=64)
        if split == "train":
            with pytest.raises(ValueError, match=r"train-0.parquet is read by source 'corpus'"):
                build_validation(config, 0, 1)
        else:
            [data] = build_validation(config, 0, 1)
            expected = [f"{split} {i}" for i in range(3)]
            assert texts_of([batch["tokens"] for batch in data.batches()]) == expected


@pytest.mark.parametrize(
    ("trained", "validated", "refusal"),
    [
        (("hub", "train"), ("hub/data/train-0.parquet", "train"), "train-0.parquet is read by"),
        (
            ("hub/data/validation-0.parquet", "train"),
            ("hub", "validation"),
            "validation-0.parquet is read by",
        ),
        (("hub", "train+validation"), ("hub", "validation"), "validation-0.parquet is read by"),
        (
            ("o/n", "train[:50%] + test"),
            ("O/n", "validation+train[50%:]"),
            r"o/n \(default, train\) is read by",
        ),
        (("o/n", "all"), ("o/n", "validation"), "o/n: split 'all' does not say which"),
        (("hub", "train"), ("hub/data/validation-0.parquet", "train"), None),
    ],
)
def test_splits_and_their_files(
    trained: tuple[str, str],
    validated: tuple[str, str],
    refusal: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "hub" / "data").mkdir(parents=True)
    for split in ("train", "validation"):
        pq.write_table(pa.table({"text": [split]}), tmp_path / f"hub/data/{split}-0.parquet")
    monkeypatch.chdir(tmp_path)
    path, split = validated
    sets = [ValidationSet(name="own", path=path, split=split, max_tokens=99)]
    config = make_config(source(trained[0], split=trained[1]), sets=sets)
    with pytest.raises(ValueError, match=refusal) if refusal else nullcontext():
        build_validation(config, 0, 1)


def test_standard_library_bigram() -> None:
    """The figure that the debug recipe has to beat, on this Python's library."""
    sets = [ValidationSet(name="held", holdout_of="stdlib", max_tokens=500_000)]
    config = make_config(
        source("builtin:python-stdlib", name="stdlib", holdout_every=20), sets=sets, seq_len=256
    )
    [data] = build_validation(config, 0, 1)
    assert 2.2 < data.bigram_nats_per_byte < 2.6
    tokens = sum(int((batch["labels"] != -100).sum()) for batch in data.batches())
    assert torch.is_tensor(next(data.batches())["tokens"])
    assert data.bytes < tokens < data.bytes + 1000

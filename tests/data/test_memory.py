"""Memory of the data path: bounded by its window, whatever the corpus."""

import sys
import tracemalloc
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.data_memory import write_jsonl as write_megabytes
from tests.data import naive
from tests.data.corpora import WRITERS, make_config, make_documents, source, write_jsonl
from titan_moe.config.sections import Source
from titan_moe.data import build_train_loader
from titan_moe.data.documents import DocumentStreams, Position
from titan_moe.data.readers import open_reader

MEGABYTE = 1 << 20


def make_streams(
    section: Source, num_streams: int, window_bytes: int, starts: dict[int, Position] | None = None
) -> DocumentStreams:
    return DocumentStreams(
        open_reader(section),
        name=section.name,
        holdout_every=section.holdout_every,
        num_streams=num_streams,
        streams=starts or {s: Position() for s in range(num_streams)},
        window_bytes=window_bytes,
    )


def expected_document(documents: list[str], num_streams: int, stream: int, turn: int) -> str:
    return documents[(stream + turn * num_streams) % len(documents)]


@pytest.mark.parametrize("kind", WRITERS)
def test_lagging_streams_stay_in_the_window(kind: str, tmp_path: Path) -> None:
    """One stream asks ten times as often; the others' documents must not pile up in memory."""
    documents = make_documents(60)
    streams = make_streams(source(WRITERS[kind](tmp_path, documents)), 4, window_bytes=2000)
    largest = max(sys.getsizeof(text) for text in documents)
    turns = [0, 0, 0, 0]
    most_scans = 0
    for i in range(400):
        stream = 1 if i % 10 else i // 10 % 4
        _, text = streams.next(stream)
        assert text == expected_document(documents, 4, stream, turns[stream])
        turns[stream] += 1
        assert streams.waiting_bytes <= 2000 + largest
        most_scans = max(most_scans, streams.num_scans)
    assert 1 < most_scans <= 4


def test_even_streams_share_one_scan(tmp_path: Path) -> None:
    documents = make_documents(100)
    streams = make_streams(source(write_jsonl(tmp_path, documents)), 8, window_bytes=MEGABYTE)
    for i in range(400):
        streams.next(i * 3 % 8)
        assert streams.num_scans == 1


def test_scans_meet_again(tmp_path: Path) -> None:
    """A stream that ran ahead and waits is caught up with, and one scan serves all again."""
    documents = make_documents(300)
    streams = make_streams(source(write_jsonl(tmp_path, documents)), 2, window_bytes=1500)
    for _ in range(60):
        streams.next(0)
    streams.next(1)
    assert streams.num_scans == 2
    for _ in range(62):
        streams.next(1)
    streams.next(0)
    assert streams.num_scans == 1


def test_starts_far_apart_get_scans_of_their_own(tmp_path: Path) -> None:
    """Resuming reads neither from the start nor through all that lies between."""
    documents = make_documents(300)
    section = source(write_jsonl(tmp_path, documents))
    first = make_streams(section, 4, window_bytes=3000)
    starts = {}
    for stream, turns in ((0, 2), (1, 3), (2, 50), (3, 51)):
        for _ in range(turns):
            starts[stream], _ = first.next(stream)
    resumed = make_streams(section, 4, window_bytes=3000, starts=starts)
    assert resumed.num_scans == 2
    for stream, turns in ((3, 51), (0, 2), (2, 50), (1, 3)):
        for turn in range(turns - 1, turns + 40):
            assert resumed.next(stream)[1] == expected_document(documents, 4, stream, turn)


def test_documents_of_others_are_not_parsed(tmp_path: Path) -> None:
    """Rank 1's broken line does not concern rank 0."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n{"text": cut\n')
    config = make_config(source(path), num_streams=2, global_batch_size=2)
    assert len(list(islice(build_train_loader(config, 0, 2), 5))) == 5
    with pytest.raises(ValueError, match="line 2: broken JSON"):
        next(build_train_loader(config, 1, 2))


def peak_bytes(path: Path, num_tokens: int) -> int:
    config = make_config(source(path), seq_len=4096, num_streams=4)
    loader = build_train_loader(config, 0, 1)
    tracemalloc.start()
    for _ in islice(loader, num_tokens // (8 * 4096)):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_peak_does_not_grow_with_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five times the text, read to its end, in the same heap."""
    monkeypatch.setattr("titan_moe.data.build.WINDOW_BYTES", MEGABYTE // 4)
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    write_megabytes(small, 8 * MEGABYTE)
    write_megabytes(large, 40 * MEGABYTE)
    peaks = [peak_bytes(path, path.stat().st_size) for path in (small, large)]
    assert peaks[1] < peaks[0] + MEGABYTE, peaks


def test_long_and_short_documents(tmp_path: Path) -> None:
    """Where a stream's documents are a hundred times longer, tokens are still the contract's."""
    documents = [
        text * (100 if i % 4 == 0 else 1) for i, text in enumerate(make_documents(80, longest=6))
    ]
    config = make_config(source(write_jsonl(tmp_path, documents)), num_streams=4, seq_len=32)
    settings = naive.Settings(num_streams=4, seq_len=32)
    expected = naive.sequences([naive.Corpus(documents)], settings, 8 * 40)
    loader = build_train_loader(config, 0, 1)
    actual = [row for batch in islice(loader, 40) for row in batch["tokens"].tolist()]
    assert actual == [row["tokens"] for _, row in expected]

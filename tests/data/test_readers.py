"""What readers refuse, and with which words."""

import gzip
import json
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.corpora import (
    WRITERS,
    make_config,
    make_documents,
    source,
    write_hub,
    write_jsonl,
    write_parquet,
)
from titan_moe.data import build_train_loader
from titan_moe.data.readers import hub, open_reader

GOOD = b'{"text": "good"}\n'


def read_all(path: Path | str, **keys: object) -> list[str]:
    return [d.read() for d in open_reader(source(path, **keys)).documents(None)]


@pytest.mark.parametrize("kind", WRITERS)
def test_every_cursor_leads_to_its_document(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "SNAPSHOT_ROWS", 4)
    documents = make_documents(23)
    reader = open_reader(source(WRITERS[kind](tmp_path, documents)))
    everything = list(reader.documents(None))
    assert [d.read() for d in everything] == documents
    before = [reader.bytes_before(d.cursor) for d in everything]
    assert before == sorted(before)
    assert before[-1] <= reader.size_bytes
    for i, document in enumerate(everything):
        cursor = json.loads(json.dumps(document.cursor))
        rest = list(reader.documents(cursor))
        assert [d.read() for d in rest] == documents[i:]
        assert rest[0].cursor == document.cursor or kind == "hub"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "a.jsonl is empty"),
        ("a.txt", b"", "a.txt is empty"),
        ("a.jsonl", GOOD + b"\n" + b'{"text": "cut\n', "a.jsonl, line 3: broken JSON: .*column"),
        ("a.jsonl", GOOD + b'{"text": "\xff"}\n', "a.jsonl, line 2: broken UTF-8: invalid start"),
        ("a.txt", b"one\ntwo\xff", "a.txt, line 2: broken UTF-8: invalid start byte"),
        (
            "a.jsonl",
            b'{"id": 1, "body": "b"}\n',
            "a.jsonl, line 1: no field 'text' .* 'id', 'body'",
        ),
        ("a.jsonl", GOOD + b'{"text": 5}\n', "a.jsonl, line 2: field 'text' is int, not a string"),
        ("a.jsonl", b'{"text": null}\n', "a.jsonl, line 1: field 'text' is null"),
        ("a.json", b'[{"text": "b"}]\n', "a.json, line 1: expected an object with fields.* list"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl, line 1: .* half of a surrogate pair"),
        ("a.jsonl", GOOD + b'{"n": ' + b"9" * 4301 + b"}", "a.jsonl, line 2: JSON beyond"),
        ("a.jsonl", GOOD + b"[" * 100_000, "a.jsonl, line 2: JSON beyond"),
        ("a.jsonl.gz", gzip.compress(GOOD * 99)[:-9], "a.jsonl.gz: cannot be decompressed"),
        ("a.jsonl.zst", b"not zstd at all", "a.jsonl.zst: cannot be decompressed"),
        ("a.parquet", b"PAR1 no", "a.parquet: cannot be read as parquet"),
        ("a.arrow", b"\0" * 99, "a.arrow: cannot be read as arrow"),
        ("a.csv", b"text\nb\n", "a.csv names no known format; set format"),
        ("a.txt.gz", b"text\nb\n", "a.txt.gz names no known format; set format"),
    ],
)
def test_broken_files(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_all(tmp_path / name)


def test_a_line_is_named_after_seeking(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD * 3 + b'{"body": ""}\n')
    reader = open_reader(source(path))
    third = list(reader.documents(None))[2]
    with pytest.raises(ValueError, match="line 4: no field"):
        [d.read() for d in reader.documents(third.cursor)]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"body": ["a"], "id": [1]},
            r"no field 'text' \(text_field\); the fields are 'body', 'id'",
        ),
        ({"text": [1, 2]}, "field 'text' is int64, not a string"),
        ({"text": ["a", None]}, "row 2: field 'text' is null, not a string"),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_broken_columns(kind: str, columns: dict, message: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    table = pa.table(columns)
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as sink:
            sink.write_table(table)
    with pytest.raises(ValueError, match=f"a.{kind}.*{message}"):
        read_all(path)


def test_paths(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path / "none", "./owner/name", "wikitext"):
        with pytest.raises(
            ValueError, match=r"source 'corpus': no file or folder .*format = 'hub'"
        ):
            open_reader(source(path))
    with pytest.raises(ValueError, match="no files in folder"):
        open_reader(source(tmp_path))
    with pytest.raises(ValueError, match="no 'builtin:other'; there is builtin:python-stdlib"):
        open_reader(source("builtin:other"))
    assert open_reader(source("owner/name")).format == "hub"
    write_jsonl(tmp_path, ["a"])
    with pytest.raises(ValueError, match="no parquet files in folder"):
        open_reader(source(tmp_path, format="parquet"))


def test_folders_of_one_format_only(tmp_path: Path) -> None:
    write_jsonl(tmp_path, ["a"])
    write_parquet(tmp_path, make_documents(9))
    with pytest.raises(ValueError, match=r"mixes formats: jsonl \(corpus.jsonl\), parquet \(parq"):
        open_reader(source(tmp_path))
    assert read_all(tmp_path, format="jsonl") == ["a"]
    assert read_all(tmp_path, format="parquet") == make_documents(9)
    (tmp_path / "parquet" / "_SUCCESS").touch()
    (tmp_path / "parquet" / ".a.crc").touch()
    assert len(read_all(tmp_path / "parquet")) == 9


def test_linked_folders_are_read(tmp_path: Path) -> None:
    for name in ("a", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.txt").write_text(name)
    (tmp_path / "a" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "a" / ".hidden").symlink_to(tmp_path / "nowhere")
    assert read_all(tmp_path / "a") == ["a", "elsewhere"]


@pytest.mark.parametrize("kind", ["jsonl-folder", "hub"])
@pytest.mark.parametrize(
    ("target", "message"),
    [("nowhere", "link is a broken link: .*nowhere"), (".", "back to a folder|leaves out linked")],
)
def test_links_that_give_nothing(kind: str, target: str, message: str, tmp_path: Path) -> None:
    path = WRITERS[kind](tmp_path, make_documents(9))
    (path / "link").symlink_to(target)
    with pytest.raises(ValueError, match=message):
        open_reader(source(path))


def test_format_overrides_the_ending(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(GOOD)
    assert read_all(tmp_path / "a.log", format="jsonl") == ["good"]
    assert read_all(tmp_path, format="text") == [GOOD.decode()]


def test_an_empty_file_in_a_folder_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path, ["a"])
    (tmp_path / "z.jsonl").touch()
    with pytest.raises(ValueError, match=r"z.jsonl is empty"):
        open_reader(source(tmp_path))


def test_hub_folders(tmp_path: Path) -> None:
    path = write_hub(tmp_path, make_documents(9))
    for keys, message in (
        ({"split": "test"}, r"hub \(subset None, split test\): .*test"),
        ({"subset": "other"}, r"hub \(subset other, split train\): .*other"),
        ({"text_field": "body"}, r"hub \(train\): no field 'body' .* 'id', 'text'"),
    ):
        with pytest.raises(ValueError, match=message):
            read_all(path, **keys)
    (tmp_path / "bare" / "data").mkdir(parents=True)
    (path / "shards" / "train-0.parquet").rename(tmp_path / "bare/data/train-0.parquet")
    reader = open_reader(source(tmp_path / "bare"))
    assert reader.format == "hub"
    assert len(list(reader.documents(None))) == 1


def test_hub_rows_are_not_split_again_by_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` deals shards to loader processes by itself; here streams are dealt, not shards."""
    documents = make_documents(23)
    reader = open_reader(source(write_hub(tmp_path, documents)))
    worker = SimpleNamespace(id=1, num_workers=2)
    monkeypatch.setattr("torch.utils.data.get_worker_info", lambda: worker)
    assert [document.read() for document in reader.documents(None)] == documents


def test_no_training_document(tmp_path: Path) -> None:
    (tmp_path / "blank.jsonl").write_bytes(b"\n\n")
    with pytest.raises(ValueError, match="source 'corpus' has no training document: empty"):
        next(build_train_loader(make_config(source(tmp_path / "blank.jsonl")), 0, 1))
    (tmp_path / "blank.jsonl").write_bytes(GOOD * 3)
    config = make_config(source(tmp_path / "blank.jsonl", holdout_every=1))
    with pytest.raises(ValueError, match=r"all 3 are held out \(holdout_every = 1\)"):
        next(build_train_loader(config, 0, 1))


@pytest.mark.parametrize("documents", [[""], ["", "", "a", ""]])
def test_streams_of_empty_documents_end(documents: list[str], tmp_path: Path) -> None:
    """Four documents on four streams: three of them would never get a token."""
    path = write_jsonl(tmp_path, documents)
    config = make_config(source(path), num_streams=4, add_bos=False, add_eos=False)
    with pytest.raises(ValueError, match="source 'corpus', stream 0: only empty documents in 4"):
        next(build_train_loader(config, 0, 1))
    config = make_config(source(path), num_streams=4, add_bos=False, add_eos=True)
    assert (next(build_train_loader(config, 0, 1))["tokens"] == 257).any()


def test_names_are_unique(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, ["a"])
    with pytest.raises(ValueError, match="two are named 'corpus'"):
        build_train_loader(make_config(source(path), source(path)), 0, 1)


def test_standard_library() -> None:
    reader = open_reader(source("builtin:python-stdlib"))
    root = Path(sysconfig.get_path("stdlib")).resolve()
    names = [Path(name).relative_to(root).as_posix() for name in reader.origins()]
    assert "argparse.py" in names
    assert "json/decoder.py" in names
    assert names != sorted(names)
    assert not [name for name in names if "-packages" in name]
    assert len(names) == len(set(names)) > 500
    texts = [document.read() for document in reader.documents(None)]
    assert (root / "argparse.py").read_bytes().decode() in texts

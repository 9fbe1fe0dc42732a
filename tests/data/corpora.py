"""Small corpora in every format, and configs that read them."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from titan_moe.config.model import ModelConfig
from titan_moe.config.sections import (
    Data,
    DataLoader,
    Job,
    Optimizer,
    RunConfig,
    Source,
    Training,
    Validation,
    ValidationSet,
)

WORDS = ["ein", "zwei", "naïve", "Ωmega", "四", "fünf\nsix", "seven\teight", "\\u00e9", '"so"']


def make_documents(count: int, seed: int = 0, longest: int = 30) -> list[str]:
    """Distinct texts of 1 to `longest` words, with line ends, quotes and non-ASCII in them."""
    rng = random.Random(seed)
    return [
        f"{seed}/{i}: " + " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))
        for i in range(count)
    ]


def lines(documents: list[str]) -> bytes:
    rows = [json.dumps({"id": i, "text": text}) for i, text in enumerate(documents)]
    return "".join(row + "\n" for row in rows).encode()


def thirds(documents: list[str]) -> list[list[str]]:
    """Three pieces of unequal length."""
    a, b = len(documents) // 5, len(documents) // 2
    return [documents[:a], documents[a:b], documents[b:]]


def write_jsonl(folder: Path, documents: list[str]) -> Path:
    path = folder / "corpus.jsonl"
    path.write_bytes(lines(documents))
    return path


def write_jsonl_folder(folder: Path, documents: list[str]) -> Path:
    target = folder / "jsonl"
    (target / "b").mkdir(parents=True)
    a, b, c = (lines(piece) for piece in thirds(documents))
    (target / "a.jsonl").write_bytes(a)
    (target / "b" / "b.jsonl.gz").write_bytes(gzip.compress(b))
    # Two frames, a blank line, and no line end at the end.
    half = c.index(b"\n") + 1
    frames = [c[:half], b"\n" + c[half:].rstrip(b"\n")]
    compressor = zstandard.ZstdCompressor()
    (target / "c.jsonl.zst").write_bytes(b"".join(map(compressor.compress, frames)))
    return target


def _table(documents: list[str]) -> pa.Table:
    return pa.table({"id": list(range(len(documents))), "text": documents})


def write_parquet(folder: Path, documents: list[str]) -> Path:
    target = folder / "parquet"
    target.mkdir()
    for name, piece in zip("abc", thirds(documents), strict=True):
        pq.write_table(_table(piece), target / f"{name}.parquet", row_group_size=5)
    return target


def write_arrow(folder: Path, documents: list[str]) -> Path:
    """An IPC stream as `datasets` caches it, and an IPC file, in small batches."""
    target = folder / "arrow"
    target.mkdir()
    a, b, c = map(_table, thirds(documents))
    for name, table, new in (
        ("a", a, pa.ipc.new_stream),
        ("b", b, pa.ipc.new_file),
        ("c", c, pa.ipc.new_stream),
    ):
        with new(str(target / f"{name}.arrow"), table.schema) as sink:
            sink.write_table(table, max_chunksize=4)
    (target / "state.json").write_text("{}")
    return target


def write_text(folder: Path, documents: list[str]) -> Path:
    target = folder / "texts"
    for i, document in enumerate(documents):
        file = target / f"{i // 10:03d}" / f"{i:04d}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(document.encode())
    return target


def write_hub(folder: Path, documents: list[str]) -> Path:
    """Laid out like a repository of the hub, with a card that names a configuration."""
    target = folder / "hub"
    (target / "shards").mkdir(parents=True)
    for i, piece in enumerate(thirds(documents)):
        pq.write_table(_table(piece), target / "shards" / f"train-{i}.parquet", row_group_size=5)
    (target / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - split: train\n    path: shards/train-*.parquet\n---\n# A data set\n"
    )
    return target


WRITERS: dict[str, Callable[[Path, list[str]], Path]] = {
    "jsonl": write_jsonl,
    "jsonl-folder": write_jsonl_folder,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "text": write_text,
    "hub": write_hub,
}


def source(path: Path | str, name: str = "corpus", **keys: object) -> Source:
    return Source(name=name, path=str(path), **keys)


def make_config(
    *sources: Source,
    num_streams: int = 8,
    seq_len: int = 16,
    global_batch_size: int = 8,
    add_bos: bool = True,
    add_eos: bool = True,
    num_workers: int = 0,
    document_mask: bool = True,
    loss_across_documents: bool = False,
    vocab_size: int = 259,
    sets: list[ValidationSet] | None = None,
    balance_group_size: int | None = None,
    **data_keys: object,
) -> RunConfig:
    return RunConfig(
        job=Job(name="test"),
        model=ModelConfig(
            recipe="none",
            vocab_size=vocab_size,
            hidden_size=8,
            num_layers=1,
            num_heads=1,
            intermediate_size=8,
            moe_intermediate_size=8,
            num_experts=1,
            top_k=1,
            max_seq_len=seq_len,
            rope_theta=1e4,
            norm_eps=1e-6,
            initializer_range=0.02,
            balance_loss_weight=0.1,
            balance_loss_scope="sequence" if balance_group_size is None else "group",
            balance_group_size=balance_group_size,
        ),
        training=Training(
            local_batch_size=2,
            global_batch_size=global_batch_size,
            seq_len=seq_len,
            steps=1,
            document_mask=document_mask,
            loss_across_documents=loss_across_documents,
            dataloader=DataLoader(num_workers=num_workers),
        ),
        optimizer=Optimizer(lr=1e-3),
        data=Data(
            add_bos=add_bos,
            add_eos=add_eos,
            num_streams=num_streams,
            sources=list(sources),
            **data_keys,
        ),
        validation=Validation(enable=sets is not None, sets=sets or []),
    )

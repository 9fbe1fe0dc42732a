"""A run that stops at any step goes on with the tokens it would have had, on any layout."""

import copy
import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.data.corpora import WRITERS, make_config, make_documents, source, write_jsonl
from titan_moe.config.sections import RunConfig
from titan_moe.data import build_train_loader, merge_states
from titan_moe.data.readers import hub

State = dict[str, Any]


def read(
    config: RunConfig, dp_degree: int, steps: int, state: State | None = None
) -> tuple[list[Tensor], list[State]]:
    """All ranks' batches put together, [F, B, S] per step in a fixed order, and merged states."""
    loaders = [build_train_loader(config, rank, dp_degree, state) for rank in range(dp_degree)]
    batches, states = [], []
    for _ in range(steps):
        parts = [torch.stack(list(next(loader).values())) for loader in loaders]
        batch = torch.cat(parts, dim=1)
        # Ranks hold different rows, so compare rows as a set: sorted by content.
        order = sorted(range(batch.shape[1]), key=lambda i: batch[:, i].tolist())
        batches.append(batch[:, order])
        states.append(json.loads(json.dumps(merge_states([loader.state() for loader in loaders]))))
    for loader in loaders:
        loader.close()
    return batches, states


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for k, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, b), f"step {k} differs"


@pytest.mark.parametrize("kind", WRITERS)
def test_every_boundary(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of documents, at the end of a file, and several passes on."""
    monkeypatch.setattr(hub, "SNAPSHOT_ROWS", 4)
    documents = make_documents(23, longest=8)
    documents[5] = ""
    config = make_config(source(WRITERS[kind](tmp_path, documents), holdout_every=6))
    steps = 16
    unbroken, states = read(config, 1, steps)
    assert states[-1]["streams"]["corpus"]["0"]["epoch"] >= 2, "too short to pass over the data"
    for k in range(steps - 1):
        assert_same(read(config, 2, steps - k - 1, states[k])[0], unbroken[k + 1 :])


def mixture(folder: Path, **keys: Any) -> RunConfig:
    sources = []
    for i, (count, weight) in enumerate([(20, 0.5), (3, 0.2), (40, 0.3)]):
        (folder / str(i)).mkdir(exist_ok=True)
        path = write_jsonl(folder / str(i), make_documents(count, seed=i, longest=12))
        sources.append(source(path, name=f"corpus {i}", weight=weight, holdout_every=7 * (i % 2)))
    return make_config(*sources, **keys)


def test_layouts_change_neither_tokens_nor_state(tmp_path: Path) -> None:
    config = mixture(tmp_path)
    batches, states = read(config, 1, 9)
    for dp_degree in (2, 4, 8):
        other_batches, other_states = read(config, dp_degree, 9)
        assert_same(other_batches, batches)
        assert other_states == states
    for k in range(0, 8, 3):
        for dp_degree in (1, 4):
            assert_same(read(config, dp_degree, 8 - k, states[k])[0], batches[k + 1 :])


def test_global_batch_size_may_change(tmp_path: Path) -> None:
    small, large = mixture(tmp_path), mixture(tmp_path, global_batch_size=16)
    one_loader = build_train_loader(small, 0, 1)
    expected = [next(one_loader)["tokens"] for _ in range(8)]
    _, states = read(small, 2, 2)
    resumed = build_train_loader(large, 0, 1, states[1])
    assert torch.equal(
        torch.cat([next(resumed)["tokens"] for _ in range(3)]), torch.cat(expected[2:])
    )


@dataclass
class WorkerInfo:
    id: int
    num_workers: int


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("dp_degree", [1, 2])
def test_workers_share_a_rank_s_streams(
    num_workers: int, dp_degree: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Split by rank, then by worker: disjoint, complete, and every worker has its part."""
    shard = build_train_loader(mixture(tmp_path, num_streams=12), 0, dp_degree)._shard
    alone = list(islice(shard, 6))
    shares = []
    for worker in range(num_workers):
        info = WorkerInfo(worker, num_workers)
        monkeypatch.setattr("titan_moe.data.shard.get_worker_info", lambda info=info: info)
        shares.append(list(islice(shard, 6)))
    for k, whole in enumerate(alone):
        numbers = [number for share in shares for number in share[k].numbers]
        assert sorted(numbers) == whole.numbers
        rows = torch.cat([share[k].rows for share in shares])[torch.tensor(numbers).argsort()]
        assert torch.equal(rows, whole.rows)
        assert {key: r for share in shares for key, r in share[k].records.items()} == whole.records
    counts = [sum(len(item.numbers) for item in share) for share in shares]
    assert min(counts) == max(counts)


def test_worker_processes(tmp_path: Path) -> None:
    """Two of them serve the same batches with the same states, whatever they prepared ahead, and
    continue from a state that none wrote."""
    config, threaded = mixture(tmp_path), mixture(tmp_path, num_workers=2)
    plain = build_train_loader(config, 1, 2)
    with_workers = build_train_loader(threaded, 1, 2)
    states = []
    for _ in range(6):
        batch, other = next(plain), next(with_workers)
        assert all(torch.equal(batch[key], other[key]) for key in batch)
        assert with_workers.state() == plain.state()
        states.append(copy.deepcopy(with_workers.state()))
    with_workers.close()
    # Closing forgets what was prepared ahead, and going on starts where the last batch ended.
    other_rank = build_train_loader(config, 0, 2)
    state = merge_states([list(_states(other_rank, 3))[-1], states[2]])
    resumed = build_train_loader(threaded, 1, 2, state)
    again = build_train_loader(config, 1, 2, state)
    for _ in range(4):
        batch, other = next(again), next(resumed)
        assert all(torch.equal(batch[key], other[key]) for key in batch)
    resumed.close()


def _states(loader: Any, steps: int) -> Any:
    return (loader.state() for _ in islice(loader, steps))


def test_closed_loader_goes_on(tmp_path: Path) -> None:
    config = mixture(tmp_path)
    expected = [batch["tokens"] for batch in islice(build_train_loader(config, 0, 1), 6)]
    loader = build_train_loader(config, 0, 1)
    actual = []
    for _ in range(3):
        actual += [batch["tokens"] for batch in islice(loader, 2)]
        loader.close()
    assert_same(actual, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_streams": 16}, "num_streams is 16 now, but 8 in the checkpoint"),
        ({"seq_len": 32}, "seq_len is 32 now, but 16 in the checkpoint"),
        ({"add_bos": False}, "bos is None now, but 256 in the checkpoint"),
        ({"add_eos": False}, "eos is None now, but 257 in the checkpoint"),
    ],
)
def test_refuses_another_recipe(change: State, message: str, tmp_path: Path) -> None:
    _, states = read(mixture(tmp_path), 1, 1)
    with pytest.raises(ValueError, match=message):
        build_train_loader(mixture(tmp_path, **change), 0, 1, states[0])


def test_refuses_other_sources(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, make_documents(9))
    _, states = read(make_config(source(path)), 1, 1)
    for other, message in (
        (source(path, name="other"), r"data.sources are \['other'\] now, but \['corpus'\]"),
        (source(path, weight=2.0), "data.sources 'corpus': weight is 2.0 now, but 1.0"),
        (source(path, holdout_every=4), "data.sources 'corpus': holdout_every is 4 now, but 0"),
        (source(path, text_field="id"), "data.sources 'corpus': text_field is id now, but text"),
    ):
        with pytest.raises(ValueError, match=message):
            build_train_loader(make_config(other), 0, 1, states[0])


def test_refuses_changed_data(tmp_path: Path) -> None:
    config = make_config(source(write_jsonl(tmp_path, make_documents(9))))
    _, states = read(config, 1, 1)
    write_jsonl(tmp_path, make_documents(10))
    with pytest.raises(ValueError, match=r"data.sources 'corpus': files is .* in the checkpoint"):
        build_train_loader(config, 0, 1, states[0])


def test_refuses_a_rank_s_own_state_on_another_layout(tmp_path: Path) -> None:
    config = mixture(tmp_path)
    loader = build_train_loader(config, 1, 2)
    next(loader)
    with pytest.raises(ValueError, match="data state of rank 1 of 2 given to rank 0 of 4"):
        build_train_loader(config, 0, 4, loader.state())


def test_refuses_layouts_that_do_not_divide(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.num_streams = 8 is not a multiple of .* 3"):
        build_train_loader(mixture(tmp_path), 0, 3)
    with pytest.raises(ValueError, match=r"training.global_batch_size = 6 is not a multiple"):
        build_train_loader(mixture(tmp_path, global_batch_size=6), 0, 4)


def test_refuses_a_mixture_that_cannot_be_dealt(tmp_path: Path) -> None:
    """After an odd number of sequences no two ranks' shares of a step are equal."""
    config = mixture(tmp_path, global_batch_size=1)
    _, states = read(config, 1, 3)
    with pytest.raises(ValueError, match=r"stands at sequence 3 cannot be dealt .* degree of 2"):
        build_train_loader(mixture(tmp_path), 0, 2, states[2])


def test_state_is_small(tmp_path: Path) -> None:
    """Records do not grow with the data, the length of documents, or what was read ahead."""
    _, states = read(mixture(tmp_path), 2, 9)
    records = [r for streams in states[-1]["streams"].values() for r in streams.values()]
    assert len(records) == 3 * 8
    assert max(len(json.dumps(record)) for record in records) < 120

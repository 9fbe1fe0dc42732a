"""A save that does not finish leaves nothing that loads; the one before it still does."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tests.checkpoint.stand_in import Run, assert_same
from titan_moe.check.pool import Pool
from titan_moe.checkpoint import folder as disk

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MODES = ["disabled", "async"]


def failing(*args: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_background_save_writes_the_values_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = threading.Event()
    write_data = FileSystemWriter.write_data

    def write_when_changed(*args: Any) -> Any:
        assert changed.wait(timeout=30)
        return write_data(*args)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_when_changed)
    run = Run(tmp_path, async_mode="async").train(2)
    at_save = run.values()
    run.save()
    with torch.no_grad():
        for tensor in (*run.model.parameters(), *run.model.buffers()):
            tensor.zero_()
    run.train(2)
    assert disk.committed_steps(tmp_path) == []
    changed.set()
    run.checkpointer.finish()
    fresh = Run(tmp_path, seed=1)
    assert fresh.load()
    assert_same(fresh.values(), at_save)


def test_one_background_save_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing: list[int] = []
    write_data = FileSystemWriter.write_data

    def counted(*args: Any) -> Any:
        writing.append(threading.get_ident())
        try:
            assert len(writing) == 1
            return write_data(*args)
        finally:
            writing.pop()

    monkeypatch.setattr(FileSystemWriter, "write_data", counted)
    run = Run(tmp_path, async_mode="async")
    for _ in range(4):
        run.train().save()
    run.checkpointer.finish()
    assert disk.committed_steps(tmp_path) == [2, 3, 4]


def after_a_save(call: Callable[[Run], Any], run: Run) -> str:
    with pytest.raises(RuntimeError, match="No space left") as caught:
        call(run)
    return str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda run: run.checkpointer.finish(),
        lambda run: run.train().save(),
        lambda run: run.load(),
    ],
    ids=["finish", "save", "load"],
)
def test_a_failed_background_save_is_heard_of_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Run], Any]
) -> None:
    run = Run(tmp_path, async_mode="async").train()
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", failing)
        run.save()
        message = after_a_save(call, run)
    assert message == (
        f"saving {tmp_path}/step-1 failed: rank 0: OSError(28, 'No space left on device')"
    )
    assert disk.committed_steps(tmp_path) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("where", "name"),
    [(FileSystemWriter, "write_data"), (FileSystemWriter, "finish"), (disk, "commit")],
)
def test_killed_before_the_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, where: Any, name: str
) -> None:
    run = Run(tmp_path, async_mode=mode).train().save()
    at_first = run.values()
    run.checkpointer.finish()
    with monkeypatch.context() as patch:
        patch.setattr(where, name, failing)
        with pytest.raises(RuntimeError, match="No space left"):
            run.train().save().checkpointer.finish()
    assert (tmp_path / "step-2").is_dir()

    again = Run(tmp_path, seed=1)
    assert again.load() == {"schema_version": 1, "step": 1, "tokens_seen": 100}
    assert_same(again.values(), at_first)
    again.train().save()  # over the leftover
    newest = Run(tmp_path, seed=2)
    assert newest.load()
    assert newest.step == 2
    assert_same(newest.values(), again.values())


def save_and_fail_on(folder: Path, rank: int, mode: str) -> str:
    run = Run(folder, (4,), async_mode=mode).train().save()
    run.checkpointer.finish()
    write_data = FileSystemWriter.write_data

    def write(*args: Any) -> Any:
        write_data(*args)
        return failing() if torch.distributed.get_rank() == rank else write_data(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", write)
        with pytest.raises(RuntimeError) as caught:
            run.train().save().checkpointer.finish()
    return str(caught.value)


def load_save_load(folder: Path) -> list[str]:
    run = Run(folder, (2,), seed=1)
    state = run.load()
    assert state
    assert state["step"] == 1
    run.train().save()
    again = Run(folder, (2,), seed=2)
    again.load()
    assert_same(again.values(), run.values())
    return sorted(path.name for path in (folder / "step-2").iterdir())


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_of_four_fails_and_two_go_on(pool: Pool, tmp_path: Path, mode: str) -> None:
    failures = pool.run(4, save_and_fail_on, tmp_path, 2, mode)
    message = "step-2 failed: rank 2: OSError(28, 'No space left on device')"
    assert all(failure.endswith(message) for failure in failures)
    assert {"__0_0.distcp", "__1_0.distcp", "__3_0.distcp"} <= {
        path.name for path in (tmp_path / "step-2").iterdir()
    }
    assert disk.committed_steps(tmp_path) == [1]
    for files in pool.run(2, load_save_load, tmp_path):
        assert files == [
            ".metadata",
            "COMMITTED",
            "__0_0.distcp",
            "__1_0.distcp",
            "train_state.json",
        ]


def test_keep_latest_k(tmp_path: Path) -> None:
    (tmp_path / "step-1.backup").mkdir()
    run = Run(tmp_path, keep_latest_k=2)
    for _ in range(5):
        run.train().save()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-1.backup", "step-4", "step-5"]


def test_going_back_in_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, keep_latest_k=2)
    for _ in range(2):
        run.train().save()
    values = run.values()
    run.train()
    back = Run(tmp_path, seed=1, load_step=1, keep_latest_k=2)
    with caplog.at_level(logging.WARNING):
        back.load()
    assert "resuming from step 1, though step 2 is complete" in caplog.text
    with torch.no_grad():
        back.model.embedding.weight.zero_()
    back.train().save()
    assert disk.committed_steps(tmp_path) == [1, 2]
    newest = Run(tmp_path, seed=2)
    newest.load()
    assert_same(newest.values(), back.values())
    assert not torch.equal(newest.values()["embedding.weight"], values["embedding.weight"])


def test_a_step_on_disk_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(tmp_path).train(3).save().save()
    run = Run(tmp_path)
    run.load()
    monkeypatch.setattr(FileSystemWriter, "write_data", failing)
    run.save()  # e.g. at the end of a run that had ended already
    assert disk.committed_steps(tmp_path) == [3]

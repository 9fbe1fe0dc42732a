"""What counts as a checkpoint on disk, and what is never touched."""

import json
from pathlib import Path

import pytest

from titan_moe.checkpoint import folder as disk


def committed(parent: Path, step: int) -> Path:
    path = disk.step_folder(parent, step)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"data")
    disk.write_durably(path / disk.TRAIN_STATE, json.dumps({"step": step}))
    disk.commit(path, step)
    return path


def lookalikes(parent: Path) -> list[Path]:
    """Folders that bear a marker and yet are none of ours, and one of ours that is not complete."""
    foreign = ["step-100.backup", "step-x", "step-007", "step-", "xstep-5", "step-5 ", "Step-5"]
    for name in foreign:
        (parent / name).mkdir(parents=True)
        (parent / name / disk.MARKER).write_text('{"schema_version": 1, "step": 5}')
    (parent / "step-900").mkdir()
    (parent / "step-901").write_text("a file")
    (parent / "step-902" / disk.MARKER).mkdir(parents=True)
    return sorted(path for path in parent.rglob("*"))


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    assert disk.committed_steps(tmp_path / "none") == []
    for step in (20, 3, 100, 0):
        committed(tmp_path, step)
    lookalikes(tmp_path)
    assert disk.committed_steps(tmp_path) == [0, 3, 20, 100]


def test_purge_keeps_the_newest_and_everything_foreign(tmp_path: Path) -> None:
    foreign = lookalikes(tmp_path)
    for step in (9, 10, 11, 100):
        committed(tmp_path, step)
    assert disk.purge(tmp_path, keep=0, last_step=100) == []
    assert disk.purge(tmp_path, keep=5, last_step=100) == []
    assert disk.purge(tmp_path, keep=2, last_step=100) == [9, 10]
    assert disk.committed_steps(tmp_path) == [11, 100]
    ours = [p for step in (11, 100) for p in disk.step_folder(tmp_path, step).rglob("*")]
    ours += [disk.step_folder(tmp_path, step) for step in (11, 100)]
    assert sorted(tmp_path.rglob("*")) == sorted(foreign + ours)


def test_a_run_that_went_back_leaves_its_later_steps_aside(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        committed(tmp_path, step)
    assert disk.purge(tmp_path, keep=1, last_step=20) == [10]
    assert disk.set_aside(tmp_path, 20) == [30, 40]
    assert disk.committed_steps(tmp_path) == [20]
    committed(tmp_path, 30)
    assert disk.set_aside(tmp_path, 20) == [30]
    for name in ("step-30.abandoned", "step-30.abandoned-2", "step-40.abandoned"):
        assert (tmp_path / name / disk.MARKER).is_file()


def test_of_a_linked_checkpoint_the_link_is_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        committed(tmp_path, step)
    elsewhere = tmp_path / "elsewhere"
    disk.step_folder(tmp_path, 1).rename(elsewhere)
    disk.step_folder(tmp_path, 1).symlink_to(elsewhere)
    assert disk.purge(tmp_path, keep=2, last_step=3) == [1]
    assert disk.committed_steps(tmp_path) == [2, 3]
    assert (elsewhere / disk.MARKER).is_file()


def test_a_killed_deletion_never_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        committed(tmp_path, step)

    def killed(path: Path) -> None:
        next(p for p in Path(path).iterdir() if p.name != disk.MARKER).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(disk.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            disk.purge(tmp_path, keep=2, last_step=3)
    assert disk.committed_steps(tmp_path) == [2, 3]
    assert len(list(tmp_path.iterdir())) == 3
    disk.purge(tmp_path, keep=2, last_step=3)  # the next one clears up
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]


def test_the_marker_is_written_after_all_else_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("write_durably", "sync_directory"):
        real = getattr(disk, name)

        def spy(path: Path, *args: str, real=real, name=name) -> None:  # type: ignore[no-untyped-def]
            calls.append(f"{name} {path.relative_to(tmp_path.parent)}")
            real(path, *args)

        monkeypatch.setattr(disk, name, spy)
    path = tmp_path / "step-5"
    path.mkdir()
    disk.commit(path, 5)
    root = tmp_path.name
    assert calls == [
        f"sync_directory {root}/step-5",
        f"write_durably {root}/step-5/COMMITTED",
        f"sync_directory {root}/step-5",
        f"sync_directory {root}",
    ]
    assert json.loads((path / disk.MARKER).read_text()) == {"schema_version": 1, "step": 5}


def test_markers_are_checked(tmp_path: Path) -> None:
    path = committed(tmp_path, 5)
    assert disk.check_committed(path) == 5
    marker = path / disk.MARKER
    for content, message in [
        ("", f"{marker}: damaged"),
        ("[1]", f"{marker}: damaged: not a JSON object"),
        ('{"step": 5}', f"{marker}: schema_version and step should be integers"),
        ('{"schema_version": 2, "step": 5}', f"{marker}: schema_version 2 is newer than 1"),
    ]:
        marker.write_text(content)
        with pytest.raises(ValueError, match="COMMITTED") as caught:
            disk.check_committed(path)
        assert str(caught.value).startswith(message)
    marker.unlink()
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        disk.check_committed(path)
    with pytest.raises(ValueError, match="step-6: no such checkpoint folder"):
        disk.check_committed(tmp_path / "step-6")


def test_train_state_is_checked(tmp_path: Path) -> None:
    path = committed(tmp_path, 5)
    assert disk.read_train_state(path) == {"step": 5}
    state = path / disk.TRAIN_STATE
    state.write_text('{"step": 4}')
    with pytest.raises(ValueError, match="step 4 is not 5"):
        disk.read_train_state(path)
    state.write_text('{"step": 5, "tok')
    with pytest.raises(ValueError, match=r"train_state\.json: damaged"):
        disk.read_train_state(path)
    state.unlink()
    with pytest.raises(ValueError, match=r"train_state\.json: missing"):
        disk.read_train_state(path)

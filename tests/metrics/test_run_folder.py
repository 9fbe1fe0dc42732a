"""A run folder is entered by its own run alone, and counts how often."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.metrics.configs import run_config
from titan_moe.metrics.run_folder import RunFolder


def prepared(parent: Path) -> RunFolder:
    """One that an attempt has trained in."""
    folder = RunFolder(parent, "tiny")
    folder.prepare(run_config())
    folder.record(run_config())
    folder.metrics_file.write_text('{"step": 1, "attempt": 1}\n')
    folder.release()
    return folder


def test_a_new_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "deep" / "er", "tiny")
    config = run_config(checkpoint={"folder": "ckpt"}, metrics={"save_tb_folder": "curves"})
    assert folder.prepare(config) == folder.attempt == 1
    assert folder.path == tmp_path / "deep" / "er" / "tiny"
    assert {path.name for path in folder.path.iterdir()} == {"ckpt", "logs"}
    folder.record(config)
    assert 'recipe = "recipes.tiny"' in folder.config_file.read_text()


def test_each_start_is_an_attempt(tmp_path: Path) -> None:
    assert [RunFolder(tmp_path, "tiny").prepare(run_config()) for _ in range(3)] == [1, 2, 3]


def test_attempts_survive_torn_lines_and_lost_files(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    starts = folder.logs / "attempts.jsonl"
    with starts.open("a") as file:
        file.write('{"attempt": 7, "started": "x"}\n{"attempt": 9, "st')
    assert RunFolder(tmp_path, "tiny").prepare(run_config()) == 8
    starts.unlink()
    folder.metrics_file.write_text('{"step": 1, "attempt": 8}\n{"step": 2, "att')
    assert RunFolder(tmp_path, "tiny").prepare(run_config()) == 9


def test_what_a_run_may_change(tmp_path: Path) -> None:
    prepared(tmp_path)
    changed = run_config(
        training={"steps": 40, "global_batch_size": 8, "local_batch_size": 1},
        metrics={"log_freq": 1},
        parallelism={"data_parallel_replicate_degree": 2},
        model={"balance_loss_weight": 0.5, "bias_update_rate": 0.0},
    )
    folder = RunFolder(tmp_path, "tiny")
    assert folder.prepare(changed) == 2
    folder.record(changed)
    assert "steps = 40" in (tmp_path / "tiny" / "config.toml").read_text()


@pytest.mark.parametrize(
    ("section", "key", "there", "here"),
    [
        ("model", "hidden_size", 4, 8),
        ("model", "num_kv_heads", 1, 2),
        ("model", "rope_theta", 10000.0, 500000.0),
        ("model", "recipe", "recipes.tiny", "recipes.other"),
        ("data", "tokenizer", "byte", "tok.json"),
        ("data", "num_streams", 4, 8),
        ("training", "seq_len", 8, 4),
        ("debug", "seed", 0, 1),
    ],
)
def test_another_run_is_refused(
    tmp_path: Path, section: str, key: str, there: object, here: object
) -> None:
    folder = prepared(tmp_path)
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="another model's run") as caught:
        RunFolder(tmp_path, "tiny").prepare(run_config(**{section: {key: here}}))
    assert str(caught.value) == (
        f"{folder.config_file}: this folder holds another model's run:\n"
        f"  {section}.{key}: {json.dumps(there)} there, {json.dumps(here)} here\n"
        "choose another job.name, or remove the folder"
    )
    after = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    assert after == before


def test_all_differences_are_named(tmp_path: Path) -> None:
    prepared(tmp_path)
    scaling: dict[str, Any] = {"type": "yarn", "factor": 2.0, "original_max_seq_len": 4}
    other = run_config(model={"hidden_size": 8, "rope_scaling": scaling}, debug={"seed": 3})
    with pytest.raises(ValueError, match="another model's run") as caught:
        RunFolder(tmp_path, "tiny").prepare(other)
    differing = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert [line.split(":")[0].strip() for line in differing] == [
        "debug.seed",
        "model.hidden_size",
        "model.rope_scaling",
    ]
    assert "model.rope_scaling: absent there" in str(caught.value)


def test_keys_that_came_later_have_their_defaults(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    text = folder.config_file.read_text()
    older = text.replace("num_kv_heads = 1\n", "").replace("seed = 0\n", "")
    assert len(older) < len(text)
    folder.config_file.write_text(older)
    assert RunFolder(tmp_path, "tiny").prepare(run_config()) == 2


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("hidden_size = 4", "hidden_width = 4", "hidden_size: Field required"),
        ("seq_len = 8", 'seq_len = "8"', "seq_len: Input should be a valid integer"),
        ("[model]", "[model", "TOMLDecodeError"),
    ],
)
def test_a_config_of_another_version(tmp_path: Path, old: str, new: str, reason: str) -> None:
    folder = prepared(tmp_path)
    folder.config_file.write_text(folder.config_file.read_text().replace(old, new))
    with pytest.raises(ValueError, match="cannot be read by this version") as caught:
        RunFolder(tmp_path, "tiny").prepare(run_config())
    assert str(folder.config_file) in str(caught.value)
    assert reason in str(caught.value)
    assert "choose another job.name" in str(caught.value)


def test_a_run_without_its_config_is_refused(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    folder.config_file.unlink()
    with pytest.raises(ValueError, match=r"holds a run without its config\.toml"):
        RunFolder(tmp_path, "tiny").prepare(run_config())


def test_an_attempt_that_never_trained_binds_nobody(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "tiny")
    folder.prepare(run_config())
    folder.record(run_config())
    folder.release()
    assert RunFolder(tmp_path, "tiny").prepare(run_config(model={"hidden_size": 8})) == 2


def test_one_process_at_a_time(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, "tiny")
    first.prepare(run_config())
    with pytest.raises(ValueError, match="another process trains in this folder"):
        RunFolder(tmp_path, "tiny").prepare(run_config())
    first.release()
    assert RunFolder(tmp_path, "tiny").prepare(run_config()) == 2


@pytest.mark.parametrize("section", [{"enable": False}, {"folder": "other"}])
def test_checkpoints_are_not_passed_over(tmp_path: Path, section: dict[str, Any]) -> None:
    folder = prepared(tmp_path)
    saved = folder.path / "checkpoint" / "step-1"
    saved.mkdir()
    RunFolder(tmp_path, "tiny").prepare(run_config(checkpoint=section))  # not complete: no loss
    (saved / "COMMITTED").touch()
    with pytest.raises(ValueError, match=r"holds checkpoints, in checkpoint/"):
        RunFolder(tmp_path, "tiny").prepare(run_config(checkpoint=section))
    assert folder.metrics_file.read_text() == '{"step": 1, "attempt": 1}\n'


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_text("")
    with pytest.raises(ValueError, match=r"tiny.*job\.dump_folder and job\.name"):
        RunFolder(tmp_path, "tiny").prepare(run_config())

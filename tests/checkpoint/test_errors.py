"""What a person is told when a checkpoint is not what they think. Nothing is ever made up."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint.stand_in import Block, Run, assert_same
from titan_moe.check.pool import Pool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(folder: Path, steps: int = 2) -> Run:
    run = Run(folder, keep_latest_k=0)
    for _ in range(steps):
        run.train().save()
    return run


def complaint(act: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        act()
    return str(caught.value)


def test_nothing_saved_yet(tmp_path: Path) -> None:
    run = Run(tmp_path / "none")
    before = run.values()
    assert run.load() is None
    assert_same(run.values(), before)


def test_load_step(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    run = Run(tmp_path, seed=1, load_step=2)
    assert run.load() == {"schema_version": 1, "step": 2, "tokens_seen": 200}
    (tmp_path / "step-7").mkdir()
    assert complaint(Run(tmp_path, load_step=7).load) == (
        f"checkpoint.load_step = 7: no complete checkpoint of that step in {tmp_path}; "
        "complete steps: 1, 2, 3"
    )
    assert complaint(Run(tmp_path / "none", load_step=0).load) == (
        f"checkpoint.load_step = 0: no complete checkpoint of that step in {tmp_path}/none; "
        "complete steps: none"
    )


def test_a_renamed_folder(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "step-2").rename(tmp_path / "step-20")
    assert complaint(Run(tmp_path).load) == f"{tmp_path}/step-20: holds step 2; rename it back"


def test_newer_schema(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "step-2" / "COMMITTED").write_text('{"schema_version": 2, "step": 2}')
    assert "schema_version 2 is newer than 1" in complaint(Run(tmp_path).load)


def change_model(change: Callable[[nn.Module], object]) -> Callable[[Path], str]:
    def load(folder: Path) -> str:
        run = Run(folder, seed=1)
        change(run.model)
        run.optimizer.param_groups.clear()
        run.optimizer.add_param_group({"params": list(run.model.parameters())})
        return complaint(run.load)

    return load


def test_another_model(tmp_path: Path) -> None:
    saved(tmp_path)
    start = f"{tmp_path}/step-2 holds another model: "

    more = change_model(lambda model: model.layers.update({"2": Block()}))(tmp_path)
    assert more.startswith(start + "not in the checkpoint: model.layers.2.experts, ")
    assert more.endswith(" and 6 more")

    fewer = change_model(lambda model: model.layers.pop("1"))(tmp_path)
    assert fewer.startswith(start + "not in the model: model.layers.1.experts, ")

    wider = change_model(lambda model: setattr(model, "embedding", nn.Embedding(13, 5)))(tmp_path)
    assert wider == (
        start + "of another shape or type: "
        "model.embedding.weight is float32[11, 5] there, float32[13, 5] here, "
        "optimizer.exp_avg.embedding.weight is float32[11, 5] there, float32[13, 5] here, "
        "optimizer.exp_avg_sq.embedding.weight is float32[11, 5] there, float32[13, 5] here"
    )

    other = change_model(lambda model: model.layers["0"].norm.bfloat16())(tmp_path)
    assert "model.layers.0.norm.weight is float32[5] there, bfloat16[5] here" in other


def test_a_refused_checkpoint_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path)
    run = Run(tmp_path, seed=1)
    run.model.register_buffer("extra", torch.zeros(1))
    before = run.model.state_dict()
    complaint(run.load)
    assert_same(run.model.state_dict(), before)


def load_with_another_layer(folder: Path) -> str:
    run = Run(folder, (2,), seed=1)
    if torch.distributed.get_rank() == 1:
        run.model.register_buffer("extra", torch.zeros(1))
    return complaint(run.load)


def test_all_ranks_hear_of_it(pool: Pool, tmp_path: Path) -> None:
    saved(tmp_path)
    expected = f"{tmp_path}/step-2 holds another model: not in the checkpoint: model.extra"
    assert pool.run(2, load_with_another_layer, tmp_path) == [expected] * 2


def load_what_is_not_there(folder: Path) -> str:
    return complaint(Run(folder, (2,), load_step=9).load)


def test_all_ranks_hear_of_a_missing_step(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, load_what_is_not_there, tmp_path)
    assert first == second
    assert "load_step = 9" in first


def test_damaged_files(tmp_path: Path) -> None:
    saved(tmp_path)
    step_2 = tmp_path / "step-2"
    (data,) = step_2.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:100])
    assert complaint(Run(tmp_path, seed=1).load).startswith(f"{step_2} is damaged: rank 0: ")
    (step_2 / ".metadata").write_bytes(b"\x80\x04nonsense")
    assert complaint(Run(tmp_path, seed=1).load).startswith(
        f"{step_2} is damaged: no readable metadata: "
    )
    (step_2 / ".metadata").unlink()
    assert "no readable metadata: FileNotFoundError" in complaint(Run(tmp_path, seed=1).load)


def test_initial_weights(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    elsewhere = shutil.copytree(tmp_path / "source" / "step-2", tmp_path / "kept-weights")
    run = Run(tmp_path / "new", seed=1)
    assert run.load() is None
    run.checkpointer.load_weights(elsewhere)
    assert_same(run.model.state_dict(), source.model.state_dict())
    assert not run.optimizer.state
    run.train().save()  # step 1 of a run of its own
    assert Run(tmp_path / "new").load() == {"schema_version": 1, "step": 1, "tokens_seen": 100}


def test_initial_weights_of_another_float_type(tmp_path: Path) -> None:
    source = saved(tmp_path)
    run = Run(tmp_path / "new", seed=1)
    run.model.embedding.bfloat16()
    run.checkpointer.load_weights(tmp_path / "step-2")
    expected = source.model.embedding.weight.detach().bfloat16()
    assert torch.equal(run.model.embedding.weight, expected)
    run.model.layers["0"].previous_counts = torch.zeros(3, dtype=torch.float32)
    assert "previous_counts is int64[3] there, float32[3] here" in complaint(
        lambda: run.checkpointer.load_weights(tmp_path / "step-2")
    )


def test_wrong_initial_path(tmp_path: Path) -> None:
    saved(tmp_path)
    run = Run(tmp_path / "new")
    for path, message in [
        (tmp_path / "nowhere", "nowhere: no such checkpoint folder"),
        (tmp_path, "not a complete checkpoint (no COMMITTED in it); name a step-N folder"),
        (tmp_path / "step-2" / "COMMITTED", "COMMITTED: no such checkpoint folder"),
    ]:
        assert message in complaint(lambda path=path: run.checkpointer.load_weights(path))

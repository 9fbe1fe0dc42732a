"""How an export ends: whole, of that checkpoint, with that run's tokenizer; or not at all."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from tokenizers import Tokenizer as Backend
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.data.test_tokenizer import write_tokenizer as write_json_tokenizer
from tests.hf.test_transformers import DEBUG, ROOT, model_of, tensors_in
from tests.train.runs import train_here, write_recipe
from titan_moe.check.pool import Pool
from titan_moe.cli.main import main
from titan_moe.config import load_config
from titan_moe.generate import generate, open_checkpoint, open_hf_folder
from titan_moe.hf import export as exporting
from titan_moe.hf.export import check_exportable, export, export_model
from titan_moe.hf.importing import save_weights

PROMPT = "ab abc  é"


def saved(folder: Path, **data: Any) -> Path:
    """A checkpoint with layers of multi-token prediction, as a run with such [data] leaves it."""
    config = load_config(DEBUG[0])
    keys = config.model.model_dump(exclude_none=True) | {
        "num_layers": 2,
        "num_mtp_layers": 2,
        "vocab_size": 400,
    }
    cfg = type(config.model).model_validate(keys)
    recipe_model = exporting.load_recipe(cfg.recipe).load_model_class()
    model = recipe_model(cfg, layers=range(2), has_embedding=True, has_head=True)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    section = config.data.model_copy(update=data)
    save_weights([model], folder, config.model_copy(update={"model": cfg, "data": section}))
    if section.tokenizer != "byte":
        digest = hashlib.sha256(Path(section.tokenizer).read_bytes()).hexdigest()[:32]
        state = json.loads((folder / "train_state.json").read_text())
        state["data"] = {"identity": {"tokenizer": f"sha256:{digest}"}}
        (folder / "train_state.json").write_text(json.dumps(state))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("saved") / "step-0")


def with_json_tokenizer(folder: Path, add_bos: bool) -> Path:
    """Its own post-processor adds both BOS and EOS, and it cuts and pads."""
    path = write_json_tokenizer(folder)
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return saved(folder / "step-0", tokenizer=str(path), add_bos=add_bos, **names)


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("kind", ["byte", "json"])
def test_a_prompt_has_the_same_ids_there_and_back(kind: str, add_bos: bool, tmp_path: Path) -> None:
    step = (
        saved(tmp_path / "step-0", add_bos=add_bos)
        if kind == "byte"
        else with_json_tokenizer(tmp_path, add_bos)
    )
    export(step, tmp_path / "x", dtype="float32")
    ours, back = open_checkpoint(step), open_hf_folder(tmp_path / "x", "recipes.deepseek_v3")
    expected = ours.tokenizer.encode(PROMPT)
    assert len(expected) > 3
    if add_bos:
        assert ours.tokenizer.bos_id is not None
        expected = [ours.tokenizer.bos_id, *expected]
    assert AutoTokenizer.from_pretrained(tmp_path / "x")(PROMPT).input_ids == expected
    assert Backend.from_file(str(tmp_path / "x/tokenizer.json")).encode(PROMPT).ids == expected
    made = list(generate(ours, PROMPT, tokens=8))
    assert list(generate(back, PROMPT, tokens=8)) == made
    assert back.tokenizer.decode(made) == ours.tokenizer.decode(made)


@pytest.mark.parametrize("config", DEBUG[1:], ids=lambda path: path.parent.name)
def test_every_familys_tokenizer_is_read_as_it_is(config: Path, tmp_path: Path) -> None:
    """Whatever class AutoTokenizer has for the model type."""
    run = load_config(config)
    model, recipe, cfg = model_of(config)
    export_model(model, recipe, cfg, tmp_path / "x")
    data = run.data.model_copy(update={"add_bos": True})
    ours = exporting.saved_tokenizer({"config": {"data": data.model_dump()}}, tmp_path)[1]
    exporting.write_tokenizer(data, ours, tmp_path / "x", max_length=64)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "x")
    assert theirs(PROMPT).input_ids == [256, *PROMPT.encode()]


def test_another_tokenizer_is_refused_and_a_moved_one_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = with_json_tokenizer(tmp_path, add_bos=True)
    file, moved = tmp_path / "tokenizer.json", tmp_path / "moved.json"
    shutil.copy(file, moved)
    file.write_text(moved.read_text() + " ")
    command = ["export", str(step), str(tmp_path / "x")]
    prompt = ["generate", str(step), "--prompt=ab", "--tokens=2"]
    for arguments in (command, prompt):
        assert main(arguments) == 2
        assert "was trained with sha256:" in capsys.readouterr().err
    file.unlink()
    for arguments in (command, prompt):
        assert main(arguments) == 2
        assert "where it is now by --tokenizer PATH" in capsys.readouterr().err
        assert main([*arguments, "--tokenizer", str(moved)]) == 0


def test_without_layers_of_prediction_ahead(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "x"
    assert main(["export", str(checkpoint), str(target), "--without-mtp", "--dtype=float32"]) == 0
    assert json.loads((target / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert not any(name.startswith("model.layers.2") for name in tensors_in(target))
    theirs, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info.values()), info

    # What transformers saves of a folder that has them lacks them, and says that it has them.
    export(checkpoint, tmp_path / "all", dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "all", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    assert config["num_nextn_predict_layers"] == 2
    made = [
        list(generate(open_hf_folder(tmp_path / name, "recipes.deepseek_v3"), PROMPT, tokens=4))
        for name in ("x", "all", "theirs")
    ]
    assert made[0] == made[1] == made[2]


def full(*args: Any, **kwargs: Any) -> None:
    raise SafetensorError("No space left on device")


def on_a_full_disk(step: Path, target: Path) -> str:
    """Rank 1 alone has no room."""
    whole = exporting.save_file
    exporting.save_file = full if dist.get_rank() == 1 else whole
    try:
        export(step, target, shard_bytes=40_000)
    except ValueError as error:
        return str(error)
    finally:
        exporting.save_file = whole
    return "exported"


def test_one_ranks_full_disk_is_told_by_all(pool: Pool, checkpoint: Path, tmp_path: Path) -> None:
    told = pool.run(2, on_a_full_disk, checkpoint, tmp_path / "x")
    for text in told:
        assert "model-00002-of" in text
        assert "cannot be written: No space left on device" in text
    assert list(tmp_path.iterdir()) == []


def test_a_failure_at_the_end_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(exporting, "write_tokenizer", fails)
    with pytest.raises(ValueError, match="No space left"):
        export(checkpoint, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_what_a_target_may_be(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    export(checkpoint, tmp_path / "link")
    assert (tmp_path / "empty/config.json").is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match="worked in or mounted"):
        export(checkpoint, ".")
    # Somebody else is at it; somebody was, and was killed.
    draft = tmp_path / ".x.partial"
    draft.mkdir()
    (draft / "half").touch()
    other = os.open(draft, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="another process is writing it"):
        export(checkpoint, tmp_path / "x")
    assert (draft / "half").is_file()
    os.close(other)
    export(checkpoint, tmp_path / "x")
    assert not (tmp_path / "x/half").exists()
    assert not draft.exists()


def test_a_checkpoint_without_its_table_of_contents(checkpoint: Path, tmp_path: Path) -> None:
    step = shutil.copytree(checkpoint, tmp_path / "step-0")
    (step / ".metadata").write_bytes(b"")
    with pytest.raises(ValueError, match=r"\.metadata: damaged"):
        export(step, tmp_path / "x")
    (step / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"no \.metadata in it"):
        export(step, tmp_path / "x")


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


HARM: list[tuple[str, Callable[[Path], Any]]] = [
    ("stale", lambda hf: os.utime(hf.parents[1] / "checkpoint/step-2/COMMITTED", (1, 1))),
    ("empty", emptied),
    ("partial", lambda hf: next(hf.glob("*.safetensors")).unlink()),
    ("strange", lambda hf: (hf / "model.safetensors.index.json").unlink()),
]


def test_the_export_at_the_end_is_of_the_last_checkpoint(pool: Pool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    ending = [
        "--training.steps=2",
        "--checkpoint.last_save_in_hf=true",
        "--validation.enable=false",
    ]
    pool.run(1, train_here, recipe, *ending)
    hf = tmp_path / "runs/run/hf/step-2"
    weights = tensors_in(hf)
    inode = hf.stat().st_ino
    pool.run(1, train_here, recipe, *ending)
    assert hf.stat().st_ino == inode  # relaunched: nothing to do
    for name, harm in HARM:
        harm(hf)
        inode = hf.stat().st_ino
        pool.run(1, train_here, recipe, *ending)
        assert hf.stat().st_ino != inode, name
        assert tensors_in(hf).keys() == weights.keys(), name
    assert len(list(hf.parent.glob("step-2.abandoned*"))) == 3  # all but the empty one


def test_what_config_json_cannot_say_is_told_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: Any, **kwargs: Any) -> None:
        assert list(tmp_path.iterdir()) == []
        raise ValueError("no words for it")

    monkeypatch.setattr(exporting, "config_json", refuses)
    with pytest.raises(ValueError, match="no words for it"):
        export(checkpoint, tmp_path / "x")
    _, recipe, cfg = model_of(DEBUG[0])
    with pytest.raises(ValueError, match="no words for it"):
        check_exportable(recipe, cfg)


def test_a_run_whose_end_could_not_be_exported() -> None:
    _, recipe, cfg = model_of(ROOT / "train_configs/qwen3_moe/debug.toml")
    check_exportable(recipe, cfg.model_copy(update={"bias_update_rate": 0.0}))
    rates = [0.0] * (cfg.num_layers - cfg.num_dense_layers)
    rates[-1] = 1e-3
    for rate in (1e-3, rates):
        with pytest.raises(
            ValueError, match=r"last_save_in_hf: model\.bias_update_rate = .* moves"
        ):
            check_exportable(recipe, cfg.model_copy(update={"bias_update_rate": rate}))
    _, recipe, cfg = model_of(DEBUG[0])  # which has a place for it
    check_exportable(recipe, cfg.model_copy(update={"bias_update_rate": 1e-3}))

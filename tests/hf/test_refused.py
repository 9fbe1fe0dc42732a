"""What may not go by in silence: names, shapes, sizes, files, and values that would be lost."""

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.hf.test_transformers import DEBUG, ROOT, model_of
from titan_moe.hf.config_json import check_config, config_json, model_keys
from titan_moe.hf.draft import refuse_taken
from titan_moe.hf.export import export, export_model
from titan_moe.hf.load import load_weights
from titan_moe.hf.names import spelled_out
from titan_moe.hf_table import HuggingFace, LeftOut, OursOnly, Weight
from titan_moe.recipe import Recipe

ONE = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "x"
    model, recipe, cfg = model_of(DEBUG[0])
    export_model(model, recipe, cfg, folder, dtype="bfloat16", shard_bytes=1_000_000)
    return folder


def file_with(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / str(index["weight_map"][name])


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = file_with(folder, ONE)
    tensors = load_file(path)
    before = set(tensors)
    change(tensors)
    save_file(tensors, path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name in before - tensors.keys():
        del index["weight_map"][name]
    index["weight_map"] |= dict.fromkeys(tensors, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def cut(folder: Path) -> None:
    path = file_with(folder, ONE)
    path.write_bytes(path.read_bytes()[:-100])


def key(name: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {name: value}))

    return change


BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: edit(f, lambda t: t.pop(ONE)), f"not in the folder: {ONE}"),
    (
        lambda f: edit(f, lambda t: t.update(strange=torch.zeros(1))),
        "in the folder, but in no row of recipes.deepseek_v3.hf.HF: strange",
    ),
    (
        lambda f: edit(f, lambda t: t.update({ONE: t[ONE].T.contiguous()})),
        rf"of another shape: {ONE} is \[128, 64\] there, \[64, 128\] by",
    ),
    (lambda f: file_with(f, ONE).unlink(), "names files that are not there: model-0000"),
    (cut, "cut short, or no safetensors file"),
    (lambda f: (f / "config.json").unlink(), "no config.json in it: not a Hugging Face folder"),
    (lambda f: (f / "model.safetensors.index.json").unlink(), "neither model.safetensors.index"),
    (key("num_hidden_layers", 9), r"model.num_layers = 8, but 9 \(num_hidden_layers\) there"),
    (key("attention_bias", True), "attention_bias = True: the recipe computes False"),
    (key("num_key_value_heads", 1), "num_key_value_heads = 1: the recipe computes 8"),
    (key("model_type", "llama"), "model_type = 'llama': the recipe is of 'deepseek_v3'"),
    (key("rope_scaling", {"type": "linear", "factor": 2}), "rope_scaling of type 'linear'"),
    (key("rope_theta", 5), "model.rope_theta = 10000.0, but 5 there"),
]


@pytest.mark.parametrize(("harm", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_folder_that_is_not_the_models(
    harm: Callable[[Path], Any], message: str, exported: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(exported, tmp_path / "x")
    harm(folder)
    model, recipe, cfg = model_of(DEBUG[0])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_weights([model], folder, recipe, cfg)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_one_file_without_an_index(exported: Path, tmp_path: Path) -> None:
    tensors = {k: v for f in exported.glob("*.safetensors") for k, v in load_file(f).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(exported / "config.json", tmp_path)
    model, recipe, cfg = model_of(DEBUG[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    load_weights([model], tmp_path, recipe, cfg)
    router = model.state_dict()["layers.1.moe.router.weight"]
    assert torch.equal(router, tensors["model.layers.1.mlp.gate.weight"])
    up = model.state_dict()["layers.1.moe.experts.up"][3]
    assert torch.equal(up, tensors[ONE].float().T)


def test_the_selection_bias_keeps_its_bits(exported: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = load_file(file_with(exported, name))[name]
    assert bias.dtype == torch.float32
    assert torch.equal(bias, torch.full_like(bias, 0.123456))


def test_what_is_left_out_is_told(
    exported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(exported, tmp_path / "x")
    edit(folder, lambda t: t.update({"model.layers.8.eh_proj.weight": torch.zeros(2)}))
    model, recipe, cfg = model_of(DEBUG[0])
    key("num_nextn_predict_layers", 1)(folder)
    with caplog.at_level(logging.INFO):
        load_weights([model], folder, recipe, cfg)
    assert "left out: 1 tensor, model.layers.{beyond}.*" in caplog.text


def with_rows(recipe: Recipe, change: Callable[[Any], Any]) -> HuggingFace:
    table = recipe.load_hf()
    rows = (change(row) for row in table.weights)
    return dataclasses.replace(table, weights=tuple(row for row in rows if row is not None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: None if "experts.up" in getattr(row, "ours", "") else row, "in no row of HF"),
        (
            lambda row: (
                dataclasses.replace(row, theirs="model.norm.weight")
                if isinstance(row, Weight) and row.ours == "head.output.weight"
                else row
            ),
            "rows of model.norm.weight want it",
        ),
        (
            lambda row: (
                dataclasses.replace(row, every=(0, 2))
                if isinstance(row, Weight) and row.ours == "head.output.weight"
                else row
            ),
            "of every 2 entries of lm_head.weight, rows write number 0",
        ),
    ],
)
def test_a_table_that_is_wrong(change: Callable[[Any], Any], message: str) -> None:
    model, recipe, cfg = model_of(DEBUG[0])
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        spelled_out(with_rows(recipe, change), cfg, shapes, "HF")


def test_wrappers_leave_no_trace_in_names(tmp_path: Path) -> None:
    model, recipe, cfg = model_of(DEBUG[0])
    export_model(model, recipe, cfg, tmp_path / "plain")
    model.layers["1"] = torch.compile(model.layers["1"], backend="eager")
    export_model(model, recipe, cfg, tmp_path / "compiled")
    plain, compiled = (
        json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
        for name in ("plain", "compiled")
    )
    assert plain == compiled
    assert not any("_orig_mod" in name for name in plain["weight_map"])


def test_values_that_would_be_lost(tmp_path: Path) -> None:
    model, recipe, cfg = model_of(ROOT / "train_configs/qwen3_moe/debug.toml")
    name = "layers.0.moe.router.selection_bias"
    model.state_dict()[name][2] = 1e-3
    with pytest.raises(ValueError, match=f"{name}: not zero in 1 place"):
        export_model(model, recipe, cfg, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []  # not half of one either


def test_nothing_is_overwritten(exported: Path, tmp_path: Path) -> None:
    model, recipe, cfg = model_of(DEBUG[0])
    with pytest.raises(ValueError, match="there is something already"):
        export_model(model, recipe, cfg, exported)
    with pytest.raises(ValueError, match="there is something already"):
        refuse_taken(exported)
    with pytest.raises(ValueError, match="no such checkpoint folder"):
        export(tmp_path / "nowhere", tmp_path / "y")


def test_styles_of_rotary_positions() -> None:
    """Published in the old style; transformers 5 writes the new one."""
    _, recipe, cfg = model_of(
        DEBUG[0],
        rope_scaling={
            "type": "yarn",
            "factor": 4.0,
            "original_max_seq_len": 256,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
    )
    table = recipe.load_hf()
    old = config_json(table, cfg, dtype="bfloat16", bos=None, eos=None)
    assert old["rope_scaling"]["original_max_position_embeddings"] == 256
    new = {k: v for k, v in old.items() if not k.startswith("rope_")}
    new["rope_parameters"] = old["rope_scaling"] | {"rope_theta": old["rope_theta"]}
    check_config(table, cfg, old, "old")
    check_config(table, cfg, new, "new")
    assert model_keys(table, new, "new") == model_keys(table, old, "old")
    new["rope_parameters"]["attention_factor"] = 2.0
    with pytest.raises(ValueError, match=r"rope_\w+\.attention_factor = 2\.0: not computed"):
        check_config(table, cfg, new, "new")


def test_rows_of_every_kind_are_told_apart() -> None:
    rows = (
        Weight("a.{layer}", "x.{layer}"),
        OursOnly("b"),
        LeftOut("x.{beyond}", "not wanted"),
    )
    table = HuggingFace("A", "a", rows, {})
    _, _, cfg = model_of(DEBUG[0], num_layers=2)
    names = spelled_out(table, cfg, {"a.0": (1,), "a.1": (1,), "b": (1,)}, "HF")
    names.check({"x.0": (1,), "x.1": (1,), "x.2": (5,), "x.11": (5,)}, "here", layers=12)
    with pytest.raises(ValueError, match=r"in no row of HF: x\.11"):
        names.check({"x.0": (1,), "x.1": (1,), "x.2": (5,), "x.11": (5,)}, "here", layers=11)
    with pytest.raises(ValueError, match="here: in the folder, but in no row of HF: y"):
        names.check({"x.0": (1,), "x.1": (1,), "y": (1,)}, "here", layers=2)

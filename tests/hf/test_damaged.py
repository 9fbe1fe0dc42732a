"""Folders that say two things at once, or what nobody can read: refused by file, key and name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.hf.test_refused import ONE, edit, file_with, key
from tests.hf.test_transformers import DEBUG, fresh, model_of
from titan_moe.config import load_config
from titan_moe.hf.export import export_model
from titan_moe.hf.load import load_weights

INDEX = "model.safetensors.index.json"
STALE = "model-stale.safetensors"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "x"
    model, recipe, cfg = model_of(DEBUG[0])
    export_model(model, recipe, cfg, folder, shard_bytes=1_000_000)
    return folder


def indexed(name: str, file: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][name] = file
        (folder / INDEX).write_text(json.dumps(index))

    return change


def twice(folder: Path) -> None:
    """A second one, of other numbers, in a file that the index names for others."""
    last = sorted(folder.glob("*.safetensors"))[-1]
    save_file(load_file(last) | {ONE: torch.full((64, 128), 7.0)}, last)


def unnamed(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][ONE]
    (folder / INDEX).write_text(json.dumps(index))


def quantised(value: Any) -> Callable[[Path], None]:
    return key("quantization_config", value)


def of_type(dtype: torch.dtype) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda t: t.update({ONE: t[ONE].to(dtype)}))


BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (twice, rf"{ONE}: in two files, model-0000\d-of-\d+.safetensors and"),
    (unnamed, rf"{ONE}: in model-0000\d-of-\d+.safetensors, but not in weight_map of"),
    (indexed(ONE, 3), rf"{INDEX}: weight_map.{ONE} = 3: not the name of a file"),
    (indexed(ONE, ["a"]), r"= \['a'\]: not the name of a file"),
    (indexed(ONE, "../x/model-00001.safetensors"), "x/model-00001.safetensors': not the name"),
    (of_type(torch.uint8), f"{ONE}: its numbers are U8, and nothing says how"),
    (of_type(torch.int64), f"{ONE}: its numbers are I64, and nothing says how"),
    (quantised("fp8"), "config.json: quantization_config = 'fp8': not a JSON object"),
    (quantised(["fp8"]), r"quantization_config = \['fp8'\]: not a JSON object"),
    (quantised({"quant_method": ["a"]}), r"quant_method = \['a'\]: only fp8 and mxfp4"),
    *(
        (
            quantised({"quant_method": "fp8", "weight_block_size": size}),
            r"quantization_config.weight_block_size = .*: expected two integers > 0",
        )
        for size in (128, [0, 0], [128], ["a", "b"])
    ),
    (
        lambda f: edit(f, lambda t: t.update({"model.layers.999.x": torch.zeros(2)})),
        "in no row of recipes.deepseek_v3.hf.HF: model.layers.999.x",
    ),
]


@pytest.mark.parametrize(("harm", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_refused_by_name(
    harm: Callable[[Path], Any], message: str, exported: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(exported, tmp_path / "x")
    harm(folder)
    model, recipe, cfg = model_of(DEBUG[0])
    with pytest.raises(ValueError, match=message):
        load_weights([model], folder, recipe, cfg)


@pytest.mark.parametrize("left_out", [torch.int64, torch.bool, torch.float8_e4m3fn])
def test_types_of_what_is_left_out_do_not_matter(
    left_out: torch.dtype, exported: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(exported, tmp_path / "x")
    key("num_nextn_predict_layers", 1)(folder)
    odd = torch.zeros(3).to(left_out)
    edit(folder, lambda t: t.update({"model.layers.8.eh_proj.weight": odd}))
    model, recipe, cfg = model_of(DEBUG[0])
    load_weights([model], folder, recipe, cfg)


def ahead() -> tuple[Any, Any, Any]:
    """A model with a layer of multi-token prediction."""
    cfg = load_config(DEBUG[0]).model
    keys = cfg.model_dump(exclude_none=True) | {"num_layers": 2, "num_mtp_layers": 1}
    cfg = type(cfg).model_validate(keys)
    return (*fresh(cfg), cfg)


@pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
def test_copies_hold_the_numbers_that_they_are_copies_of(copy: str, tmp_path: Path) -> None:
    model, recipe, cfg = ahead()
    export_model(model, recipe, cfg, tmp_path / "x")
    load_weights([model], tmp_path / "x", recipe, cfg)
    name = f"model.layers.2.{copy}.weight"
    path = file_with(tmp_path / "x", name)
    tensors: dict[str, Tensor] = load_file(path)
    tensors[name][-1] += 1
    save_file(tensors, path)
    with pytest.raises(ValueError, match=f"{name}: its numbers are not those of model|lm_head"):
        load_weights([model], tmp_path / "x", recipe, cfg)

"""Every family's debug model: exported, it is what transformers itself would have written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tolerances import FP32_LOGITS
from titan_moe.config import load_config
from titan_moe.config.model import ModelConfig
from titan_moe.data.tokenizer import tokenizer_of
from titan_moe.hf.config_json import model_config
from titan_moe.hf.export import export_model
from titan_moe.hf.folder import open_folder
from titan_moe.hf.load import load_weights
from titan_moe.hf.tokenizer_files import write_tokenizer
from titan_moe.parallel.initialise import initialise
from titan_moe.recipe import Recipe, load_recipe

ROOT = Path(__file__).parents[2]
DEBUG = [ROOT / "train_configs/debug.toml", *sorted(ROOT.glob("train_configs/*/debug.toml"))]


def model_of(config: Path, **changes: Any) -> tuple[nn.Module, Recipe, ModelConfig]:
    """The model of a TOML without multi-token prediction, which transformers does not build."""
    cfg = load_config(config).model
    if cfg.mtp_depth():
        changes["num_mtp_layers"] = 0
    cfg = type(cfg).model_validate(cfg.model_dump(exclude_none=True) | changes)
    return (*fresh(cfg), cfg)


def fresh(cfg: ModelConfig) -> tuple[nn.Module, Recipe]:
    """With a selection bias that bf16 does not hold, where the family has one."""
    recipe = load_recipe(cfg.recipe)
    blocks = range(cfg.num_layers)
    model = recipe.load_model_class()(cfg, layers=blocks, has_embedding=True, has_head=True)
    initialise(model, 0)
    lost = {row.ours for row in recipe.load_hf().weights if getattr(row, "must_be_zero", False)}
    if not any(name.endswith("selection_bias") for name in lost):
        for name, buffer in model.named_buffers():
            if name.endswith("selection_bias"):
                buffer.fill_(0.123456)
    return model, recipe


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def logits(model: Any, tokens_BS: Tensor) -> Tensor:
    """Of rows that are one document each."""
    positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    documents_BS = torch.zeros_like(tokens_BS)
    model.eval()
    hidden = model(
        tokens_BS, positions_BS=positions_BS, document_ids_BS=documents_BS, tokens_BS=tokens_BS
    )
    result: Tensor = model.head.logits(hidden)
    return result


@pytest.mark.parametrize("config", DEBUG, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformers_writes_the_same(config: Path, dtype: Any, tmp_path: Path) -> None:
    model, recipe, cfg = model_of(config)
    export_model(model, recipe, cfg, tmp_path / "ours", dtype=dtype, shard_bytes=2_000_000)
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype=dtype
    )
    assert not any(info.values()), info
    theirs.save_pretrained(tmp_path / "theirs")
    ours, expected = tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs")
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name

    if dtype == "float32":
        tokens_BS = torch.arange(24).view(2, 12) * 7
        with torch.no_grad():
            difference = logits(model, tokens_BS) - theirs.eval()(tokens_BS).logits
        assert difference.abs().max() < FP32_LOGITS

    # Sizes come back the same from our config.json and from transformers' own.
    folder = open_folder(tmp_path / "ours")
    read = model_config(recipe, cfg.recipe, folder.config, "ours")
    for key in (*recipe.load_hf().keys, "rope_theta", "rope_scaling"):
        assert getattr(read, key) == getattr(cfg, key), key
    again, _ = fresh(cfg)
    for parameter in again.parameters():
        parameter.data.fill_(torch.nan)
    load_weights([again], tmp_path / "theirs", recipe, cfg)
    if dtype == "float32":
        for name, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), name


def test_the_byte_tokenizer_is_one_that_transformers_reads(tmp_path: Path) -> None:
    data = load_config(DEBUG[0]).data
    model, recipe, cfg = model_of(DEBUG[0])
    export_model(model, recipe, cfg, tmp_path / "x")
    ours = tokenizer_of(data)
    write_tokenizer(data, ours, tmp_path / "x", max_length=cfg.max_seq_len)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "x")
    text = "".join(map(chr, range(1000))) + "  two\n\n\tlines 日本 \U0001f600"
    assert theirs(text).input_ids == [ours.bos_id, *ours.encode(text)]  # add_bos, as in training
    assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.decode([0xE6, 0x41]) == ours.decode([0xE6, 0x41])
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)

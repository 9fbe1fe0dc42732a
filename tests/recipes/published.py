"""Published models, whole but without memory: what a TOML says against what it makes."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.recipes.against_transformers import their_config
from titan_moe.config.model import ModelConfig
from titan_moe.recipe import fits, load_recipe

CONFIGS = Path(__file__).parents[2] / "train_configs"


@dataclass(frozen=True)
class Published:
    """toml: below train_configs. params: as published. by_hand: the same from the file's sizes.

    All without layers of multi-token prediction.
    """

    toml: str
    params: int
    by_hand: Callable[[dict[str, Any]], int]

    def __str__(self) -> str:
        return self.toml

    @property
    def cfg(self) -> ModelConfig:
        sizes = tomllib.loads((CONFIGS / self.toml).read_text())["model"]
        if "num_mtp_layers" in sizes:
            sizes["num_mtp_layers"] = 0
        return load_recipe(sizes["recipe"]).config.model_validate(sizes)


def on_meta(cfg: ModelConfig, layers: range | None = None) -> Any:
    """Blocks `layers` (default all), with what stands before the first and after the last."""
    layers = range(cfg.num_layers) if layers is None else layers
    with torch.device("meta"):
        return load_recipe(cfg.recipe).load_model_class()(
            cfg,
            layers=layers,
            has_embedding=layers.start == 0,
            has_head=layers.stop == cfg.num_layers,
        )


def params_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def check_params(published: Published) -> None:
    """The model's parameters, by hand, and those of transformers' model of the same config."""
    cfg = published.cfg
    model = on_meta(cfg)
    assert params_of(model) == published.params
    assert published.by_hand(cfg.model_dump()) == published.params
    halves = [on_meta(cfg, range(1)), on_meta(cfg, range(1, cfg.num_layers))]
    names = [name for half in halves for name, _ in half.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(their_config(cfg))
    assert params_of(theirs) == published.params


def check_attention_shape(published: Published) -> None:
    """Projections as in the module tree, in every block."""
    cfg = published.cfg
    for layer, block in on_meta(cfg).layers.items():
        shape = cfg.attention_shape(int(layer))
        matrices = [p.numel() for p in block.attention.parameters() if p.ndim == 2]
        assert shape.projection_params == sum(matrices)
        assert shape.num_heads * shape.v_head_dim == block.attention.out.weight.shape[1]
        assert shape.num_heads * shape.qk_head_dim == block.attention.q.weight.shape[0]
        assert shape.window == block.attention.window
        assert shape.sinks == (block.attention.sinks_H is not None)


def check_one_layer_traces(published: Published, dtype: torch.dtype) -> None:
    """Forward and backward of the last block and the head."""
    cfg = published.cfg
    torch.set_default_dtype(dtype)
    try:
        model = on_meta(cfg, range(cfg.num_layers - 1, cfg.num_layers))
    finally:
        torch.set_default_dtype(torch.float32)
    tokens_BS = torch.zeros(1, 128, dtype=torch.int64, device="meta")
    hidden_BSD = torch.empty(1, 128, cfg.hidden_size, device="meta", dtype=dtype)
    out_BSD = model(
        hidden_BSD, positions_BS=tokens_BS, document_ids_BS=tokens_BS, tokens_BS=tokens_BS
    )
    assert (out_BSD.dtype, out_BSD.shape) == (dtype, hidden_BSD.shape)
    model.head.logits(out_BSD).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def check_fsdp_units(published: Published) -> None:
    """Each parameter is some unit's: its first one's, since inner units come before outer ones."""
    cfg = published.cfg
    model = on_meta(cfg)
    modules = dict(model.named_modules())
    owner: dict[str, str] = {}
    for unit in load_recipe(cfg.recipe).load_sharding().fsdp_units:
        patterns = (unit.pattern,) if isinstance(unit.pattern, str) else unit.pattern
        matched = [name for name in modules if fits(name, patterns)]
        assert matched, unit.pattern
        for module_name in matched:
            for name, _ in modules[module_name].named_parameters(prefix=module_name):
                owner.setdefault(name, f"{unit.mesh} {unit.precision}")
    assert owner.keys() == {name for name, _ in model.named_parameters()}
    for name, kind in owner.items():
        router, expert = ".moe.router." in name, ".moe.experts." in name
        wanted = f"{'sparse' if expert else 'dense'} {'float32' if router else 'policy'}"
        assert kind == wanted, name

"""A folder to start runs from: a valid config, and a recipe package that is not installed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from titan_moe.config import ConfigError, load_config

RECIPE = '''
from pydantic import Field, model_validator
from titan_moe.config.model import AttentionShape, ModelConfig
from titan_moe.recipe import Recipe

class TinyConfig(ModelConfig):
    """Two groups of nothing."""
    num_groups: int = Field(1, gt=0, description="groups of experts")
    window: int | None = Field(None, description="of the last layer alone")
    sinks: bool = Field(False, description="of the last layer alone")
    decay_per_layer: float | list[float] = Field(0.5, description="a number, or one per layer")

    @model_validator(mode="after")
    def _groups_divide(self):
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_groups = {self.num_groups} does not divide {self.num_experts}")
        return self

    def attention_shape(self, layer):
        last = layer == self.num_layers - 1
        return AttentionShape(64, 2, 8, 8, self.window if last else None, self.sinks and last)

RECIPE = Recipe(TinyConfig, "tiny_recipe.model.Model", "tiny_recipe.sharding.SHARDING")
'''

TINY = """\
[job]
name = "tiny"

[model]
recipe = "tiny_recipe"
vocab_size = 264
hidden_size = 16
num_layers = 2
num_heads = 2
intermediate_size = 32
moe_intermediate_size = 16
num_experts = 4
top_k = 2
max_seq_len = 128
rope_theta = 10000.0
norm_eps = 1e-6
initializer_range = 0.02

[training]
local_batch_size = 2
global_batch_size = 8
seq_len = 64
steps = 100

[optimizer]
lr = 1e-3

[lr_scheduler]
warmup_steps = 10

[data]
add_bos = true
add_eos = false
num_streams = 8

[[data.sources]]
name = "stdlib"
path = "builtin:python-stdlib"
holdout_every = 10

[[data.sources]]
name = "notes"
path = "notes.jsonl"
weight = 2
"""


@pytest.fixture(scope="session")
def recipe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "tiny_recipe").mkdir()
    (folder / "tiny_recipe" / "__init__.py").write_text(RECIPE)
    return folder


@pytest.fixture
def start(tmp_path: Path, recipe_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a test: tiny.toml, notes.jsonl, and tiny_recipe within reach."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(recipe_folder))
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "notes.jsonl").write_text('{"text": "a note"}\n')
    return tmp_path


Message = Callable[..., str]


@pytest.fixture
def message(start: Path) -> Message:
    """What load_config says against tiny.toml, with one text replaced, or against overrides."""

    def tell(old: str = "", new: str = "", *overrides: str, world: int | None = None) -> str:
        assert old in TINY
        (start / "tiny.toml").write_text(TINY.replace(old, new, 1) if old else TINY)
        with pytest.raises(ConfigError) as caught:
            load_config("tiny.toml", overrides, world)
        return str(caught.value)

    return tell

"""What is written from a config: the resolved TOML, the listing of keys, the schema."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.config.conftest import TINY
from titan_moe.config import load_config, save_config
from titan_moe.config.help import keys_text
from titan_moe.config.keys import keys_of, sections_of
from titan_moe.config.load import sections_for
from titan_moe.config.model import ModelConfig
from titan_moe.config.schema import json_schema

YARN = "{type = 'yarn', factor = 2, original_max_seq_len = 64}"


def test_resolved_config_loads_again_to_the_same(start: Path) -> None:
    (start / "top.toml").write_text('extends = "tiny.toml"\n[optimizer]\neps = 1.1e-30\n')
    overrides = [
        '--job.description=quotes " and \\ and ü',
        f"--model.rope_scaling={YARN}",
        "--model.decay_per_layer=[0.1, 0.3]",
        "--lr_scheduler.decay_ratio=0.1",
        "--validation.sets=[{name = 'v', holdout_of = 'stdlib', max_tokens = 1_000}]",
    ]
    config = load_config("top.toml", overrides)
    save_config(config, start / "config.toml")
    assert load_config("config.toml") == config
    written = tomli.loads((start / "config.toml").read_text("utf-8"))
    assert written["model"]["decay_per_layer"] == [0.1, 0.3]
    assert written["optimizer"]["eps"] == 1.1e-30
    assert "extends" not in written
    assert "total_steps" not in written["lr_scheduler"]
    assert sorted(path.name for path in start.iterdir() if "config" in path.name) == ["config.toml"]


def test_no_key_that_may_be_absent_has_another_default() -> None:
    """Left out of the resolved config, it would come back as that default."""
    for name, section in sections_of(ModelConfig).items():
        for key in keys_of(name, section):
            holder = section
            for part in key.table.split(".")[1:]:
                holder = _inner(holder, part)
            info = holder.model_fields[key.name]
            takes_none = type(None) in getattr(info.annotation, "__args__", ())
            assert not takes_none or info.default is None, f"{key.table}.{key.name}"


def _inner(section: Any, name: str) -> Any:
    annotation = section.model_fields[name].annotation
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next(c for c in candidates if hasattr(c, "model_fields"))


def test_a_config_does_not_change(start: Path) -> None:
    config = load_config("tiny.toml")
    with pytest.raises(ValueError, match="frozen"):
        config.training.steps = 3  # type: ignore[misc]
    assert isinstance(config.data.sources, tuple)


def test_every_key_is_listed_with_type_default_and_meaning(start: Path) -> None:
    sections = sections_for("tiny.toml")
    text = keys_text(sections)
    for name, section in sections.items():
        for key in keys_of(name, section):
            assert f"\n  {key.name} " in text, key
            assert key.description, f"{key.table}.{key.name} has no line of meaning"
    words = " ".join(text.split())
    assert "steps optimizer steps [integer > 0; required]" in words
    assert "beta2 decay of the second moment [number >= 0.0 and < 1.0; default 0.95]" in words
    assert "num_groups groups of experts [integer > 0; default 1]" in words
    assert "total_steps end of decay; absent: training.steps [integer > 0]" in words
    assert "[[data.sources]] one corpus of the mixture" in words
    assert "[training.dataloader] how batches are brought in the background" in words
    assert max(map(len, text.splitlines())) <= 100


def test_schema_describes_the_whole_file(start: Path) -> None:
    schema = json.loads(json.dumps(json_schema(sections_for("tiny.toml"))))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert "null" not in json.dumps(schema)
    definitions = schema["$defs"]

    def table(name: str) -> Any:
        return definitions[schema["properties"][name]["$ref"].split("/")[-1]]

    assert set(tomli.loads(TINY)) <= set(schema["properties"])
    assert schema["additionalProperties"] is table("training")["additionalProperties"] is False
    steps = table("training")["properties"]["steps"]
    assert (steps["type"], steps["exclusiveMinimum"]) == ("integer", 0)
    assert steps["description"] == "optimizer steps"
    assert table("lr_scheduler")["properties"]["decay_type"]["enum"] == ["linear", "sqrt", "cosine"]
    assert table("lr_scheduler")["properties"]["total_steps"]["type"] == "integer"
    assert table("model")["properties"]["num_groups"]["default"] == 1
    assert "extends" in schema["properties"]


def test_schema_requires_only_of_files_that_extend_nothing(start: Path) -> None:
    schema = json_schema(sections_for("tiny.toml"))
    assert "required" not in schema
    assert schema["if"] == {"not": {"required": ["extends"]}}
    assert schema["then"]["required"] == ["job", "model", "training", "optimizer", "data"]
    assert "steps" in schema["then"]["properties"]["training"]["required"]
    assert "required" not in schema["$defs"]["Training"]
    assert schema["$defs"]["Source"]["required"] == ["name", "path"]

"""From a TOML file and a command line to a checked RunConfig, or to a ConfigError."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from titan_moe.config.checks import run_checks
from titan_moe.config.errors import ConfigError
from titan_moe.config.faults import missing_key
from titan_moe.config.files import Document, read_document
from titan_moe.config.keys import dotted, path_of, sections_of, toml_text
from titan_moe.config.model import ModelConfig
from titan_moe.config.overrides import COMMAND_LINE, Override, apply_overrides, parse_overrides
from titan_moe.config.recipe_config import model_config_of
from titan_moe.config.sections import RunConfig
from titan_moe.config.tables import typed_tables

RECIPE_KEY = ("model", "recipe")


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    world: int | None = None,
    on_disk: bool = False,
) -> RunConfig:
    """Read, layer, type and check a run's config. Imports no torch.

    path: TOML file; it may extend others. overrides: `--section.key=value` in any number.
    world: number of processes, if known: then the layout is checked too.
    on_disk: the run starts from here: then the local files that it names must be there.

    Raises ConfigError (a ValueError) with one line per fault: wrong keys and types all together;
    if there are none, what does not fit together.
    """
    document = read_document(Path(path))
    given, faults = parse_overrides(overrides)
    sections, recipe_faults = _sections(document, given)
    faults += recipe_faults + apply_overrides(document, given, sections)
    parts, wrong = typed_tables(document, sections, known=RunConfig.model_fields)
    if faults + wrong:
        raise ConfigError(faults + wrong)
    config = RunConfig(**parts)
    misfits = run_checks(config, world, on_disk)
    if misfits:
        raise ConfigError([f"{document.origin(path_of(key))}: {misfit}" for key, misfit in misfits])
    return config


def sections_for(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, type[BaseModel]]:
    """Every table's class, with the `[model]` of the recipe that a config names.

    Nothing else about the config needs to be right. Raises ConfigError: the recipe does not load.
    """
    given, _ = parse_overrides(overrides)
    sections, faults = _sections(read_document(Path(path)), given)
    if faults:
        raise ConfigError(faults)
    return sections


def _sections(
    document: Document, overrides: Sequence[Override]
) -> tuple[dict[str, type[BaseModel]], list[str]]:
    """Every table's class. A recipe that does not load: no `[model]` among them, and the fault."""
    sections = sections_of(ModelConfig)
    model = document.tree.get("model", {})
    texts = [override.text for override in overrides if override.path == RECIPE_KEY]
    recipe = texts[-1] if texts else model.get("recipe") if isinstance(model, dict) else None
    if isinstance(recipe, str):
        try:
            return sections | {"model": model_config_of(recipe)}, []
        except ValueError as error:
            origin = COMMAND_LINE if texts else document.origin(RECIPE_KEY)
            fault = f"{origin}: {dotted(RECIPE_KEY)} = {toml_text(recipe)}: {error}"
    elif not isinstance(model, dict):
        fault = (
            f"{document.origin(('model',))}: model = {toml_text(model)}: expected a table, [model]"
        )
    elif recipe is None:
        fault = missing_key(RECIPE_KEY, document, sections)
    else:
        origin = document.origin(RECIPE_KEY)
        fault = f"{origin}: {dotted(RECIPE_KEY)} = {toml_text(recipe)}: expected string"
    del sections["model"]
    return sections, [fault]

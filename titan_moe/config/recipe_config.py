"""From `[model] recipe`, a dotted name, to the recipe's own ModelConfig."""

import importlib
import pkgutil
import re
import sys
from difflib import get_close_matches
from pathlib import Path

from titan_moe.config.model import ModelConfig


def model_config_of(recipe: str) -> type[ModelConfig]:
    """Import the recipe package and return the config class of its RECIPE.

    The current folder is searched first, as `python -m` does, so that a recipe package that is
    not installed is found by the console script too.

    Raises ValueError: no such module, a module that fails to import, a module without RECIPE.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", recipe):
        raise ValueError("expected a dotted module name, for example recipes.deepseek_v3")
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(recipe)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{recipe}.".startswith(f"{error.name}."):
            raise ValueError(f"its import failed: {error}") from error
        raise ValueError(f"no such module{_meant(recipe)}") from None
    except (Exception, SystemExit) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"its import failed: {why}") from error
    config = getattr(getattr(module, "RECIPE", None), "config", None)
    if not (isinstance(config, type) and issubclass(config, ModelConfig)):
        raise ValueError("the module has no RECIPE whose config is a ModelConfig")
    return config


def _meant(recipe: str) -> str:
    """The sibling most like it, or where modules are looked for."""
    parent, _, name = recipe.rpartition(".")
    try:
        path = importlib.import_module(parent).__path__ if parent else None
        siblings = [module.name for module in pkgutil.iter_modules(path)]
    except (ImportError, AttributeError):
        siblings = []
    near = get_close_matches(name, siblings, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {'.'.join(filter(None, [parent, near[0]]))}?"
    return "; it must be installed, or lie in the folder that the run starts from"

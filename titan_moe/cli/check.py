"""`titan-moe check recipes.NAME ...`: the contract test of a recipe."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from titan_moe.check.wanted import Wanted
from titan_moe.config.command_line import DEFAULT_CONFIG
from titan_moe.config.errors import ConfigError
from titan_moe.config.files import read_document
from titan_moe.config.load import load_config
from titan_moe.config.recipe_config import model_config_of

HELP = """\
usage: titan-moe check RECIPE [RECIPE ...] [--config TOML]

Hold a recipe to its contract, on this machine's CPU: RECIPE is a dotted name, as in
recipes.qwen3_moe, or of a package in the current folder. Sizes are those of TOML, by default
train_configs/NAME/debug.toml, in the current folder or beside the recipe's package; of its blocks
a few are kept, and its rows are shortened.

  house      imports of the recipe, and its size
  meta       builds on meta, as a whole and as stages of a pipeline
  init       every parameter is initialised, to the same bits under any layout
  flops      what flops.py counts from the config is what the model's matmuls cost
  logits     equal those of transformers for the same weights
  gradients  of every parameter do, too
  roundtrip  export and import give every bit back, under transformers' own names
  layouts    loss, norm and every gradient are the same under parallelism
  bf16       a step with bf16 weights is finite, and near fp32
  passes     torch.compile and low precision: not yet part of titan-moe

logits, gradients and roundtrip need the recipe's hf.py, and transformers, which comes with
`pip install 'titan-moe[dev]'`.

exit code: 0 if all is right, 1 if something is not, 2 where names, files or options are wrong,
3 if what could be checked is right but some steps could not be done: they say why.
"""


def main(arguments: Sequence[str]) -> int:
    if {"--help", "-h"} & set(arguments) or not arguments:
        print(HELP, end="")
        return 0 if arguments else 2
    names, config = _take_config(arguments)
    recipes = [wanted(name, config) for name in names]
    from titan_moe.check.run import check_all  # imports torch; what is wrong so far is told first

    return check_all(recipes)


def _take_config(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    names, config, rest = [], None, list(arguments)
    while rest:
        argument = rest.pop(0)
        option, equals, value = argument.partition("=")
        if option == "--config":
            value = value if equals else (rest.pop(0) if rest else "")
            if not value:
                raise ConfigError(["command line: --config: expected the path of a TOML file"])
            config = Path(value)
        elif argument.startswith("-"):
            raise ConfigError([f"command line: unknown option {argument}; there is --config"])
        else:
            names.append(argument)
    if not names:
        raise ConfigError(["command line: no recipe named, as in recipes.deepseek_v3"])
    if config and len(names) > 1:
        raise ConfigError([f"command line: --config = {config}: goes with one recipe alone"])
    return names, config


def wanted(name: str, config: Path | None = None) -> Wanted:
    """Raises ConfigError: no such recipe, no config for it, or a config that is wrong."""
    try:
        model_config_of(name)
    except ValueError as error:
        raise ConfigError([f"command line: {name}: {error}"]) from error
    folder = package_folder(name)
    file = config or debug_config_of(name, folder)
    loaded = load_config(file, [f"--model.recipe={name}"])
    return Wanted(name, folder, file, loaded)


def package_folder(name: str) -> Path:
    """Of the recipe's own files; the package can be imported."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} has been imported"
    assert spec.origin is not None, f"{name} is no package with files"
    return Path(spec.origin).parent


def debug_config_of(name: str, folder: Path) -> Path:
    """The TOML of debugging sizes that goes with a recipe.

    Raises ConfigError: there is none where it would be.
    """
    family = name.rpartition(".")[2]
    root = folder.parents[name.count(".")]
    usual = Path("train_configs") / family / "debug.toml"
    places = [usual, root / usual]
    for path in places:
        if path.is_file():
            return path
    for path in (DEFAULT_CONFIG, root / DEFAULT_CONFIG):
        if path.is_file() and _recipe_in(path) == name:
            return path
    looked = " or ".join(map(str, places))
    raise ConfigError([f"command line: {name}: no config at {looked}; name one by --config"])


def _recipe_in(path: Path) -> str | None:
    model = read_document(path).tree.get("model")
    return model.get("recipe") if isinstance(model, dict) else None

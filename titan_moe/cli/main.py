"""`titan-moe COMMAND ...`: commands are found by hand, so that nothing is imported in vain."""

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from titan_moe import __version__
from titan_moe.config.errors import ConfigError

CONFIG_FAULT = 2

COMMANDS = {
    "train": ("titan_moe.cli.train", "launch a run: check its config, then become torchrun"),
    "validate": ("titan_moe.cli.validate", "check a config, without torch"),
    "import": ("titan_moe.cli.import_", "weights of a Hugging Face folder as a checkpoint"),
    "export": ("titan_moe.cli.export", "a checkpoint as a Hugging Face folder"),
    "plan": ("titan_moe.cli.plan", "does a run fit a machine, and where does its traffic go"),
    "check": ("titan_moe.cli.check", "hold a recipe to its contract: the same numbers everywhere"),
    "fork": ("titan_moe.cli.fork", "copy a recipe under a new name, ready to edit"),
    "generate": ("titan_moe.cli.generate", "text from a checkpoint or a Hugging Face folder"),
    "schema": ("titan_moe.cli.schema", "print the JSON Schema of a config, for editors"),
}

USAGE = f"""\
titan-moe {__version__}: pre-train Mixture-of-Experts language models, one TOML file per run

usage: titan-moe COMMAND [CONFIG] [--section.key=value ...]

{"".join(f"  {name:<10}{about}{chr(10)}" for name, (_, about) in COMMANDS.items())}
  titan-moe COMMAND --help    the command's own options; train's lists every key of a config
  titan-moe --version
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 2 where config, options or environment are wrong."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["help"]
    if name in ("help", "--help", "-h"):
        print(USAGE, end="")
        return 0
    if name == "--version":
        print(f"titan-moe {__version__}")
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"titan-moe: unknown command {name}; {meant}", file=sys.stderr)
        return CONFIG_FAULT
    try:
        code: int = importlib.import_module(COMMANDS[name][0]).main(rest)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return CONFIG_FAULT
    return code


if __name__ == "__main__":
    sys.exit(main())

"""`titan-moe export CHECKPOINT HF_DIR`: for transformers and serving stacks."""

from collections.abc import Sequence
from typing import Literal, cast

from titan_moe.config.errors import ConfigError

HELP = """\
usage: titan-moe export CHECKPOINT HF_DIR [--dtype bfloat16|float32] [--shard-size-gb N]
                        [--tokenizer PATH] [--without-mtp]

Write CHECKPOINT, any step-N folder, saved under whatever layout, as sharded safetensors with their
index, config.json and tokenizer files into HF_DIR, a folder that is new or empty. Run it in the
folder that the run was started from: the recipe, and a tokenizer.json, are found from there.

  --dtype           of the weights; default bfloat16. What the recipe keeps in fp32 stays so
  --shard-size-gb   of a file at most, in 10^9 bytes; default 5
  --tokenizer       where the run's tokenizer.json is now, if not where it was: the very same file
  --without-mtp     leave out the layers of multi-token prediction, and have config.json say that
                    there are none. transformers reads no such layers: it warns of those that are
                    more than the family was published with, and what it saves itself lacks them
"""
OPTIONS = {"--dtype": "bfloat16", "--shard-size-gb": "5", "--tokenizer": ""}
WITHOUT_MTP = "--without-mtp"


def main(arguments: Sequence[str]) -> int:
    if {"--help", "-h"} & set(arguments):
        print(HELP, end="")
        return 0
    without_mtp = WITHOUT_MTP in arguments
    checkpoint, target, options = _parse([each for each in arguments if each != WITHOUT_MTP])
    dtype = options["--dtype"]
    if dtype not in ("bfloat16", "float32"):
        raise ConfigError([f"command line: --dtype = {dtype}: expected bfloat16 or float32"])
    try:
        size = float(options["--shard-size-gb"])
    except ValueError:
        size = 0.0
    if not 0.0 < size < float("inf"):
        text = options["--shard-size-gb"]
        raise ConfigError([f"command line: --shard-size-gb = {text}: expected a number > 0"])

    from titan_moe.hf.export import export
    from titan_moe.metrics.logs import setup_logging

    setup_logging(0)
    try:
        kind = cast(Literal["bfloat16", "float32"], dtype)
        export(
            checkpoint,
            target,
            dtype=kind,
            shard_bytes=int(size * 1e9),
            without_mtp=without_mtp,
            tokenizer=options["--tokenizer"] or None,
        )
    except ValueError as error:
        raise ConfigError([f"titan-moe: {error}"]) from error
    return 0


def _parse(arguments: Sequence[str]) -> tuple[str, str, dict[str, str]]:
    options, folders = dict(OPTIONS), []
    waiting = iter(arguments)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        if name in OPTIONS:
            options[name] = value if equals else next(waiting, "")
        elif argument.startswith("-"):
            known = ", ".join([*OPTIONS, WITHOUT_MTP])
            raise ConfigError([f"command line: unknown option {argument}; there are {known}"])
        else:
            folders.append(argument)
    if len(folders) != 2:
        raise ConfigError(["command line: expected CHECKPOINT HF_DIR; see --help"])
    return folders[0], folders[1], options

"""`titan-moe generate CHECKPOINT --prompt TEXT`: look at what a run has learned."""

from collections.abc import Sequence
from pathlib import Path

from titan_moe.config.errors import ConfigError
from titan_moe.config.keys import number_in

HELP = """\
usage: titan-moe generate CHECKPOINT --prompt TEXT [--tokens N] [--temperature T] [--seed S]
                          [--tokenizer PATH] [--recipe RECIPE]

Print TEXT and what the model goes on with. CHECKPOINT is a step-N folder saved under any layout, a
run's folder (its newest complete checkpoint), or, with --recipe, a Hugging Face folder. It is for
looking, on one process: without a cache of keys and values, each token costs a forward over all
tokens before it. Ends at EOS, and where model.max_seq_len is reached. Run it in the folder that the
run was started from: the recipe, and a tokenizer.json, are found from there.

  --tokens        at most; default 64
  --temperature   0, the default, takes the likeliest token; above, tokens are drawn
  --seed          of the draw; default 0
  --tokenizer     where the run's tokenizer.json is now, if not where it was: the very same file
  --recipe        whose hf.py reads a Hugging Face folder, as in recipes.qwen3_moe
"""
DEFAULTS = {
    "--prompt": "",
    "--tokens": "64",
    "--temperature": "0",
    "--seed": "0",
    "--tokenizer": "",
    "--recipe": "",
}


def main(arguments: Sequence[str]) -> int:
    if {"--help", "-h"} & set(arguments):
        print(HELP, end="")
        return 0
    path, options = _parse(arguments)
    tokens = _count(options, "--tokens", least=1)
    seed = _count(options, "--seed", least=0)
    temperature = _temperature(options["--temperature"])

    from titan_moe.generate import generate, open_checkpoint, open_hf_folder

    recipe, prompt = options["--recipe"], options["--prompt"]
    moved_to = options["--tokenizer"] or None
    if recipe and moved_to:
        raise ConfigError(["command line: --tokenizer: a Hugging Face folder has its own"])
    try:
        speaker = open_hf_folder(path, recipe) if recipe else open_checkpoint(path, moved_to)
        made = generate(speaker, prompt, tokens=tokens, temperature=temperature, seed=seed)
        ids = list(made)
    except ValueError as error:
        raise ConfigError([f"titan-moe: {error}"]) from error
    print(prompt + speaker.tokenizer.decode(ids))
    return 0


def _parse(arguments: Sequence[str]) -> tuple[Path, dict[str, str]]:
    options, folders, named = dict(DEFAULTS), [], set()
    waiting = iter(arguments)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        if name in DEFAULTS:
            named.add(name)
            options[name] = value if equals else next(waiting, "")
        elif argument.startswith("-"):
            known = ", ".join(DEFAULTS)
            raise ConfigError([f"command line: unknown option {argument}; there are {known}"])
        else:
            folders.append(argument)
    if len(folders) != 1:
        raise ConfigError(["command line: expected one checkpoint folder, see --help"])
    if "--prompt" not in named:
        raise ConfigError(["command line: expected --prompt TEXT"])
    return Path(folders[0]), options


def _count(options: dict[str, str], name: str, least: int) -> int:
    number = number_in(options[name])
    if number is None or number < least:
        raise ConfigError([f"command line: {name} = {options[name]}: expected integer >= {least}"])
    return number


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise ConfigError([f"command line: --temperature = {text}: expected a number >= 0"])
    return value

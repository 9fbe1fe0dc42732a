"""`titan-moe check`, once torch may be imported."""

import logging
from collections.abc import Sequence

from titan_moe.check.pool import Pool
from titan_moe.check.report import Outcome, line_of, outcome_of
from titan_moe.check.steps import STEPS
from titan_moe.check.subject import Subject, tiny_run
from titan_moe.check.wanted import Wanted
from titan_moe.config.errors import ConfigError
from titan_moe.recipe import load_recipe

PROCESSES = 4
ALL_RIGHT, WRONG, IN_PART = 0, 1, 3


def check_all(recipes: Sequence[Wanted], pool: Pool | None = None) -> int:
    """Check one recipe after the other, a line per step. Returns the exit code, the worst of all.

    0: all is right; 1: something is not; 3: what could be checked is right, but not all could.

    Raises:
        ConfigError: a config whose tiny run cannot be made.
    """
    own = pool or Pool(PROCESSES)
    level = logging.getLogger("titan_moe").level
    logging.getLogger("titan_moe").setLevel(logging.WARNING)
    try:
        outcomes = [outcome for wanted in recipes for outcome in _check(wanted, own)]
    finally:
        logging.getLogger("titan_moe").setLevel(level)
        if pool is None:
            own.close()
    verdicts = {outcome.verdict for outcome in outcomes}
    if "FAILED" in verdicts:
        return WRONG
    return IN_PART if "not checked" in verdicts else ALL_RIGHT


def subject_of(wanted: Wanted, pool: Pool) -> Subject:
    """Raises ConfigError: its tiny run cannot be made."""
    try:
        config = tiny_run(wanted.config)
    except ValueError as error:
        raise ConfigError([f"{wanted.config_file}: cannot be made small: {error}"]) from error
    recipe = load_recipe(wanted.name)
    return Subject(wanted.name, wanted.config_file, wanted.folder, config, recipe, pool)


def _check(wanted: Wanted, pool: Pool) -> list[Outcome]:
    subject = subject_of(wanted, pool)
    config = subject.config
    blocks, training = config.model.num_layers, config.training
    print(
        f"{wanted.name}: {wanted.config_file}, {blocks} of its {wanted.config.model.num_layers} "
        f"blocks, {training.global_batch_size} rows of {training.seq_len} tokens",
        flush=True,
    )
    outcomes = []
    for step in STEPS:
        outcomes.append(outcome_of(step, subject))
        print(line_of(outcomes[-1]), flush=True)
    counts = {
        verdict: sum(outcome.verdict == verdict for outcome in outcomes)
        for verdict in ("ok", "FAILED", "not checked")
    }
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    print(f"{wanted.name}: {said}\n", flush=True)
    return outcomes

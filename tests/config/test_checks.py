"""What must hold between keys. Every row of the table is seen to refuse, with its arithmetic."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordLevel

from tests.config.refused import FLEX, HELD_OUT, REFUSED, SDPA, SETS
from titan_moe.config import ConfigError, load_config
from titan_moe.config.checks import CHECKS
from titan_moe.config.checks_disk import ids_in


def files(start: Path) -> None:
    """What the overrides name: a run whose logs are a file, tokenizers, orders of pipelines."""
    (start / "blocked" / "tiny").mkdir(parents=True)
    (start / "blocked" / "tiny" / "logs").touch()
    added = [{"id": 4, "content": "<s>"}]
    for name, tokens in {
        "tokenizer": {},
        "words": {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": added},
        "pieces": {"model": {"vocab": [["a", -1.5], ["<p>", -2.0]]}, "added_tokens": added},
    }.items():
        (start / f"{name}.json").write_text(json.dumps(tokens))
    (start / "order.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    (start / "wide.csv").write_text("0" * 200_000)


@pytest.mark.parametrize(
    ("row", "overrides", "world", "said"),
    [(row, *case) for row, cases in REFUSED.items() for case in cases],
)
def test_refused(start: Path, row: str, overrides: list[str], world: int | None, said: str) -> None:
    files(start)
    reason = next(check.reason for check in CHECKS if check.name == row)
    with pytest.raises(ConfigError) as caught:
        load_config("tiny.toml", overrides, world, on_disk=True)
    assert str(caught.value) == f"{said} ({reason})"


def test_every_row_is_tried() -> None:
    assert sorted(REFUSED) == sorted(check.name for check in CHECKS)


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        ([], 1),
        ([], 4),
        (["--parallelism.data_parallel_replicate_degree=2"], 4),
        (
            [
                "--parallelism.data_parallel_replicate_degree=2",
                "--parallelism.data_parallel_shard_degree=2",
            ],
            4,
        ),
        (["--training.seq_len=128"], None),
        (SDPA, None),
        ([*SDPA, "--model.window=64"], None),  # as long as a row
        ([*FLEX, "--model.window=63"], None),
        ([*FLEX, "--model.sinks=true"], None),
        (["--lr_scheduler.warmup_steps=100"], None),
        (["--lr_scheduler.total_steps=1000", "--lr_scheduler.warmup_steps=500"], None),
        (["--lr_scheduler.total_steps=50", "--lr_scheduler.min_lr_factor=0.1"], None),
        (["--training.dataloader.num_workers=2"], 4),
        ([HELD_OUT, "--validation.enable=true"], None),
        (["--model.vocab_size=259"], None),
        (["--data.tokenizer=words.json", "--data.bos_token=<s>", "--model.vocab_size=5"], None),
        (["--data.tokenizer=pieces.json", "--data.bos_token=<p>"], None),
        (["--data.tokenizer=tokenizer.json", "--data.bos_token=<s>"], None),
        (["--job.dump_folder=not/yet/there"], None),
        (["--metrics.save_tb_folder=logs/tb"], None),
        (["--data.sources.1.path=owner/hub"], None),
        (["--data.sources.1.path=hub", "--data.sources.1.format=hub"], None),
        (
            [
                "--data.sources.1.path=owner/hub",
                SETS + "[{name = 'v', path = 'owner/hub', max_tokens = 9}]",
            ],
            None,
        ),
    ],
)
def test_accepted(start: Path, overrides: list[str], world: int | None) -> None:
    files(start)
    load_config("tiny.toml", overrides, world, on_disk=True)


def test_files_are_looked_for_only_where_the_run_starts(start: Path) -> None:
    overrides = ["--data.tokenizer=not/here.json", "--data.bos_token=<s>"]
    load_config("tiny.toml", overrides)
    with pytest.raises(ConfigError, match="no such file"):
        load_config("tiny.toml", overrides, on_disk=True)


def test_initial_weights_are_needed_once(start: Path) -> None:
    there = ["--checkpoint.initial_load_path=step-5"]
    (start / "step-5").mkdir()
    (start / "step-5" / "COMMITTED").touch()
    load_config("tiny.toml", there, on_disk=True)
    gone = ["--checkpoint.initial_load_path=gone"]
    load_config("tiny.toml", gone)
    (start / "outputs/tiny/checkpoint/step-2").mkdir(parents=True)
    load_config("tiny.toml", gone, on_disk=True)
    with pytest.raises(ConfigError, match="no such folder"):
        load_config("tiny.toml", [*gone, "--checkpoint.enable=false"], on_disk=True)


@pytest.mark.parametrize("model", [WordLevel({"a": 0, "<p>": 1}), Unigram([("a", -1.0), ("b", 0)])])
def test_token_ids_are_those_of_the_library(start: Path, model: WordLevel | Unigram) -> None:
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<s>", "a"])
    tokenizer.add_tokens(["more"])
    tokenizer.save("made.json")
    assert ids_in("made.json") == tokenizer.get_vocab(with_added_tokens=True)


def test_paths_that_no_file_can_have_are_not_there(start: Path) -> None:
    long = "n" * 5000
    for override in (f"--data.sources.1.path=./{long}", f"--checkpoint.initial_load_path={long}"):
        with pytest.raises(ConfigError, match="no such"):
            load_config("tiny.toml", [override], on_disk=True)


def test_misfits_come_together(start: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("tiny.toml", ["--training.seq_len=999", "--model.vocab_size=9"], 3)
    keys = [line.partition(": ")[2].split(" ")[0] for line in caught.value.faults]
    assert keys == [
        "training.global_batch_size",
        "data.num_streams",
        "training.seq_len",
        "model.vocab_size",
    ]

"""For each row of the table of checks, configs that it refuses, and the arithmetic it tells."""

from tests.config.refused_layouts import REFUSED_LAYOUTS
from tests.config.refused_pipelines import REFUSED_PIPELINES

SETS = "--validation.sets="
SDPA = ["--training.attention_backend=sdpa", "--training.document_mask=false"]
FLEX = ["--training.attention_backend=flex", "--training.document_mask=false"]
HELD_OUT = SETS + "[{name = 'v', holdout_of = 'stdlib', max_tokens = 9}]"

# name of the row -> (overrides, processes, what is said before the reason)
REFUSED: dict[str, list[tuple[list[str], int | None, str]]] = {
    **REFUSED_LAYOUTS,
    **REFUSED_PIPELINES,
    "sequence within the rotary table": [
        (
            ["--training.seq_len=129"],
            None,
            "command line: training.seq_len = 129: more than model.max_seq_len 128, "
            "the rotary limit",
        )
    ],
    "backend masks documents": [
        (
            ["--training.attention_backend=sdpa"],
            None,
            'command line: training.attention_backend = "sdpa": cannot go with '
            'training.document_mask = true; use "auto", "flex" or "blocked"',
        )
    ],
    "backend has windows and sinks": [
        (
            [*SDPA, f"--model.{key}"],
            None,
            'command line: training.attention_backend = "sdpa": cannot go with a model that has '
            f'{found}; use "auto", "flex" or "blocked"',
        )
        for key, found in (("window=63", "windows of 63"), ("sinks=true", "sinks"))
    ],
    "flex has documents": [
        (
            keys,
            None,
            'command line: training.attention_backend = "flex": cannot go with '
            'training.document_mask = false; use "auto" or "sdpa"',
        )
        for keys in (FLEX, [*FLEX, "--model.window=64"])
    ],
    "warmup and decay fit": [
        (
            ["--lr_scheduler.warmup_steps=101"],
            None,
            "command line: lr_scheduler.warmup_steps = 101: longer than training.steps 100",
        ),
        (
            [
                "--lr_scheduler.decay_ratio=0.5",
                "--lr_scheduler.total_steps=110",
                "--lr_scheduler.warmup_steps=60",
            ],
            None,
            "command line: lr_scheduler.warmup_steps = 60: "
            "warmup 60 + decay 55 > lr_scheduler.total_steps 110",
        ),
    ],
    "no step at rate zero": [
        (
            ["--lr_scheduler.total_steps=99"],
            None,
            "command line: lr_scheduler.total_steps = 99: less than training.steps 100; "
            "raise it, or lr_scheduler.min_lr_factor above 0",
        )
    ],
    "names differ": [
        (
            ["--data.sources.1.name=stdlib"],
            None,
            'command line: data.sources.1.name = "stdlib": data.sources.0 has the same name',
        )
    ],
    "holdout leaves training data": [
        (
            ["--data.sources.0.holdout_every=1"],
            None,
            "command line: data.sources.0.holdout_every = 1: nothing is left to train on",
        )
    ],
    "validation has sets": [
        (
            ["--validation.enable=true"],
            None,
            "command line: validation.enable = true: there is no [[validation.sets]]",
        )
    ],
    "validation set has one origin": [
        (
            [SETS + "[{name = 'v', max_tokens = 9}]"],
            None,
            'command line: validation.sets.0.name = "v": it has neither holdout_of nor path',
        ),
        (
            [HELD_OUT, "--validation.sets.0.path=owner/hub"],
            None,
            'command line: validation.sets.0.path = "owner/hub": it also has holdout_of "stdlib"',
        ),
        (
            [HELD_OUT, "--validation.sets.0.holdout_of=stlib"],
            None,
            'command line: validation.sets.0.holdout_of = "stlib": no data source has that name; '
            'there are "stdlib", "notes"',
        ),
        (
            [HELD_OUT, "--validation.sets.0.holdout_of=notes"],
            None,
            'command line: validation.sets.0.holdout_of = "notes": that source holds nothing out; '
            "set its holdout_every to 2 or more",
        ),
    ],
    "validation apart from training": [
        (
            [SETS + "[{name = 'v', path = './notes.jsonl', max_tokens = 9}]"],
            None,
            'command line: validation.sets.0.path = "./notes.jsonl": '
            'the data source "notes" trains on it',
        ),
        (
            [SETS + "[{name = 'v', path = 'builtin:python-stdlib', max_tokens = 9}]"],
            None,
            'command line: validation.sets.0.path = "builtin:python-stdlib": '
            'the data source "stdlib" trains on it',
        ),
        (
            [
                "--data.sources.1.path=owner/hub",
                SETS + "[{name = 'v', path = 'owner/hub', split = 'train', max_tokens = 9}]",
            ],
            None,
            'command line: validation.sets.0.path = "owner/hub": '
            'the data source "notes" trains on it',
        ),
    ],
    "vocabulary covers bytes": [
        (
            ["--model.vocab_size=258"],
            None,
            "command line: model.vocab_size = 258: less than the 259 ids of the byte tokenizer",
        )
    ],
    "tokenizer keys": [
        (
            ["--data.bos_token=<s>"],
            None,
            'command line: data.bos_token = "<s>": leave it out with data.tokenizer = "byte"',
        ),
        (
            ["--data.tokenizer=tokenizer.json"],
            None,
            "tiny.toml: data.bos_token = (absent): data.add_bos = true needs it",
        ),
    ],
    "local paths exist": [
        (
            ["--data.tokenizer=tokens.json", "--data.bos_token=<s>"],
            None,
            'command line: data.tokenizer = "tokens.json": no such file; '
            'expected "byte" or a tokenizer.json',
        ),
        (
            ["--data.sources.1.path=./note.jsonl"],
            None,
            'command line: data.sources.1.path = "./note.jsonl": no such file or folder; '
            'for a data set on the hub, format = "hub"',
        ),
        (
            ["--data.sources.1.path=owner/notes", "--data.sources.1.format=parquet"],
            None,
            'command line: data.sources.1.path = "owner/notes": no such file or folder',
        ),
        (
            ["--data.sources.1.path=builtin:linux"],
            None,
            'command line: data.sources.1.path = "builtin:linux": no such built-in data; '
            "there is builtin:python-stdlib",
        ),
    ],
    "run folder can be made": [
        (
            ["--job.dump_folder=notes.jsonl"],
            None,
            'command line: job.dump_folder = "notes.jsonl": notes.jsonl is not a folder',
        ),
        (
            ["--job.dump_folder=blocked"],
            None,
            'command line: job.dump_folder = "blocked": blocked/tiny/logs is not a folder',
        ),
        (
            [f"--job.dump_folder=a/{'n' * 256}"],
            None,
            f'command line: job.dump_folder = "a/{"n" * 74}...: '
            "a name in it is longer than 255 bytes",
        ),
    ],
    "initial weights are there": [
        (
            ["--checkpoint.initial_load_path=nowhere"],
            None,
            'command line: checkpoint.initial_load_path = "nowhere": no such folder',
        ),
        (
            ["--checkpoint.initial_load_path=blocked"],
            None,
            'command line: checkpoint.initial_load_path = "blocked": '
            "not a complete checkpoint, with a file COMMITTED in it",
        ),
        (
            ["--checkpoint.initial_load_path=blocked", "--checkpoint.initial_load_in_hf=true"],
            None,
            'command line: checkpoint.initial_load_path = "blocked": '
            "not a Hugging Face folder, with config.json in it",
        ),
    ],
    "folders are apart": [
        (
            ["--checkpoint.folder=./logs"],
            None,
            'command line: checkpoint.folder = "./logs": the same as the logs of the run',
        ),
        (
            ["--metrics.save_tb_folder=metrics.jsonl/tb"],
            None,
            'command line: metrics.save_tb_folder = "metrics.jsonl/tb": '
            "the run has a file metrics.jsonl",
        ),
        (
            ["--profiling.save_traces_folder=checkpoint"],
            None,
            'command line: profiling.save_traces_folder = "checkpoint": '
            "the same as checkpoint.folder",
        ),
    ],
    "tokenizer fits": [
        (
            ["--data.tokenizer=words.json", "--data.bos_token=<s>", "--model.vocab_size=4"],
            None,
            "command line: model.vocab_size = 4: less than the 5 ids of words.json",
        ),
        (
            ["--data.tokenizer=pieces.json", "--data.bos_token=<S>"],
            None,
            'command line: data.bos_token = "<S>": not among the tokens of pieces.json',
        ),
    ],
    "loading is enabled": [
        (
            ["--checkpoint.enable=false", "--checkpoint.load_step=10"],
            None,
            "command line: checkpoint.load_step = 10: checkpoint.enable is false",
        ),
        (
            ["--checkpoint.initial_load_in_hf=true"],
            None,
            "command line: checkpoint.initial_load_in_hf = true: "
            "checkpoint.initial_load_path is absent",
        ),
    ],
    "last step is saved": [
        (
            ["--checkpoint.enable=false", "--checkpoint.last_save_in_hf=true"],
            None,
            "command line: checkpoint.last_save_in_hf = true: checkpoint.enable is false",
        )
    ],
    "profile fits its period": [
        (
            ["--profiling.enable_profiling=true", "--profiling.profile_freq=3"],
            None,
            "command line: profiling.profile_freq = 3: "
            "less than profiler_warmup 3 + profiler_active 1 = 4",
        )
    ],
}

"""Pipelines that do not fit: (overrides, processes, what is said before the reason), by row."""

KEY = "--parallelism.pipeline_parallel_"
PP = f"{KEY}degree="
TOLD = "command line: parallelism.pipeline_parallel_"

REFUSED_PIPELINES: dict[str, list[tuple[list[str], int | None, str]]] = {
    "pipeline is there": [
        (
            [f"{KEY}{name}={text}"],
            None,
            f"{TOLD}{name} = {shown}: parallelism.pipeline_parallel_degree is 1; raise it, or "
            "leave this out",
        )
        for name, text, shown in (
            ("schedule", "DualPipeV", '"DualPipeV"'),
            ("schedule_csv", "order.csv", '"order.csv"'),
            ("microbatch_size", "3", "3"),
            ("stages_per_rank", "1", "1"),
            ("layers", "[1, 1]", "[1, 1]"),
            ("first_stage_less_layers", "0", "0.0"),
            ("last_stage_less_layers", "2.5", "2.5"),
        )
    ],
    "one plan of stages": [
        (
            [f"{PP}2", f"{KEY}schedule_csv=order.csv", f"{KEY}schedule=GPipe"],
            None,
            f'{TOLD}schedule = "GPipe": parallelism.pipeline_parallel_schedule_csv has one of its '
            "own; leave one of them out",
        ),
        (
            [f"{PP}2", f"{KEY}schedule_csv=order.csv", f"{KEY}stages_per_rank=1"],
            None,
            f"{TOLD}stages_per_rank = 1: parallelism.pipeline_parallel_schedule_csv has one of its "
            "own; leave one of them out",
        ),
        (
            [f"{PP}2", f"{KEY}layers=[1, 1]", f"{KEY}last_stage_less_layers=0.5"],
            None,
            f"{TOLD}last_stage_less_layers = 0.5: parallelism.pipeline_parallel_layers tells each "
            "stage's blocks; leave one of them out",
        ),
    ],
    "schedule takes stages": [
        (
            [f"{PP}2", f"{KEY}schedule={name}", f"{KEY}stages_per_rank={given}"],
            None,
            f"{TOLD}stages_per_rank = {given}: {name} has exactly {exactly}",
        )
        for name, given, exactly in (
            ("GPipe", 2, 1),
            ("1F1B", 3, 1),
            ("ZBVZeroBubble", 1, 2),
            ("DualPipeV", 3, 2),
        )
    ],
    "stages have layers": [
        (
            [f"{PP}4", f"{KEY}schedule=GPipe"],
            4,
            f"{TOLD}degree = 4: 4 ranks with 1 stage each have 4, more than model.num_layers 2",
        ),
        (
            [f"{PP}2", f"{KEY}schedule=LoopedBFS"],
            None,
            f"{TOLD}degree = 2: 2 ranks with 2 stages each have 4, more than model.num_layers 2",
        ),
        (
            [f"{PP}2", "--model.num_layers=6", f"{KEY}layers=[1, 2, 3]"],
            None,
            f"{TOLD}layers = [1, 2, 3]: 3 numbers for 2 stages",
        ),
        (
            [f"{PP}2", "--model.num_layers=6", f"{KEY}layers=[2, 3]"],
            None,
            f"{TOLD}layers = [2, 3]: 2 + 3 = 5, but model.num_layers is 6",
        ),
        *(
            (
                [f"{PP}2", f"{KEY}{end}_stage_less_layers=2.5"],
                None,
                f"{TOLD}{end}_stage_less_layers = 2.5: more than model.num_layers 2, what all "
                "blocks cost",
            )
            for end in ("first", "last")
        ),
    ],
    "micro-batches are whole": [
        (
            [f"{PP}2", f"{KEY}microbatch_size=4"],
            None,
            f"{TOLD}microbatch_size = 4: does not divide training.local_batch_size 2",
        ),
    ],
    "weights stay for both parts": [
        (
            [
                f"{PP}2",
                "--model.num_layers=4",
                f"{KEY}schedule=DualPipeV",
                "--training.local_batch_size=4",
                "--training.global_batch_size=4",
                "--parallelism.fsdp_reshard_after_forward=always",
            ],
            2,
            'command line: parallelism.fsdp_reshard_after_forward = "always": DualPipeV takes '
            'backward in two parts; use "default" or "never"',
        ),
    ],
    "schedule takes micro-batches": [
        (
            [f"{PP}2", f"{KEY}microbatch_size=2"],
            2,
            f"{TOLD}microbatch_size = 2: training.local_batch_size 2 in micro-batches of 2: "
            "1F1B needs a micro-batch per stage, but has 1 for 2 stages",
        ),
        (
            [f"{PP}2", f"{KEY}schedule=DualPipeV", "--model.num_layers=4"],
            2,
            "tiny.toml: training.local_batch_size = 2: 2 in micro-batches of 1: "
            "DualPipeV needs a micro-batch per stage, but has 2 for 4 stages",
        ),
        *(
            (
                [
                    f"{PP}2",
                    f"{KEY}schedule={name}",
                    "--model.num_layers=4",
                    "--training.local_batch_size=5",
                    "--training.global_batch_size=10",
                ],
                None,
                "command line: training.local_batch_size = 5: 5 in micro-batches of 1: "
                f"{name} goes in 5 // 2 ranks = 2 rounds, "
                "which do not divide the 5 micro-batches; a multiple of 2 does",
            )
            for name in ("Interleaved1F1B", "InterleavedZeroBubble")
        ),
    ],
    "order can be run": [
        (
            [f"{PP}2", f"{KEY}schedule_csv=none.csv"],
            None,
            f'{TOLD}schedule_csv = "none.csv": it cannot be read: No such file or directory',
        ),
        (
            [f"{PP}2", f"{KEY}schedule_csv=wide.csv"],
            None,
            f'{TOLD}schedule_csv = "wide.csv": field larger than field limit (131072)',
        ),
        (
            [f"{PP}3", "--model.num_layers=6", f"{KEY}schedule_csv=order.csv"],
            None,
            f'{TOLD}schedule_csv = "order.csv": order.csv: 2 lines, but '
            "parallelism.pipeline_parallel_degree = 3; a line per rank",
        ),
        (
            [f"{PP}2", "--model.num_layers=1", f"{KEY}schedule_csv=order.csv"],
            None,
            f"{TOLD}degree = 2: 2 ranks with 1 stage each have 2, more than model.num_layers 1",
        ),
        (
            [f"{PP}2", "--training.local_batch_size=4", f"{KEY}schedule_csv=order.csv"],
            None,
            f'{TOLD}schedule_csv = "order.csv": training.local_batch_size 4 in '
            "micro-batches of 1: order.csv is an order for 2 micro-batches, not for 4",
        ),
    ],
}

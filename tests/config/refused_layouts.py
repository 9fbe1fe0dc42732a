"""Layouts that do not fit: (overrides, processes, what is said before the reason), by row."""

TP, CP, EP = (f"--parallelism.{kind}_parallel_degree=" for kind in ("tensor", "context", "expert"))
REPLICATE, SHARD = (
    f"--parallelism.data_parallel_{kind}_degree=" for kind in ("replicate", "shard")
)
DOMAIN = "--parallelism.scale_up_size="
TWO_TIER = "--parallelism.expert_parallel_comm_backend=two_tier"
PP, ROWS = (f"--parallelism.pipeline_parallel_{key}=" for key in ("degree", "microbatch_size"))
BATCH, PASS = (f"--training.{kind}_batch_size=" for kind in ("global", "local"))
GROUP = "--model.balance_group_size="
GROUPS = ["--model.balance_loss_weight=0.1", "--model.balance_loss_scope=group"]
TOLD = "command line: parallelism."

REFUSED_LAYOUTS: dict[str, list[tuple[list[str], int | None, str]]] = {
    "degrees fill the world": [
        (
            [f"{SHARD}2"],
            4,
            f"{TOLD}data_parallel_shard_degree = 2: pp 1 × dp_replicate 1 × dp_shard 2 × cp 1 × "
            "tp 1 = 2, but the world has 4 processes; data_parallel_shard_degree = -1 takes what "
            "the others leave",
        ),
        (
            [f"{SHARD}2", f"{TP}2", f"{CP}2", "--parallelism.pipeline_parallel_degree=2"],
            8,
            f"{TOLD}data_parallel_shard_degree = 2: pp 2 × dp_replicate 1 × dp_shard 2 × cp 2 × "
            "tp 2 = 16, but the world has 8 processes; data_parallel_shard_degree = -1 takes what "
            "the others leave",
        ),
        (
            [f"{REPLICATE}3"],
            4,
            f"{TOLD}data_parallel_replicate_degree = 3: pp 1 × dp_replicate 3 × cp 1 × tp 1 = 3 "
            "does not divide the world of 4 processes",
        ),
        (
            [f"{CP}4", f"{TP}2"],
            4,
            f"{TOLD}context_parallel_degree = 4: pp 1 × dp_replicate 1 × cp 4 × tp 2 = 8 "
            "does not divide the world of 4 processes",
        ),
    ],
    "balance groups are whole": [
        (
            [*GROUPS, f"{GROUP}3", f"{BATCH}8", f"{PASS}8"],
            None,
            "command line: model.balance_group_size = 3: does not divide "
            "training.global_batch_size 8",
        ),
        (
            [*GROUPS, f"{GROUP}2", f"{BATCH}8", f"{PASS}8", "--data.num_streams=2"],
            None,
            "command line: model.balance_group_size = 2: its 4 groups in a step do not divide "
            "data.num_streams 2",
        ),
        (
            [*GROUPS, f"{GROUP}4", f"{BATCH}8", f"{PASS}2"],
            4,
            "command line: model.balance_group_size = 4: its 2 groups in a step cannot be shared "
            "by 4 data-parallel ranks",
        ),
        (
            [*GROUPS, f"{GROUP}4", f"{BATCH}8", f"{PASS}2"],
            2,
            "command line: training.local_batch_size = 2: 2 rows are no whole groups of 4",
        ),
        (
            [*GROUPS, f"{GROUP}4", f"{BATCH}8", f"{PASS}8", f"{PP}2", f"{ROWS}2"],
            2,
            f"{TOLD}pipeline_parallel_microbatch_size = 2: no whole groups of "
            "model.balance_group_size 4",
        ),
    ],
    "experts fold": [
        (
            [f"{REPLICATE}2", f"{EP}4"],
            4,
            f"{TOLD}expert_parallel_degree = 4: dp_shard 2 × cp 1 × tp 1 = 2 ranks cannot be "
            "folded into groups of ep 4; ep must divide them",
        ),
        (
            [f"{SHARD}1", f"{TP}2", f"{EP}4"],
            None,
            f"{TOLD}expert_parallel_degree = 4: dp_shard 1 × cp 1 × tp 2 = 2 ranks cannot be "
            "folded into groups of ep 4; ep must divide them",
        ),
    ],
    "experts divide": [
        (
            [f"{EP}4", "--model.num_experts=6"],
            4,
            f"{TOLD}expert_parallel_degree = 4: does not divide model.num_experts 6",
        ),
    ],
    "experts are there": [
        (
            [f"{EP}2", "--model.num_dense_layers=2"],
            None,
            f"{TOLD}expert_parallel_degree = 2: model.num_layers 2 - num_dense_layers 2 = 0 "
            "layers have experts",
        ),
        (
            ["--parallelism.max_expert_tokens=8", "--model.num_dense_layers=2"],
            None,
            f"{TOLD}max_expert_tokens = 8: model.num_layers 2 - num_dense_layers 2 = 0 "
            "layers have experts",
        ),
    ],
    "widths divide": [
        ([f"{TP}4"], None, f"{TOLD}tensor_parallel_degree = 4: does not divide model.num_heads 2"),
        (
            [f"{TP}2", "--model.vocab_size=267"],
            None,
            f"{TOLD}tensor_parallel_degree = 2: does not divide model.vocab_size 267; "
            "pad it to 268",
        ),
        (
            [f"{TP}2", "--model.num_dense_layers=1", "--model.intermediate_size=33"],
            None,
            f"{TOLD}tensor_parallel_degree = 2: does not divide model.intermediate_size 33",
        ),
        (
            [f"{TP}2", "--model.num_shared_experts=3", "--model.moe_intermediate_size=5"],
            None,
            f"{TOLD}tensor_parallel_degree = 2: does not divide "
            "model.moe_intermediate_size * num_shared_experts = 15",
        ),
    ],
    "sequence divides": [
        (
            [f"{TP}2", "--training.seq_len=63"],
            None,
            "command line: training.seq_len = 63: 63 tokens, not a multiple of "
            "tensor_parallel_degree 2",
        ),
        (
            [f"{TP}2", "--training.seq_len=63", "--parallelism.sequence_parallel=false"],
            None,
            "command line: training.seq_len = 63: 63 tokens, not a multiple of "
            "tensor_parallel_degree 2",
        ),
        (
            [f"{TP}2", "--training.seq_len=63", "--model.num_dense_layers=2"],
            None,
            "command line: training.seq_len = 63: 63 tokens, not a multiple of "
            "tensor_parallel_degree 2",
        ),
        (
            [f"{CP}2", "--training.seq_len=62"],
            None,
            "command line: training.seq_len = 62: not a multiple of "
            "2 headtail chunks * context_parallel_degree 2 = 4",
        ),
        (
            [
                f"{CP}4",
                "--training.seq_len=62",
                "--parallelism.context_parallel_load_balancer=none",
            ],
            None,
            "command line: training.seq_len = 62: not a multiple of context_parallel_degree 4",
        ),
        (
            [
                f"{CP}2",
                f"{TP}2",
                "--training.seq_len=62",
                "--parallelism.context_parallel_load_balancer=none",
            ],
            None,
            "command line: training.seq_len = 62: 62 / context_parallel_degree 2 = 31 tokens, "
            "not a multiple of tensor_parallel_degree 2",
        ),
    ],
    "batch divides": [
        (
            ["--training.local_batch_size=4"],
            4,
            "tiny.toml: training.global_batch_size = 8: not a multiple of "
            "4 data-parallel ranks * local_batch_size 4 = 16",
        ),
        (
            [f"{REPLICATE}2", f"{SHARD}2", f"{CP}2", "--training.global_batch_size=12"],
            None,
            "command line: training.global_batch_size = 12: not a multiple of "
            "4 data-parallel ranks * local_batch_size 2 = 8",
        ),
        (
            ["--training.global_batch_size=9"],
            None,
            "command line: training.global_batch_size = 9: not a multiple of "
            "1 data-parallel ranks * local_batch_size 2 = 2",
        ),
    ],
    "ranks share streams": [
        (
            ["--data.num_streams=6"],
            4,
            "command line: data.num_streams = 6: not a multiple of 4 data-parallel ranks",
        ),
        (
            ["--data.num_streams=6", f"{TP}2"],
            8,
            "command line: data.num_streams = 6: not a multiple of 4 data-parallel ranks",
        ),
        (
            ["--data.num_streams=6", f"{REPLICATE}2", f"{SHARD}2"],
            None,
            "command line: data.num_streams = 6: not a multiple of 4 data-parallel ranks",
        ),
    ],
    "workers share streams": [
        (
            ["--training.dataloader.num_workers=3"],
            4,
            "command line: training.dataloader.num_workers = 3: more than "
            "data.num_streams 8 / 4 data-parallel ranks = 2",
        )
    ],
    "slices have masks": [
        (
            [
                f"{CP}2",
                "--training.attention_backend=sdpa",
                "--training.document_mask=false",
            ],
            None,
            'command line: training.attention_backend = "sdpa": cannot go with '
            'parallelism.context_parallel_degree 2; use "auto", "flex" or "blocked"',
        )
    ],
    "tensor parallel inside a domain": [
        (
            [f"{TP}2", f"{DOMAIN}1"],
            2,
            f"{TOLD}tensor_parallel_degree = 2: a group crosses domains of scale_up_size 1 "
            "(is more than 1); lower it, or allow it by tensor_parallel_across_domains = true",
        ),
        (
            [f"{TP}2", f"{DOMAIN}1"],
            None,
            f"{TOLD}tensor_parallel_degree = 2: a group crosses domains of scale_up_size 1 "
            "(is more than 1); lower it, or allow it by tensor_parallel_across_domains = true",
        ),
        (
            [f"{TP}2", f"{DOMAIN}3"],
            4,
            f"{TOLD}tensor_parallel_degree = 2: a group crosses domains of scale_up_size 3 "
            "(3 % 2 = 1); lower it, or allow it by tensor_parallel_across_domains = true",
        ),
    ],
    "two tiers are there": [
        (
            [f"{EP}4", TWO_TIER],
            4,
            f'{TOLD}expert_parallel_comm_backend = "two_tier": set parallelism.scale_up_size, '
            'the ranks of a fast domain, or use "flat"',
        ),
        (
            [f"{EP}2", f"{DOMAIN}4", TWO_TIER],
            4,
            f'{TOLD}expert_parallel_comm_backend = "two_tier": expert_parallel_degree 2 / '
            'scale_up_size 4 = 0.5 domains; make it 2 or more whole ones, or use "flat"',
        ),
        (
            [f"{EP}4", f"{DOMAIN}4", TWO_TIER],
            4,
            f'{TOLD}expert_parallel_comm_backend = "two_tier": expert_parallel_degree 4 / '
            'scale_up_size 4 = 1 domains; make it 2 or more whole ones, or use "flat"',
        ),
        (
            [f"{EP}4", f"{DOMAIN}3", TWO_TIER],
            None,
            f'{TOLD}expert_parallel_comm_backend = "two_tier": expert_parallel_degree 4 / '
            'scale_up_size 3 = 1.333 domains; make it 2 or more whole ones, or use "flat"',
        ),
    ],
}

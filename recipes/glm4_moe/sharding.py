"""Which weights are split how."""

from titan_moe.recipe import FsdpUnit, Sharding

SHARDING = Sharding(
    # Inner modules before the ones that contain them.
    fsdp_units=(
        FsdpUnit("embedding"),
        FsdpUnit("layers.*.moe.router", precision="float32"),
        FsdpUnit("layers.*.moe.experts", mesh="sparse"),
        FsdpUnit("layers.*"),
        FsdpUnit("head.norm"),  # multi-token prediction asks for it alone
        FsdpUnit("head"),
    ),
    colwise=(
        "layers.*.attention.q",
        "layers.*.attention.k",
        "layers.*.attention.v",
        "layers.*.mlp.gate",
        "layers.*.mlp.up",
        "layers.*.moe.shared.gate",
        "layers.*.moe.shared.up",
    ),
    rowwise=(
        "layers.*.attention.out",
        "layers.*.mlp.down",
        "layers.*.moe.shared.down",
    ),
    gather_inputs=("layers.*.attention", "layers.*.mlp", "layers.*.moe.shared"),
)

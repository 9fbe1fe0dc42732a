"""Which weights are split how."""

from titan_moe.recipe import FsdpUnit, Sharding

SHARDING = Sharding(
    # Inner modules before the ones that contain them.
    fsdp_units=(
        FsdpUnit("embedding"),
        FsdpUnit("layers.*.moe.router", precision="float32"),
        FsdpUnit("layers.*.moe.experts", mesh="sparse"),
        FsdpUnit("layers.*"),
        FsdpUnit("head"),
    ),
    colwise=(
        "layers.*.attention",  # its sinks, one per head
        "layers.*.attention.q",
        "layers.*.attention.k",
        "layers.*.attention.v",
    ),
    rowwise=("layers.*.attention.out",),
    gather_inputs=("layers.*.attention",),
)

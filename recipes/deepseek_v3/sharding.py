"""Which weights FSDP gathers together, inner modules before the ones that contain them."""

from titan_moe.recipe import FsdpUnit, Sharding

SHARDING = Sharding(
    fsdp_units=(
        FsdpUnit("embedding"),
        FsdpUnit("layers.*.moe.router", precision="float32"),
        FsdpUnit("layers.*.moe.experts", mesh="sparse"),
        FsdpUnit("layers.*"),
        FsdpUnit("head"),
    )
)

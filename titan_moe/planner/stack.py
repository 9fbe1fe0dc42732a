"""A software stack: how much of a machine it gets, and how it goes about a step.

The constants of a stack are few, and each means something physical. They are data, in
`stacks/<name>.toml`, fitted to published figures by `benchmarks/plan_accuracy.py --fit`.
"""

from titan_moe.config.base import Section


class Stack(Section):
    """A whole stack file."""

    name: str

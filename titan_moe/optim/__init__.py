"""How weights are moved: the optimizer and its schedule."""

from titan_moe.optim.adamw import build_optimizer
from titan_moe.optim.schedule import learning_rate

__all__ = ["build_optimizer", "learning_rate"]

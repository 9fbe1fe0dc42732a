"""Which tokens, in which order: the same on any layout, from any step on."""

from titan_moe.data.build import build_train_loader, build_validation
from titan_moe.data.loader import StepLoader
from titan_moe.data.state import merge_states
from titan_moe.data.tokenizer import tokenizer_of
from titan_moe.data.validation import ValidationData

__all__ = [
    "StepLoader",
    "ValidationData",
    "build_train_loader",
    "build_validation",
    "merge_states",
    "tokenizer_of",
]

"""Every tolerance that several tests share, each with its reason.

Those of the contract test, which is installed code, are in `titan_moe/check/tolerances.py`.
"""

from titan_moe.check.tolerances import FP32_LOGITS as FP32_LOGITS
from titan_moe.check.tolerances import FP32_MODEL_GRADIENT as FP32_MODEL_GRADIENT
from titan_moe.check.tolerances import LAYOUT_GRADIENT_ERROR, LAYOUT_RTOL

# Layouts, three steps in fp32, AdamW eps 1e-5. Only the order of sums differs: 6e-7 of a gradient
# at first. A step of AdamW divides by small numbers and hands the difference on, some twofold.
PARITY_GRADIENT_ERROR = LAYOUT_GRADIENT_ERROR
PARITY_LATER_GRADIENT_ERROR = 1e-5
# Loss, balance loss and norm are sums over all tokens or weights, in which errors even out.
PARITY_RTOL = LAYOUT_RTOL
# ‖Δ‖/‖reference‖ of each weight: three updates of 1e-3 or so, each as far off as its gradient.
PARITY_WEIGHT_ERROR = 1e-6
# Twenty steps of a tiny model amplify the first step's errors some ten times in loss and norm.
PARITY_CURVE_RTOL = 1e-5
# A loss from the same weights, loaded under another layout, and the one after it.
LOADED_LOSS_RTOL = 1e-6
# Scores of a choice taken and the next best must differ by more than layouts do, or it may flip.
PARITY_MIN_GAP = 1e-5

# Same formula, another order of fp32 sums; a few hundred terms each.
FP32_REORDERED = 2e-6
# bf16 keeps 8 bits; scores, weights and results are each rounded once (2^-9 relative each).
BF16_ROUNDED = 1e-2

# A norm of fp32 gradients, summed in fp64 in another order.
NORM_RTOL = 1e-12

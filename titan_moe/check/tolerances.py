"""How far numbers of a right recipe may be apart, each bound with its reason."""

# Absolute, on logits of order 1 after several layers in fp32 by two implementations; 1e-5 or less
# is usual, a wrong formula gives 1e-2 or more.
FP32_LOGITS = 1e-4
# ‖Δ‖/‖reference‖ of each parameter's gradient, ours against theirs: errors of all layers add up,
# and small gradients come from large terms.
FP32_MODEL_GRADIENT = 2e-5
# The same, layouts against one process: only the order of sums differs.
LAYOUT_GRADIENT_ERROR = 5e-6
# Loss, balance loss and norm are sums over all tokens or weights, in which errors even out.
LAYOUT_RTOL = 2e-6
# A gradient that is zero but for rounding, as of a bias that softmax takes out again, has no
# direction to compare: below this share of the largest gradient's norm it need only be as small.
NEGLIGIBLE_GRADIENT = 1e-6
# Weights are moved by this much, relatively, to see whether some token's choice of experts is so
# near to a tie that rounding could turn it; rounding moves scores by less.
NEARLY_TIED = 2e-5
# Loss of one bf16 step against fp32: 8 bits each in some ten roundings one after the other, and a
# few tokens that take other experts.
BF16_LOSS = 3e-2
# Two counts of the same FLOPs in fp64.
FLOPS_RTOL = 1e-9

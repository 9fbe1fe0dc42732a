"""The contract test, step by step: what must be true of every recipe."""

from dataclasses import replace

import torch

from titan_moe.check.against_transformers import gradients_equal, logits_equal, round_trip
from titan_moe.check.counts import flops_agree
from titan_moe.check.errors import gradient_errors
from titan_moe.check.layouts import LAYOUTS, WORLDS, Trace, first_values, laid_out, one_step
from titan_moe.check.patterns import suspicious_patterns
from titan_moe.check.report import LaterError, Step, UncheckedError, WrongError, few, worst
from titan_moe.check.sources import house_rules
from titan_moe.check.subject import Subject
from titan_moe.check.tolerances import (
    BF16_LOSS,
    LAYOUT_GRADIENT_ERROR,
    LAYOUT_RTOL,
)
from titan_moe.config.checks import run_checks
from titan_moe.parallelize import build_on_meta
from titan_moe.stages import Stage

LAYOUTS_OF_INIT = ("fsdp 4, ep 2", "tp 2")


def builds_on_meta(subject: Subject) -> str:
    """The whole, and every block as a stage of its own: their names are the whole's."""
    cfg = subject.model_config
    last = cfg.num_layers - 1

    def tensors(layers: range, embedding: bool, head: bool) -> dict[str, torch.Size]:
        stage = Stage(0, layers, has_embedding=embedding, has_head=head)
        model = build_on_meta(subject.config, subject.recipe, stage)
        on_memory = [name for name, p in model.named_parameters() if not p.is_meta]
        if on_memory:
            raise WrongError(
                f"not on meta when built there: {few(on_memory)}", subject.file("model.py")
            )
        return {name: tensor.shape for name, tensor in model.state_dict().items()}

    whole = tensors(range(cfg.num_layers), True, True)
    seen: dict[str, torch.Size] = {}
    for layer in range(cfg.num_layers):
        of_stage = tensors(range(layer, layer + 1), layer == 0, layer == last)
        # The head's stage may hold the embedding once more: tied, or for tokens further ahead.
        twice = [name for name in of_stage if name in seen and not name.startswith("embedding.")]
        if twice:
            raise WrongError(f"in two stages: {few(twice)}", subject.file("model.py"))
        seen |= of_stage
    if seen != whole:
        unlike = sorted(
            name for name in seen.keys() | whole.keys() if seen.get(name) != whole.get(name)
        )
        raise WrongError(
            f"the stages together are not the whole model: {few(unlike)}",
            f"{subject.file('model.py')}: what depends on layers, has_embedding and has_head",
        )
    return f"{len(whole)} tensors, as a whole and as {cfg.num_layers} stages"


def initialises(subject: Subject) -> str:
    """Every parameter has an init, none is left as it was, and layouts have the same bits."""
    where = f"{subject.file('model.py')}: the `inits` of the module that owns it"
    [alone] = subject.pool.run(1, first_values, laid_out(subject.config, {}))
    poisoned = [name for name, (_, is_poisoned) in alone.items() if is_poisoned]
    if poisoned:
        raise WrongError(f"left uninitialised: {few(poisoned)}", where)
    done = ["one process"]
    for layout in LAYOUTS_OF_INIT:
        config = laid_out(subject.config, LAYOUTS[layout])
        world = WORLDS.get(layout, 2)
        if run_checks(config, world, on_disk=False):
            continue  # the layouts' step says why
        for values in subject.pool.run(world, first_values, config):
            unlike = [name for name, value in values.items() if value != alone[name]]
            if unlike or values.keys() != alone.keys():
                unlike += sorted(values.keys() ^ alone.keys())
                raise WrongError(f"under {layout} other first values: {few(unlike)}", where)
        done.append(layout)
    return f"{len(alone)} tensors, no NaN; the same bits under {'; '.join(done)}"


def same_under_layouts(subject: Subject) -> str:
    """Loss, norm and every gradient of one step against one process."""
    alone = _step(subject, 1, {})
    largest, done, not_run = 0.0, [], []
    for layout, keys in LAYOUTS.items():
        config, world = laid_out(subject.config, keys), WORLDS.get(layout, 2)
        faults = run_checks(config, world, on_disk=False)
        if faults:
            not_run.append(f"{layout} ({faults[0][1]})")
            continue
        try:
            trace = _step(subject, world, keys)
        except Exception as error:
            said = " ".join(str(error).split())[:400]
            raise WrongError(
                f"under {layout}: {type(error).__name__}: {said}", _where(subject)
            ) from error
        largest = max(largest, _compare(subject, layout, trace, alone))
        done.append(layout)
    if not done:
        raise UncheckedError(f"the sizes allow none: {'; '.join(not_run)}")
    missing = f"; not run: {'; '.join(not_run)}" if not_run else ""
    return f"gradients within {largest:.1e} under {'; '.join(done)}{missing}"


def _step(subject: Subject, world: int, keys: dict[str, object]) -> Trace:
    config = laid_out(subject.config, dict(keys))
    keep = subject.keeps_first_value
    trace: Trace = subject.pool.run(world, one_step, config, subject.batch, subject.seed, keep)[0]
    return trace


def _where(subject: Subject) -> str:
    hints = suspicious_patterns(subject.recipe.load_sharding(), subject.build("meta"))
    said = "; ".join(hints) or "the patterns of what is named"
    return f"{subject.file('sharding.py')}: {said}"


def _compare(subject: Subject, layout: str, trace: Trace, alone: Trace) -> float:
    """The largest error of a gradient."""
    for what, wanted in alone.scalars.items():
        got = trace.scalars[what]
        if not abs(got - wanted) <= LAYOUT_RTOL * abs(wanted):
            raise WrongError(
                f"under {layout}: {what} {got:.8g}, on one process {wanted:.8g}", _where(subject)
            )
    if trace.gradients.keys() != alone.gradients.keys():
        unlike = sorted(trace.gradients.keys() ^ alone.gradients.keys())
        raise WrongError(
            f"under {layout}: gradients of other weights: {few(unlike)}", _where(subject)
        )
    errors = gradient_errors(trace.gradients, alone.gradients)
    name, error = worst(errors)
    if not error <= LAYOUT_GRADIENT_ERROR:
        wrong = [name for name, error in errors.items() if not error <= LAYOUT_GRADIENT_ERROR]
        raise WrongError(
            f"under {layout}: gradient of {name} off by {error:.1e} > {LAYOUT_GRADIENT_ERROR:.0e}; "
            f"beyond it in all: {len(wrong)} of {len(errors)}",
            _where(subject),
        )
    return error


def bf16_policy(subject: Subject) -> str:
    """One step with bf16 weights in forward and backward: finite, and near fp32's loss."""
    alone = _step(subject, 1, {})
    config = subject.config.model_copy(
        update={
            "training": subject.config.training.model_copy(
                update={"mixed_precision_param": "bfloat16"}
            )
        }
    )
    low = _step(replace(subject, config=config), 1, {})
    for name, gradient in low.gradients.items():
        if not gradient.isfinite().all():
            raise WrongError(f"gradient of {name} is not finite in bf16", subject.file("model.py"))
    loss, wanted = low.scalars["loss"], alone.scalars["loss"]
    off = abs(loss - wanted) / wanted
    if not off <= BF16_LOSS:
        raise WrongError(
            f"loss {loss:.5f} in bf16, {wanted:.5f} in fp32: {off:.1e} > {BF16_LOSS:.0e}",
            f"{subject.file('model.py')}: what needs fp32",
        )
    return f"loss {loss:.4f} in bf16, {wanted:.4f} in fp32"


def not_yet(subject: Subject) -> str:
    """Passes that there are none of."""
    raise LaterError("torch.compile and low precision are not yet part of titan-moe")


STEPS = (
    Step("house", "imports and size", house_rules, "config.py"),
    Step("meta", "builds on meta, whole and in stages", builds_on_meta),
    Step("init", "first values: all set, the same bits under any layout", initialises),
    Step(
        "flops", "FLOPs of the config equal those of the matmuls that run", flops_agree, "config.py"
    ),
    Step("logits", "logits equal transformers'", logits_equal),
    Step("gradients", "every parameter's gradient equals transformers'", gradients_equal, "hf.py"),
    Step("roundtrip", "export and import, bit for bit", round_trip, "hf.py"),
    Step(
        "layouts", "loss, norm and gradients under parallelism", same_under_layouts, "sharding.py"
    ),
    Step("bf16", "a step under the bf16 policy", bf16_policy),
    Step("passes", "compile and low precision", not_yet),
)

"""Tells a recorder what FSDP and a pipeline are about, while a step is traced.

Both are torch's, and say nothing of it by themselves: their methods are wrapped for the time.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.tensor import DTensor

from titan_moe.parallel.fsdp import fsdp_modules
from titan_moe.parallel.pipeline import Pipeline
from titan_moe.parallel.whole import WholeModel
from titan_moe.planner.figures import Dimension
from titan_moe.planner.trace.counts import Kind, Moment
from titan_moe.planner.trace.pretend import replaced
from titan_moe.planner.trace.recorder import Recorder

Method = Callable[..., Any]

# FSDP's meshes, by the dimension that shards.
DIMENSIONS: dict[str, Dimension] = {"fsdp": "dp_shard", "efsdp": "efsdp"}


class Marks:
    """parts: of one rank; stages: their numbers.

    received_bytes: places where stages receive what others send, of all micro-batches of a pass.
    kept_bytes: gradients of inputs that stages still have when all of a pass is through.
    """

    def __init__(self, recorder: Recorder, parts: list[nn.Module], stages: list[int]) -> None:
        self._recorder = recorder
        self.run = 0  # the call of the runner that is going on
        self.received_bytes = self.kept_bytes = 0
        self._groups: dict[int, list[FSDPParamGroup]] = {}
        self._stage_of: dict[FSDPParamGroup, int] = {}
        self._watched: set[int] = set()
        for part, stage in zip(parts, stages, strict=True):
            states = [module._get_fsdp_state() for module in fsdp_modules(part)]
            self._groups[stage] = [g for state in states for g in state._fsdp_param_groups]
            self._stage_of |= dict.fromkeys(self._groups[stage], stage)

    @contextmanager
    def set(self) -> Iterator[None]:
        """While it lasts."""
        with ExitStack() as stack:
            for owner, name, wrapper in (
                (WholeModel, "forward_backward", self._pass),
                (Pipeline, "forward_backward", self._pass),
                (FSDPParamGroup, "unshard", self._unshard),
                (FSDPParamGroup, "wait_for_unshard", self._wait_for_unshard),
                (FSDPParamGroup, "post_backward", self._post_backward),
                (PipelineStage, "_prepare_forward_infra", self._receive),
                (PipelineStage, "_prepare_backward_infra", self._receive),
                (PipelineStage, "forward_one_chunk", self._forward),
                (PipelineStage, "backward_one_chunk", self._backward),
                (PipelineStage, "backward_weight_one_chunk", self._weights),
                (PipelineStage, "perform_reduce_grad", self._reduce),
                (torch_schedules._PipelineSchedule, "_maybe_compute_loss", self._loss),
                (torch_schedules, "_batch_p2p", self._hop),
            ):
                stack.enter_context(replaced(owner, name, wrapper(getattr(owner, name))))
            yield

    def _pass(self, method: Method) -> Method:
        def forward_backward(runner: Any, *args: Any) -> Tensor:
            kind: Kind = "hop" if isinstance(runner, Pipeline) else "pass"
            with self._recorder.during(Moment(kind, self.run)):
                loss: Tensor = method(runner, *args)
            self.run += 1
            return loss

        return forward_backward

    def _unshard(self, method: Method) -> Method:
        def unshard(group: FSDPParamGroup, *args: Any, **keywords: Any) -> Any:
            with self._gathering(group), self._recorder.sending("weights", _dimension(group)):
                return method(group, *args, **keywords)

        return unshard

    @contextmanager
    def _gathering(self, group: FSDPParamGroup) -> Iterator[None]:
        """Outside of all stages it is the schedule that asks for their weights."""
        if self._recorder.moment.kind != "hop":
            yield
            return
        with self._recorder.during(Moment("gather", self.run, self._stage_of[group])):
            yield

    def _wait_for_unshard(self, method: Method) -> Method:
        def wait_for_unshard(group: FSDPParamGroup) -> None:
            with self._recorder.ledger.making("buffers"):
                method(group)
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None and id(whole) not in self._watched:
                    self._watched.add(id(whole))
                    whole.register_post_accumulate_grad_hook(self._accumulated)

        return wait_for_unshard

    def _accumulated(self, whole: Tensor) -> None:
        """A gradient that is still to be reduced."""
        assert whole.grad is not None
        self._recorder.ledger.relabel(local(whole.grad), "buffers")

    def _post_backward(self, method: Method) -> Method:
        def post_backward(group: FSDPParamGroup, *args: Any) -> None:
            with self._recorder.sending("gradients", _dimension(group)):
                method(group, *args)
            for parameter in group.fsdp_params:
                gradient = parameter.sharded_param.grad
                if gradient is not None:
                    self._recorder.ledger.relabel(local(gradient), "gradients")

        return post_backward

    def _receive(self, method: Method) -> Method:
        def prepare(stage: PipelineStage, *args: Any, **keywords: Any) -> Any:
            live = self._recorder.ledger.live
            before = live["buffers"]
            with self._recorder.ledger.making("buffers"):
                result = method(stage, *args, **keywords)
            self.received_bytes += live["buffers"] - before
            return result

        return prepare

    def _at(self, kind: Kind, stage: PipelineStage, number: int) -> Any:
        return self._recorder.during(Moment(kind, self.run, stage.stage_index, number))

    def _forward(self, method: Method) -> Method:
        def forward(stage: PipelineStage, number: int, *args: Any, **keywords: Any) -> Any:
            with self._at("forward", stage, number):
                return method(stage, number, *args, **keywords)

        return forward

    def _loss(self, method: Method) -> Method:
        def loss(
            schedule: Any, stage: PipelineStage, output: Any, targets: Any, number: int, *args: Any
        ) -> None:
            with self._at("forward", stage, number):
                method(schedule, stage, output, targets, number, *args)

        return loss

    def _backward(self, method: Method) -> Method:
        def backward(
            stage: PipelineStage,
            number: int,
            loss: Any = None,
            full_backward: bool = True,
            **k: Any,
        ) -> None:
            with self._at("backward" if full_backward else "inputs", stage, number):
                method(stage, number, loss=loss, full_backward=full_backward, **k)
            self._unreduced(stage.stage_index)

        return backward

    def _weights(self, method: Method) -> Method:
        def weights(stage: PipelineStage, number: int, **keywords: Any) -> None:
            with self._at("weights", stage, number):
                method(stage, number, **keywords)
            self._unreduced(stage.stage_index)

        return weights

    def _unreduced(self, stage: int) -> None:
        """A backward in two parts sets gradients without a hook's being called."""
        for group in self._groups[stage]:
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                for gradient in (
                    getattr(whole, "grad", None),
                    parameter.unsharded_accumulated_grad,
                ):
                    if gradient is not None:
                        self._recorder.ledger.relabel(local(gradient), "buffers")

    def _reduce(self, method: Method) -> Method:
        def reduce(stage: PipelineStage, *args: Any) -> None:
            if self.run == 0:
                infos = (info for infos in stage.args_recv_info.values() for info in infos)
                grads = (info.buffer.grad for info in infos if info.buffer is not None)
                self.kept_bytes += sum(g.untyped_storage().nbytes() for g in grads if g is not None)
            with self._recorder.during(Moment("reduction", self.run, stage.stage_index)):
                method(stage, *args)

        return reduce

    def _hop(self, method: Method) -> Method:
        def hop(*args: Any, **keywords: Any) -> Any:
            with self._recorder.sending("hidden states", "pp"):
                return method(*args, **keywords)

        return hop


def local(tensor: Tensor) -> Tensor:
    """This rank's slice, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _dimension(group: FSDPParamGroup) -> Dimension:
    """Of its shards."""
    names = group.mesh_info.mesh.mesh_dim_names
    assert names is not None
    return DIMENSIONS[names[-1]]

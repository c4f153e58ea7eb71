"""Strategies with which Lightning's Fabric and Trainer train a parallelised model.

    from vescale_parallel.integrations.lightning import FabricStrategy, TrainerStrategy

    fabric = Fabric(strategy=FabricStrategy(mesh(dp=2, tp=2), plan))
    trainer = Trainer(strategy=TrainerStrategy(mesh(dp=2, tp=2), plan))

Models are parallelised by `fabric.setup` or when the fit begins, before optimizers are made. Every
rank reads whole batches; steps (`training_step`) are called as the model's forward is, so the plan
shards what enters them. Rank 0 logs and writes, and checkpoints are those of one device.

Where the plan has stages (`pipeline=`), `microbatches=` or `deterministic=`, steps are called as
they are: with `automatic_optimization = False`, `training_step` calls `forward_backward(self, ...)`
and the optimizer, and the other steps call the module.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vescale_parallel._apply.no_sync import no_sync
from vescale_parallel._apply.through_forward import through_forward
from vescale_parallel._errors import ParallelError
from vescale_parallel._step.forward_backward import step_of
from vescale_parallel.integrations._states import (
    PlanFor,
    barrier,
    broadcast_plain,
    decided,
    inner,
    is_parallel,
    loading_whole,
    local_rank,
    made_parallel,
    model_state,
    rank,
    whole,
    whole_states,
)

__all__ = ["FabricStrategy", "TrainerStrategy"]


def _device(mesh: Any) -> torch.device:
    kind = "cpu" if mesh is None else mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.cuda.current_device())


def _log_on_first_rank() -> None:
    """As Lightning's strategies do: functions marked `rank_zero_only` learn who is rank 0."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning_utilities.core.rank_zero import rank_zero_only as of_utilities

    rank_zero_only.rank = of_utilities.rank = rank()


class OneProcess:
    """What both kinds of strategies share: one process's worth of data, and rank 0 writes.

    Args:
        mesh: of `vescale_parallel.mesh`.
        plan: a `Plan`, a function that makes one of the model, or None for data parallel.
        **options: of Lightning's `SingleDeviceStrategy`.
    """

    def __init__(self, mesh: Any, plan: PlanFor = None, **options: Any) -> None:
        self._mesh, self._plan = mesh, plan
        base: Any = super()
        # `base` is Lightning's class, which stands behind this one once `type` has put them
        # together: type checkers see no base here.
        base.__init__(device=_device(mesh), **options)
        # After the base class, which takes itself for the only process.
        self.global_rank = rank()
        self.local_rank = local_rank()
        _log_on_first_rank()

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank logs and writes."""
        return rank() == 0

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait until all ranks are here."""
        barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what rank `src` has: names of files with the time in them, say."""
        return broadcast_plain(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks decide so, or any: whether to stop early, say. Collective."""
        return decided(bool(decision), every=all)

    def all_gather(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return global plain tensors."""
        return whole(tensor)

    def _state_of(self, optimizer: Any) -> Any:
        with whole_states(optimizer):
            return inner(optimizer).state_dict()

    if TYPE_CHECKING:
        root_device: Any


class OfFabric(OneProcess):
    """What Fabric's strategy does."""

    def all_reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return global plain tensors: there is nothing to add."""
        return whole(tensor)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Parallelise a model."""
        base: Any = super()
        found: nn.Module = base.setup_module(made_parallel(module, self._mesh, self._plan))
        return found

    def get_module_state_dict(self, module: nn.Module) -> Any:
        """Return the state of one device, on rank 0. Collective."""
        base: Any = super()
        return model_state(module) if is_parallel(module) else base.get_module_state_dict(module)

    def get_optimizer_state(self, optimizer: Any) -> Any:
        """Return the state of one device, on rank 0. Collective."""
        return self._state_of(optimizer)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint of one device. Collective."""
        base: Any = super()
        base.save_checkpoint(*args, **kwargs)
        barrier()

    def load_checkpoint(self, path: Any, state: Any = None, **kwargs: Any) -> Any:
        """Read a checkpoint of one device, or of any mesh."""
        base: Any = super()
        several = list(state.values()) if isinstance(state, dict) else [state]
        optimizers = [one for one in several if isinstance(one, torch.optim.Optimizer)]
        with loading_whole(*optimizers):
            return base.load_checkpoint(path, state, **kwargs)


def _log_whole(module: Any) -> None:
    """Let `module.log` note plain values: what rank 0 alone reads later must need no other rank."""
    # Once, however often the module is fitted.
    if "log" in vars(module):
        return
    log = module.log

    def log_whole(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        log(name, whole(value), *args, **kwargs)

    vars(module)["log"] = log_whole


class OfTrainer(OneProcess):
    """What the Trainer's strategy does."""

    strategy_name = "vescale"

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return global plain tensors: there is nothing to add."""
        return whole(tensor)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        base: Any = super()
        _log_whole(self.lightning_module)
        found: nn.Module = base._setup_model(made_parallel(model, self._mesh, self._plan))
        return found

    def _step(self, context: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        module = self.lightning_module
        with context:
            # `training_step` calls `forward_backward` itself, which divides the batch: it must come
            # whole.
            if step_of(module) is not None:
                return getattr(module, name)(*args, **kwargs)
            return through_forward(module, name, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's `training_step` as its forward is called."""
        module = self.lightning_module
        if step_of(module) is not None and module.automatic_optimization:
            raise ParallelError(
                f"{type(module).__name__}: this plan's steps compute forward and backward in one "
                "call, so Lightning has no loss to differentiate. Set self.automatic_optimization "
                "= False, and in training_step call forward_backward(self, ...) and the optimizer."
            )
        context = self.precision_plugin.train_step_context()
        return self._step(context, "training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's `validation_step` as its forward is called."""
        context = self.precision_plugin.val_step_context()
        return whole(self._step(context, "validation_step", args, kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's `test_step` as its forward is called."""
        context = self.precision_plugin.test_step_context()
        return whole(self._step(context, "test_step", args, kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's `predict_step` as its forward is called; its results are whole."""
        context = self.precision_plugin.predict_step_context()
        return whole(self._step(context, "predict_step", args, kwargs))

    def lightning_module_state_dict(self) -> Any:
        """Return the state of one device, on rank 0. Collective."""
        return model_state(self.lightning_module)

    def optimizer_state(self, optimizer: Any) -> Any:
        """Return the state of one device, on rank 0. Collective."""
        return self._state_of(optimizer)

    def save_checkpoint(self, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint of one device. Collective: callbacks may keep distributed metrics."""
        base: Any = super()
        # On every rank, of which only the first one writes: to make tensors whole is a collective.
        base.save_checkpoint(whole(checkpoint), *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Read the states of one device, or of any mesh."""
        base: Any = super()
        with loading_whole(*self.optimizers):
            base.load_optimizer_state_dict(checkpoint)

    def block_backward_sync(self) -> Any:
        """Let gradients be reduced once, by the backward outside of it."""
        return no_sync(self.lightning_module)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether checkpoints are read into the parallel model."""
        return True

    if TYPE_CHECKING:
        lightning_module: Any
        precision_plugin: Any
        optimizers: list[Any]


@cache
def _fabric_strategy() -> type:
    # Imported when the class is first asked for: Lightning need not be installed.
    from lightning.fabric.strategies import SingleDeviceStrategy

    return type("FabricStrategy", (OfFabric, SingleDeviceStrategy), {"__module__": __name__})


@cache
def _trainer_strategy() -> type:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    return type("TrainerStrategy", (OfTrainer, SingleDeviceStrategy), {"__module__": __name__})


if TYPE_CHECKING:
    FabricStrategy: Any
    TrainerStrategy: Any


def __getattr__(name: str) -> Any:
    if name == "FabricStrategy":
        return _fabric_strategy()
    if name == "TrainerStrategy":
        return _trainer_strategy()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

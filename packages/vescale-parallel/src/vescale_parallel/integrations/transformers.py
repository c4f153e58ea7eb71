"""`transformers.Trainer`, and what is derived from it (trl's trainers), on a parallelised model.

    from vescale_parallel.integrations.transformers import parallel

    trainer = parallel(Trainer)(model, args, train_dataset=rows, mesh=mesh(dp=2, tp=2), plan=plan)
    trainer.train()

Batch sizes are those of one device: `per_device_train_batch_size` rows a step, over all ranks.
Losses, accumulation, clipping, evaluation and early stopping are those of one device; rank 0 logs
and writes, checkpoints are those of one device, and are resumed on any mesh.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn

from vescale_parallel.integrations._states import (
    PlanFor,
    barrier,
    is_parallel,
    loading_whole,
    made_parallel,
    model_state,
    whole,
    whole_states,
)
from vescale_parallel.integrations.accelerate import one_process

__all__ = ["parallel"]


class ParallelTrainer:
    """What a `Trainer` does otherwise where its model is parallelised; see `parallel`."""

    def __init__(self, *args: Any, mesh: Any = None, plan: PlanFor = None, **kwargs: Any) -> None:
        self._mesh, self._plan = mesh, plan
        # Before anything asks how many processes there are. The arguments share this state.
        one_process()
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        if given is not None and getattr(given, "accelerator_config", None) is not None:
            # Else rank 0 would read streams for all others, and they would wait for it.
            given.accelerator_config.dispatch_batches = False
        base: Any = super()
        base.__init__(*args, **kwargs)
        self.model = self._made_parallel(self.model)
        if isinstance(getattr(self, "ref_model", None), nn.Module):
            self.ref_model = self._made_parallel(self.ref_model)

    def _made_parallel(self, model: Any) -> Any:
        return made_parallel(model, self._mesh, self._plan) if model is not None else None

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which sees one process."""
        one_process()
        base: Any = super()
        base.create_accelerator_and_postprocess()

    def call_model_init(self, trial: Any = None) -> Any:
        """Make a model anew, and parallelise it."""
        base: Any = super()
        return self._made_parallel(base.call_model_init(trial))

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch; what it gives is global and plain."""
        base: Any = super()
        return whole(base.prediction_step(*args, **kwargs))

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Write the model as one device does. Collective."""
        base: Any = super()
        base.save_model(*args, **kwargs)
        barrier()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None and is_parallel(self.model):
            state_dict = model_state(self.model)
        base: Any = super()
        base._save(output_dir, state_dict)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        base: Any = super()
        optimizers = [] if self.args.save_only_model else [self.optimizer]
        with whole_states(*optimizers):
            base._save_checkpoint(*args, **kwargs)
        barrier()

    def _save_rng_state(self, output_dir: str) -> None:
        # Generators are alike on all ranks, and one file is not written by several.
        base: Any = super()
        if self.args.should_save:
            base._save_rng_state(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        base: Any = super()
        with loading_whole(self.optimizer):
            base._load_optimizer_and_scheduler(checkpoint)

    if TYPE_CHECKING:
        args: Any
        model: Any
        optimizer: Any
        ref_model: Any


@cache
def parallel(trainer: type) -> Any:
    """Return a trainer class that trains a parallelised model, derived from a given one.

    It takes two more keyword arguments: `mesh`, of `vescale_parallel.mesh`, and `plan`: a `Plan`, a
    function that makes one of the trainer's model (`Plan.from_hf`), or None for data parallel. The
    model is parallelised after the trainer has made it (with its adapters, say), and a reference
    model, which `ref_model` holds, as well. A model that is parallel already needs neither.

    Args:
        trainer: `transformers.Trainer`, or a class derived from it.
    """
    body = {"__doc__": trainer.__doc__, "__module__": trainer.__module__}
    return type(f"Parallel{trainer.__name__}", (ParallelTrainer, trainer), body)

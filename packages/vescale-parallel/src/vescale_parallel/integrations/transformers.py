"""`transformers.Trainer`, and what is derived from it (trl's trainers), on a parallelised model.

    from vescale_parallel.integrations.transformers import parallel

    trainer = parallel(Trainer)(model, args, train_dataset=rows, mesh=mesh(dp=2, tp=2), plan=plan)
    trainer.train()

Batch sizes are those of one device: `per_device_train_batch_size` rows a step, over all ranks.
Losses, accumulation, clipping, evaluation and early stopping are those of one device; rank 0 logs
and writes, checkpoints are those of one device, and are resumed on any mesh.

A plan with stages (`pipeline=`), `microbatches=` or `deterministic=` has its training step run by
`forward_backward`, in place of the trainer's forward and backward.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vescale_parallel._errors import ParallelError
from vescale_parallel._step.forward_backward import forward_backward, step_of
from vescale_parallel.integrations._states import (
    PlanFor,
    barrier,
    decided,
    is_offloaded,
    is_parallel,
    loading_whole,
    made_parallel,
    model_state,
    rank,
    whole,
    whole_states,
)
from vescale_parallel.integrations.accelerate import one_process, with_last_rows

__all__ = ["parallel"]


class _Returns(nn.Module):
    """Stands for a model that has been called already, in a trainer's `compute_loss`."""

    def __init__(self, name: str, outputs: Any) -> None:
        super().__init__()
        self._name, self._outputs = name, outputs

    def _get_name(self) -> str:  # by which a trainer knows whose labels it has to shift
        return self._name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._outputs


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
        # After the trainer has put adapters into it, and before it makes an optimizer, which
        # happens in `train`.
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
        prepare = self.accelerator.prepare_model

        def prepare_model(model: Any, device_placement: Any = None, **options: Any) -> Any:
            # What `offload=` keeps on the host stays there: gathers bring values to the device.
            placed = False if is_offloaded(model) else device_placement
            return prepare(model, device_placement=placed, **options)

        self.accelerator.prepare_model = prepare_model
        prepare_loader = self.accelerator.prepare_data_loader

        def prepare_data_loader(loader: Any, *args: Any, **options: Any) -> Any:
            return with_last_rows(prepare_loader(loader, *args, **options))

        self.accelerator.prepare_data_loader = prepare_data_loader

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        if not is_offloaded(model):
            base: Any = super()
            base._move_model_to_device(model, device)

    def call_model_init(self, trial: Any = None) -> Any:
        """Make a model anew, and parallelise it."""
        base: Any = super()
        return self._made_parallel(base.call_model_init(trial))

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward on a batch: in parts, where the plan asks for them."""
        base: Any = super()
        if step_of(self.model) is None:
            return base.training_step(model, inputs, *args, **kwargs)
        items = kwargs["num_items_in_batch"] if kwargs else next(iter(args), None)
        self._require_own_loss()
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # schedule-free ones
            self.optimizer.train()
        given = dict(self._prepare_inputs(inputs))
        with self.compute_loss_context_manager():
            return self._step_in_parts(given, items)

    def _step_in_parts(self, given: dict[str, Any], items: Any) -> Tensor:
        """Compute what `Trainer.training_step` does, whose losses parts share.

        Args:
            given: inputs of the model, the whole batch.
            items: number of tokens of all batches of this update, by which losses are divided that
                are sums over tokens; None if they are means.
        """
        apart = self.label_smoother is not None or self.compute_loss_func is not None
        rows = next(len(x) for x in given.values() if isinstance(x, Tensor) and x.ndim)
        labels = given.pop("labels", None) if apart else None
        counts = items is not None and (self.model_accepts_loss_kwargs or apart)
        if counts and not apart:
            given["num_items_in_batch"] = torch.as_tensor(items)
        # Sums are divided by the tokens of all batches of the update already; means, by the number
        # of these batches.
        accumulated = 1 if counts else self.current_gradient_accumulation_steps

        def loss(outputs: Any, own: Tensor) -> Tensor:
            made = _Returns(self.model._get_name(), outputs)
            inputs = {} if labels is None else {"labels": own}
            # Of the class: a trainer that was derived may count what it computes.
            trainer = self._trainer()
            found: Tensor = trainer.compute_loss(self, made, inputs, num_items_in_batch=items)
            # Parts count by their rows, and what is divided by all tokens is to be added up.
            return found * (rows / len(own)) if counts and apart else found / accumulated

        # Without labels, something else that is cut as the batch is.
        own = torch.empty(rows, 0, device="cpu") if labels is None else labels
        return forward_backward(self.model, loss=(loss, own), **given)

    @staticmethod
    def _trainer() -> Any:
        from transformers import Trainer

        return Trainer

    def _require_own_loss(self) -> None:
        owner = next(one for one in type(self).__mro__ if "compute_loss" in vars(one))
        if owner is not self._trainer():
            raise ParallelError(
                f"{owner.__name__}.compute_loss calls the model, and this plan's steps run it in "
                "parts. Give the trainer `compute_loss_func`, a function of the outputs, the "
                "labels and `num_items_in_batch`; or leave pipeline=, microbatches= and "
                "deterministic= out of the plan."
            )
        if getattr(self.accelerator, "scaler", None) is not None:
            raise ParallelError(
                "fp16 of a Trainer scales its own backward, and this plan's steps run theirs. Use "
                "bf16=True, or leave pipeline=, microbatches= and deterministic= out of the plan."
            )

    def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute what trl's preference trainers keep of a reference, and cache it. Collective.

        Every rank has it all, and writes and reads a file of its own: one of rows in memory has
        another name in each process, and one on disk the same name and content.
        """
        from accelerate import PartialState

        base: Any = super()
        state, own = PartialState(), dataset._get_cache_file_path
        index = state.process_index

        def path(fingerprint: str) -> str:
            found: str = own(fingerprint)
            known = Path(found).exists()
            # Read by all, or computed by all.
            return found if decided(known, every=True) or not known else f"{found}.{rank()}"

        dataset._get_cache_file_path, state.process_index = path, 0
        try:
            return base._precompute_ref_logps(dataset, *args, **kwargs)
        finally:
            state.process_index = index
            del dataset._get_cache_file_path

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
        accelerator: Any
        args: Any
        compute_loss_context_manager: Any
        compute_loss_func: Any
        current_gradient_accumulation_steps: int
        label_smoother: Any
        model: Any
        model_accepts_loss_kwargs: bool
        optimizer: Any
        ref_model: Any
        train_dataset: Any
        _train_batch_size: int
        _prepare_inputs: Any


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

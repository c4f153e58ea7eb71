"""`accelerate` on a parallelised model: every rank is one process of which rank 0 writes.

    from vescale_parallel.integrations.accelerate import Accelerator

    accelerator = Accelerator(mesh=mesh(dp=2, tp=2), plan=Plan(zero=3))
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

The rest of a script stays: `accumulate`, `backward`, `clip_grad_norm_`, `gather_for_metrics`,
`save_state`, `load_state`. Loaders give whole batches on every rank. Checkpoints are those of one
device, and are read on any mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import IterableDataset

from vescale_parallel._apply.no_sync import no_sync
from vescale_parallel._errors import ParallelError
from vescale_parallel.integrations._states import (
    PlanFor,
    barrier,
    decided,
    is_parallel,
    loading_whole,
    local_rank,
    made_parallel,
    model_state,
    rank,
    whole,
    whole_states,
)

__all__ = ["Accelerator", "one_process"]


def one_process(**options: Any) -> Any:
    """Let accelerate see one process on every rank, of which rank 0 is the main one.

    Loaders then pass whole batches, models are not wrapped, and `is_main_process` is true on rank 0
    alone. It holds until the state is reset, as `TrainingArguments` of transformers does.

    Args:
        **options: of `accelerate.PartialState`, where there is none yet: `cpu=True`.

    Returns:
        The `PartialState`.
    """
    from accelerate import DistributedType, PartialState

    state = PartialState(**options)
    state.distributed_type, state.num_processes = DistributedType.NO, 1
    # Of one process, and its true number all the same: it decides who is the main one.
    state.process_index = rank()
    state.local_process_index = local_rank()
    # One process is the main one for accelerate, and waits for nobody. There are more, which go by
    # what all its states share: so trackers and `main_process_first` do, too.
    vars(state).update(_AS_RANKS)
    return state


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What ranks call in place of a function of another rank."""


def _on_first(function: Any) -> Any:
    return function if rank() == 0 else _nothing


def _on_local_first(function: Any) -> Any:
    return function if local_rank() == 0 else _nothing


def _on_process(function: Any = None, process_index: int | None = None) -> Any:
    if function is None:
        return partial(_on_process, process_index=process_index)
    return function if rank() == process_index else _nothing


def _on_local_process(function: Any = None, local_process_index: int | None = None) -> Any:
    if function is None:
        return partial(_on_local_process, local_process_index=local_process_index)
    return function if local_rank() == local_process_index else _nothing


def with_last_rows(loader: Any) -> Any:
    """Let a prepared loader of a stream say how many rows its last batch has; it is changed.

    On one device accelerate dispatches streams, and by these rows `gather_for_metrics` cuts what
    was repeated for a whole batch; a loader that does not dispatch leaves them open.
    """
    base = loader.base_dataloader
    if isinstance(loader.dataset, IterableDataset) and "__iter__" not in vars(base):
        iterate = base.__iter__

        def counted() -> Iterator[Any]:
            rows = None
            for batch in iterate():
                rows = _rows_of(batch)
                yield batch
            # The loader reads ahead: it has not given its last batch yet.
            if loader.remainder == -1 and rows is not None:
                loader.remainder = rows

        # Called by this name, as a method of the instance.
        base.__iter__ = counted
    return loader


def _rows_of(batch: Any) -> int | None:
    from accelerate.utils import find_batch_size

    try:
        rows: int = find_batch_size(batch)
    except (TypeError, ValueError):  # no tensors
        return None
    return rows


_AS_RANKS = {
    "on_main_process": _on_first,
    # The last of one process is the first.
    "on_last_process": _on_first,
    "on_local_main_process": _on_local_first,
    "on_process": _on_process,
    "on_local_process": _on_local_process,
    "wait_for_everyone": barrier,
}


class OneProcess:
    """What an `Accelerator` does otherwise where models are parallelised."""

    def __init__(self, *args: Any, mesh: Any = None, plan: PlanFor = None, **kwargs: Any) -> None:
        self._mesh, self._plan = mesh, plan
        base: Any = super()
        if args:
            raise ParallelError("Accelerator: name its options, as in Accelerator(cpu=True).")
        one_process(**({"cpu": True} if kwargs.get("cpu") else {}))
        base.__init__(**kwargs)
        # Else rank 0 would read streams for all others, and they would wait for it.
        self.dataloader_config: Any
        self.dataloader_config.dispatch_batches = False

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Parallelise a model that is not parallel yet, and prepare it."""
        base: Any = super()
        return base.prepare_model(made_parallel(model, self._mesh, self._plan), *args, **kwargs)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader, which gives whole batches on every rank."""
        base: Any = super()
        return with_last_rows(base.prepare_data_loader(data_loader, *args, **kwargs))

    def gather(self, tensor: Any) -> Any:
        """Return global plain tensors: those of all ranks are one."""
        return whole(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return global plain tensors, without rows that fill up a last batch."""
        base: Any = super()
        return base.gather_for_metrics(whole(input_data), use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return global plain tensors: there is nothing to add."""
        base: Any = super()
        return base.reduce(whole(tensor), reduction, scale)

    def no_sync(self, model: nn.Module) -> Any:
        """Let gradients be reduced once, by the backward outside of it."""
        base: Any = super()
        return no_sync(model) if is_parallel(model) else base.no_sync(model)

    def wait_for_everyone(self) -> None:
        """Wait until all ranks are here."""
        barrier()

    def check_trigger(self) -> bool:
        """Return whether any rank has called `set_trigger` since this was last true. Collective."""
        found = decided(self.flag_tensor is not None and bool(self.flag_tensor), every=False)
        if found:
            self.flag_tensor = None
        return found

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the state of one device, on the CPU of rank 0; elsewhere empty. Collective."""
        base: Any = super()
        return model_state(model) if is_parallel(model) else base.get_state_dict(model, unwrap)

    def save_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Write a model as one device writes it. Collective."""
        base: Any = super()
        result = base.save_model(model, *args, **kwargs)
        barrier()
        return result

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Write a checkpoint of one device. Collective."""
        base: Any = super()
        with whole_states(*self._optimizers):
            result = base.save_state(*args, **kwargs)
        barrier()
        return result

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Read a checkpoint of one device, or of any mesh. Collective."""
        base: Any = super()
        state, index = self.state, self.state.process_index
        # Generators are alike on all ranks, and there may be more ranks than had written theirs.
        state.process_index = 0
        handle = self.register_load_state_pre_hook(_load_models)
        try:
            with loading_whole(*self._optimizers):
                return base.load_state(*args, **kwargs)
        finally:
            handle.remove()
            state.process_index = index

    if TYPE_CHECKING:
        flag_tensor: Any
        state: Any
        _optimizers: list[Any]
        register_load_state_pre_hook: Any


def _load_models(models: list[nn.Module], folder: Any) -> None:
    """Load all models of a checkpoint; accelerate asks for memory that DTensors do not have."""
    from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME, load
    from safetensors.torch import load_file

    for at, model in enumerate(models):
        ending = f"_{at}" if at else ""
        file = Path(folder, f"{SAFE_MODEL_NAME}{ending}.safetensors")
        # accelerate writes safetensors, or pickles where `safe_serialization` is off.
        if file.exists():
            state = load_file(file)
            # What is tied is in the file once.
            missing, unexpected = model.load_state_dict(state, strict=False)
            tied = _tied(model)
            gone = [name for name in missing if not tied.get(name, set()) & state.keys()]
            if gone or unexpected:
                raise ParallelError(
                    f"{file}: misses {gone}, and has {unexpected} beside the model."
                )
        else:
            bin_file = Path(folder, f"{MODEL_NAME}{ending}.bin")
            model.load_state_dict(load(bin_file, map_location="cpu"))
    models.clear()  # so that accelerate does not load them again


def _tied(model: nn.Module) -> dict[str, set[str]]:
    """For each name of a parameter, all names of it."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {name: several for several in names.values() for name in several}


@cache
def _accelerator() -> type:
    # Imported when the class is first asked for: accelerate need not be installed.
    import accelerate

    body = {"__doc__": accelerate.Accelerator.__doc__, "__module__": __name__}
    return type("Accelerator", (OneProcess, accelerate.Accelerator), body)


if TYPE_CHECKING:
    Accelerator: Any


def __getattr__(name: str) -> Any:
    if name == "Accelerator":
        return _accelerator()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

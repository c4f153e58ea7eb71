"""A run as a checkpoint, and back, on any mesh: tensors by parameter name, the rest as JSON."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vescale_rng
from torch import Tensor, nn

from vescale_parallel._errors import TrainError

if TYPE_CHECKING:
    from vescale_parallel.train.run import Run


def save_run(run: "Run", path: Path) -> None:
    """Write the run; a collective over all ranks."""
    _ckpt().save(path, _tensors(run) | _facts(run))


def load_run(run: "Run", path: Path) -> None:
    """Restore a freshly built run from a checkpoint that any mesh wrote; a collective."""
    materialise_adam_state(run.optimizer)
    loaded = _ckpt().load(path, into=_tensors(run) | _facts(run))
    run.scheduler.load_state_dict(loaded["scheduler"])
    for group, rate in zip(run.optimizer.param_groups, loaded["rates"], strict=True):
        group["lr"] = rate
    run.step = loaded["step"]
    vescale_rng.set_state(loaded["rng"])


def remembered_options(path: Path) -> dict[str, Any]:
    """The options that a checkpoint was trained with."""
    facts = _ckpt().load(path, into={"options": None})
    options: dict[str, Any] = facts["options"]
    return options


def materialise_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that Adam makes at its first step, so it can be loaded into.

    The moments are made from the parameters, so they have their layouts. Covers Adam and AdamW
    without `amsgrad`, whose state is public: `step`, `exp_avg`, `exp_avg_sq`.

    Raises:
        TrainError: the optimizer keeps other state than that.
    """
    plain_adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    if not plain_adam or any(group["amsgrad"] for group in optimizer.param_groups):
        raise TrainError(f"no known state for {type(optimizer).__name__}; use Adam or AdamW.")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }


def _tensors(run: "Run") -> dict[str, Any]:
    parameters = dict(run.model.named_parameters())
    return {
        "model": {name: _detached(parameter) for name, parameter in parameters.items()},
        "optimizer": {name: dict(run.optimizer.state[p]) for name, p in parameters.items()},
    }


def _facts(run: "Run") -> dict[str, Any]:
    """Everything that is not a tensor; plain JSON, the same on every mesh."""
    return {
        "step": run.step,
        "scheduler": run.scheduler.state_dict(),
        "rates": [group["lr"] for group in run.optimizer.param_groups],
        "rng": vescale_rng.get_state(),
        "options": run.options.remembered(),
        "data": {"checksum": run.corpus.checksum, "position": run.step * run.options.batch},
    }


def _detached(parameter: nn.Parameter) -> Tensor:
    return parameter.detach()


def _ckpt() -> Any:
    try:
        import vescale_ckpt
    except ImportError as error:
        raise TrainError(
            "checkpoints need vescale-ckpt: pip install 'vescale-parallel[train]', or pass "
            "--save-every -1 to train without."
        ) from error
    return vescale_ckpt

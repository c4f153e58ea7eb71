"""A run as a checkpoint, and back, on any mesh: tensors by parameter name, the rest as JSON."""

from pathlib import Path
from typing import Any

import vescale_rng

from vescale_parallel._errors import TrainError
from vescale_parallel.train.run import Run, go_to_step


def save_run(run: Run, path: Path) -> None:
    """Write the run; a collective over all ranks."""
    checkpoint_package().save(path, _state(run), overwrite=True)


def load_run(run: Run, path: Path) -> None:
    """Restore a freshly built run from a checkpoint that any mesh wrote; a collective.

    Raises:
        CheckpointError: on every rank: there is none, it is damaged, or it is of another model.
        TrainError: on every rank: it was trained on other text, and no text was named.
    """
    ckpt = checkpoint_package()
    # Adam makes its moments in its first step; they must exist, in their layouts, to be filled.
    ckpt.init_optimizer_state(run.optimizer)
    loaded = ckpt.load(path, into=_state(run))
    # The position is counted in steps, which mean other windows of another text.
    if loaded["data"]["checksum"] != run.corpus.checksum and not run.options.data:
        raise TrainError(
            f"{path} was trained on other text than {run.corpus.source}. Say with --data which "
            "text to go on with."
        )
    go_to_step(run, loaded["step"])
    run.checkpoint = path
    # Last: building the model and the optimizer has drawn numbers. Of another seed they go on.
    if loaded["options"]["seed"] == run.options.seed:
        vescale_rng.set_state(loaded["rng"])


def remembered_options(path: str) -> dict[str, Any]:
    """Read the options that a checkpoint was trained with, and no tensor. A collective."""
    ckpt = checkpoint_package()
    loaded = ckpt.load(path, into={"options": ckpt.WHOLE}, strict=False)
    if not isinstance(loaded["options"], dict):
        raise TrainError(f"--resume {path}: not a checkpoint of this trainer; it has no options.")
    return loaded["options"]


def _state(run: Run) -> dict[str, Any]:
    """Return parameters and moments under the parameter's name, and facts that all ranks share."""
    # By name: the optimizer's own numbers follow the order in which a model lists parameters.
    parameters = dict(run.model.named_parameters())
    return {
        "model": parameters,
        "optimizer": {name: dict(run.optimizer.state[p]) for name, p in parameters.items()},
        # From here on plain JSON, the same on every rank and for every mesh.
        "step": run.step,
        # For whoever looks into it: a resumed run's rates are those of its options.
        "scheduler": run.scheduler.state_dict(),
        "rates": [group["lr"] for group in run.optimizer.param_groups],
        "rng": vescale_rng.get_state(),
        "options": run.options.remembered(),
        "data": {"checksum": run.corpus.checksum, "position": run.step * run.options.batch},
    }


def checkpoint_package() -> Any:
    """Return the package that reads and writes checkpoints, which the `train` extra installs.

    Raises:
        TrainError: it is not installed.
    """
    try:
        import vescale_ckpt
    except ImportError as error:
        raise TrainError(
            "checkpoints need vescale-ckpt: pip install 'vescale-parallel[train]', or pass "
            "--save-every -1 to train without."
        ) from error
    return vescale_ckpt

"""Finds the user's line that a call comes from, for errors, or a module of torch."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.distributed.tensor import placement_types

# What is between the user's code and what refuses it.
_BETWEEN = frozenset({"torch", "vescale_dtensor", "contextlib", "functools", "typing_extensions"})


def call_site() -> str:
    """The module and the line that called torch: of the user's program, or of a library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.split(".")[0] not in _BETWEEN:
            return f"{module} ({frame.f_code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back
    return "code that is not Python's"


_INTEGRATIONS = "vescale_parallel.integrations"
# The line that takes the place of a library's own, by the module that led here.
_LINES = {
    "transformers.trainer": "transformers.parallel(Trainer)(..., mesh=mesh, plan=plan)",
    "trl": "transformers.parallel(SFTTrainer)(..., mesh=mesh, plan=plan)",
    "accelerate": "accelerate.Accelerator(mesh=mesh, plan=plan)",
    "lightning.fabric": "lightning.FabricStrategy(mesh, plan)",
    "lightning.pytorch": "lightning.TrainerStrategy(mesh, plan)",
    "torchmetrics": "torchmetrics.of_whole_batches(metric)",
}
_SAVES = {"transformers.modeling_utils", "peft.peft_model"}
_SAVED = (
    " A model is saved by vescale_parallel.save_pretrained(model, folder), or, in a trainer of "
    f"{_INTEGRATIONS}, by trainer.save_model(folder): every rank calls it, and one writes."
)


def integration() -> str:
    """What to write where a library that trains or measures led here; behind an error's words.

    The outermost one counts: transformers' Trainer calls accelerate, Lightning's torchmetrics.
    Nothing is said where an integration is in use.
    """
    found = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        of = str(type(frame.f_locals.get("self")).__module__)
        if module.startswith(_INTEGRATIONS) or of.startswith(_INTEGRATIONS):
            return ""
        for name, line in _LINES.items():
            if f"{module}.".startswith(f"{name}."):
                found = f" Under torchrun, write {_INTEGRATIONS}.{line}."
        if module in _SAVES and not found:
            found = _SAVED
        frame = frame.f_back
    return found


# The module that defines `isinstance` for torch's placements: its name differs over versions.
_PLACEMENT_META = type(placement_types.Shard).__module__


def asked_by_torch_dtensor() -> bool:
    """Whether a module of torch.distributed.tensor reads the attribute whose getter asks."""
    # Frame 0 is this function, 1 the getter, 2 the code that reads the attribute. `isinstance`
    # itself has no frame.
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == _PLACEMENT_META:
        frame = frame.f_back  # the `isinstance` of torch's placements is a Python function
    name = "" if frame is None else str(frame.f_globals.get("__name__"))
    return name.startswith("torch.distributed.tensor")

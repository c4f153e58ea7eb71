"""Trains with somebody else's library on one device and on a mesh, and says how far they are apart.

Each file in `ecosystem/` is one library: `PACKAGES`, the distributions whose versions count, and
`CASES`, functions of a `Run` that train a small model for a few steps and return what they found:
numbers (losses, metrics) and tensors (parameters). With `run.mesh` None they do what a user of the
library writes for one device; otherwise what he writes under torchrun.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from model_runs import share, whole
from model_zoo_more import automatic
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm.testing import device_mesh
from vescale_parallel import Plan, parallelize

FOLDER = Path(__file__).parent / "ecosystem"
LAYOUTS: dict[str, dict[str, int]] = {
    "dp=4": {"dp": 4},
    "dp=2, tp=2": {"dp": 2, "tp": 2},
    "dp=4, zero=3": {"dp": 4},
}
# Of cases that train in parts; not of the table.
STAGES: dict[str, dict[str, int]] = {"pp=2, dp=2": {"pp": 2, "dp": 2}}
FLOOR = 1e-2
"""Parameters are compared as a share of their largest element, or of this."""


@dataclass(frozen=True)
class Run:
    """Where a case trains.

    Attributes:
        mesh: None on one device.
        plan: makes the plan of a model.
        folder: an empty one; of all ranks together, or of one device.
    """

    mesh: DeviceMesh | None
    plan: Callable[[nn.Module], Plan] | None
    folder: Path

    def parallelize(self, model: nn.Module) -> nn.Module:
        """The model, on the mesh; on one device as it is."""
        if self.mesh is None or self.plan is None:
            return model
        return parallelize(model, self.mesh, self.plan(model))


Found = Mapping[str, Any]
Case = Callable[[Run], Found]


def plan_of(layout: str) -> Callable[[nn.Module], Plan]:
    """What a user writes about a layout, whatever the model."""

    def plan(model: nn.Module) -> Plan:
        zero = 3 if "zero=3" in layout else 0
        rules = automatic(model) if "tp" in layout else {"*": "replicate"}
        return Plan(batch="dp:0", parameters=rules, zero=zero)

    return plan


def load(library: str) -> ModuleType:
    """The file of a library."""
    path = FOLDER / f"{library}.py"
    spec = importlib.util.spec_from_file_location(f"ecosystem_{library}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def as_torchrun(rank: int, world_size: int) -> Iterator[None]:
    """The variables by which libraries tell that torchrun has started them."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    told |= {"LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "none"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29999}
    before = dict(os.environ)
    os.environ.update({key: str(value) for key, value in told.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def seeded(folder: Path) -> Iterator[None]:
    """The same draws on every rank, and on one device; nothing is reported anywhere."""
    folder.mkdir(parents=True, exist_ok=True)
    random.seed(0)
    torch.manual_seed(0)
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def compare(
    rank: int, world_size: int, library: str, case: str, layouts: list[str]
) -> dict[str, dict[str, float]]:
    """For each layout, how far each number and tensor is from one device's; on rank 0."""
    logging.disable(logging.WARNING)
    # Nobody is asked for anything over the network, and nothing is printed but by `print`.
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_DISABLED": "true", "TQDM_DISABLE": "1"}
    os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "CUDA_VISIBLE_DEVICES": ""}
    box = [tempfile.mkdtemp(prefix="ecosystem-") if rank == 0 else ""]
    dist.broadcast_object_list(box)
    with warnings.catch_warnings(action="ignore"):
        try:
            return compared(rank, world_size, load(library).CASES[case], layouts, Path(box[0]))
        finally:
            if rank == 0:
                shutil.rmtree(box[0], ignore_errors=True)


def compared(
    rank: int, world_size: int, case: Case, layouts: list[str], root: Path
) -> dict[str, dict[str, float]]:
    wanted: dict[str, Any] = {}
    if rank == 0:
        forget()
        with seeded(root / "alone"):
            wanted = plain(case(Run(None, None, root / "alone")))
    dist.barrier()
    found = {}
    for layout in layouts:
        forget()
        folder = root / layout.replace(", ", "-")
        sizes = (LAYOUTS | STAGES)[layout]
        with as_torchrun(rank, world_size), seeded(folder):
            mesh = device_mesh(tuple(sizes.values()), tuple(sizes))
            got = plain(case(Run(mesh, plan_of(layout), folder)))
        found[layout] = differences(got, wanted) if rank == 0 else {}
        dist.barrier()
    return found


def forget() -> None:
    """Begin as in a new process: accelerate keeps what it once took the process for."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


def plain(found: Found) -> dict[str, Any]:
    """What a case found, without distributed tensors."""
    return {
        name: whole(value).clone() if isinstance(value, Tensor) else value
        for name, value in found.items()
    }


def differences(got: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    return {name: difference(got[name], wanted[name]) for name in wanted}


def difference(ours: Any, dense: Any) -> float:
    """The largest difference, of numbers and lists of them relative to 1 or more."""
    if isinstance(dense, Tensor):
        return share(ours.float(), dense.float(), FLOOR)
    if isinstance(dense, list | tuple):
        assert len(ours) == len(dense), (ours, dense)
        return max((difference(a, b) for a, b in zip(ours, dense, strict=True)), default=0.0)
    if isinstance(dense, str):
        assert ours == dense, (ours, dense)
        return 0.0
    return abs(float(ours) - float(dense)) / max(1.0, abs(float(dense)))


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Those that were trained."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

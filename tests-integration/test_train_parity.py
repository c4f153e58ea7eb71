"""The trainer's losses on any mesh are those of one device, with dropout, also after a resume."""

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from vescale_comm.testing import Failed, outcomes, run
from vescale_parallel import mesh as make_mesh
from vescale_parallel.train.checkpoint import load_run, remembered_options, save_run
from vescale_parallel.train.data import load_corpus
from vescale_parallel.train.digests import DropoutMasks, digest
from vescale_parallel.train.options import Options
from vescale_parallel.train.run import Run, build, train_step, validate

STEPS = 20
SMALL = {"layers": 2, "dim": 64, "hidden": 96, "context": 32, "batch": 8, "steps": STEPS}
TEXT = str(Path(sysconfig.get_paths()["stdlib"]) / "argparse.py")
MESHES = [{"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 3}]
ONE_PROCESS: dict[str, int] = {}


def start(sizes: dict[str, int], **changes: Any) -> Run:
    options = Options(data=(TEXT,), **(SMALL | changes))
    mesh = make_mesh(device_type="cpu", **sizes) if sizes else None
    return build(options, load_corpus(options.data, options.context), mesh)


def go(run_: Run, steps: int) -> list[float]:
    return [train_step(run_).loss for _ in range(steps)]


def first_step(run_: Run) -> tuple[str, list[tuple[str, str]], float]:
    """Digest of the initial parameters, digests of the dropout masks, loss."""
    parameters = digest(run_.model.named_parameters())
    with DropoutMasks(run_.model) as masks:
        loss = train_step(run_).loss
    return parameters, masks.digests, loss


def close(found: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0)


def world(sizes: dict[str, int]) -> int:
    return torch.Size(sizes.values()).numel()


@pytest.fixture(scope="module")
def reference() -> tuple[tuple[str, list[tuple[str, str]], float], list[float], float]:
    """One device: the facts of the first step, the losses, the validation loss at the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = start(ONE_PROCESS)
    first = first_step(alone)
    losses = [first[2], *go(alone, STEPS - 1)]
    last = validate(alone)
    torch.set_num_threads(threads)
    return first, losses, last


def train_on(rank: int, world_size: int, sizes: dict[str, int]) -> tuple[Any, list[float], float]:
    there = start(sizes)
    first = first_step(there)
    return first, [first[2], *go(there, STEPS - 1)], validate(there)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_twenty_steps_are_those_of_one_device(sizes: dict[str, int], reference: Any):
    (parameters, masks, _), losses, validation = reference
    for first, found, validated in run(train_on, world(sizes), sizes):
        assert first[0] == parameters
        assert len(masks) == 2 * 3
        assert first[1] == masks
        close(found, losses)
        close([validated], [validation])


def save_halfway(rank: int, world_size: int, sizes: dict[str, int], path: str) -> list[float]:
    there = start(sizes)
    losses = go(there, STEPS // 2)
    save_run(there, Path(path))
    return losses


def resume(rank: int, world_size: int, sizes: dict[str, int], path: str) -> list[float]:
    there = start(sizes)
    torch.manual_seed(rank)  # what the checkpoint does not restore would show
    load_run(there, Path(path))
    assert there.step == STEPS // 2
    return go(there, STEPS // 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("run") / "halfway")
    run(save_halfway, 4, {"dp": 2, "tp": 2}, path)
    return path


@pytest.mark.parametrize("sizes", [{"tp": 4}, {"dp": 3}, ONE_PROCESS], ids=str)
def test_a_checkpoint_continues_the_curve_on_another_mesh(
    sizes: dict[str, int], checkpoint: str, reference: Any
):
    for losses in run(resume, world(sizes), sizes, checkpoint):
        close(losses, reference[1][STEPS // 2 :])


def test_a_checkpoint_of_one_process_continues_on_a_mesh(tmp_path: Path, reference: Any):
    path = str(tmp_path / "alone")
    run(save_halfway, 1, ONE_PROCESS, path)
    for losses in run(resume, 4, {"dp": 2, "tp": 2}, path):
        close(losses, reference[1][STEPS // 2 :])


def resume_another_model(rank: int, world_size: int, path: str) -> None:
    there = start({"dp": world_size}, hidden=128)
    load_run(there, Path(path))


def read_options(rank: int, world_size: int, path: str) -> dict[str, Any]:
    return remembered_options(path)


def test_the_options_of_a_checkpoint_are_remembered(checkpoint: str):
    for options in run(read_options, 2, checkpoint):
        assert options["hidden"] == SMALL["hidden"]
        assert options["decay_steps"] == STEPS


def test_a_checkpoint_of_another_model_is_refused_everywhere(checkpoint: str):
    for one in outcomes(resume_another_model, 2, checkpoint):
        assert isinstance(one, Failed)
        assert one.type_name.rpartition(".")[2] == "MismatchError"
        for part in ("blocks.0.mlp.up.weight", "96", "128"):
            assert part in one.message


@pytest.mark.parametrize("damage", ["missing", "half-written"])
def test_a_checkpoint_that_is_not_there_is_refused_everywhere(
    damage: str, checkpoint: str, tmp_path: Path
):
    path = tmp_path / damage
    if damage == "half-written":
        shutil.copytree(checkpoint, path)
        for file in path.rglob("*"):
            if file.is_file() and file.suffix != ".safetensors":
                file.unlink()
    for one in outcomes(read_options, 2, str(path)):
        assert isinstance(one, Failed)
        assert one.type_name.rpartition(".")[2] in ("NotFoundError", "UncommittedError")
        assert str(path) in one.message

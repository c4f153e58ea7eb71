"""`capture(mesh=)`: of a call that not all ranks make, others are asked nothing."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import ExecutionLog
from vescale_comm.testing import on_ranks
from vescale_dtensor import Shard, capture, distribute_tensor


def scaled(x: Tensor) -> Tensor:
    return x * x.sum().item()


def asked_by(mesh: DeviceMesh) -> list[tuple[tuple[int, ...], bool]]:
    """Whom a refused function asks whether they refuse it as well, and the answers."""
    answers: list[Any] = []
    asks = ExecutionLog.all_say

    def asked(log: ExecutionLog, word: str) -> bool:
        answers.append((log.ranks, asks(log, word)))
        return answers[-1][1]

    captured = capture(scaled, refused="run", mesh=mesh)
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None)
    with patch.object(ExecutionLog, "all_say", asked):
        for _ in range(3):
            assert torch.equal(captured(x).full_tensor(), torch.arange(4.0) * 6)
    assert captured.refusal is not None
    return answers


@on_ranks(3)
def test_ranks_of_other_meshes_are_not_asked(rank: int, world_size: int):
    pair, alone = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2])
    if rank < 2:
        assert asked_by(pair) == [((0, 1), True)]
    else:
        assert asked_by(alone) == []

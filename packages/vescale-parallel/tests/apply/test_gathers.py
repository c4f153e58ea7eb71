"""What the first forward gathers over the batch is said once, and only where it gathers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import vescale_parallel as vp
from torch import Tensor, nn
from vescale_comm import simulate

WIDTH, ROWS = 64, 100


class Sorted(nn.Module):
    """Rows in the order of a score, changed, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        out = torch.zeros_like(x)
        out[order] = self.linear(x[order])
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Sorted() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def run(words: dict[str, Any], rows: int = ROWS, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, where = Net(), vp.mesh(dp=2, device_type="cpu")
    plan = vp.Plan(**words)
    vp.parallelize(model, where, plan, **options)
    for _ in range(3):
        model(torch.randn(rows, WIDTH)).backward()
    return model, plan.check(model, where)


def reports(words: dict[str, Any], *args: Any, **options: Any) -> list[Any]:
    return simulate(2).run(lambda rank, size: run(words, *args, **options)[1])


@pytest.mark.parametrize("static", [False, True])
def test_one_warning_names_modules_lines_and_what_to_write(
    static: bool, caplog: pytest.LogCaptureFixture
):
    for report in reports({}, static=static):
        assert {one.module for one in report.gathers} == {"blocks.0", "blocks.1"}
        for one in report.gathers:
            assert one.kind == "Sorted"
            assert one.axes == ("dp",)
            assert one.bytes >= ROWS * WIDTH * 4
            assert "test_gathers.py:" in one.line
        assert "gathered within" in str(report)
    (said,) = [one.getMessage() for one in caplog.records if one.name == "vescale_parallel"]
    assert "'blocks.0' (Sorted)" in said
    assert "Plan(local_rows='blocks.*')" in said


def test_nothing_is_said_where_nothing_is_gathered(caplog: pytest.LogCaptureFixture):
    quiet: list[dict[str, Any]] = [{"local_rows": "blocks.*"}, {"batch": None}]
    for words in quiet:
        assert all(one.gathers == () for one in reports(words))
    # Few bytes are no matter.
    assert all(one.gathers == () for one in reports({}, 6))
    assert not [one for one in caplog.records if one.name == "vescale_parallel"]
    assert vp.Plan().check(Net(), {"dp": 2}).gathers == ()


def evaluated(rank: int, size: int) -> list[int]:
    model, where = Net(), vp.mesh(dp=2, device_type="cpu")
    vp.parallelize(model, where, vp.Plan())
    x, found = torch.randn(ROWS, WIDTH), []
    with torch.no_grad():
        model(x)
    found.append(len(vp.Plan().check(model, where).gathers))
    with pytest.raises(Exception, match=r"shape|size"):
        model(torch.randn(ROWS, WIDTH + 1))
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one(x)
        found.append(len(vp.Plan().check(one, where).gathers))
    return found


def test_evaluations_failures_and_copies():
    # Those that are not trained, and those that fail, are not the first.
    assert simulate(2).run(evaluated) == [[0, 2, 2]] * 2

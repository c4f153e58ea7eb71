"""Property: on a GPU, pieces are the bytes that torch draws there: the table of `nox -s gpu`.

Where there is no GPU, its printing is tried on the numpy model. Layouts, dropout, tensors of
probabilities, captured draws and generators are asked by `tools/first_gpu`, which that runs, too.
"""

import pytest
import torch
from cuda_model import ModelDevice
from cuda_table import KINDS, lines, sizes_of, table
from vescale_rng._cuda import map_check


def test_the_table_can_be_printed_without_a_gpu(monkeypatch):
    monkeypatch.setattr(map_check, "have_triton", lambda: False)
    device = ModelDevice(256)
    rows = table(device, [KINDS[0], KINDS[5]])
    assert [row[2] for row in rows] == ["kernel", "waves"] * 2
    assert all(at is None for row in rows for at in row[4])
    text = list(lines(device, rows))
    assert "triton is not installed" in text[2]
    assert text[3].count("equal") == len(sizes_of(256))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.timeout(1800)  # Some hundred kernels are compiled.
def test_every_distribution_on_every_dtype_around_every_boundary(capsys):
    device = map_check.cuda_device(torch.cuda.current_device())
    rows = table(device)
    with capsys.disabled():
        print("", *lines(device, rows), sep="\n")
    wrong = [row for row in rows if any(at is not None for at in row[4])]
    assert not wrong

"""Every public name of torch.distributed.tensor and its modules is here, with the same signature,
or is listed with a reason; and PARITY.md says so of the installed torch.
"""

import pytest
import torch
from torch_parity import REASONS, TARGET, rows, text


@pytest.mark.smoke
def test_what_differs_is_listed_and_what_is_listed_differs():
    faulty = {row.key: row.fault for row in rows() if row.fault}
    assert {key: fault for key, fault in faulty.items() if key not in REASONS} == {}
    absent = {key for key in REASONS if key not in faulty}
    assert absent == set(), "these reasons have no difference left"


def test_the_comparison_finds_differences():
    from torch_parity import _signatures

    def theirs(a, b=1, *, c=None):
        pass

    assert _signatures(theirs, theirs) == ("", ())
    assert _signatures(theirs, lambda a, b=1, *, c=None, d=2: 0) == ("", ("d",))
    assert "by position" in _signatures(theirs, lambda b, a=1, *, c=None: 0)[0]
    assert "lacks `c`" in _signatures(theirs, lambda a, b=1: 0)[0]
    assert "`b=2`, not 1" in _signatures(theirs, lambda a, b=2, *, c=None: 0)[0]
    assert "needs `d`" in _signatures(theirs, lambda a, b=1, *, c=None, d: 0)[0]


def test_the_table_is_that_of_this_torch():
    version = torch.__version__.partition("+")[0].rpartition(".")[0]
    if f"for torch {version};" not in TARGET.read_text():
        pytest.skip("PARITY.md was written for another torch")
    assert TARGET.read_text() == text()

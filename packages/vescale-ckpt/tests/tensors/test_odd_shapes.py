"""What torch can hold is saved and comes back, or is refused when it is saved."""

import os

import pytest
import torch
import vescale_ckpt as ckpt

KEPT = {
    "column of a row": torch.rand(1, 3)[:, :1],
    "every second of two": torch.rand(2)[::2],
    "stride 0": torch.rand(1).expand(1, 1),
    "of bfloat16": torch.rand(1, 3).to(torch.bfloat16)[:, :1],
    "of complex numbers": torch.rand(2, dtype=torch.complex64)[::2],
    "empty and large": torch.empty(0, 1 << 40, 1 << 20),
    "64 dims": torch.rand([1] * 64),
    "63 dims of complex numbers": torch.rand([1] * 63, dtype=torch.complex64),
}

REFUSED = {
    "65 dims": torch.rand([1] * 65),
    "64 dims of complex numbers": torch.rand([1] * 64, dtype=torch.complex64),
    "empty beyond what torch allocates": torch.empty(0).as_strided(
        (0, 1 << 61, 1 << 61), (1, 1, 1)
    ),
}


@pytest.mark.parametrize("tensor", KEPT.values(), ids=KEPT)
def test_what_is_saved_comes_back(path, tensor):
    ckpt.save(path, {"w": tensor})
    assert ckpt.verify(path).tensors == 1
    assert torch.equal(ckpt.read(path)["w"], tensor)
    into = {"w": torch.zeros(tensor.shape, dtype=tensor.dtype)}
    if tensor.numel() == 1 and tensor.ndim < 3:
        # One element of a stride of its own, as a slice of a larger tensor.
        into = {"w": torch.zeros(2, dtype=tensor.dtype)[::2].view(tensor.shape)}
    ckpt.load(path, into)
    assert torch.equal(into["w"], tensor)


@pytest.mark.parametrize("tensor", REFUSED.values(), ids=REFUSED)
def test_what_could_not_be_read_is_not_saved(path, tensor):
    with pytest.raises(ckpt.StateError, match=r"at 'w': \d+ dims of sizes .*: at most 64 dims"):
        ckpt.save(path, {"w": tensor})
    assert not os.path.exists(path)

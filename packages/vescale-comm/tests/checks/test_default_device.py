"""What is found out about dtypes does not depend on torch's default device."""

import pytest
import torch
from vescale_comm import CommArgumentError, broadcast, simulate
from vescale_comm._checks import arguments


def test_a_dtype_that_is_only_a_name_is_refused_whatever_the_default_device_is():
    arguments._can_be_copied.cache_clear()

    def send(rank: int, world_size: int) -> str:
        # On "meta" everything can be copied; what was found out there would be kept.
        for default in ("meta", "cpu"):
            x = torch.empty(4, dtype=torch.uint8, device="cpu").view(torch.uint4)
            with torch.device(default), pytest.raises(CommArgumentError) as raised:
                broadcast(x)
        return str(raised.value)

    assert all("uint4" in text for text in simulate(2)(send))

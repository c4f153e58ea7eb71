"""Files are written and read through the host's memory whatever torch's default device is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vescale_ckpt import async_save, compare, load, read, save
from vescale_ckpt.__main__ import main


def state() -> dict[str, Any]:
    weight = torch.arange(12.0, device="cpu").view(3, 4)
    half = torch.ones(3, dtype=torch.float16, device="cpu")
    return {"weight": weight, "turned": weight.t(), "half": half, "step": 3}


def zeros() -> dict[str, Any]:
    return {
        name: torch.zeros_like(one) if isinstance(one, torch.Tensor) else 0
        for name, one in state().items()
    }


def is_state(found: dict[str, Any]) -> bool:
    return all(
        torch.equal(found[name], one) if isinstance(one, torch.Tensor) else found[name] == one
        for name, one in state().items()
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_default_device_is_nothing_to_a_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    path = tmp_path / "saved"
    into = zeros()
    with torch.device("meta"):
        if asynchronous:
            async_save(path, state()).wait()
        else:
            save(path, state())
        found = read(path)
        assert not any(compare(path, into))
        loaded = load(path, into)
    assert is_state(found)
    assert is_state(loaded)


def test_nor_to_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = state()
    other["weight"][0, 0] = 5
    said = []
    for default in ("cpu", "meta"):
        with torch.device(default):
            save(tmp_path / "one", state(), overwrite=True)
            save(tmp_path / "other", other, overwrite=True)
            ends = [
                main(["diff", str(tmp_path / "one"), str(tmp_path / "other")]),
                main(["verify", str(tmp_path / "one")]),
                main(["export", str(tmp_path / "one"), str(tmp_path / default)]),
            ]
        said.append((ends, capsys.readouterr().out.replace(default, "default")))
    assert said[0] == said[1]
    assert "1 of 12" in said[0][1]

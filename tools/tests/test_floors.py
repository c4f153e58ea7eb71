"""A floor is the lowest version that can be had, and a raised one comes with its reason."""

import pytest

from tools import floors


@pytest.mark.parametrize(
    ("requirement", "versions", "found"),
    [
        ("numpy>=1.26", ["2.4.6", "1.26.4", "1.26.0", "1.25.2"], ("1.26.0", None)),
        ("numpy>=1.26", ["2.4.6", "2.1.0"], ("2.1.0", "no wheel of a lower version")),
        ("numpy>=1.26,<2", ["2.0.0", "1.26.4"], ("1.26.4", None)),
    ],
)
def test_lowest(requirement, versions, found):
    version, reason = floors.lowest(requirement, versions)
    assert version == found[0]
    assert (reason or "").startswith(found[1] or "")
    assert (reason is None) == (found[1] is None)


def test_on_linux_only_cpu_builds_of_torch_count(monkeypatch):
    monkeypatch.setattr(floors.sys, "platform", "linux")
    version, reason = floors.lowest("torch>=2.11", ["2.15.0", "2.13.0+cpu", "2.11.0"])
    assert version == "2.13.0+cpu"
    assert "CUDA" in reason


def test_elsewhere_every_build_of_torch_is_small(monkeypatch):
    monkeypatch.setattr(floors.sys, "platform", "darwin")
    assert floors.lowest("torch>=2.11", ["2.13.0", "2.11.0"]) == ("2.11.0", None)


def test_nothing_to_be_had_is_an_error():
    with pytest.raises(ValueError, match="no version of numpy>=9"):
        floors.lowest("numpy>=9", ["2.0.0"])

"""A torch that was not tested is told in words, once, at the line that imports us."""

import subprocess
import sys
import warnings

import pytest
import torch
from vescale_rng._torch_versions import NEWEST, NEWEST_PYTHON, OLDEST, warn_untested


@pytest.mark.parametrize("version", ["{}.{}.0", "{}.{}.1+cpu", "{}.{}.0a0+git1234567"])
@pytest.mark.parametrize("tested", [OLDEST, (2, 13), NEWEST])
def test_what_was_tested_is_no_news(version, tested):
    with warnings.catch_warnings(action="error"):
        warn_untested(version.format(*tested))
        warn_untested("of my own making")


@pytest.mark.parametrize(
    ("version", "way"),
    [
        (f"{NEWEST[0]}.{NEWEST[1] + 1}.0", "newer"),
        (f"{NEWEST[0]}.{NEWEST[1] + 1}.0.dev20261123+cu130", "newer"),
        ("3.0.0", "newer"),
        (f"{OLDEST[0]}.{OLDEST[1] - 1}.2", "older"),
        ("2.9.1", "older"),  # as a number, and not as text
    ],
)
def test_others_are_told(version, way):
    with pytest.warns(UserWarning, match=f"is {way} than what") as found:
        warn_untested(version)
    (one,) = found
    assert one.filename == __file__
    for said in (version, *(f"{a}.{b}" for a, b in (OLDEST, NEWEST))):
        assert f"torch {said}" in str(one.message) or f"to {said}" in str(one.message)


def test_a_newer_python_is_told():
    with pytest.warns(UserWarning, match=r"Python 3\.99 is newer than what"):
        warn_untested(torch.__version__, (3, 99))
    with warnings.catch_warnings(action="error"):
        warn_untested(torch.__version__, (3, 99))  # once is enough
        warn_untested(torch.__version__, NEWEST_PYTHON)


def test_one_import_warns_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "torch.__version__ = '9.1.0'\n"
        "import vescale_comm, vescale_rng, vescale_rng.init\n"  # two packages on one line
        "vescale_rng.streams.position()\n"
    )
    command = [sys.executable, "-W", "default::UserWarning", str(script)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stderr
    assert said.count("9.1.0 is newer") == 1
    assert f"{script}:3: UserWarning" in said


def test_this_torch_is_one_of_them():
    with warnings.catch_warnings(action="error"):
        warn_untested(torch.__version__)

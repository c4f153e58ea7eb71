"""Every hostile checkpoint in tests/attacks/ is refused with its named error, and runs nothing."""

import json
from pathlib import Path

import pytest
from vescale_ckpt import FormatError, load, read, verify

ATTACKS = Path(__file__).parent.parent / "attacks"
EXPECTED = json.loads((ATTACKS / "expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_refused(name):
    for attempt in (read, verify, lambda path: load(path, {})):
        with pytest.raises(FormatError, match=EXPECTED[name]):
            attempt(ATTACKS / name)


def test_every_attack_has_an_expectation():
    folders = {path.name for path in ATTACKS.iterdir() if path.is_dir()}
    assert folders == set(EXPECTED)
    assert len(folders) > 45

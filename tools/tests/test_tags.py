"""A tag names one package and one version, and nothing else passes for a tag."""

import pytest

from tools import tags
from tools.packages import find


def test_a_tag_names_a_package_and_a_version():
    assert tags.parse("vescale-rng-v0.10.2") == (find("rng"), "0.10.2")


@pytest.mark.parametrize(
    "text",
    ["v0.1.0", "vescale-rng-0.1.0", "vescale-rng-v0.1", "vescale-rng-v0.1.0rc1", "rng-v1.0.0"],
)
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="is no release tag"):
        tags.parse(text)


def test_an_unknown_package_is_refused():
    with pytest.raises(ValueError, match="no package is called 'vescale-ring'"):
        tags.parse("vescale-ring-v0.1.0")


def test_the_last_tag_is_the_highest_version_not_the_last_in_the_alphabet():
    known = ["vescale-rng-v0.9.0", "vescale-rng-v0.10.0", "vescale-comm-v3.0.0", "other"]
    assert tags.last(find("rng"), known) == "vescale-rng-v0.10.0"
    assert tags.last(find("ckpt"), known) is None


def test_a_tag_of_another_version_than_the_checkout_fails(capsys):
    assert tags.main(["vescale-rng-v99.0.0"]) == 1
    assert "99.0.0" in capsys.readouterr().err

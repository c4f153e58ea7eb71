"""No message has the password of a URL."""

import pytest
import vescale_ckpt as ckpt
from vescale_ckpt._cli.main import main
from vescale_ckpt._errors import without_password

pytest.importorskip("fsspec", reason="fsspec is not installed")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no s3://user:secret@host/x here", "no s3://user:***@host/x here"),
        ("http://:secret@host", "http://:***@host"),
        ("a://b:c@d and e://f:g@h", "a://b:***@d and e://f:***@h"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("host:80, user@host", "host:80, user@host"),
        ("://" * 50_000 + ":" * 50_000, None),
    ],
)
def test_passwords_of_urls(text, said):
    assert without_password(text) == (text if said is None else said)


def test_errors_and_the_command_line(capsys):
    place = "memory://user:secret@host/nothing"
    with pytest.raises(ckpt.CheckpointError) as raised:
        ckpt.read(place)
    assert "user:***@host" in str(raised.value)
    assert main(["verify", place]) != 0
    assert main(["ls", place, "--json"]) != 0
    said = capsys.readouterr()
    assert "secret" not in said.out + said.err

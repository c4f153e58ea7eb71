"""What is no word of a rank is passed over: the threads of the watchdog live on."""

import json
import random

import pytest
import torch.distributed as dist
from vescale_comm._watchdog.channel import Answer, Channel, Ending, _host
from vescale_comm._watchdog.crash import crash_of
from vescale_comm._watchdog.log_store import (
    LogStore,
    alarm_of,
    parsed_entries,
    positions_of,
)
from vescale_comm._watchdog.state_message import parsed_state
from vescale_comm._watchdog.store_reads import parsed_json

ODD = [
    b"", b"\xff\xfe", b"null", b"3", b"[]", b"{}", b'"text"', b"[" * 100_000, b"9" * 5000, b"NaN",
    b'{"text": 1, "op": 2, "ranks": 3}', b'{"text": "", "op": "", "ranks": "01"}',
    b'{"text": "", "op": "", "ranks": [null]}', b'["host", "pid", null]', b'["host", -1, null]',
    b'["host", 3]', b'["host", 3, 4]', b'["host", 3, "a\\u0000b"]', b'[[1]]', b'{"key": []}',
    b'{"report": 3}', b'{"a": {"number": "x", "ranks": [], "words": ""}}',
]  # fmt: skip


@pytest.fixture
def store(tmp_path):
    return dist.FileStore(str(tmp_path / "store"), 2)


@pytest.mark.parametrize("said", ODD, ids=range(len(ODD)))
def test_answers_endings_and_processes(store, said):
    channels = [Channel(store, rank, 2) for rank in range(2)]
    for key in ("answers/1", "raised"):
        channels[0]._store.set(key, b"0 " + said + b"\n" + said + b"\n")
    channels[0]._store.set(f"host/{_host()}", said + b"\n")
    channels[0]._store.set("told/1", said)
    channels[0]._store.set("asked", said)
    channels[1].answer(1, Answer("here"))
    channels[1].end(Ending("raised"))
    channels[1].introduce()
    assert channels[1].answers(1) == {1: Answer("here")}
    assert channels[1].endings() == {1: Ending("raised")}
    assert channels[1].gone(range(2)) == {}
    assert channels[1].asked() in (0, 3)
    assert parsed_state(channels[1].told(1)) is None


@pytest.mark.parametrize("said", ODD, ids=range(len(ODD)))
def test_words_of_logs(said):
    assert not parsed_entries(said)
    assert not parsed_json(said, positions_of)
    assert not parsed_json(said, alarm_of)


def test_digests_of_a_length_that_none_has(store):
    log_store = LogStore(store, 0, 2)
    for said in (b"", b"1", b"x" * 7, b"x" * 15, b"x" * 17):
        log_store.set("key", said)
        assert log_store.pair("key") is None
        log_store.set("state/log/1", said)
        assert len(log_store.published(type("Log", (), {"key": "log"})(), 1)) == len(said) // 16


def test_a_note_is_a_file_of_some_size(tmp_path):
    fatal = "Fatal Python error: Aborted\n\nThread (most recent call first):\n"
    (tmp_path / "note").write_text(fatal)
    assert crash_of(tmp_path / "note") == "Aborted, at no line of Python"
    (tmp_path / "endless").symlink_to("/dev/zero")
    assert crash_of(tmp_path / "endless") == ""
    assert crash_of(tmp_path) == ""


def test_words_with_changes():
    healthy = [
        json.dumps([[1, 2, 3, "what", "site", ["before"]]]).encode(),
        json.dumps({"log": {"number": 1, "ranks": [0, 1], "words": "at"}}).encode(),
        json.dumps({"key": "log", "ranks": [0, 1], "tellers": [0]}).encode(),
    ]
    dice = random.Random(49)
    for _ in range(5000):
        said = bytearray(dice.choice(healthy))
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(said))
            said[at : at + dice.randrange(3)] = dice.choice((b"", b"[", b'"', b"9", b"{}", b"null"))
        parsed_entries(bytes(said))
        parsed_json(bytes(said), positions_of)
        parsed_json(bytes(said), alarm_of)

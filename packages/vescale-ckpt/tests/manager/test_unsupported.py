"""What a newer release wrote, or a missing package keeps from being read, is not damaged."""

import hashlib
import json
import zlib

import pytest
import torch
import vescale_ckpt as ckpt
from vescale_ckpt._format import checksums


def state(step):
    return {"w": torch.full((3,), float(step)), "step": step}


def restored(manager, **options):
    return manager.restore(into=state(0), **options)["step"]


@pytest.mark.parametrize("needs", ["commit", "manifest", "xxhash"])
def test_what_needs_another_installation_is_not_damaged(tmp_path, needs, monkeypatch):
    stands_in = checksums.Checksum(checksums.XXH3, 16, lambda data: f"{zlib.crc32(data):016x}")
    manager, newest = ckpt.CheckpointManager(tmp_path), tmp_path / "step-00000002"
    for step, found in ((1, None), (2, stands_in if needs == "xxhash" else None)):
        monkeypatch.setattr(checksums, "_xxh3", lambda found=found: found)
        manager.save(step, state(step))
    monkeypatch.setattr(checksums, "_xxh3", lambda: None)
    if needs != "xxhash":
        of_a_newer_version(newest, needs)
    manager, words = ckpt.CheckpointManager(tmp_path), "step-00000002: .*(newer|xxhash).*by `step`"
    calls = manager.latest, manager.latest_healthy, manager.metrics, lambda: restored(manager)
    for call in (*calls, lambda: manager.save(3, state(3))):
        with pytest.raises(ckpt.UnsupportedError, match=words):
            call()
    assert manager.steps() == [1, 2]
    assert restored(manager, step=1) == 1
    with pytest.raises(ckpt.UnsupportedError, match="install"):
        restored(manager, step=2)
    newest.rename(tmp_path / "away")
    assert manager.latest() == restored(manager) == 1


def of_a_newer_version(checkpoint, what):
    """Write what says that a release has made it which this one does not know."""
    commit, (manifest,) = checkpoint / "COMMIT", checkpoint.rglob("manifest.json")
    said = json.loads(commit.read_text())
    if what == "manifest":
        content = manifest.read_text().replace('"version":2', '"version":3', 1).encode()
        manifest.write_bytes(content)
        said["manifest_sha256"] = hashlib.sha256(content).hexdigest()
    else:
        said["version"] = 3
    commit.write_text(json.dumps(said, separators=(",", ":")))

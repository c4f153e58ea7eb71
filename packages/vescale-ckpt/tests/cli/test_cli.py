"""The command line shows what is there, finds damage, and says both for programs, too."""

import json
import subprocess
import sys

import pytest
import torch
from edited_checkpoint import damage, generation_of, manifest_of, rewrite_manifest
from emulated_ranks import save_on, sharded, succeed
from vescale_ckpt import CheckpointManager, RankLocal, save
from vescale_ckpt.__main__ import main


@pytest.fixture
def saved(path):
    pieces = sharded(torch.zeros(4, 3), 2)
    states = [
        {"model": {"w": piece, "b": torch.zeros(())}, "step": 7, "own": RankLocal(rank)}
        for rank, piece in enumerate(pieces)
    ]
    succeed(save_on(states, path))
    return path


def run(capsys, *arguments):
    return main(arguments), *capsys.readouterr()


def test_ls_of_a_checkpoint(saved, capsys):
    status, out, _ = run(capsys, "ls", saved)
    assert status == 0
    assert f"{saved}: 2 tensors" in out
    assert "by 2 rank(s)" in out
    assert "model/w  float32[4, 3]  in 2 chunks" in out
    assert "model/b  float32[]" in out
    assert "step     7" in out
    assert "own      PerRank(values=(0, 1))" in out


def test_ls_as_json(saved, capsys):
    status, out, _ = run(capsys, "ls", "--json", saved)
    found = json.loads(out)
    assert status == 0
    assert found["tensors"]["model/w"] == {
        "dtype": "float32", "shape": [4, 3], "chunks": 2, "bytes": 48,
    }  # fmt: skip
    assert found["values"]["step"] == "7"


def test_ls_of_a_directory_of_checkpoints(tmp_path, capsys):
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, {"w": torch.zeros(3)})
    (generation_of(manager.path(2)) / "manifest.json").write_bytes(b"{}")
    status, out, _ = run(capsys, "ls", str(tmp_path))
    assert status == 0
    assert "step-00000001" in out
    assert "step-00000002  CorruptError" in out
    status, out, _ = run(capsys, "ls", "--json", str(tmp_path))
    assert [entry["name"] for entry in json.loads(out)["checkpoints"]] == [
        "step-00000001", "step-00000002",
    ]  # fmt: skip


def test_verify(saved, capsys):
    status, out, err = run(capsys, "verify", saved)
    assert (status, err) == (0, "")
    assert out.startswith("ok: 2 tensors in 2 files")
    assert json.loads(run(capsys, "verify", "--json", saved)[1])["ok"] is True
    damage(saved, file="r00001.safetensors")
    status, out, err = run(capsys, "verify", saved)
    assert (status, out) == (1, "")
    assert err.startswith("CorruptError: 1 problem(s)")
    status, out, err = run(capsys, "verify", "--json", saved)
    assert (status, json.loads(out)["error"], err) == (1, "CorruptError", "")


def test_nothing_there(tmp_path, capsys):
    for command in ("ls", "verify"):
        status, out, err = run(capsys, command, f"{tmp_path}/none")
        assert (status, out) == (1, "")
        assert err.startswith("NotFoundError: there is no checkpoint at")


def test_names_cannot_control_the_terminal(path, capsys):
    save(path, {"\x1b[2J\x07": torch.zeros(2), "w": torch.zeros(2)})
    status, out, _ = run(capsys, "ls", path)
    assert status == 0
    assert "\x1b" not in out
    assert "\\x1b[2J\\x07" in out
    manifest = manifest_of(path)
    manifest["provenance"]["created"] = "\x1b]0;gone\x07"
    rewrite_manifest(path, manifest)
    assert "\x1b" not in run(capsys, "ls", path)[1]


USAGES = [
    (["--help"], 0, "examples:"),
    (["ls", "--help"], 0, "--json"),
    (["remove", "x"], 2, "invalid choice"),
    (["ls", "--jsn", "x"], 2, "unrecognized arguments: --jsn"),
    ([], 2, "required"),
]


@pytest.mark.parametrize(("arguments", "status", "words"), USAGES)
def test_help_and_wrong_usage(capsys, arguments, status, words):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == status
    assert words in "".join(capsys.readouterr())


@pytest.mark.smoke
def test_as_a_program(path):
    save(path, {"w": torch.zeros(2)})
    command = [sys.executable, "-m", "vescale_ckpt", "verify", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ok: 1 tensors")


def test_show(path, capsys):
    save(path, {"w": torch.tensor([1.0, -2.0, float("nan")]), "o": torch.zeros(2), "n": "x" * 99})
    status, out, _ = run(capsys, "show", path)
    assert status == 0
    assert "w  float32[3]\n  min nan  mean nan  max nan  1 not finite\n  1, -2, nan\n" in out
    assert "x" * 99 in out
    assert "w  float32" not in run(capsys, "show", path, "o", "n")[1]
    assert json.loads(run(capsys, "show", "--json", path, "o")[1])["tensors"]["o"]["max"] == "0"


def test_diff(tmp_path, capsys):
    a, b = f"{tmp_path}/a", f"{tmp_path}/b"
    whole = torch.arange(12.0).reshape(4, 3)
    both = {"nan": torch.tensor(float("nan")), "c": torch.ones(2) * 1j, "e": torch.empty(0)}
    states = [{"w": p, **both, "n": 1} for p in sharded(whole, 2)]
    succeed(save_on(states, a))
    save(b, {"w": whole, **both, "n": 1})
    status, out, _ = run(capsys, "diff", a, b)
    assert (status, out) == (0, "4 tensors are the same bit for bit; 0 tensors or values differ\n")
    whole[1, 1] += 0.5
    whole[0, 0] = -0.0
    save(b, {"w": whole, "nan": torch.zeros(2), "c": both["c"], "x": whole, "n": 2}, overwrite=True)
    status, out, _ = run(capsys, "diff", a, b)
    assert status == 1
    assert "w    2 of 12 elements differ, by at most 0.5\n" in out
    assert "nan  float32[] became float32[2]\n" in out
    assert "e    only in the first\n" in out
    assert "x    only in the second\n" in out
    assert "n    1 became 2\n" in out
    assert json.loads(run(capsys, "diff", "--json", a, b)[1])["same_tensors"] == 1


def test_differences_that_are_no_numbers_are_legal_json(tmp_path, capsys):
    for name, value in (("a", 0.0), ("b", float("nan")), ("c", float("inf"))):
        save(f"{tmp_path}/{name}", {"w": torch.full((2,), value), "loss": value})
    for other, largest in (("b", "nan"), ("c", "inf")):
        _, out, _ = run(capsys, "diff", "--json", f"{tmp_path}/a", f"{tmp_path}/{other}")
        found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert found["different"][0]["largest"] == largest


def test_export_and_import(tmp_path, saved, capsys):
    status, out, _ = run(capsys, "export", "--at", "model", saved, f"{tmp_path}/hf")
    assert (status, out) == (0, "2 tensors, 52 bytes\nmodel.safetensors\n")
    status, out, _ = run(capsys, "import", "--at", "model", f"{tmp_path}/hf", f"{tmp_path}/in")
    assert (status, out) == (0, f"2 tensors from safetensors in {tmp_path}/in\n")
    assert run(capsys, "import", f"{tmp_path}/hf", f"{tmp_path}/in")[0] == 1
    assert run(capsys, "import", "--overwrite", f"{tmp_path}/hf", f"{tmp_path}/in")[0] == 0
    assert "w  float32[4, 3]" in run(capsys, "ls", f"{tmp_path}/in")[1]


def test_who_reads_only_the_beginning(path):
    save(path, {str(i): i for i in range(20_000)})
    command = f"'{sys.executable}' -m vescale_ckpt ls '{path}' | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "0 tensors" in done.stdout
    assert (done.stderr, done.returncode) == ("", 0)

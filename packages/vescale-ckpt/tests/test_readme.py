"""What the README shows is what happens: its blocks run, and print what it says they print."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import vescale_ckpt

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(
    r"^```(python|python distributed|python fsdp2|text|printed)\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def blocks():
    return BLOCK.findall(README.read_text())


def test_the_blocks_of_one_process_print_what_the_readme_says():
    names, printed, compared = {}, "", 0
    for kind, text in blocks():
        if kind == "text":
            assert printed == text
            compared += 1
        if kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(text, "README.md", "exec"), names)
            printed = out.getvalue()
    assert compared == 8


def run_block(rank, world_size, text, path):
    names = {"path": path}
    exec(compile(text, "README.md", "exec"), names)
    return names["step"], names["weight"].full_tensor()


def test_the_distributed_block_goes_on_with_another_number_of_processes(path):
    testing = pytest.importorskip("vescale_comm.testing", reason="vescale-comm is not installed")
    (text,) = [text for kind, text in blocks() if kind == "python distributed"]
    one = [testing.run(run_block, 1, text, f"{path}-one")[0] for _ in range(3)]
    many = [testing.run(run_block, size, text, f"{path}-many")[0] for size in (4, 3, 2)]
    for (step, weight), (expected_step, expected_weight) in zip(many, one, strict=True):
        assert step == expected_step
        assert weight.equal(expected_weight)
    assert [step for step, _ in many] == [3, 6, 9]


def print_block(rank, world_size, text, path):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(text, "README.md", "exec"), {"path": path})
    return out.getvalue()


def test_the_fsdp2_block_prints_what_the_readme_says(path):
    testing = pytest.importorskip("vescale_comm.testing", reason="vescale-comm is not installed")
    (text,) = [text for kind, text in blocks() if kind == "python fsdp2"]
    (printed,) = [text for kind, text in blocks() if kind == "printed"]
    found = [testing.run(print_block, size, text, path)[0] for size in (4, 2)]
    assert "".join(found) == printed


def test_every_public_name_is_in_the_readme_and_documented():
    text = README.read_text()
    for name in vescale_ckpt.__all__:
        if name != "__version__":
            assert f"`{name}" in text, name
            assert getattr(vescale_ckpt, name).__doc__, name

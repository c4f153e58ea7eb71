"""What can be imported, and how it is called, is the same until a changelog says otherwise."""

import inspect
import subprocess
import sys

import vescale_ckpt

PUBLIC = {
    "CheckpointError", "CheckpointManager", "CoordinationError", "CorruptError", "Differences",
    "ExistsError", "Exported", "FormatError", "Inspected", "MismatchError", "NotFoundError",
    "PerRank", "RankLocal", "Replicated", "SaveHandle", "SavedChunk", "SavedTensor", "Staging",
    "StateError", "Statistics", "StorageError", "UncommittedError", "UnsupportedError", "Verified",
    "WHOLE", "__version__", "async_save", "compare", "export_safetensors", "import_dcp",
    "import_safetensors", "init_optimizer_state", "inspect", "load", "progress_line", "read",
    "save", "verify",
}  # fmt: skip


def test_names():
    assert set(vescale_ckpt.__all__) == PUBLIC
    assert all(hasattr(vescale_ckpt, name) for name in PUBLIC)


def test_everything_else_is_private():
    # Modules count: a room without an underscore would be a promise.
    # `dcp` is public, and imported by those who use it only: it imports all of torch's DCP.
    others = {name for name in vars(vescale_ckpt) if not name.startswith("_")} - PUBLIC
    assert others <= {"dcp"}


def test_functions_are_functions():
    # A module of the same name, once imported, must not take the function's place.
    __import__("vescale_ckpt._save.save")
    __import__("vescale_ckpt._inspect.inspect")
    for name in ("save", "async_save", "load", "inspect", "verify", "read"):
        assert inspect.isfunction(getattr(vescale_ckpt, name))


def test_the_names_of_dcp():
    from vescale_ckpt import dcp

    assert dcp.__all__ == ["StorageReader", "StorageWriter"]
    for cls in (dcp.StorageReader, dcp.StorageWriter):
        assert not getattr(cls, "__abstractmethods__", ())
        assert cls.__doc__


def test_importing_brings_no_dcp():
    code = "import sys, vescale_ckpt; print('torch.distributed.checkpoint' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


def test_the_command_line_is_a_module():
    command = [sys.executable, "-m", "vescale_ckpt", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"vescale-ckpt {vescale_ckpt.__version__}\n"

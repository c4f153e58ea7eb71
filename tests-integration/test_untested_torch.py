"""Packages that import each other warn of an untested torch once, at the user's line."""

import subprocess
import sys


def test_an_import_of_all_packages_warns_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "torch.__version__ = '9.1.0'\n"
        "import vescale_parallel, vescale_ckpt\n"
        "print(vescale_parallel.Plan)\n"
    )
    command = [sys.executable, "-W", "default::UserWarning", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is newer than what") == 1
    assert f"{script}:3: UserWarning: torch 9.1.0" in done.stderr

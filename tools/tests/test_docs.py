"""The site's pages exist, their links lead somewhere, and their programs print what they say."""

import re
import subprocess
import sys

import pytest

from tools.docs.sources import ABOUT, GUIDES, PAGES, Page, linked, public_modules, section, write
from tools.packages import PACKAGES, ROOT, find

BLOCK = re.compile(r"^```python\n(.*?)^```(?:[^`]*?^```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
PROGRAMS = [
    pytest.param(code, said, id=f"{path.stem}-{at}")
    for path in sorted(PAGES.glob("*.md"))
    for at, (code, said) in enumerate(BLOCK.findall(path.read_text()))
]


@pytest.mark.parametrize(("code", "said"), PROGRAMS)
def test_each_program_of_a_guide_runs_alone_and_prints_what_is_written(tmp_path, code, said):
    assert said, "nothing is said about what it prints"
    (tmp_path / "program.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == said


def test_the_menu_holds_every_guide_and_no_page_that_is_not_there(tmp_path):
    found = write(tmp_path)
    assert {*GUIDES.values(), *ABOUT.values()} <= {*found}
    assert {path.name for path in PAGES.glob("*.md")} <= {*GUIDES.values(), *ABOUT.values()}
    for package in PACKAGES:
        assert f"packages/{package.short}.md" in found
        assert f"reference/{package.short}/index.md" in found


def test_links_lead_to_pages_and_what_no_page_shows_is_only_named():
    page = Page(
        "packages/x.md", "[a](../b/README.md#s) [c](code.py) [d](#e)", ROOT / "p/x/README.md"
    )
    known = {ROOT / "p/b/README.md": "packages/b.md"}
    assert linked(page, known) == "[a](b.md#s) c [d](#e)"


def test_a_section_of_the_readme_becomes_a_page():
    assert section("# T\n## A\nx\n### B\n## C\n", "A") == "# A\nx\n## B\n"
    with pytest.raises(ValueError, match="no heading `## Z`"):
        section("# T\n", "Z")


def test_the_reference_names_every_public_name():
    import vescale_dtensor

    modules = {module.name: module for module in public_modules(find("dtensor"))}
    ours = modules["vescale_dtensor"]
    public = {name for name in vescale_dtensor.__all__ if not name.startswith("__")}
    assert {*ours.names} == public
    assert ours.foreign["DeviceMesh"].startswith("torch.distributed")
    assert "vescale_dtensor.rules" in modules

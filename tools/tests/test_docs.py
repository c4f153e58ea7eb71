"""The site's pages exist, their links lead somewhere, and their programs print what they say."""

import contextlib
import io
import re

import pytest
import torch.distributed as dist

from tools.docs.sources import (
    ABOUT,
    GUIDES,
    PAGES,
    Page,
    benchmarks_page,
    guides,
    linked,
    public_modules,
    section,
    write,
)
from tools.links import with_links
from tools.packages import PACKAGES, ROOT, find

BLOCK = re.compile(r"^```python\n(.*?)^```(?:[^`]*?^```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
PROGRAMS = [
    pytest.param(code, said, id=f"{path.stem}-{at}")
    for path in sorted(PAGES.glob("*.md"))
    for at, (code, said) in enumerate(BLOCK.findall(path.read_text()))
]
# What is read in the repository; the site's own pages link to pages, which mkdocs checks.
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", ".github/*.md", "packages/*/*.md", "packages/*/docs/*.md")
    for path in ROOT.glob(pattern)
)


def anchors(text):
    """The headings of a document, as GitHub names them in links."""
    heads = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("code", "said"), PROGRAMS)
def test_each_program_of_a_guide_runs_alone_and_prints_what_is_written(tmp_path, code, said):
    assert said, "nothing is said about what it prints"
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.chdir(tmp_path):
        # In a namespace of its own: what it does not import is not there.
        exec(compile(code, "program.py", "exec"), {"__name__": "__main__"})
    if dist.is_initialized():  # a mesh of one process has made a world
        dist.destroy_process_group()
    assert out.getvalue() == said


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


def test_recorded_runs_are_a_page_with_their_raw_data(tmp_path):
    row = {"name": "fill", "ours": 3.0, "reference": 2.0, "unit": "s", "against": "x", "ratio": 1.5}
    machine = {"processor": "p", "cores": 2, "torch": "2.13.0"}
    run = {"benchmark": "some", "title": "A title.", "commit": "abc", "date": "2999-01-01T"}
    page = benchmarks_page({tmp_path / "some.json": {**run, "machine": machine, "results": [row]}})
    assert "| fill | 3 s | x: 2 s | 1.500 |" in page
    assert "[raw data](raw/some.json), commit `abc`" in page
    written = write(tmp_path / "pages")
    for name in re.findall(r"\(raw/(.*?)\)", written["measured.md"].text):
        assert (tmp_path / "pages" / "raw" / name).is_file()


def test_the_reference_names_every_public_name():
    import vescale_dtensor

    modules = {module.name: module for module in public_modules(find("dtensor"))}
    ours = modules["vescale_dtensor"]
    public = {name for name in vescale_dtensor.__all__ if not name.startswith("__")}
    assert {*ours.names} == public
    assert ours.foreign["DeviceMesh"].startswith("torch.distributed")
    assert "vescale_dtensor.rules" in modules


def test_guides_of_packages_have_names_of_their_own_and_a_place_in_the_menu():
    names = [path.name for package in PACKAGES for path in package.folder.glob("docs/*.md")]
    assert names
    assert len(names) == len({*names})
    listed = {target for package in PACKAGES for one in guides(package) for target in one.values()}
    assert {f"guides/{name}" for name in names} <= listed | {*GUIDES.values()}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_of_documents_lead_to_files_and_headings(page):
    def led(match, path, section):
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), match[0]
        if section and there.suffix == ".md":
            assert section.removeprefix("#") in anchors(there.read_text()), match[0]
        return match[0]

    with_links(page.read_text(), led)

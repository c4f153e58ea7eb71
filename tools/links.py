"""Point a package's page on PyPI at the repository that releases it.

`python -m tools.links rng https://github.com/OWNER/NAME TAG` edits the checkout: it adds
`[project.urls]` to the package's pyproject.toml and makes the relative links of its README
absolute, to the files as they are at that tag. Only a release knows both, so the checkout itself
has neither.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import sys
from collections.abc import Callable, Sequence

from tools.packages import Package, find

# [text](target) and ![picture](target), with an optional title; code spans have no such links here.
LINK = re.compile(r"(?P<picture>!?)(?P<text>\[[^\]\n]*\])\((?P<target>[^)\s]+)(?P<title>[^)\n]*)\)")


def absolute(text: str, repository: str, ref: str, folder: str) -> str:
    """Markdown whose links below `folder` of the repository lead to the files at `ref`."""

    def led(match: re.Match[str], path: str, section: str) -> str:
        way = "raw" if match["picture"] else "blob"
        place = posixpath.normpath(posixpath.join(folder, path))
        full = f"{repository}/{way}/{ref}/{place}{section}"
        return f"{match['picture']}{match['text']}({full}{match['title']})"

    return with_links(text, led)


def with_links(text: str, led: Callable[[re.Match[str], str, str], str]) -> str:
    """Markdown whose relative links are replaced; those of code, of other sites and within stay.

    Args:
        text: the Markdown.
        led: what stands in place of a link: of its match, its path and its `#section` (or nothing).
    """

    def replaced(match: re.Match[str]) -> str:
        if match["target"].startswith("#") or re.match(r"[a-z]+:", match["target"]):
            return match[0]
        path, mark, section = match["target"].partition("#")
        return led(match, path, mark + section)

    fenced = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(replaced, part) for part in fenced)


def with_urls(project: str, repository: str, ref: str, folder: str) -> str:
    """The text of a pyproject.toml with the table of the project's addresses.

    Raises:
        ValueError: it has one already.
    """
    if "[project.urls]" in project:
        raise ValueError("pyproject.toml has [project.urls] already")
    below = f"{repository}/blob/{ref}/{folder}"
    table = f"""[project.urls]
Homepage = "{repository}"
Documentation = "{below}/README.md"
Source = "{repository}/tree/{ref}/{folder}"
Issues = "{repository}/issues"
Changelog = "{below}/CHANGELOG.md"

"""
    before, mark, after = project.partition("[tool.hatch.version]")
    return before + table + mark + after


def point(package: Package, repository: str, ref: str) -> None:
    """Edit the README and the pyproject.toml of one package."""
    folder = f"packages/{package.name}"
    readme, project = package.folder / "README.md", package.folder / "pyproject.toml"
    project.write_text(with_urls(project.read_text(), repository, ref, folder))
    readme.write_text(absolute(readme.read_text(), repository, ref, folder))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.links", description=__doc__)
    parser.add_argument("package")
    parser.add_argument("repository", help="https://github.com/OWNER/NAME")
    parser.add_argument("ref", help="the tag that is released")
    options = parser.parse_args(arguments)
    try:
        point(find(options.package), options.repository.rstrip("/"), options.ref)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Build the documentation site: `nox -s docs` (into runs/docs/site), `-- --serve` to watch it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.docs.sources import ABOUT, GUIDES, guides, write
from tools.packages import PACKAGES, ROOT

OUT = ROOT / "runs" / "docs"


def navigation(targets: Sequence[str]) -> list[dict[str, Any]]:
    """The menu: guides, packages with guides, tables and changelogs, reference, and the rest."""
    packages, names = [], []
    for package in PACKAGES:
        own = f"packages/{package.short}"
        more = [one for one in targets if one.startswith(f"{own}-")]
        titles = [{one.removeprefix(f"{own}-").removesuffix(".md").upper(): one} for one in more]
        below = [{"Overview": f"{own}.md"}, *guides(package), *titles]
        packages.append({package.name: below})
        pages = [one for one in targets if one.startswith(f"reference/{package.short}/")]
        names.append({package.name: pages})
    return [
        {"veScale": "index.md"},
        {"Guides": [{title: target} for title, target in GUIDES.items()]},
        {"Packages": packages},
        {"Reference": names},
        {"About": [{title: target} for title, target in ABOUT.items()]},
    ]


def settings(targets: Sequence[str]) -> dict[str, Any]:
    """What mkdocs reads; JSON is YAML."""
    options = {
        "docstring_style": "google",
        "show_source": False,
        "show_root_heading": True,
        "heading_level": 2,
        "members_order": "source",
        "show_signature_annotations": True,
        "separate_signature": True,
        "filters": ["!^_"],
    }
    return {
        "site_name": "veScale",
        "docs_dir": str(OUT / "pages"),
        "site_dir": str(OUT / "site"),
        "use_directory_urls": False,  # so that it can be read from a folder, without a server
        "theme": {
            "name": "material",
            "font": False,  # nothing is fetched from elsewhere by who reads it
            "features": ["navigation.indexes", "navigation.top", "search.highlight"],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
            ],
        },
        "nav": navigation(targets),
        "not_in_nav": "/code-of-conduct.md",
        "validation": {"links": {"anchors": "warn", "unrecognized_links": "warn"}},
        "markdown_extensions": [
            "admonition",
            "tables",
            "pymdownx.superfences",
            {"toc": {"permalink": True}},
        ],
        "plugins": [
            "search",
            {
                "mkdocstrings": {
                    "handlers": {
                        "python": {
                            "paths": [str(package.source) for package in PACKAGES],
                            "options": options,
                        }
                    }
                }
            },
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="nox -s docs --", description=__doc__)
    parser.add_argument("--serve", action="store_true", help="serve on localhost:8000, and watch")
    options = parser.parse_args(arguments)
    targets = sorted(write(OUT / "pages"))
    config = Path(OUT / "mkdocs.yml")
    config.write_text(json.dumps(settings(targets), indent=1))
    verb = ["serve"] if options.serve else ["build", "--strict", "--clean"]
    done = subprocess.run([sys.executable, "-m", "mkdocs", *verb, "--config-file", str(config)])
    if done.returncode == 0:
        print(f"the site: {OUT / 'site' / 'index.html'}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())

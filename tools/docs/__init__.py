"""The documentation site: guides of its own, and pages made of what the packages already say.

`pages/` holds the guides. `sources` adds the READMEs, tables, changelogs and a reference of every
public name, and `__main__` gives all of it to mkdocs, strictly: a broken link is a failure.
"""

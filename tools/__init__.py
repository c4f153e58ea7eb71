"""Small scripts of the workspace; each runs as `python -m tools.NAME --help`."""

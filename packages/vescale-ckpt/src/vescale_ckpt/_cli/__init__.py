"""`python -m vescale_ckpt`.

Reading guide: `main` parses arguments and runs the commands; `output` makes JSON and lines of what
they found.
"""

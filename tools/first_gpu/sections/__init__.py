"""Asks the questions of a first run: a module for each section, with `cases(device)`."""

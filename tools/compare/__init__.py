"""The main job: the trainer on one device and on meshes, and what their numbers have in common.

`python -m tools.compare --help`.
"""

"""Resolves a plan for a model and a mesh, or lists every problem. No processes.

Text of a plan -> `parsed_rules` (no model yet) -> `check` (rules resolved against modules and mesh
sizes; all problems are collected before one error is raised) -> `report` (what `plan.check`
returns).
"""

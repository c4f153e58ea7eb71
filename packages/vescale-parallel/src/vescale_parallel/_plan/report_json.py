"""A resolved plan for programs: all rows of a report as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vescale_parallel._check.report import Report
from vescale_parallel._notation.rows import ParameterRow


def report_json(report: Report) -> str:
    """Return all rows of a report; bytes and shapes as numbers."""
    content = {
        "mesh": dict(report.mesh),
        "batch": None if report.batch is None else str(report.batch),
        "bytes_per_rank": report.bytes_per_rank,
        "bytes_on_one_device": report.total_bytes,
        "notes": list(report.notes),
        "parameters": [_parameter(row) for row in report.parameters],
        "boundaries": [
            {"module": row.module, "rule": row.rule, "in_out": row.boundary.text}
            for row in report.boundaries
        ],
        "buffers": [
            {
                "unit": row.unit,
                "zero": row.zero,
                "dtype": str(row.dtype).removeprefix("torch."),
                "stored_bytes": row.stored_bytes,
                "gathered_bytes": row.gathered_bytes,
                "gradient_bytes": row.gradient_bytes,
                "offload": row.offload,
                "host_bytes": row.host_bytes,
            }
            for row in report.buffers
        ],
        "reduce_ahead": None if report.reduce_ahead is None else asdict(report.reduce_ahead),
        "batch_is": report.batch_is,
        "recomputed": [
            {"module": row.module, "rule": row.rule, "kind": row.kind, "saved": list(row.saved)}
            for row in report.regions
        ],
        "local_rows": list(report.local_rows),
        "gathers": [asdict(row) for row in report.gathers],
        "captured": [asdict(unit) for unit in report.captured],
        "activation_bytes_a_token": _activations(report),
    }
    return json.dumps(content, indent=2)


def _activations(report: Report) -> Mapping[str, float]:
    """Of a rank, estimated, with what the plan recomputes and without."""
    found = report.activations
    token = float(found.sharers)
    return {"kept": found.bytes_of(token, found.regions), "without": found.bytes_of(token, ())}


def _parameter(row: ParameterRow) -> Mapping[str, Any]:
    return {
        "names": list(row.names),
        "rule": row.rule,
        "layout": str(row.layout),
        "zero": row.zero,
        "global_shape": list(row.global_shape),
        "local_shape": list(row.local_shape),
        "local_bytes": row.local_bytes,
        "uneven": row.uneven,
    }

"""The whole: sections are run, and the report is written and shown."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence

from tools.first_gpu import report, schedule
from tools.first_gpu.catalogue import Section
from tools.first_gpu.findings import BAD, Finding, latest, read
from tools.first_gpu.options import Options, parse

FILES = ("report.json", "report.md", "findings.jsonl", "log.txt")
"""All that is written."""

_SHOWN = 6
"""Findings of a section that are shown as soon as it has ended; all are in the report."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 if something is not as expected.

    Where it is interrupted, what was found until then is reported as well.
    """
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (options.out / name).unlink(missing_ok=True)
    start = time.monotonic()
    file, log = options.out / "findings.jsonl", options.out / "log.txt"
    print(f"{options.minutes:g} minutes on {options.device}, into {options.out}", flush=True)
    lock = threading.Lock()

    def tell(section: Section) -> None:
        with lock:
            found = [one for one in latest(read(file)) if one.section == section.name]
            print(_told(section, found, time.monotonic() - start), flush=True)

    interrupted = False
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        schedule.run(options, file, log, tell)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        signal.signal(signal.SIGTERM, before)
    found = report.in_order(latest(read(file)))
    made = report.Report(options, found, time.monotonic() - start)
    (options.out / "report.json").write_text(made.to_json())
    (options.out / "report.md").write_text(made.to_markdown())
    print("\n" + made.to_terminal(_shows_errors(options)))
    if interrupted:
        return 130
    return 1 if any(one.bad for one in found) else 0


def _told(section: Section, found: Sequence[Finding], seconds: float) -> str:
    bad = [one for one in found if one.status in BAD]
    text = f"{seconds:5.0f} s  {section.name:8} {report.status_counts(found)}"
    lines = [f"         {one.status:7} {one.case}: {one.got[:100]}" for one in bad[:_SHOWN]]
    more = [f"         and {len(bad) - _SHOWN} more"] if len(bad) > _SHOWN else []
    return "\n".join([text, *lines, *more])


def _shows_errors(options: Options) -> bool:
    return options.case != "*" and os.environ.get("CI") is None

"""Writes docs/devices.md from the kit's reports in docs/reports/WHO/NAME.json (`accelz check NAME --json`).

`python -m scripts.device_table` fails if the page is not what the reports say; with --write it writes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORTS = Path("docs/reports")
PAGE = Path("docs/devices.md")
HEAD = """# Devices

What the conformance kit has said of devices, and who has run it. `python -m scripts.device_table --write`
writes this page from [reports](reports): each is the output of `accelz check NAME --json`, stored as
`docs/reports/WHO/NAME.json`. Send yours as a pull request.

| backend | run by | verdict | ranks | operators right | torch | driver and devices | machine |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def page(root: Path) -> str:
    """The text of the page."""
    paths = sorted((root / REPORTS).glob("*/*.json"))
    return HEAD + "".join(
        _row(path.parent.name, json.loads(path.read_text(encoding="utf-8"))) for path in paths
    )


def _row(who: str, report: dict[str, Any]) -> str:
    versions, operators = report["versions"], report["operators"].values()
    right = sum(tier["passed"] for tier in operators)
    cells = (
        versions["backend"],
        who,
        _verdict(report),
        str(report["ranks_tested"]),
        f"{right} of {right + sum(tier['failed'] for tier in operators)}",
        versions["torch"],
        versions["driver and devices"],
        versions["machine"],
    )
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


def _verdict(report: dict[str, Any]) -> str:
    if report["failed"] or report["not_run"]:
        ran = report["passed"] + report["failed"]
        return f"fails {report['failed']} of {ran}, {report['not_run']} not run"
    untested = ", ".join(row["what"] for row in report["not_tried"])
    of = f" of {report['selection']}" if report.get("selection") else ""  # which older reports do not say
    return f"passes {report['passed']}{of}{f', not tested: {untested}' if untested else ''}"


def main(arguments: list[str]) -> int:
    text = page(ROOT)
    if "--write" in arguments:
        (ROOT / PAGE).write_text(text, encoding="utf-8")
        return 0
    if (ROOT / PAGE).read_text(encoding="utf-8") == text:
        print("device table: clean")
        return 0
    print(f"{PAGE} is not what {REPORTS} says: python -m scripts.device_table --write")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

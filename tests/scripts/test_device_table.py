"""The page of devices is what the stored reports say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts import device_table

REPORT: dict[str, Any] = {
    "device": "foo",
    "versions": {"torch": "2.13", "backend": "accelz-foo 1.0", "driver and devices": "4 | 5", "machine": "m"},
    "passed": 9,
    "failed": 0,
    "not_run": 0,
    "ranks_tested": 2,
    "not_tried": [{"what": "streams", "needs": "a device"}],
    "operators": {"core": {"passed": 3, "failed": 1}, "training": {"passed": 4, "failed": 0}},
}


def test_each_report_is_a_row(tmp_path: Path) -> None:
    folder = tmp_path / "docs/reports/acme"
    folder.mkdir(parents=True)
    (folder / "foo.json").write_text(json.dumps(REPORT))
    (folder / "sad.json").write_text(json.dumps(REPORT | {"failed": 1, "not_run": 3}))
    (folder / "quick.json").write_text(json.dumps(REPORT | {"selection": "the quick tests", "not_tried": []}))
    rows = device_table.page(tmp_path).splitlines()[-3:]
    assert rows == [
        "| accelz-foo 1.0 | acme | passes 9, not tested: streams | 2 | 7 of 8 | 2.13 | 4 / 5 | m |",
        "| accelz-foo 1.0 | acme | passes 9 of the quick tests | 2 | 7 of 8 | 2.13 | 4 / 5 | m |",
        "| accelz-foo 1.0 | acme | fails 1 of 10, 3 not run | 2 | 7 of 8 | 2.13 | 4 / 5 | m |",
    ]


def test_the_page_is_what_the_reports_say() -> None:
    assert device_table.main([]) == 0

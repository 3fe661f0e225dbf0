"""Adds up what ctest and GoogleTest reported: "N passed, N failed", alone on the last line.

A GoogleTest executable counts as its cases; any other test, and an executable that ended before it wrote its
report, as one.
"""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def main() -> int:
    folder = pathlib.Path(sys.argv[1])
    passed = failed = skipped = 0
    for case in ElementTree.parse(folder / "ctest.junit").getroot().iter("testcase"):
        case_failed = case.get("status") != "run" and case.find("skipped") is None
        report = folder / (case.get("name").replace("/", "_").replace("-", "_") + ".xml")
        if not report.exists():
            failed += case_failed
            skipped += case.find("skipped") is not None
            passed += not case_failed and case.find("skipped") is None
            continue
        statuses = [status_of(test) for test in ElementTree.parse(report).getroot().iter("testcase")]
        failed += statuses.count("failed")
        skipped += statuses.count("skipped")
        passed += statuses.count("passed")
        if case_failed and "failed" not in statuses:
            failed += 1
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0


def status_of(test: ElementTree.Element) -> str:
    if test.find("failure") is not None:
        return "failed"
    return "skipped" if test.find("skipped") is not None or test.get("status") == "notrun" else "passed"


if __name__ == "__main__":
    sys.exit(main())

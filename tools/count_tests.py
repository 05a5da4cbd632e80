"""Prints how many test cases passed and failed, from the JUnit XML files below the given folders.

The last line is `N passed, N failed`. Exits with 1 if any failed or none ran.
"""

import pathlib
import sys
import xml.etree.ElementTree


def main() -> int:
    passed = failed = 0
    for folder in sys.argv[1:]:
        for path in sorted(pathlib.Path(folder).rglob("*.xml")):
            try:
                cases = xml.etree.ElementTree.parse(path).iter("testcase")
            except xml.etree.ElementTree.ParseError as error:
                failed += 1
                print(f"failed: {path} can't be read: {error}")
                continue
            for case in cases:
                if case.get("status") == "notrun" or case.find("skipped") is not None:
                    continue
                if case.find("failure") is None and case.find("error") is None:
                    passed += 1
                else:
                    failed += 1
                    print(f"failed: {case.get('classname', '')}.{case.get('name')} ({path})")
    print(f"{passed} passed, {failed} failed")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())

"""Extracts the members of a wheel that match any of the given patterns.

usage: extract_wheel.py WHEEL DESTINATION PATTERN=NEW_PREFIX...

A member whose path matches `PATTERN` (a prefix) is written below DESTINATION with that prefix replaced by NEW_PREFIX.
A prefix that matches nothing is an error: the wheel is not the one that the build expects.
"""

import pathlib
import shutil
import sys
import zipfile


def main() -> int:
    wheel, destination, *rules = sys.argv[1:]
    with zipfile.ZipFile(wheel) as archive:
        for rule in rules:
            prefix, new_prefix = rule.split("=", 1)
            members = [m for m in archive.namelist() if m.startswith(prefix) and not m.endswith("/")]
            if not members:
                print(f"{wheel}: no member starts with {prefix!r}", file=sys.stderr)
                return 1
            for member in members:
                target = pathlib.Path(destination, new_prefix + member[len(prefix):])
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
    return 0


if __name__ == "__main__":
    sys.exit(main())

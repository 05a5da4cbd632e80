"""Prints compile_commands.json, from `bazel aquery --output=jsonproto` on standard input.

Arguments: the root of the workspace, Bazel's output_base and its output_path. Commands run in the root: where Bazel's own name
files of its output folders, these name the folders in full.
"""

import json
import sys

# g++ knows it, clang does not.
_NOT_FOR_CLANG = {"-fno-canonical-system-headers"}
# What a command writes next to the object file.
_OUTPUTS = {"-MD"}
_OUTPUTS_WITH_VALUE = {"-MF", "-o"}


def _adapted(arguments: list[str], folders: dict[str, str]) -> list[str]:
    result = []
    arguments = iter(arguments)
    for argument in arguments:
        if argument in _OUTPUTS_WITH_VALUE:
            next(arguments)
        elif argument not in _NOT_FOR_CLANG | _OUTPUTS and not argument.startswith("-frandom-seed="):
            folder, slash, rest = argument.partition("/")
            result.append(folders.get(folder, folder) + slash + rest)
    return result


def main() -> int:
    root, output_base, output_path = sys.argv[1:]
    folders = {"external": output_base + "/external", "bazel-out": output_path}
    entries = {}
    for action in json.load(sys.stdin).get("actions", []):
        arguments = action["arguments"]
        source = arguments[arguments.index("-c") + 1]
        # Two targets may compile one file: one command is enough to know its options.
        if not source.startswith(("external/", "bazel-out/")):
            entries.setdefault(source, _adapted(arguments, folders))
    if not entries:
        print("compile_commands: Bazel compiles nothing", file=sys.stderr)
        return 1
    json.dump(
        [
            {"directory": root, "file": source, "arguments": arguments}
            for source, arguments in sorted(entries.items())
        ],
        sys.stdout,
        indent=1,
    )
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())

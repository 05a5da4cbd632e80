"""Checks that each header compiles alone, and that public ones say which language and which libtorch they need.

A source that includes a header before all else shows it: if the source compiles, so does the header. The other headers are
compiled, with the options that compile_commands.json has for a source that includes them. Runs in the root of the workspace.
"""

import concurrent.futures
import os
import re
import subprocess
import sys

import cpp_sources


def _error_of(header: str, arguments: list[str]) -> str:
    """What the compiler says of a header, or nothing."""
    command = [*arguments[: arguments.index("-c")], "-fsyntax-only", "-x", "c++", "-"]
    result = subprocess.run(command, input=f'#include "{header}"\n', capture_output=True, text=True, check=False)
    return result.stderr or f"{command[0]} failed" if result.returncode else ""


def _missing_versions(header: str, files: dict[str, str]) -> list[str]:
    """The headers with an #error for what is too old that a public header does not reach."""
    reached = cpp_sources.included(header, files) | {header}
    wanted = ["config/language_version.h"]
    if any(name.startswith(("ATen/", "c10/", "torch/")) for file in reached for name in cpp_sources.includes(files[file])):
        wanted.append("distributed/libtorch_version.h")
    return [name for name in wanted if name not in reached]


def main() -> int:
    files = cpp_sources.read_files()
    commands = cpp_sources.read_compile_commands(files)
    shown = {cpp_sources.first_include(files[source]) for source in commands}
    left = [name for name in files if name.endswith(".h") and name not in shown]
    users = {header: source for source in commands for header in cpp_sources.included(source, files)}

    failed = False
    for header in files:
        if re.match(r"(config|distributed|lora)/(?!.*internal/).*\.h$", header):
            for name in _missing_versions(header, files):
                failed = True
                print(f"check_headers: {header} does not reach {name}: include it", file=sys.stderr)

    compiled = [header for header in left if header in users]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = pool.map(lambda header: _error_of(header, commands[users[header]]), compiled)
        for header, error in zip(compiled, errors):
            if error:
                failed = True
                print(f"{error}\ncheck_headers: {header} does not compile alone: include what it uses", file=sys.stderr)
    for header in left:
        if header not in users:
            print(f"check_headers: {header} was not compiled: no source of a build for CPU includes it")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

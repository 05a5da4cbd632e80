"""Runs clang-tidy on sources of compile_commands.json. tools/tidy.sh says which, and runs this in the root of the workspace."""

import argparse
import concurrent.futures
import os
import subprocess
import sys

import cpp_sources


def _differing(revision: str, files: dict[str, str]) -> list[str]:
    differing = []
    for command in (
        ["git", "diff", "--name-only", "--relative", revision, "--"],
        ["git", "ls-files", "--others", "--exclude-standard"],
    ):
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if result.returncode:
            sys.exit(f"tidy: git can't compare with {revision}: give a revision that it knows")
        differing += [name for name in result.stdout.splitlines() if name in files]
    return differing


def _source_with(file: str, files: dict[str, str], commands: dict[str, list[str]]) -> str | None:
    """The source that is checked for a file: itself, or for a header its own source, or else one that includes it."""
    if file in commands:
        return file
    own = [source for source in commands if cpp_sources.first_include(files[source]) == file]
    users = own or [source for source in commands if file in cpp_sources.included(source, files)]
    return users[0] if users else None


def _is_torch_free_library(source: str, arguments: list[str]) -> bool:
    return not source.startswith("tests/") and not any("/external/libtorch" in argument for argument in arguments)


def _error_of(source: str) -> str:
    """What clang-tidy says of a source, or nothing."""
    command = ["clang-tidy", "--quiet", source]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return result.stdout or f"clang-tidy fails on {source}" if result.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="tidy")
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--since", metavar="REVISION")
    parser.add_argument("--torch-free", action="store_true")
    options = parser.parse_args()
    if bool(options.files) + bool(options.since) + options.torch_free > 1:
        parser.error("give files, --since or --torch-free, not several of them")

    files = cpp_sources.read_files()
    commands = cpp_sources.read_compile_commands(files)
    if options.torch_free:
        wanted = [source for source, arguments in commands.items() if _is_torch_free_library(source, arguments)]
    elif options.since:
        wanted = _differing(options.since, files)
    else:
        wanted = options.files or list(commands)
    sources = {file: _source_with(file, files, commands) for file in wanted}
    unknown = [file for file, source in sources.items() if source is None]
    for file in unknown:
        print(f"tidy: {file} was not checked: no source of a build for CPU has it", file=sys.stderr)

    failed = 0
    checked = sorted({source for source in sources.values() if source is not None})
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for error in pool.map(_error_of, checked):
            if error:
                failed += 1
                print(error, file=sys.stderr)
    print(f"tidy: {len(checked)} sources checked, {failed} with findings")
    # A name that is given has to exist; a file that differs may be for CUDA alone.
    return 1 if failed or (unknown and options.files) else 0


if __name__ == "__main__":
    sys.exit(main())

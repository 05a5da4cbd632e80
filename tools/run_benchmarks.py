"""Runs built benchmarks one after the other, and writes a report of all as benchmarks.md and benchmarks.json.

tools/bench.sh builds them and calls this, as does the run.sh of an archive that it packs. Flags after `--` go to each benchmark:
`-- --benchmark_filter=/Float`. The report is written anew after each benchmark, so that a run cut short leaves what it measured.
Exits with 1 if a benchmark fails or measures nothing, and names it; one that only lacks a GPU is skipped and named.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from typing import Any, NamedTuple

# What Google Benchmark says of a case; every other number is a counter.
_NO_COUNTERS = frozenset(
    ("cpu_coefficient", "cpu_time", "family_index", "iterations", "per_family_instance_index")
    + ("real_coefficient", "real_time", "repetition_index", "repetitions", "rms", "threads")
)

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}

# So ends the line of a benchmark that is asked for CUDA, and leaves with success because there is no GPU.
_NO_GPU = "this machine has no GPU"


class Benchmark(NamedTuple):
    label: str
    quick_flags: list[str]

    @property
    def path(self) -> str:
        return self.label.removeprefix("//").replace(":", "/")


def read_benchmarks(file: pathlib.Path) -> list[Benchmark]:
    """The benchmarks of the smoke tests, whose flags are those of a quick run, that `bazel query --output=xml` describes."""
    return sorted(
        Benchmark(
            rule.get("name", "").removesuffix("_smoke_test"),
            [flag.get("value", "") for flag in rule.iterfind("list[@name='args']/string")],
        )
        for rule in xml.etree.ElementTree.parse(file).iter("rule")
    )


def format_number(value: float) -> str:
    """With three digits; integers below a million with all of theirs."""
    if value.is_integer() and abs(value) < 1e6:
        return f"{int(value):,}"
    value = float(f"{value:.3g}")
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.3g}"


def format_time(value: float, unit: str) -> str:
    seconds = float(f"{value * _SECONDS[unit]:.3g}")
    unit = next((unit for unit, size in _SECONDS.items() if seconds >= size), "ns")
    return f"{format_number(seconds / _SECONDS[unit])} {unit.replace('u', 'µ')}"


def format_case_time(case: dict[str, Any]) -> str:
    if case.get("error_occurred"):
        return "error"
    if "big_o" in case:  # A line through several cases, and how far they are from it.
        return f"{format_time(case['real_coefficient'], case['time_unit'])} × {case['big_o']}"
    if "rms" in case:
        return f"{case['rms']:.1%}"
    if case.get("aggregate_unit") == "percentage":  # Of the variation, where cases are repeated.
        return f"{case['real_time']:.1%}"
    return format_time(case["real_time"], case["time_unit"])


def is_counter(name: str, value: Any) -> bool:
    return name not in _NO_COUNTERS and isinstance(value, (int, float)) and not isinstance(value, bool)


def run(benchmark: Benchmark, binaries: pathlib.Path, device: str, flags: list[str]) -> dict[str, Any]:
    """What a benchmark measured: {label, state, reason, context, cases}; state is measured, skipped or failed."""
    result = {"label": benchmark.label, "state": "failed", "reason": "", "context": {}, "cases": []}
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder, "output.json")
        command = [binaries.absolute() / benchmark.path, f"--device={device}", *flags]
        command += [f"--benchmark_out={output}", "--benchmark_out_format=json"]
        try:
            process = subprocess.run(command, stderr=subprocess.PIPE, errors="replace")
        except OSError as error:
            return {**result, "reason": f"does not start: {error}"}
        print(process.stderr, end="", file=sys.stderr, flush=True)
        try:
            measured = json.loads(output.read_text())
            result.update(context=measured["context"], cases=measured["benchmarks"])
        except (OSError, ValueError, KeyError):
            pass  # Missing, empty or cut short: nothing is measured.
    last_line = (process.stderr.strip().splitlines() or ["it said nothing"])[-1]
    measured_device = result["context"].get("device", "host")
    errors = [f"{case['name']}: {case['error_message']}" for case in result["cases"] if case.get("error_occurred")]
    if errors:
        result["reason"] = "; ".join(errors)
    elif process.returncode < 0:
        result["reason"] = f"ended by signal {-process.returncode}: {last_line}"
    elif process.returncode > 0:
        result["reason"] = f"exit status {process.returncode}: {last_line}"
    elif not result["cases"]:
        result["reason"] = f"measured nothing: {last_line}"
        if device == "cuda" and last_line.endswith(_NO_GPU):
            result.update(state="skipped", reason=last_line)
    elif measured_device not in ("host", device, f"{device}:0"):
        result["reason"] = f"asked for {device}, it measured on {measured_device}"
    else:
        result["state"] = "measured"
    return result


def describe_machine() -> dict[str, str]:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        gpus = []
    return {
        "CPU": f"{model}, {len(os.sched_getaffinity(0))} cores",
        "GPU": "; ".join(f"{name}, driver {driver}" for name, driver in (gpu.rsplit(", ", 1) for gpu in gpus)) or "none",
        "kernel": f"{platform.system()} {platform.release()}",
        "load average before": f"{os.getloadavg()[0]:.2f}",
    }


def format_cases(cases: list[dict[str, Any]]) -> list[str]:
    counters = list(dict.fromkeys(name for case in cases for name, value in case.items() if is_counter(name, value)))
    lines = ["| " + " | ".join(["case", "time", *counters]) + " |", "|---" * (2 + len(counters)) + "|"]
    for case in cases:
        cells = [format_number(float(case[name])) if name in case else "" for name in counters]
        lines.append("| " + " | ".join([case["name"], format_case_time(case), *cells]) + " |")
    return lines


def format_report(report: dict[str, Any]) -> str:
    lines = ["# Benchmarks", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in report["run"].items()]
    if report["quick"]:
        lines += ["", "A quick run, which shows that they work: its times mean nothing."]
    for result in report["benchmarks"]:
        lines += ["", f"## `{result['label']}`"]
        if result["reason"]:
            lines += ["", f"{result['state'].capitalize()}: {result['reason']}"]
        if result["cases"]:
            lines += ["", *format_cases(result["cases"])]
    return "\n".join(lines) + "\n"


def write_report(folder: pathlib.Path, report: dict[str, Any]) -> None:
    """Adds to what is said of the run what the benchmarks know alone."""
    for name in ("compiler", "libtorch"):
        found = {result["context"][name] for result in report["benchmarks"] if name in result["context"]}
        report["run"][name] = ", ".join(sorted(found)) or "unknown"
    (folder / "benchmarks.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    (folder / "benchmarks.md").write_text(format_report(report))


def regular_expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text} is no regular expression: {error}") from error


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench", add_help=False, allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--filter", type=regular_expression, default="", metavar="REGEX")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=pathlib.Path, default="bench_results", metavar="FOLDER")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG_OF_GOOGLE_BENCHMARK")
    # From the scripts that call this: what bazel query says of the smoke tests, where tests/lora/dora_benchmark is, and what
    # was built.
    parser.add_argument("--targets", type=pathlib.Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--binaries", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--commit", default="unknown", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="only prints the labels")
    options = parser.parse_args(arguments)

    every = read_benchmarks(options.targets)
    benchmarks = [benchmark for benchmark in every if options.filter.search(benchmark.label)]
    if not benchmarks:
        parser.error(f"--filter={options.filter.pattern} matches none of {', '.join(b.label for b in every)}")
    if options.list:
        print(*(benchmark.label for benchmark in benchmarks), sep="\n")
        return 0

    options.output.mkdir(parents=True, exist_ok=True)
    report = {
        "run": {
            "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
            "commit": options.commit,
            "device": options.device,
            **describe_machine(),
        },
        "quick": options.quick,
        "benchmarks": [],
    }
    for benchmark in benchmarks:
        print(f"=== {benchmark.label}", flush=True)
        flags = [*(benchmark.quick_flags if options.quick else []), *options.flags]
        report["benchmarks"].append(run(benchmark, options.binaries, options.device, flags))
        write_report(options.output, report)

    failed = False
    for result in report["benchmarks"]:
        if result["state"] != "measured":
            failed |= result["state"] == "failed"
            print(f"bench: {result['label']} {result['state']}: {result['reason']}", file=sys.stderr)
    print(f"bench: wrote {options.output / 'benchmarks.md'} and benchmarks.json")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs programs that stand for benchmarks, and reads the report of them."""

import contextlib
import io
import json
import pathlib
import tempfile
import unittest

from tools import run_benchmarks

_CONTEXT = {"device": "cpu", "compiler": "g++ 12.2.0", "libtorch": "2.11.0"}


def case(name, real_time, unit="ms", **others):
    return {"name": name, "run_type": "iteration", "iterations": 1, "real_time": real_time, "time_unit": unit, **others}


class RunBenchmarksTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.rules = []

    def add(self, name, cases=(), context=None, stderr="", status=0, quick_flags=()):
        """Adds the benchmark //tests:name; without cases it writes no output. It keeps its flags in a file beside it."""
        output = json.dumps({"context": context or _CONTEXT, "benchmarks": cases}) if cases else ""
        binary = self.folder / "bin" / "tests" / name
        binary.parent.mkdir(parents=True, exist_ok=True)
        binary.write_text(
            "#!/usr/bin/env python3\n"
            "import pathlib, sys\n"
            "pathlib.Path(sys.argv[0] + '.flags').write_text(' '.join(sys.argv[1:]))\n"
            "output = next(flag.split('=')[1] for flag in sys.argv if flag.startswith('--benchmark_out='))\n"
            f"pathlib.Path(output).write_text({output!r})\n"
            f"sys.stderr.write({stderr!r})\n"
            f"sys.exit({status})\n"
        )
        binary.chmod(0o755)
        flags = "".join(f"<string value='{flag}'/>" for flag in quick_flags)
        self.rules.append(
            f"<rule class='cc_test' name='//tests:{name}_smoke_test'><list name='tags'><string value='benchmark'/></list>"
            f"<list name='args'>{flags}</list></rule>"
        )

    def run_all(self, *arguments):
        """The exit status, and what was written to stderr, benchmarks.md and benchmarks.json."""
        targets = self.folder / "targets.xml"
        targets.write_text(f"<query>{''.join(self.rules)}</query>")
        output = self.folder / "output"
        stderr = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(stderr):
            status = run_benchmarks.main(
                [
                    f"--targets={targets}",
                    f"--binaries={self.folder / 'bin'}",
                    f"--output={output}",
                    "--commit=abc",
                    *arguments,
                ]
            )
        report = json.loads((output / "benchmarks.json").read_text())
        return status, stderr.getvalue(), (output / "benchmarks.md").read_text(), report

    def flags_of(self, name):
        flags = (self.folder / "bin" / "tests" / f"{name}.flags").read_text().split()
        return [flag for flag in flags if not flag.startswith("--benchmark_out")]

    def test_writes_a_table_of_each_benchmark(self):
        self.add(
            "b_benchmark",
            [case("BM_B/1", 1.23456, vs_base=0.51234), case("BM_B/2", 25001.0, vs_base=2.0, peak_bytes=25200000.0)],
        )
        self.add("a_benchmark", [case("BM_A", 31.84, "us")])
        status, stderr, markdown, report = self.run_all()
        self.assertEqual((status, stderr), (0, ""))
        self.assertIn("| commit | abc |\n| device | cpu |\n", markdown)
        self.assertIn("| compiler | g++ 12.2.0 |\n| libtorch | 2.11.0 |\n", markdown)
        self.assertTrue(
            markdown.endswith(
                "\n## `//tests:a_benchmark`\n\n| case | time |\n|---|---|\n| BM_A | 31.8 µs |\n"
                "\n## `//tests:b_benchmark`\n\n| case | time | vs_base | peak_bytes |\n|---|---|---|---|\n"
                "| BM_B/1 | 1.23 ms | 0.512 |  |\n| BM_B/2 | 25 s | 2 | 25.2 M |\n"
            ),
            markdown,
        )
        self.assertEqual([result["label"] for result in report["benchmarks"]], ["//tests:a_benchmark", "//tests:b_benchmark"])
        self.assertEqual(report["benchmarks"][1]["cases"][0]["vs_base"], 0.51234)

    def test_writes_the_line_through_several_cases(self):
        line = {"name": "BM_A_BigO", "big_o": "N", "cpu_coefficient": 3.0, "real_coefficient": 1941.4, "time_unit": "ns"}
        self.add("a_benchmark", [case("BM_A/8", 1.0), line, {"name": "BM_A_RMS", "rms": 0.0364}])
        _, _, markdown, _ = self.run_all()
        self.assertIn(
            "| case | time |\n|---|---|\n| BM_A/8 | 1 ms |\n| BM_A_BigO | 1.94 µs × N |\n| BM_A_RMS | 3.6% |\n", markdown
        )

    def test_goes_on_after_a_failure_and_names_it(self):
        self.add("a_benchmark", [case("BM_A", 1.0)], stderr="first\nno memory\n", status=3)
        self.add("b_benchmark", [case("BM_B", 1.0)])
        status, stderr, markdown, _ = self.run_all()
        self.assertEqual(status, 1)
        self.assertIn("bench: //tests:a_benchmark failed: exit status 3: no memory\n", stderr)
        self.assertNotIn("//tests:b_benchmark", stderr)
        self.assertIn("## `//tests:a_benchmark`\n\nFailed: exit status 3: no memory\n", markdown)
        self.assertIn("| BM_B | 1 ms |", markdown)

    def test_goes_on_after_what_does_not_start(self):
        self.add("a_benchmark")
        self.add("b_benchmark", [case("BM_B", 1.0)])
        (self.folder / "bin" / "tests" / "a_benchmark").unlink()
        status, stderr, markdown, _ = self.run_all()
        self.assertEqual(status, 1)
        self.assertIn("bench: //tests:a_benchmark failed: does not start: ", stderr)
        self.assertIn("| BM_B | 1 ms |", markdown)

    def test_fails_for_a_case_with_an_error(self):
        self.add("a_benchmark", [case("BM_A", 0.0, error_occurred=True, error_message="no file"), case("BM_B", 1.0)], status=1)
        status, stderr, markdown, _ = self.run_all()
        self.assertEqual(status, 1)
        self.assertIn("bench: //tests:a_benchmark failed: BM_A: no file\n", stderr)
        self.assertIn("| BM_A | error |\n| BM_B | 1 ms |\n", markdown)

    def test_fails_for_a_benchmark_that_measures_nothing(self):
        self.add("a_benchmark", stderr="Failed to match any benchmarks against regex: x\n", status=1)
        status, stderr, _, _ = self.run_all()
        self.assertEqual(status, 1)
        self.assertIn("a_benchmark failed: exit status 1: Failed to match any benchmarks against regex: x\n", stderr)

    def test_skips_what_lacks_a_gpu(self):
        self.add("a_benchmark", stderr="--device=cuda: nothing is measured, as this machine has no GPU\n")
        self.add("b_benchmark", [case("BM_B", 1.0)], context={"device": "host"})
        status, stderr, markdown, _ = self.run_all("--device=cuda")
        self.assertEqual(status, 0)
        self.assertIn("bench: //tests:a_benchmark skipped: ", stderr)
        self.assertIn("this machine has no GPU", markdown)
        self.assertEqual(self.flags_of("a_benchmark"), ["--device=cuda"])

    def test_fails_for_a_device_that_was_not_asked_for(self):
        self.add("a_benchmark", stderr="--device=cuda: nothing is measured, as this build has no CUDA\n")
        self.add("b_benchmark", [case("BM_B", 1.0)])
        status, stderr, _, _ = self.run_all("--device=cuda")
        self.assertEqual(status, 1)
        self.assertIn("bench: //tests:a_benchmark failed: measured nothing", stderr)
        self.assertIn("bench: //tests:b_benchmark failed: asked for cuda, it measured on cpu\n", stderr)

    def test_takes_the_flags_of_smoke_tests_for_quick_runs_alone(self):
        self.add("a_benchmark", [case("BM_A", 1.0)], quick_flags=["--benchmark_min_time=0"])
        _, _, markdown, _ = self.run_all("--quick", "--", "--benchmark_filter=A")
        self.assertEqual(self.flags_of("a_benchmark"), ["--device=cpu", "--benchmark_min_time=0", "--benchmark_filter=A"])
        self.assertIn("its times mean nothing", markdown)
        _, _, markdown, _ = self.run_all()
        self.assertEqual(self.flags_of("a_benchmark"), ["--device=cpu"])
        self.assertNotIn("its times mean nothing", markdown)

    def test_runs_what_the_filter_matches(self):
        self.add("a_benchmark", [case("BM_A", 1.0)])
        self.add("b_benchmark", [case("BM_B", 1.0)])
        _, _, _, report = self.run_all("--filter=:b_")
        self.assertEqual([result["label"] for result in report["benchmarks"]], ["//tests:b_benchmark"])
        with self.assertRaises(SystemExit) as error:
            self.run_all("--filter=c_")
        self.assertEqual(error.exception.code, 2)


if __name__ == "__main__":
    unittest.main()

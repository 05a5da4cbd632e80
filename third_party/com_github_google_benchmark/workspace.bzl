"""Google Benchmark."""

load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")
load("//third_party:system_repository.bzl", "system_repository")

def repository():
    maybe(
        system_repository,
        name = "com_github_google_benchmark",
        build_file = Label("//third_party/com_github_google_benchmark:benchmark.BUILD"),
        headers = ["benchmark"],
        # Debian has it only as a shared library, which programs ask for by this name.
        libraries = ["libbenchmark.so.1debian"],
        package = "libbenchmark-dev",
    )

"""JSON for Modern C++."""

load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")
load("//third_party:system_repository.bzl", "system_repository")

def repository():
    maybe(
        system_repository,
        name = "com_github_nlohmann_json",
        build_file = Label("//third_party/com_github_nlohmann_json:json.BUILD"),
        headers = ["nlohmann"],
        package = "nlohmann-json3-dev",
    )

"""spdlog, header-only, with the fmt it was built for."""

load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")
load("//third_party:system_repository.bzl", "system_repository")

def repository():
    maybe(
        system_repository,
        name = "com_github_gabime_spdlog",
        build_file = Label("//third_party/com_github_gabime_spdlog:spdlog.BUILD"),
        headers = ["fmt", "spdlog"],
        package = "libspdlog-dev",
    )

"""RE2: std::regex overflows the stack on long inputs."""

load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")
load("//third_party:system_repository.bzl", "system_repository")

def repository():
    maybe(
        system_repository,
        name = "com_googlesource_code_re2",
        build_file = Label("//third_party/com_googlesource_code_re2:re2.BUILD"),
        headers = ["re2"],
        libraries = ["libre2.a"],
        package = "libre2-dev",
    )

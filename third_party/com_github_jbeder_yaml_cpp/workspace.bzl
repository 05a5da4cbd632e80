"""yaml-cpp."""

load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")
load("//third_party:system_repository.bzl", "system_repository")

def repository():
    maybe(
        system_repository,
        name = "com_github_jbeder_yaml_cpp",
        build_file = Label("//third_party/com_github_jbeder_yaml_cpp:yaml_cpp.BUILD"),
        headers = ["yaml-cpp"],
        libraries = ["libyaml-cpp.a"],
        package = "libyaml-cpp-dev",
    )

"""The headers of Gloo, which ProcessGroupGloo.hpp includes and the libtorch wheel lacks. Nothing is linked."""

load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")
load("//third_party:system_repository.bzl", "system_repository")

def repository():
    maybe(
        system_repository,
        name = "gloo",
        build_file = Label("//third_party/gloo:gloo.BUILD"),
        headers = ["gloo"],
        package = "libgloo-dev",
    )

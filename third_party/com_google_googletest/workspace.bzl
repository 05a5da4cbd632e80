"""GoogleTest and GoogleMock."""

load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")
load("//third_party:system_repository.bzl", "system_repository")

def repository():
    maybe(
        system_repository,
        name = "com_google_googletest",
        build_file = Label("//third_party/com_google_googletest:googletest.BUILD"),
        headers = ["gmock", "gtest"],
        libraries = ["libgmock.a", "libgtest.a", "libgtest_main.a"],
        package = "libgmock-dev",
    )

"""Doxygen, which makes the API reference. A program of this machine: only what is built here can use it."""

load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")
load("//third_party:system_repository.bzl", "system_repository")

def repository():
    maybe(
        system_repository,
        name = "doxygen",
        build_file = Label("//third_party/doxygen:doxygen.BUILD"),
        package = "doxygen",
        programs = ["doxygen"],
    )

"""utf8proc: Unicode normalization and categories, for the tokenizer of the example."""

load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")
load("//third_party:system_repository.bzl", "system_repository")

def repository():
    maybe(
        system_repository,
        name = "utf8proc",
        build_file = Label("//third_party/utf8proc:utf8proc.BUILD"),
        headers = ["utf8proc.h"],
        libraries = ["libutf8proc.a"],
        package = "libutf8proc-dev",
    )

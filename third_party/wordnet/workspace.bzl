"""The WordNet 3.0 database."""

load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")
load("//third_party:system_repository.bzl", "system_repository")

def repository():
    maybe(
        system_repository,
        name = "wordnet",
        build_file = Label("//third_party/wordnet:wordnet.BUILD"),
        directories = ["/usr/share/wordnet"],
        package = "wordnet-base",
    )

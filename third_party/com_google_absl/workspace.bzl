"""Abseil, under the labels of its own Bazel build."""

load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")
load("//third_party:system_repository.bzl", "system_repository")

# The labels of Abseil that this workspace uses; all stand for the one library that Debian's archives make.
_LABELS = [
    "absl/container:flat_hash_map",
    "absl/flags:flag",
    "absl/flags:parse",
    "absl/flags:usage",
    "absl/status:status",
    "absl/status:statusor",
    "absl/strings:str_format",
    "absl/strings:strings",
    "absl/time:time",
    "absl/types:span",
]

def repository():
    maybe(
        system_repository,
        name = "com_google_absl",
        build_file = Label("//third_party/com_google_absl:absl.BUILD"),
        aliases = {label: "//:absl" for label in _LABELS},
        headers = ["absl"],
        library_prefix = "absl_",
        package = "libabsl-dev",
        pkg_config = ["absl_flags_parse", "absl_status", "absl_statusor", "absl_str_format", "absl_time"],
    )

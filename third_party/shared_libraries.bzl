"""Shared libraries of a repository that find each other beside themselves, of which programs are linked with some alone."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

def _shared_libraries_impl(ctx):
    cc_toolchain = find_cpp_toolchain(ctx)
    feature_configuration = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = cc_toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )

    # The linker gets this in place of a library that is only loaded, and takes nothing from it.
    nothing = ctx.actions.declare_file(ctx.label.name + "_nothing.ifso")
    ctx.actions.write(nothing, "/* An empty linker script. */\n")

    libraries = [
        cc_common.create_library_to_link(
            actions = ctx.actions,
            feature_configuration = feature_configuration,
            cc_toolchain = cc_toolchain,
            dynamic_library = file,
            interface_library = interface,
        )
        for files, interface in [(ctx.files.linked, None), (ctx.files.loaded, nothing)]
        for file in files
    ]
    linker_input = cc_common.create_linker_input(owner = ctx.label, libraries = depset(libraries))
    return [
        DefaultInfo(files = depset(ctx.files.linked + ctx.files.loaded)),
        CcInfo(linking_context = cc_common.create_linking_context(linker_inputs = depset([linker_input]))),
    ]

shared_libraries = rule(
    implementation = _shared_libraries_impl,
    doc = "Lays all of the libraries into one folder at run time, and links programs with those in `linked`.",
    attrs = {
        "linked": attr.label_list(allow_files = True),
        "loaded": attr.label_list(
            allow_files = True,
            doc = "found by the others, in their own folder ($ORIGIN in their RPATH), when these need them",
        ),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

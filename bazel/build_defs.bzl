"""The one place for compiler options, tags and execution properties: BUILD files list plain targets."""

_COPTS = [
    "-Wall",
    "-Wextra",
    "-Wno-sign-compare",
]

def lora_cc_library(name, copts = [], **kwargs):
    native.cc_library(
        name = name,
        copts = _COPTS + copts,
        **kwargs
    )

def lora_cc_binary(name, copts = [], **kwargs):
    native.cc_binary(
        name = name,
        copts = _COPTS + copts,
        **kwargs
    )

def lora_cc_test(name, deps = [], copts = [], size = "small", **kwargs):
    """A GoogleTest binary. Linked statically but for libtorch, so that a test is one file to ship and start."""
    native.cc_test(
        name = name,
        size = size,
        copts = _COPTS + copts,
        linkstatic = True,
        deps = deps + ["@com_google_googletest//:gtest_main"],
        **kwargs
    )

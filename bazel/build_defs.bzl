"""The one place for compiler options, tags and execution properties: BUILD files list plain targets."""

_COPTS = [
    "-Wall",
    "-Wextra",
    "-Wno-sign-compare",
]

# Where remote workers with a GPU are kept apart from others: for running a test, not for building it.
_GPU_EXEC_PROPERTIES = {"test.Pool": "gpu"}

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

def lora_cc_gpu_test(name, deps = [], tags = [], **kwargs):
    """A lora_cc_test that needs a GPU. It is built for CUDA alone, and skips its test cases where there is no GPU."""
    lora_cc_test(
        name = name,
        exec_properties = _GPU_EXEC_PROPERTIES,
        tags = tags + [
            "gpu",
            "requires-gpu-nvidia",
        ],
        target_compatible_with = select({
            "//third_party:is_cuda": [],
            "//conditions:default": ["//third_party:never"],
        }),
        deps = deps + [
            "//tests/testutil:gpu",
            "//third_party:libtorch",
            "//third_party:nccl",
        ],
        **kwargs
    )

def lora_cc_benchmark(
        name,
        srcs,
        main,
        deps = [],
        copts = [],
        data = [],
        args = [],
        smoke_args = [],
        tags = [],
        **kwargs):
    """A Google Benchmark binary, and `<name>_smoke_test`, which runs each of its benchmarks once.

    For times: `bazel run -c opt <name>`. The test only says that the benchmarks still work; `smoke_args` are further
    arguments for it alone. `main` has the main(); for sources with one of their own, which ends with RunBenchmarks(), it
    is //tests/testutil:run_benchmarks.
    """
    native.cc_library(
        name = name + "_lib",
        testonly = True,
        srcs = srcs,
        copts = _COPTS + copts,
        visibility = ["//visibility:private"],
        deps = deps + [
            main,
            "@com_github_google_benchmark//:benchmark",
        ],
        # Benchmarks register themselves: nothing refers to their objects.
        alwayslink = True,
    )
    native.cc_binary(
        name = name,
        testonly = True,
        args = args,
        data = data,
        linkstatic = True,
        tags = tags,
        deps = [":" + name + "_lib"],
        **kwargs
    )
    native.cc_test(
        name = name + "_smoke_test",
        size = "small",
        args = args + smoke_args + ["--benchmark_min_time=0"],
        data = data,
        linkstatic = True,
        tags = tags + ["benchmark"],
        deps = [":" + name + "_lib"],
        **kwargs
    )

def lora_cc_fuzz_target(name, srcs, corpus, deps = [], dictionary = None):
    """A libFuzzer binary, and `<name>_corpus_test`, which gives the corpus to the same function without libFuzzer.

    The binary needs clang: `tools/fuzz.sh`, or `bazel run --config=fuzz <name>`. Sources define LLVMFuzzerTestOneInput();
    `corpus` is a label of at least one file, `dictionary` one in libFuzzer's format.
    """
    native.cc_test(
        name = name + "_corpus_test",
        size = "small",
        srcs = srcs,
        args = ["$(rootpaths %s)" % corpus],
        copts = _COPTS,
        data = [corpus],
        linkstatic = True,
        deps = deps + ["//tests/fuzz:corpus_main"],
    )
    native.cc_binary(
        name = name,
        testonly = True,
        srcs = srcs,
        args = ["-dict=$(rootpath %s)" % dictionary] if dictionary else [],
        copts = _COPTS,
        data = [dictionary] if dictionary else [],
        linkopts = ["-fsanitize=fuzzer"],
        linkstatic = True,
        tags = ["fuzz", "manual"],
        deps = deps,
    )

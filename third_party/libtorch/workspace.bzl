"""libtorch for CPU: the headers and libraries of the torch wheel, and the two CUDA libraries that libtorch_cpu needs."""

load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")
load("//third_party:wheel_repository.bzl", "wheel_repository")

def repository():
    maybe(
        wheel_repository,
        name = "libtorch",
        build_file = Label("//third_party/libtorch:libtorch.BUILD"),
        members = {
            "nvidia_cuda_cupti:nvidia/cu13/lib/libcupti.so.13": "lib/libcupti.so.13",
            "nvidia_cuda_runtime:nvidia/cu13/lib/libcudart.so.13": "lib/libcudart.so.13",
            "torch:torch/include/": "include/",
            "torch:torch/lib/libc10.so": "lib/libc10.so",
            "torch:torch/lib/libgomp.so.1": "lib/libgomp.so.1",
            "torch:torch/lib/libtorch_cpu.so": "lib/libtorch_cpu.so",
        },
        pins = {
            "nvidia-cuda-cupti==13.0.85": "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
            "nvidia-cuda-runtime==13.0.96": "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
            "torch==2.11.0": "7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a",
        },
        platforms = [
            "manylinux_2_28_x86_64",
            "manylinux_2_25_x86_64",
            "manylinux_2_17_x86_64",
            "manylinux2014_x86_64",
        ],
    )

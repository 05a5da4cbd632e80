"""The external repositories of trainer_lora.

Every one is declared through `maybe()`: a repository of the same name that a consumer's WORKSPACE declared earlier takes
the place of ours.
"""

load("//third_party/com_github_gabime_spdlog:workspace.bzl", spdlog = "repository")
load("//third_party/com_github_google_benchmark:workspace.bzl", benchmark = "repository")
load("//third_party/com_github_jbeder_yaml_cpp:workspace.bzl", yaml_cpp = "repository")
load("//third_party/com_github_nlohmann_json:workspace.bzl", nlohmann_json = "repository")
load("//third_party/com_google_absl:workspace.bzl", absl = "repository")
load("//third_party/com_google_googletest:workspace.bzl", googletest = "repository")
load("//third_party/com_googlesource_code_re2:workspace.bzl", re2 = "repository")
load("//third_party/doxygen:workspace.bzl", doxygen = "repository")
load("//third_party/gloo:workspace.bzl", gloo = "repository")
load("//third_party/libtorch:workspace.bzl", libtorch = "repository")
load("//third_party/libtorch_cuda:workspace.bzl", libtorch_cuda = "repository")
load("//third_party/minilm:workspace.bzl", minilm = "repository")
load("//third_party/utf8proc:workspace.bzl", utf8proc = "repository")
load("//third_party/wordnet:workspace.bzl", wordnet = "repository")

def trainer_lora_repositories():
    """What the libraries and their tests need. A consumer's WORKSPACE calls this after its own repositories."""
    absl()
    benchmark()
    gloo()
    googletest()
    libtorch()
    libtorch_cuda()
    nlohmann_json()
    re2()
    spdlog()
    yaml_cpp()

def trainer_lora_docs_repositories():
    """What //docs:api_reference needs on top: Doxygen."""
    doxygen()

def trainer_lora_example_repositories():
    """What //examples needs on top: a pretrained model, a text corpus, a Unicode library."""
    minilm()
    utf8proc()
    wordnet()

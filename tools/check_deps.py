"""Compares what each C++ target includes with its deps, and finds C++ files that no target has.

Reads `bazel query //... --output=xml` from standard input, and the sources below the working folder, the root of the workspace.
A dep is right if the target includes one of its headers, or if it has none and is there to be linked.
"""

import pathlib
import sys
import xml.etree.ElementTree

import cpp_sources

# Labels of other repositories, and what the names of their headers begin with. Abseil's labels are in the names themselves.
_PREFIXES = {
    "//third_party:libtorch": ("ATen/", "c10/", "torch/"),
    # These headers of libtorch include those of CUDA and NCCL.
    "//third_party:nccl": ("ATen/cuda/", "c10/cuda/", "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"),
    "@bazel_tools//tools/cpp/runfiles:runfiles": ("tools/cpp/runfiles/",),
    "@com_github_gabime_spdlog//:spdlog": ("spdlog/",),
    "@com_github_google_benchmark//:benchmark": ("benchmark/",),
    "@com_github_jbeder_yaml_cpp//:yaml-cpp": ("yaml-cpp/",),
    "@com_github_nlohmann_json//:json": ("nlohmann/",),
    "@com_google_googletest//:gtest": ("gmock/", "gtest/"),
    "@com_google_googletest//:gtest_main": ("gmock/", "gtest/"),
    "@com_googlesource_code_re2//:re2": ("re2/",),
    "@utf8proc//:utf8proc": ("utf8proc.h",),
}

# What a macro gives to each of its targets, whether they include it or not.
_OF_MACROS = {
    "lora_cc_gpu_test": {"//tests/testutil:gpu", "//third_party:libtorch", "//third_party:nccl"},
}


class Rule:
    def __init__(self, element: xml.etree.ElementTree.Element):
        def labels(attribute: str) -> list[str]:
            values = element.find(f"list[@name='{attribute}']")
            return [] if values is None else [value.get("value") for value in values]

        self.name = element.get("name")
        self.kind = element.get("class")
        self.srcs, self.outs, self.deps = labels("srcs"), labels("outs"), labels("deps")
        self.hdrs = labels("hdrs") + labels("textual_hdrs")
        macro = element.find("string[@name='generator_function']")
        self.of_macro = _OF_MACROS.get("" if macro is None else macro.get("value"), set())


def _path(label: str) -> str:
    package, _, name = label.removeprefix("//").partition(":")
    return f"{package}/{name}" if package else name


class Workspace:
    def __init__(self, rules: list[Rule]):
        self.targets = {rule.name: rule for rule in rules if rule.kind.startswith("cc_")}
        self._generated = {out: rule.srcs for rule in rules for out in rule.outs}
        self._labels = {dep for rule in rules for dep in rule.deps}
        self._owners: dict[str, set[str]] = {}
        for rule in self.targets.values():
            for label in rule.hdrs + rule.srcs:
                self._owners.setdefault(_path(label), set()).add(rule.name)

    def files(self) -> set[str]:
        return set(self._owners)

    def includes(self, rule: Rule) -> set[str]:
        """The headers that a target includes, but for those of the system: these are in angle brackets."""
        # What is generated includes what its sources do: samples in documents.
        files = [file for label in rule.srcs + rule.hdrs for file in self._generated.get(label, [label])]
        texts = [pathlib.Path(_path(file)).read_text() for file in files]
        return {
            header
            for text in texts
            for header in cpp_sources.includes(text)
            if self.owners(header) or f'#include "{header}"' in text
        }

    def owners(self, header: str) -> set[str]:
        """The labels that have a header, of which one is enough."""
        if header in self._owners:
            return self._owners[header]
        if header.startswith("absl/"):
            package, _, name = header.removesuffix(".h").rpartition("/")
            label = f"@com_google_absl//{package}:{name}"
            # Where no target of Abseil has a header's name, it is of the package's own target.
            return {label if label in self._labels else f"@com_google_absl//{package}:{package.rpartition('/')[2]}"}
        return {label for label, prefixes in _PREFIXES.items() if header.startswith(prefixes)}

    def provides(self, label: str, header: str) -> bool:
        """Also what has no headers of its own, such as //:lora_training or a main(), gives those of its deps."""
        if label in self.owners(header):
            return True
        rule = self.targets.get(label)
        return rule is not None and not rule.hdrs and any(self.provides(dep, header) for dep in rule.deps)

    def is_only_linked(self, label: str) -> bool:
        rule = self.targets.get(label)
        return label.endswith("_main") if rule is None else not rule.hdrs and bool(rule.srcs)


def _problems(workspace: Workspace, rule: Rule) -> list[str]:
    found = []
    includes = workspace.includes(rule)
    for header in sorted(includes):
        owners = workspace.owners(header)
        if rule.name in owners or header in map(_path, rule.srcs):
            continue
        if not owners:
            found.append(f'"{header}" is of no label: is it misspelled? A new repository goes into tools/check_deps.py')
        elif not any(workspace.provides(dep, header) for dep in rule.deps):
            found.append(f'add {" or ".join(sorted(owners))} to its deps, for "{header}"')
    # A main() that is linked anyway brings its framework's headers.
    by_main = {header for dep in rule.deps if dep.endswith("_main") for header in includes if dep in workspace.owners(header)}
    for dep in rule.deps:
        if dep in rule.of_macro or workspace.is_only_linked(dep):
            continue
        if not any(workspace.provides(dep, header) for header in includes - by_main):
            found.append(f"drop {dep} from its deps: it includes nothing that needs it")
    return found


def main() -> int:
    tree = xml.etree.ElementTree.parse(sys.stdin)
    workspace = Workspace([Rule(element) for element in tree.iter("rule")])
    found = []
    for name, rule in sorted(workspace.targets.items()):
        # Bundles, such as //:lora_training, include nothing.
        if rule.srcs or rule.hdrs:
            found += [f"{name}: {problem}" for problem in _problems(workspace, rule)]

    for file in cpp_sources.read_files():
        if file not in workspace.files():
            found.append(f"{file}: add it to a target, as nothing compiles it")
    for problem in found:
        print(f"check_deps: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

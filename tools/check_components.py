"""Checks that each component has its library, and a test, a benchmark with a smoke test, and perhaps a test for GPUs, which use it.

Reads what `bazel query --output=xml //...` prints. Exits with 1, and names them, if targets are missing.
"""

import sys
import xml.etree.ElementTree

# The libraries, and the tests for GPUs of those that have one. //lora:x has //tests/lora:x_test and so on.
_COMPONENTS = {
    # Config parsing
    "//config:lora_config": None,
    # Layer replacement
    "//lora:layer_replacement": None,
    "//lora:lora_matmul": "//tests/lora:linear_gpu_test",
    "//lora:dora": None,
    # Checkpoint key aliasing, missing-parameter initialization
    "//distributed/checkpoint:key_aliases": None,
    "//distributed/checkpoint:sharded_loader": None,
    "//lora:parameter_initializer": None,
    # Gradient sync
    "//distributed:gradient_sync": "//tests/distributed:gradient_sync_gpu_test",
    "//lora:lora_gradient_sync": None,
}


def uses(label: str, library: str, inputs: dict[str, list[str]]) -> bool:
    """Whether the target depends on the library, directly or not."""
    seen, to_visit = set(), [label]
    while to_visit:
        visited = to_visit.pop()
        if visited == library:
            return True
        if visited not in seen:
            seen.add(visited)
            to_visit += inputs.get(visited, [])
    return False


def main() -> int:
    classes, inputs = {}, {}
    for rule in xml.etree.ElementTree.parse(sys.stdin).iter("rule"):
        classes[rule.get("name")] = rule.get("class")
        inputs[rule.get("name")] = [rule_input.get("name") for rule_input in rule.iter("rule-input")]

    errors = []
    for library, gpu_test in _COMPONENTS.items():
        if classes.get(library) != "cc_library":
            errors.append(f"{library} is no library")
        test = library.replace("//", "//tests/")
        wanted = {f"{test}_test": "cc_test", f"{test}_benchmark": "cc_binary", f"{test}_benchmark_smoke_test": "cc_test"}
        if gpu_test:
            wanted[gpu_test] = "cc_test"
        for label, rule_class in wanted.items():
            if classes.get(label) != rule_class:
                errors.append(f"{library} lacks {label}, a {rule_class}")
            elif not uses(label, library, inputs):
                errors.append(f"{label} does not depend on {library}")
    for error in errors:
        print(f"components: {error}: mend it, or _COMPONENTS in tools/check_components.py", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

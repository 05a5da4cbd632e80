// Reached from every public header: consumers don't inherit this repository's
// .bazelrc, so a build with Bazel's old default standard must fail here, in one
// readable line, and not in the middle of a template.
#ifndef TRAINER_LORA_CONFIG_LANGUAGE_VERSION_H_
#define TRAINER_LORA_CONFIG_LANGUAGE_VERSION_H_

#if __cplusplus < 201703L
#error "trainer_lora needs C++17: build with --cxxopt=-std=c++17"
#endif

#endif  // TRAINER_LORA_CONFIG_LANGUAGE_VERSION_H_

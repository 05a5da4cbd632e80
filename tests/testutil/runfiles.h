// Where Bazel put a test's data:
//
//   const std::string path = RunfilePath("trainer_lora/tests/testdata/a.txt");
//   const std::string vocabulary = RunfilePath("minilm/vocab.txt");
#ifndef TRAINER_LORA_TESTS_TESTUTIL_RUNFILES_H_
#define TRAINER_LORA_TESTS_TESTUTIL_RUNFILES_H_

#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>

#include "tools/cpp/runfiles/runfiles.h"

namespace trainer_lora::testutil {

// The file behind `path`, which is a repository's name and a path in it and
// must be in the test's `data`. Ends the test program if Bazel has no runfiles.
inline std::string RunfilePath(const std::string& path) {
  using ::bazel::tools::cpp::runfiles::Runfiles;
  std::string error;
  const std::unique_ptr<Runfiles> runfiles(Runfiles::CreateForTest(&error));
  if (runfiles == nullptr) {
    std::cerr << "no runfiles: " << error << std::endl;
    std::abort();
  }
  return runfiles->Rlocation(path);
}

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_RUNFILES_H_

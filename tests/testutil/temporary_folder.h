// A folder for a test's files, removed with all that is in it:
//
//   TemporaryFolder folder;
//   WriteBytes(folder.Path("broken"), "{");
//   EXPECT_THAT(folder.Names(), ElementsAre("broken"));
#ifndef TRAINER_LORA_TESTS_TESTUTIL_TEMPORARY_FOLDER_H_
#define TRAINER_LORA_TESTS_TESTUTIL_TEMPORARY_FOLDER_H_

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace trainer_lora::testutil {

// Empty at first. One at a time in a test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    // The parameter's name is part of a parameterized test's, after a slash.
    const ::testing::TestInfo* info =
        ::testing::UnitTest::GetInstance()->current_test_info();
    std::string name =
        std::string(info->test_suite_name()) + "." + info->name();
    std::replace(name.begin(), name.end(), '/', '.');
    path_ = std::filesystem::path(::testing::TempDir()) / name;
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }

  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string path() const { return path_.string(); }
  std::string Path(const std::string& name) const {
    return (path_ / name).string();
  }

  // Of what is in it, sorted.
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  std::filesystem::path path_;
};

inline void WriteBytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string ReadBytes(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_TEMPORARY_FOLDER_H_

#include "config/version.h"

#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/testutil/runfiles.h"

namespace trainer_lora::config {
namespace {

TEST(VersionTest, IsThatOfTheNumbers) {
  EXPECT_EQ(kVersion, absl::StrCat(TRAINER_LORA_VERSION_MAJOR, ".",
                                   TRAINER_LORA_VERSION_MINOR, ".",
                                   TRAINER_LORA_VERSION_PATCH));
}

TEST(VersionTest, IsThatOfTheChangelogsFirstSection) {
  std::ifstream changelog(testutil::RunfilePath("trainer_lora/CHANGELOG.md"));
  ASSERT_TRUE(changelog);
  std::string line;
  while (std::getline(changelog, line) && line.rfind("## ", 0) != 0) continue;
  // It goes on with a date, or with what is not released yet.
  EXPECT_EQ(line.substr(0, line.find(" (")), absl::StrCat("## ", kVersion));
}

}  // namespace
}  // namespace trainer_lora::config

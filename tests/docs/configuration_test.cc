// Reads the README's configuration.
#include "config/lora_config.h"
#include "config/trainer_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/log_capture.h"
#include "tests/testutil/runfiles.h"
#include "tests/testutil/status_matchers.h"
#include "yaml-cpp/yaml.h"

namespace trainer_lora::config {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::trainer_lora::testutil::LogCapture;
using ::trainer_lora::testutil::RunfilePath;

TEST(ReadmeTest, TheConfigurationShowsEveryFieldAndItsDefault) {
  const LogCapture logs;
  LORA_ASSERT_OK_AND_ASSIGN(const TrainerConfig config,
                            TrainerConfig::Load(RunfilePath(
                                "trainer_lora/tests/docs/configuration.yaml")));
  EXPECT_THAT(logs.Records(), IsEmpty());
  ASSERT_THAT(config.models, SizeIs(1));
  const RoleConfig& role = config.models[0];
  EXPECT_EQ(role.name, "student");
  EXPECT_EQ(role.trainable, RoleConfig().trainable);
  EXPECT_TRUE(role.node["trainable"].IsDefined());
  ASSERT_TRUE(role.lora.has_value());

  // Of the fields that are not set here the README shows the default.
  LoraConfig expected;
  expected.enable = true;
  expected.rank = 16;
  expected.alpha = 32;
  expected.target_modules = {{"to_q", "to_k", "to_v", "to_out"}};
  expected.exclude_modules = {"embedder"};
  expected.rank_pattern = {{"to_out", 32}};
  expected.alpha_pattern = {{"to_out", 64}};
  expected.layers_to_transform = {{{0, 0}, {8, 11}}};
  expected.layers_pattern = {"blocks"};
  expected.loraplus_lr_ratio = 16;
  EXPECT_EQ(*role.lora, expected) << role.lora->ToYaml() << "\nis not\n"
                                  << expected.ToYaml();
  // All that are optional are set, so that these are all there are.
  EXPECT_EQ(role.node["lora"].size(), expected.ToYaml().size());
}

}  // namespace
}  // namespace trainer_lora::config

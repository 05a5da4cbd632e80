// Compiles and runs the code of the README's tour.
#include "tests/docs/tour.inc"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "absl/status/status.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"

namespace {

using ::trainer_lora::testutil::IsOk;

TEST(ReadmeTest, TheTourTrainsAndSavesAnAdapter) {
  const std::string folder = testing::TempDir() + "readme_tour";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directory(folder);
  const std::string yaml = folder + "/train.yaml";
  std::ofstream(yaml) << "models: {student: {lora: {enable: true, rank: 2}}}\n";

  Transformer base;
  std::vector<distributed::TensorView> tensors;
  for (const auto& item : base->named_parameters()) {
    tensors.push_back({item.key(), distributed::TensorDtype::kF32,
                       item.value().sizes().vec(),
                       item.value().const_data_ptr()});
  }
  const std::string checkpoint = folder + "/model.safetensors";
  ASSERT_THAT(distributed::WriteSafetensors(checkpoint, tensors, {}), IsOk());

  EXPECT_THAT(Train(yaml, checkpoint, folder + "/adapter"), IsOk());
  EXPECT_TRUE(
      std::filesystem::exists(folder + "/adapter/adapter_model.safetensors"));
}

}  // namespace

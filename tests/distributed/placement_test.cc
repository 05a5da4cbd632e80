#include "distributed/placement.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::ElementsAreArray;

using OffsetsAndSizes = std::vector<std::pair<int64_t, int64_t>>;

TEST(PlacementTest, SaysWhereAParameterLiesAndWhatItsGradientNeeds) {
  EXPECT_TRUE(Placement::Replicate().is_replicate());
  EXPECT_EQ(Placement::Replicate().shard_dim(), -1);
  EXPECT_EQ(Placement::Replicate().gradient_reduction(),
            GradientReduction::kAverage);
  EXPECT_EQ(Placement::Replicate(GradientReduction::kSum).gradient_reduction(),
            GradientReduction::kSum);
  EXPECT_FALSE(Placement::Shard(0).is_replicate());
  EXPECT_EQ(Placement::Shard(1).shard_dim(), 1);
  EXPECT_EQ(Placement::Shard(1).gradient_reduction(), GradientReduction::kNone);
}

TEST(PlacementTest, IsPrinted) {
  EXPECT_EQ(Placement::Replicate().ToString(), "Replicate(average)");
  EXPECT_EQ(Placement::Replicate(GradientReduction::kSum).ToString(),
            "Replicate(sum)");
  EXPECT_EQ(Placement::Replicate(GradientReduction::kNone).ToString(),
            "Replicate(none)");
  EXPECT_EQ(Placement::Shard(2).ToString(), "Shard(2)");
}

struct ChunkCase {
  int64_t size;
  int64_t num_chunks;
  // As torch.chunk and DTensor have them.
  OffsetsAndSizes expected;
};

TEST(ChunkOfTest, CutsAsTorchChunkDoes) {
  const std::vector<ChunkCase> cases = {
      {8, 1, {{0, 8}}},
      {8, 2, {{0, 4}, {4, 4}}},
      {8, 4, {{0, 2}, {2, 2}, {4, 2}, {6, 2}}},
      // Uneven: the last one is short.
      {10, 4, {{0, 3}, {3, 3}, {6, 3}, {9, 1}}},
      {7, 2, {{0, 4}, {4, 3}}},
      // Empty: fewer indices than chunks, or than the full chunks need.
      {3, 4, {{0, 1}, {1, 1}, {2, 1}, {3, 0}}},
      {5, 4, {{0, 2}, {2, 2}, {4, 1}, {5, 0}}},
      {6, 5, {{0, 2}, {2, 2}, {4, 2}, {6, 0}, {6, 0}}},
      {1, 3, {{0, 1}, {1, 0}, {1, 0}}},
      {0, 2, {{0, 0}, {0, 0}}},
      {int64_t{3} << 60,
       2,
       {{0, int64_t{3} << 59}, {int64_t{3} << 59, int64_t{3} << 59}}},
  };
  for (const ChunkCase& test_case : cases) {
    OffsetsAndSizes chunks;
    for (int64_t index = 0; index < test_case.num_chunks; ++index) {
      const Chunk chunk = ChunkOf(test_case.size, test_case.num_chunks, index);
      chunks.emplace_back(chunk.offset, chunk.size);
    }
    EXPECT_THAT(chunks, ElementsAreArray(test_case.expected))
        << test_case.size << " in " << test_case.num_chunks;
  }
}

TEST(ChunkOfTest, ChunksCoverEveryIndexOnce) {
  for (int64_t size = 0; size <= 40; ++size) {
    for (int64_t num_chunks = 1; num_chunks <= 12; ++num_chunks) {
      int64_t end = 0;
      for (int64_t index = 0; index < num_chunks; ++index) {
        const Chunk chunk = ChunkOf(size, num_chunks, index);
        EXPECT_EQ(chunk.offset, end) << size << " in " << num_chunks;
        EXPECT_GE(chunk.size, 0);
        end += chunk.size;
      }
      EXPECT_EQ(end, size) << "in " << num_chunks;
    }
  }
}

}  // namespace
}  // namespace trainer_lora::distributed

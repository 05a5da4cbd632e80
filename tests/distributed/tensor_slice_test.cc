#include "distributed/tensor_slice.h"

#include <cstdint>
#include <vector>

#include "distributed/placement.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::ElementsAre;

TEST(TensorSliceTest, WholeIsTheTensor) {
  const TensorSlice slice = TensorSlice::Whole({3, 4});
  EXPECT_THAT(slice.offsets, ElementsAre(0, 0));
  EXPECT_THAT(slice.sizes, ElementsAre(3, 4));
  EXPECT_EQ(slice.numel(), 12);
  EXPECT_EQ(slice.ToString(), "[0:3, 0:4]");
}

TEST(TensorSliceTest, HasOneElementOfAScalar) {
  const TensorSlice slice = TensorSlice::Whole({});
  EXPECT_EQ(slice.numel(), 1);
  EXPECT_EQ(slice.ToString(), "[]");
}

TEST(SliceOfTest, IsAllWhereTheTensorIsReplicated) {
  EXPECT_EQ(SliceOf({4, 6}, {Placement::Replicate()}, {4}, {2}),
            TensorSlice::Whole({4, 6}));
  EXPECT_EQ(SliceOf({}, {Placement::Replicate()}, {4}, {2}),
            TensorSlice::Whole({}));
}

TEST(SliceOfTest, IsAChunkOfAShardedDimension) {
  const TensorSlice rows = SliceOf(
      {10, 6}, {Placement::Replicate(), Placement::Shard(0)}, {2, 4}, {1, 3});
  EXPECT_EQ(rows, (TensorSlice{{9, 0}, {1, 6}}));
  const TensorSlice columns = SliceOf(
      {10, 6}, {Placement::Shard(1), Placement::Replicate()}, {4, 2}, {1, 1});
  EXPECT_EQ(columns, (TensorSlice{{0, 2}, {10, 2}}));
}

TEST(SliceOfTest, IsEmptyWhereChunksRunOut) {
  EXPECT_EQ(SliceOf({3, 6}, {Placement::Shard(0)}, {4}, {3}),
            (TensorSlice{{3, 0}, {0, 6}}));
}

TEST(SliceOfTest, CutsSeveralDimensions) {
  EXPECT_EQ(SliceOf({10, 6}, {Placement::Shard(1), Placement::Shard(0)}, {2, 2},
                    {1, 0}),
            (TensorSlice{{0, 3}, {5, 3}}));
}

// 10 rows in 2 chunks of 5, and these in chunks of 3 and 2: as DTensor does,
// and unlike 4 chunks of 3, 3, 3 and 1.
TEST(SliceOfTest, ChunksTheChunksOfEarlierMeshDimensions) {
  std::vector<TensorSlice> slices;
  for (int64_t outer = 0; outer < 2; ++outer) {
    for (int64_t inner = 0; inner < 2; ++inner) {
      slices.push_back(SliceOf({10}, {Placement::Shard(0), Placement::Shard(0)},
                               {2, 2}, {outer, inner}));
    }
  }
  EXPECT_THAT(slices,
              ElementsAre(TensorSlice{{0}, {3}}, TensorSlice{{3}, {2}},
                          TensorSlice{{5}, {3}}, TensorSlice{{8}, {2}}));
}

TEST(RowsWithinTest, FindsTheRowsInTheRanksOwnTensor) {
  // Rows 2, 3 and 5, 6, 7 of a tensor, columns 1 and 2.
  const std::vector<TensorSlice> slices = {{{2, 1}, {2, 2}}, {{5, 1}, {3, 2}}};
  EXPECT_THAT(ConcatenatedShape(slices), ElementsAre(5, 2));
  const std::vector<HeldRows> held = RowsWithin(slices, /*begin=*/3, 3);
  ASSERT_EQ(held.size(), 2);
  EXPECT_EQ(held[0].slice, (TensorSlice{{0, 1}, {1, 2}}));  // Row 3.
  EXPECT_EQ(held[0].local_row, 1);
  EXPECT_EQ(held[1].slice, (TensorSlice{{2, 1}, {1, 2}}));  // Row 5.
  EXPECT_EQ(held[1].local_row, 2);
  EXPECT_TRUE(RowsWithin(slices, 4, 1).empty());
  EXPECT_TRUE(RowsWithin(slices, 8, 5).empty());
}

}  // namespace
}  // namespace trainer_lora::distributed

#include "distributed/gradient_bucket.h"

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::StatusIs;

GradientBucketKey Float32() { return {"data", "", "Float", 4, "cpu"}; }
GradientBucketKey BFloat16() { return {"data", "", "BFloat16", 2, "cpu"}; }
GradientBucketKey Summed() { return {"data", "tensor", "Float", 4, "cpu"}; }
GradientBucketKey OnCuda() { return {"data", "", "Float", 4, "cuda:0"}; }

struct PlanCase {
  std::string name;
  std::vector<GradientSpec> gradients;
  int64_t bucket_bytes;
  std::string expected;
};

class PlanTest : public ::testing::TestWithParam<PlanCase> {};

TEST_P(PlanTest, HasTheseBucketsAndOffsets) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const GradientBucketPlan plan,
      PlanGradientBuckets(GetParam().gradients, GetParam().bucket_bytes));
  EXPECT_EQ(plan.ToString(), GetParam().expected);
}

INSTANTIATE_TEST_SUITE_P(
    Plans, PlanTest,
    ::testing::Values(
        PlanCase{"Nothing", {}, 1024, "0 buckets, 0 gradients, 0 bytes"},
        PlanCase{"One",
                 {{"a", 16, Float32()}},
                 1024,
                 "1 buckets, 1 gradients, 64 bytes\n"
                 "bucket 0: average over data, Float on cpu, 64 bytes\n"
                 "  a [0, 16)"},
        PlanCase{"PadsToTheAlignment",
                 {{"a", 1, Float32()},
                  {"b", 17, Float32()},
                  {"empty", 0, Float32()},
                  {"c", 16, Float32()}},
                 1024,
                 "1 buckets, 4 gradients, 256 bytes\n"
                 "bucket 0: average over data, Float on cpu, 256 bytes\n"
                 "  a [0, 1)\n"
                 "  b [16, 33)\n"
                 "  empty [48, 48)\n"
                 "  c [48, 64)"},
        PlanCase{"AlignsTheBytesOfEachDtype",
                 {{"a", 1, BFloat16()},
                  {"b", 1, BFloat16()},
                  {"c", 1, {"data", "", "Double", 8, "cpu"}},
                  {"d", 1, {"data", "", "Double", 8, "cpu"}}},
                 1024,
                 "2 buckets, 4 gradients, 256 bytes\n"
                 "bucket 0: average over data, Double on cpu, 128 bytes\n"
                 "  c [0, 1)\n"
                 "  d [8, 9)\n"
                 "bucket 1: average over data, BFloat16 on cpu, 128 bytes\n"
                 "  a [0, 1)\n"
                 "  b [32, 33)"},
        PlanCase{"LimitBelowEveryGradient",
                 {{"a", 16, Float32()}, {"b", 32, Float32()}},
                 1,
                 "2 buckets, 2 gradients, 192 bytes\n"
                 "bucket 0: average over data, Float on cpu, 128 bytes\n"
                 "  b [0, 32)\n"
                 "bucket 1: average over data, Float on cpu, 64 bytes\n"
                 "  a [0, 16)"},
        // The padding counts: three times 64 bytes are above 130.
        PlanCase{"FillsFromTheLastGradient",
                 {{"a", 1, Float32()},
                  {"b", 1, Float32()},
                  {"c", 1, Float32()},
                  {"d", 1, Float32()},
                  {"e", 1, Float32()}},
                 130,
                 "3 buckets, 5 gradients, 320 bytes\n"
                 "bucket 0: average over data, Float on cpu, 128 bytes\n"
                 "  d [0, 1)\n"
                 "  e [16, 17)\n"
                 "bucket 1: average over data, Float on cpu, 128 bytes\n"
                 "  b [0, 1)\n"
                 "  c [16, 17)\n"
                 "bucket 2: average over data, Float on cpu, 64 bytes\n"
                 "  a [0, 1)"},
        PlanCase{"AHugeOneIsAlone",
                 {{"a", 1, Float32()},
                  {"huge", 1000, Float32()},
                  {"b", 1, Float32()}},
                 128,
                 "2 buckets, 3 gradients, 4160 bytes\n"
                 "bucket 0: average over data, Float on cpu, 4032 bytes\n"
                 "  huge [0, 1000)\n"
                 "bucket 1: average over data, Float on cpu, 128 bytes\n"
                 "  a [0, 1)\n"
                 "  b [16, 17)"},
        // Each is complete with its first parameter, the last of them first.
        PlanCase{"KeysThatAlternate",
                 {{"a", 16, Float32()},
                  {"b", 16, BFloat16()},
                  {"c", 16, Summed()},
                  {"d", 16, OnCuda()},
                  {"e", 16, Float32()},
                  {"f", 16, BFloat16()},
                  {"g", 16, Summed()},
                  {"h", 16, OnCuda()}},
                 1024,
                 "4 buckets, 8 gradients, 512 bytes\n"
                 "bucket 0: average over data, Float on cuda:0, 128 bytes\n"
                 "  d [0, 16)\n"
                 "  h [16, 32)\n"
                 "bucket 1: average over data, sum over tensor, Float on cpu, "
                 "128 bytes\n"
                 "  c [0, 16)\n"
                 "  g [16, 32)\n"
                 "bucket 2: average over data, BFloat16 on cpu, 128 bytes\n"
                 "  b [0, 16)\n"
                 "  f [32, 48)\n"
                 "bucket 3: average over data, Float on cpu, 128 bytes\n"
                 "  a [0, 16)\n"
                 "  e [16, 32)"},
        PlanCase{"GroupsThatDifferOrAreNone",
                 {{"a", 1, {"", "", "Float", 4, "cpu"}},
                  {"b", 1, {"", "x", "Float", 4, "cpu"}},
                  {"c", 1, {"x", "", "Float", 4, "cpu"}},
                  {"d", 1, {"", "x", "Float", 4, "cpu"}}},
                 1024,
                 "3 buckets, 4 gradients, 256 bytes\n"
                 "bucket 0: average over x, Float on cpu, 64 bytes\n"
                 "  c [0, 1)\n"
                 "bucket 1: sum over x, Float on cpu, 128 bytes\n"
                 "  b [0, 1)\n"
                 "  d [16, 17)\n"
                 "bucket 2: Float on cpu, 64 bytes\n"
                 "  a [0, 1)"}),
    [](const ::testing::TestParamInfo<PlanCase>& info) {
      return info.param.name;
    });

TEST(PlanGradientBucketsTest, GivesTheExampleOfTheHeader) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const GradientBucketPlan plan,
      PlanGradientBuckets({{"q.lora_A", 100, Summed()},
                           {"q.lora_B", 200, Float32()},
                           {"k.lora_B", 300, Float32()}}));
  EXPECT_EQ(plan.ToString(),
            "2 buckets, 3 gradients, 2496 bytes\n"
            "bucket 0: average over data, Float on cpu, 2048 bytes\n"
            "  q.lora_B [0, 200)\n"
            "  k.lora_B [208, 508)\n"
            "bucket 1: average over data, sum over tensor, Float on cpu, "
            "448 bytes\n"
            "  q.lora_A [0, 100)");
}

// What must hold of every plan, whatever the gradients.
TEST(PlanGradientBucketsTest, HasEveryGradientOnceAlignedAndWithoutOverlap) {
  const std::vector<GradientBucketKey> keys = {Float32(), BFloat16(), Summed(),
                                               OnCuda()};
  std::mt19937 random(1);
  std::vector<GradientSpec> gradients;
  for (int i = 0; i < 1000; ++i) {
    gradients.push_back({"p" + std::to_string(i),
                         static_cast<int64_t>(random() % 3000),
                         keys[random() % keys.size()]});
  }
  constexpr int64_t kBucketBytes = 8192;
  LORA_ASSERT_OK_AND_ASSIGN(const GradientBucketPlan plan,
                            PlanGradientBuckets(gradients, kBucketBytes));
  std::vector<int> times_seen(gradients.size());
  int64_t last_first = gradients.size();
  for (const GradientBucket& bucket : plan.buckets) {
    ASSERT_FALSE(bucket.slices.empty());
    EXPECT_LT(bucket.slices.front().index, last_first);
    last_first = bucket.slices.front().index;
    if (bucket.slices.size() > 1) {
      EXPECT_LE(bucket.numel * bucket.key.element_size, kBucketBytes);
    }
    int64_t end = 0;
    int64_t last_index = -1;
    for (const GradientSlice& slice : bucket.slices) {
      const GradientSpec& gradient = gradients[slice.index];
      ++times_seen[slice.index];
      EXPECT_GT(slice.index, last_index);
      last_index = slice.index;
      EXPECT_EQ(slice.name, gradient.name);
      EXPECT_EQ(slice.numel, gradient.numel);
      EXPECT_EQ(bucket.key.dtype, gradient.key.dtype);
      EXPECT_EQ(bucket.key.sum_over, gradient.key.sum_over);
      EXPECT_EQ(bucket.key.device, gradient.key.device);
      EXPECT_GE(slice.offset, end);
      EXPECT_EQ(slice.offset * gradient.key.element_size % 64, 0);
      end = slice.offset + slice.numel;
    }
    EXPECT_GE(bucket.numel, end);
  }
  EXPECT_THAT(times_seen, ::testing::Each(1));
}

TEST(PlanGradientBucketsTest, FillsBucketsOf20000Parameters) {
  // 1,024 gradients of 64 KiB to a bucket of 64 MiB.
  const std::vector<GradientSpec> gradients(
      20000, GradientSpec{"p", 16384, Float32()});
  LORA_ASSERT_OK_AND_ASSIGN(const GradientBucketPlan plan,
                            PlanGradientBuckets(gradients, int64_t{64} << 20));
  ASSERT_EQ(plan.buckets.size(), 20);
  for (int i = 0; i < 19; ++i) {
    EXPECT_EQ(plan.buckets[i].slices.size(), 1024) << i;
    EXPECT_EQ(plan.buckets[i].slices.front().index, 20000 - 1024 * (i + 1));
  }
  EXPECT_EQ(plan.buckets[19].slices.size(), 20000 - 19 * 1024);
}

// A search through the buckets for each gradient would take minutes.
TEST(PlanGradientBucketsTest, TakesNoTimePerPairOfGradients) {
  std::vector<GradientSpec> gradients;
  for (int i = 0; i < 200000; ++i) {
    gradients.push_back(
        {"p", 1, {std::to_string(i % 100000), "", "Float", 4, "cpu"}});
  }
  LORA_ASSERT_OK_AND_ASSIGN(const GradientBucketPlan plan,
                            PlanGradientBuckets(gradients));
  EXPECT_EQ(plan.buckets.size(), 100000);
}

TEST(PlanGradientBucketsTest, RefusesWhatNoBufferCanHold) {
  const auto plan = [](GradientSpec gradient) {
    return PlanGradientBuckets({{"first", 1, Float32()}, gradient}).status();
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  for (const int64_t element_size : {-4, 0, 3, 32}) {
    EXPECT_THAT(plan({"bad", 1, {"", "", "x", element_size, "cpu"}}),
                StatusIs(kInvalid, AllOf(HasSubstr("bad"),
                                         HasSubstr("1, 2, 4, 8 or 16"))));
  }
  EXPECT_THAT(plan({"bad", -1, Float32()}),
              StatusIs(kInvalid, HasSubstr("bad can't have -1 elements")));
  for (const int64_t numel : {int64_t{1} << 60, INT64_MAX}) {
    EXPECT_THAT(plan({"bad", numel, Float32()}),
                StatusIs(kInvalid, HasSubstr("up to bad exceed 2^62 bytes")));
  }
  for (const int64_t bucket_bytes : {0, -1}) {
    EXPECT_THAT(PlanGradientBuckets({}, bucket_bytes),
                StatusIs(kInvalid, HasSubstr("bytes of a bucket")));
  }
}

}  // namespace
}  // namespace trainer_lora::distributed

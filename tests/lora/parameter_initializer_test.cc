#include "lora/parameter_initializer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace trainer_lora::lora {
namespace {

using distributed::TensorSlice;
using ::testing::ElementsAre;

constexpr int64_t kRank = 6;
constexpr int64_t kInFeatures = 35;
constexpr char kName[] = "blocks.0.attn1.to_q.lora_A";

at::Tensor Whole(const LoraInitialization& initialization,
                 const std::string& name = kName,
                 at::ScalarType dtype = at::kFloat) {
  const std::vector<int64_t> shape = {kRank, kInFeatures};
  return InitialLoraValue(initialization, name, shape, dtype,
                          TensorSlice::Whole(shape));
}

// Philox4x32-10 as its paper gives it, independent of ATen's.
std::vector<uint32_t> Philox(uint64_t key, uint64_t block, uint64_t stream) {
  uint32_t k[2] = {static_cast<uint32_t>(key),
                   static_cast<uint32_t>(key >> 32)};
  uint32_t c[4] = {
      static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
      static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57} * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0],
                              static_cast<uint32_t>(p1),
                              static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1],
                              static_cast<uint32_t>(p0)};
    std::memcpy(c, next, sizeof(c));
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  return {c[0], c[1], c[2], c[3]};
}

TEST(ParameterInitializerTest, TheOracleGivesThePapersKnownAnswers) {
  EXPECT_THAT(Philox(0, 0, 0),
              ElementsAre(0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
  EXPECT_THAT(Philox(~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}),
              ElementsAre(0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
}

TEST(ParameterInitializerTest, FollowsTheDocumentedFormula) {
  const LoraInitialization initialization{0x123456789abcdef, "student"};
  const at::Tensor value = Whole(initialization);

  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : std::string("student") + '\0' + kName) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  const float scale =
      static_cast<float>(1 / std::sqrt(double{kInFeatures}) / (1 << 24));
  for (int64_t i = 0; i < kRank * kInFeatures; ++i) {
    const uint32_t word = Philox(initialization.seed, i / 4, hash)[i % 4];
    const int32_t k = 2 * static_cast<int32_t>(word >> 8) + 1 - (1 << 24);
    EXPECT_EQ(value.view(-1)[i].item<float>(), static_cast<float>(k) * scale)
        << "element " << i;
  }
}

// The bits of some elements of a float32 tensor.
std::vector<uint32_t> BitsOfSome(const at::Tensor& value) {
  std::vector<uint32_t> bits;
  for (const int64_t i : {0, 1, 2, 3, 4, 100, 209}) {
    const float element = value.view(-1)[i].item<float>();
    uint32_t word;
    std::memcpy(&word, &element, sizeof(word));
    bits.push_back(word);
  }
  return bits;
}

// A release that changes these changes every user's runs: it needs an entry in
// the changelog and a new major version, not new numbers here.
TEST(ParameterInitializerTest, GoldenValues) {
  const at::Tensor value = Whole({/*seed=*/42, /*scope=*/""}).view(-1);
  EXPECT_THAT(BitsOfSome(value),
              ElementsAre(0x3df45691, 0x3dc98b31, 0xbe03bcc9, 0x3dc207c5,
                          0x3e074248, 0xbe09a9d3, 0x3e076e98));
}

TEST(ParameterInitializerTest, ShardsAreSlicesOfTheWholeForEveryWorldSize) {
  const LoraInitialization initialization{7, ""};
  const at::Tensor whole = Whole(initialization);
  for (const int64_t world_size : {1, 2, 3, 4}) {
    for (const int64_t dim : {0, 1}) {
      const int64_t size = whole.size(dim);
      const int64_t chunk = (size + world_size - 1) / world_size;
      for (int64_t rank = 0; rank < world_size; ++rank) {
        const int64_t begin = std::min(rank * chunk, size);
        const int64_t length = std::min(chunk, size - begin);
        TensorSlice slice = TensorSlice::Whole(whole.sizes());
        slice.offsets[dim] = begin;
        slice.sizes[dim] = length;
        const at::Tensor shard = InitialLoraValue(
            initialization, kName, whole.sizes(), at::kFloat, slice);
        EXPECT_TRUE(at::equal(shard, whole.narrow(dim, begin, length)))
            << "rank " << rank << " of " << world_size << ", dimension " << dim;
        EXPECT_TRUE(shard.is_contiguous());
      }
    }
  }
}

TEST(ParameterInitializerTest, BoundMeanAndVarianceAreThoseOfKaimingUniform) {
  const std::vector<int64_t> shape = {64, 4096};
  const at::Tensor value = InitialLoraValue({1, ""}, kName, shape, at::kFloat,
                                            TensorSlice::Whole(shape))
                               .to(at::kDouble);
  const double bound = 1 / std::sqrt(4096.0);  // gain * sqrt(3 / fan_in)
  const double count = 64 * 4096;
  EXPECT_LT(value.abs().max().item<double>(), bound);
  EXPECT_GT(value.abs().max().item<double>(), 0.9999 * bound);
  // Uniform on (-bound, bound): variance bound^2 / 3. Five standard errors.
  EXPECT_NEAR(value.mean().item<double>(), 0, 5 * bound / std::sqrt(3 * count));
  EXPECT_NEAR(value.var().item<double>(), bound * bound / 3,
              5 * bound * bound * std::sqrt(4.0 / 45 / count));
}

TEST(ParameterInitializerTest, GaussianFollowsTheDocumentedFormula) {
  const LoraInitialization initialization{
      3, "", config::AdapterInitialization::kGaussian};
  const at::Tensor value =
      Whole(initialization, kName, at::kDouble).view(-1) * kRank;
  const at::Tensor uniform = Whole({3, ""}, kName, at::kDouble).view(-1) *
                             std::sqrt(double{kInFeatures});  // k * 2^-24
  for (int64_t i = 0; i < value.numel(); ++i) {
    // The distribution function, from the C library, leads back to k.
    const double p = 0.5 * std::erfc(-value[i].item<double>() / std::sqrt(2.0));
    EXPECT_NEAR(p, (uniform[i].item<double>() + 1) / 2, 1e-15) << i;
  }
}

TEST(ParameterInitializerTest, GaussianMomentsAndTailsAreThoseOfTheNormal) {
  const int64_t rank = 64;
  const std::vector<int64_t> shape = {rank, 4096};
  const at::Tensor z =
      InitialLoraValue({1, "", config::AdapterInitialization::kGaussian}, kName,
                       shape, at::kDouble, TensorSlice::Whole(shape)) *
      rank;
  // Five standard errors each.
  const double count = static_cast<double>(z.numel());
  EXPECT_NEAR(z.mean().item<double>(), 0, 5 / std::sqrt(count));
  EXPECT_NEAR(z.pow(2).mean().item<double>(), 1, 5 * std::sqrt(2 / count));
  EXPECT_NEAR(z.pow(4).mean().item<double>(), 3, 5 * std::sqrt(96 / count));
  const double beyond_three = (z.abs() > 3).sum().item<double>() / count;
  EXPECT_NEAR(beyond_three, 0.0026998, 5 * std::sqrt(0.0027 / count));
}

// From Python's statistics.NormalDist, as golden as those above.
TEST(ParameterInitializerTest, GaussianGoldenValues) {
  const at::Tensor value =
      Whole({42, "", config::AdapterInitialization::kGaussian}).view(-1);
  EXPECT_THAT(BitsOfSome(value),
              ElementsAre(0x3e33078c, 0x3e0a4837, 0xbe490093, 0x3e03ee5c,
                          0x3e51fc6f, 0xbe587893, 0x3e52715c));
}

TEST(ParameterInitializerTest, DependsOnSeedScopeAndNameAlone) {
  const at::Tensor value = Whole({42, "student"});
  at::manual_seed(1);
  at::rand({3});
  EXPECT_TRUE(at::equal(value, Whole({42, "student"})));
  EXPECT_FALSE(at::equal(value, Whole({43, "student"})));
  EXPECT_FALSE(at::equal(value, Whole({42, "critic"})));
  EXPECT_FALSE(at::equal(value, Whole({42, ""})));
  EXPECT_FALSE(
      at::equal(value, Whole({42, "student"}, "blocks.1.to_q.lora_A")));
  // Scope and name do not run into each other.
  EXPECT_FALSE(
      at::equal(Whole({1, "a"}, "b.lora_A"), Whole({1, ""}, "ab.lora_A")));
}

TEST(ParameterInitializerTest, NarrowTypesAreTheRoundedFloat32Values) {
  const at::Tensor value = Whole({42, ""});
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    EXPECT_TRUE(at::equal(Whole({42, ""}, kName, dtype), value.to(dtype)));
  }
  EXPECT_TRUE(at::allclose(Whole({42, ""}, kName, at::kDouble),
                           value.to(at::kDouble), 1e-7, 0));
}

TEST(ParameterInitializerTest, LoraBIsZeroAndLoraAIsNot) {
  const std::vector<int64_t> shape = {kInFeatures, kRank};
  const at::Tensor lora_B = InitialLoraValue(
      {42, ""}, "to_q.lora_B", shape, at::kFloat, TensorSlice::Whole(shape));
  EXPECT_TRUE(at::equal(lora_B, at::zeros(shape)));
  EXPECT_EQ((Whole({42, ""}) == 0).sum().item<int64_t>(), 0);
}

TEST(ParameterInitializerTest, RefusesOtherNamesAndSlicesOutOfRange) {
  const std::vector<int64_t> shape = {2, 3};
  EXPECT_THROW(InitialLoraValue({}, "to_q.weight", shape, at::kFloat,
                                TensorSlice::Whole(shape)),
               c10::Error);
  EXPECT_THROW(InitialLoraValue({}, kName, shape, at::kFloat,
                                TensorSlice{{0, 1}, {2, 3}}),
               c10::Error);
}

TEST(ParameterInitializerTest, KnowsAdapterNamesAlone) {
  const distributed::MissingParameterInitializer initializer =
      MakeLoraParameterInitializer({42, ""},
                                   {{"a.to_q.lora_A", "a.to_q.lora_A"},
                                    {"b.to_q.lora_A", "a.to_q.lora_A"}});
  const std::vector<int64_t> shape = {2, 3};
  const auto make = [&](const char* name) {
    return initializer(name, shape, at::kFloat, TensorSlice::Whole(shape));
  };
  EXPECT_FALSE(make("a.to_q.base_layer.weight").has_value());
  EXPECT_FALSE(make("c.to_q.lora_A").has_value());
  ASSERT_TRUE(make("a.to_q.lora_A").has_value());
  // A shared layer has one value, whatever name a loader asks for.
  EXPECT_TRUE(at::equal(*make("a.to_q.lora_A"), *make("b.to_q.lora_A")));
}

}  // namespace
}  // namespace trainer_lora::lora

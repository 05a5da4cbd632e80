#include "lora/parameter_initializer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/Parallel.h"
#include "ATen/TensorOperators.h"
#include "ATen/core/PhiloxRNGEngine.h"
#include "c10/core/Allocator.h"
#include "c10/util/ThreadLocalDebugInfo.h"
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

// FNV-1a of the bytes of a tensor.
uint64_t DigestOf(const at::Tensor& value) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto* bytes = static_cast<const unsigned char*>(value.data_ptr());
  for (size_t i = 0; i < value.nbytes(); ++i) {
    hash = (hash ^ bytes[i]) * 0x100000001b3;
  }
  return hash;
}

// Of all values of larger tensors, as golden as the few above. They were made
// when values were still drawn word by word.
TEST(ParameterInitializerTest, GoldenDigests) {
  constexpr struct {
    config::AdapterInitialization kind;
    at::ScalarType dtype;
    uint64_t digest;
  } kCases[] = {
      {config::AdapterInitialization::kDefault, at::kFloat, 0x5f61bc30fd22414f},
      {config::AdapterInitialization::kDefault, at::kDouble,
       0x0af1606e6ac59d6c},
      {config::AdapterInitialization::kDefault, at::kBFloat16,
       0xf8fb6fca1091b9b2},
      {config::AdapterInitialization::kDefault, at::kHalf, 0xa239f86a6d6d994d},
      {config::AdapterInitialization::kGaussian, at::kFloat,
       0xa862819a2e230fc7},
      {config::AdapterInitialization::kGaussian, at::kDouble,
       0xa30957a29d26dc0c},
      {config::AdapterInitialization::kGaussian, at::kBFloat16,
       0x2b7837b56c15abc8},
      {config::AdapterInitialization::kGaussian, at::kHalf, 0xd3c6c4df15c3ef14},
  };
  const std::vector<int64_t> shape = {33, 4099};
  for (const auto& test : kCases) {
    const at::Tensor value =
        InitialLoraValue({42, "student", test.kind}, kName, shape, test.dtype,
                         TensorSlice::Whole(shape));
    EXPECT_EQ(DigestOf(value), test.digest)
        << (test.kind == config::AdapterInitialization::kDefault ? "default "
                                                                 : "gaussian ")
        << test.dtype << ": 0x" << std::hex << DigestOf(value);
  }
}

// The numbers k of the header for the elements of a slice, as float64, drawn
// one word at a time by ATen's generator.
at::Tensor NumbersOf(const LoraInitialization& initialization,
                     const std::vector<int64_t>& shape,
                     const TensorSlice& slice) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : initialization.scope + '\0' + kName) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  at::Tensor numbers = at::empty(slice.sizes, at::kDouble);
  double* number = numbers.data_ptr<double>();
  for (int64_t row = 0; row < slice.sizes[0]; ++row) {
    const int64_t begin =
        (slice.offsets[0] + row) * shape[1] + slice.offsets[1];
    at::Philox4_32 generator(initialization.seed, hash, begin / 4);
    for (int64_t skipped = 0; skipped < begin % 4; ++skipped) generator();
    for (int64_t column = 0; column < slice.sizes[1]; ++column) {
      *number++ = 2.0 * (generator() >> 8) + 1 - (1 << 24);
    }
  }
  return numbers;
}

// Compares a slice of every type and both kinds with NumbersOf().
void ExpectDrawnWordByWord(LoraInitialization initialization,
                           const std::vector<int64_t>& shape,
                           const TensorSlice& slice) {
  const at::Tensor numbers = NumbersOf(initialization, shape, slice);
  const auto make = [&](at::ScalarType dtype) {
    return InitialLoraValue(initialization, kName, shape, dtype, slice);
  };
  const auto expect_narrow_types_round = [&] {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      EXPECT_TRUE(at::equal(make(dtype), make(at::kFloat).to(dtype))) << dtype;
    }
  };

  initialization.kind = config::AdapterInitialization::kDefault;
  const double scale = 1 / std::sqrt(static_cast<double>(shape[1])) / (1 << 24);
  EXPECT_TRUE(at::equal(make(at::kFloat), numbers.to(at::kFloat) * scale));
  EXPECT_TRUE(at::equal(make(at::kDouble), numbers * scale));
  expect_narrow_types_round();

  // The distribution function leads back to the number, which is odd: less
  // than 1 beside it is no other. Rounding to float32 moves it by up to 0.5.
  initialization.kind = config::AdapterInitialization::kGaussian;
  for (const auto& [dtype, tolerance] :
       {std::make_pair(at::kDouble, 1e-6), std::make_pair(at::kFloat, 0.6)}) {
    const at::Tensor z = make(dtype).to(at::kDouble) * shape[0];
    const at::Tensor drawn =
        at::erfc(z / -std::sqrt(2.0)) * (1 << 24) - (1 << 24);
    EXPECT_TRUE(at::allclose(drawn, numbers, /*rtol=*/0, tolerance)) << dtype;
  }
  expect_narrow_types_round();
}

TEST(ParameterInitializerTest, DrawsAnySliceAsWordByWord) {
  std::mt19937_64 random(20240229);
  const auto up_to = [&](int64_t most) {
    return std::uniform_int_distribution<int64_t>(0, most)(random);
  };
  for (int trial = 0; trial < 60; ++trial) {
    const bool large = trial % 3 == 0;
    const std::vector<int64_t> shape = {1 + up_to(large ? 90 : 9),
                                        1 + up_to(large ? 2000 : 70)};
    TensorSlice slice = TensorSlice::Whole(shape);
    for (const int dim : {0, 1}) {
      if (up_to(2) == 0) continue;  // Often whole in one dimension.
      slice.offsets[dim] = up_to(shape[dim] - 1) / (large ? 8 : 1);
      slice.sizes[dim] = up_to(shape[dim] - slice.offsets[dim]);
    }
    const LoraInitialization initialization{random(), "critic"};
    SCOPED_TRACE(::testing::Message()
                 << "seed " << initialization.seed << ", shape "
                 << at::IntArrayRef(shape) << ", offsets "
                 << at::IntArrayRef(slice.offsets) << ", sizes "
                 << at::IntArrayRef(slice.sizes));
    ExpectDrawnWordByWord(initialization, shape, slice);
    if (HasFailure()) return;
  }
}

// The lower half of the counter wraps at element 2^34.
TEST(ParameterInitializerTest, DrawsElementsFarOutInAHugeTensor) {
  const std::vector<int64_t> shape = {int64_t{1} << 40, 16};
  ExpectDrawnWordByWord({1, ""}, shape, {{(int64_t{1} << 30) - 2, 0}, {4, 16}});
  ExpectDrawnWordByWord({1, ""}, shape, {{(int64_t{1} << 30) - 2, 3}, {4, 6}});
}

TEST(ParameterInitializerTest, SeveralThreadsMayAskAtOnce) {
  const std::vector<int64_t> shape = {40, 3000};
  const auto make = [&] {
    return InitialLoraValue({42, ""}, kName, shape, at::kFloat,
                            TensorSlice::Whole(shape));
  };
  const at::Tensor expected = make();
  std::vector<at::Tensor> values(4);
  std::vector<std::thread> threads;
  for (at::Tensor& value : values) {
    threads.emplace_back([&make, &value] { value = make(); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const at::Tensor& value : values) {
    EXPECT_TRUE(at::equal(value, expected));
  }
}

// Counts the bytes that this thread takes from libtorch's CPU allocator.
class AllocatedBytes : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*ptr*/, int64_t alloc_size,
                         size_t /*total_allocated*/, size_t /*total_reserved*/,
                         c10::Device /*device*/) override {
    if (alloc_size > 0) bytes_ += alloc_size;
  }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

TEST(ParameterInitializerTest, AllocatesTheSliceAlone) {
  const std::vector<int64_t> shape = {8, 16384};
  const auto allocated = std::make_shared<AllocatedBytes>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE,
                                  allocated);
  int64_t expected = 0;
  for (const auto kind : {config::AdapterInitialization::kDefault,
                          config::AdapterInitialization::kGaussian}) {
    for (const at::ScalarType dtype :
         {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      const at::Tensor value = InitialLoraValue({42, "", kind}, kName, shape,
                                                dtype, {{0, 1000}, {8, 8192}});
      expected += 8 * 8192 * value.element_size();
      EXPECT_EQ(allocated->bytes(), expected) << dtype;
    }
  }
}

TEST(ParameterInitializerTest, AnEmptySliceOfAHugeTensorCostsNothing) {
  const int64_t size = int64_t{1} << 30;
  const auto allocated = std::make_shared<AllocatedBytes>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE,
                                  allocated);
  for (const char* name : {"to_q.lora_A", "to_q.lora_B"}) {
    for (const TensorSlice& slice :
         {TensorSlice{{0, 0}, {0, 0}}, TensorSlice{{size, 0}, {0, size}},
          TensorSlice{{0, size}, {size, 0}}}) {
      const at::Tensor value =
          InitialLoraValue({42, ""}, name, {size, size}, at::kFloat, slice);
      EXPECT_EQ(value.sizes(), at::IntArrayRef(slice.sizes)) << name;
    }
  }
  EXPECT_EQ(allocated->bytes(), 0);
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

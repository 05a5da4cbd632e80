#include "lora/parameter_initializer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "ATen/Dispatch.h"
#include "ATen/Functions.h"
#include "absl/strings/match.h"
#include "config/internal/fnv1a.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace trainer_lora::lora {
namespace {

// A word in the lower half of each lane; the upper halves are of no account.
using Lanes = uint64_t __attribute__((vector_size(16)));

// The full product of the word in each lane and `factor`.
inline Lanes Multiply(Lanes words, uint32_t factor) {
#ifdef __SSE2__
  // Compilers do not all see that the general product below is this one.
  const Lanes factors = {factor, factor};
  return reinterpret_cast<Lanes>(_mm_mul_epu32(
      reinterpret_cast<__m128i>(words), reinterpret_cast<__m128i>(factors)));
#else
  return (words & 0xffffffff) * factor;
#endif
}

// Two blocks of four words of Philox, side by side.
class PhiloxBlocks {
 public:
  PhiloxBlocks(uint64_t block, uint64_t name_hash)
      : c0_{block, block + 1},
        c1_(c0_ >> 32),
        c2_{name_hash, name_hash},
        c3_(c2_ >> 32) {}

  void Round(Lanes key0, Lanes key1) {
    const Lanes product0 = Multiply(c0_, 0xD2511F53);
    const Lanes product1 = Multiply(c2_, 0xCD9E8D57);
    c0_ = (product1 >> 32) ^ c1_ ^ key0;
    c1_ = product1;
    c2_ = (product0 >> 32) ^ c3_ ^ key1;
    c3_ = product0;
  }

  void Store(uint32_t* words) const {
    for (int block = 0; block < 2; ++block) {
      *words++ = static_cast<uint32_t>(c0_[block]);
      *words++ = static_cast<uint32_t>(c1_[block]);
      *words++ = static_cast<uint32_t>(c2_[block]);
      *words++ = static_cast<uint32_t>(c3_[block]);
    }
  }

 private:
  Lanes c0_, c1_, c2_, c3_;
};

// Elements are drawn in groups of four blocks, which fill SSE2's registers.
constexpr int kGroup = 16;

// The stream of random words that belongs to one parameter.
struct Stream {
  uint64_t seed;
  uint64_t name_hash;

  // The words of elements [kGroup * group, kGroup * (group + 1)).
  void Draw(uint64_t group, uint32_t (&words)[kGroup]) const {
    const uint64_t block = group * kGroup / 4;
    PhiloxBlocks first(block, name_hash);
    PhiloxBlocks second(block + 2, name_hash);
    Lanes key0 = {seed, seed};
    Lanes key1 = key0 >> 32;
    for (int round = 0; round < 10; ++round) {
      first.Round(key0, key1);
      second.Round(key0, key1);
      key0 += 0x9E3779B9;
      key1 += 0xBB67AE85;
    }
    first.Store(words);
    second.Store(words + kGroup / 2);
  }
};

Stream StreamOf(const LoraInitialization& initialization,
                absl::string_view name) {
  std::string address = initialization.scope;
  address.push_back('\0');
  address.append(name.data(), name.size());
  return {initialization.seed, config::Fnv1a64(address)};
}

// Natural logarithm for 0 < x < 1. The C library's may differ in the last bit
// between machines.
double Log(double x) {
  int exponent = 0;
  double m = std::frexp(x, &exponent);  // in [0.5, 1)
  constexpr double kSqrtHalf = 0.70710678118654752440;
  if (m < kSqrtHalf) {
    m *= 2;
    --exponent;
  }
  // log m = 2 artanh s as a power series; |s| < 0.172, so that the first term
  // left out is below 1e-18 of the sum.
  const double s = (m - 1) / (m + 1);
  double series = 0;
  for (int n = 23; n >= 1; n -= 2) series = series * s * s + 1.0 / n;
  constexpr double kLog2 = 0.69314718055994530942;
  return exponent * kLog2 + 2 * s * series;
}

template <size_t N>
double Polynomial(const double (&coefficients)[N], double x) {
  double value = 0;
  for (const double coefficient : coefficients) {
    value = value * x + coefficient;
  }
  return value;
}

// The inverse of the standard normal distribution function, for p from 2^-25
// to 1 - 2^-25: algorithm AS 241, PPND16, without its third region, which
// begins at 1.4e-11. Coefficients from the highest power down. q is p - 0.5.

// For |q| <= 0.425.
double InverseNormalCenter(double q) {
  constexpr double kNumerator[] = {
      2509.0809287301226727, 33430.575583588128105, 67265.770927008700853,
      45921.953931549871457, 13731.693765509461125, 1971.5909503065514427,
      133.14166789178437745, 3.3871328727963666080};
  constexpr double kDenominator[] = {
      5226.4952788528545610, 28729.085735721942674,
      39307.895800092710610, 21213.794301586595867,
      5394.1960214247511077, 687.18700749205790830,
      42.313330701600911252, 1.0};
  const double r = 0.180625 - q * q;
  return q * Polynomial(kNumerator, r) / Polynomial(kDenominator, r);
}

// For the other q.
double InverseNormalTail(double p, double q) {
  constexpr double kNumerator[] = {
      7.74545014278341407640e-4, 2.27238449892691845833e-2,
      2.41780725177450611770e-1, 1.27045825245236838258,
      3.64784832476320460504,    5.76949722146069140550,
      4.63033784615654529590,    1.42343711074968357734};
  constexpr double kDenominator[] = {
      1.05075007164441684324e-9, 5.47593808499534494600e-4,
      1.51986665636164571966e-2, 1.48103976427480074590e-1,
      6.89767334985100004550e-1, 1.67638483018380384940,
      2.05319162663775882187,    1.0};
  const double r = std::sqrt(-Log(q < 0 ? p : 1 - p)) - 1.6;
  const double z = Polynomial(kNumerator, r) / Polynomial(kDenominator, r);
  return q < 0 ? -z : z;
}

// The values of a group, from its numbers k, by the default kind.
template <typename ComputeType>
struct UniformValues {
  using Compute = ComputeType;
  Compute scale;

  void operator()(const int32_t (&k)[kGroup], Compute (&values)[kGroup]) const {
    for (int i = 0; i < kGroup; ++i) {
      values[i] = static_cast<Compute>(k[i]) * scale;
    }
  }
};

// The same by the gaussian kind.
template <typename ComputeType>
struct GaussianValues {
  using Compute = ComputeType;
  double rank;

  void operator()(const int32_t (&k)[kGroup], Compute (&values)[kGroup]) const {
    double p[kGroup];
    double q[kGroup];
    double z[kGroup];
    // Without a branch, for the vectorizer: six of seven are in the center.
    for (int i = 0; i < kGroup; ++i) {
      p[i] = (k[i] + (1 << 24)) * 0x1p-25;
      q[i] = p[i] - 0.5;
      z[i] = InverseNormalCenter(q[i]);
    }
    for (int i = 0; i < kGroup; ++i) {
      if (std::abs(q[i]) > 0.425) z[i] = InverseNormalTail(p[i], q[i]);
    }
    for (int i = 0; i < kGroup; ++i) {
      values[i] = static_cast<Compute>(z[i] / rank);
    }
  }
};

template <typename T, typename Values>
void FillGroup(const Stream& stream, int64_t group, const Values& values_of,
               T* out) {
  uint32_t words[kGroup];
  stream.Draw(static_cast<uint64_t>(group), words);
  int32_t k[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    k[i] = 2 * static_cast<int32_t>(words[i] >> 8) + 1 - (1 << 24);
  }
  typename Values::Compute values[kGroup];
  values_of(k, values);
  for (int i = 0; i < kGroup; ++i) out[i] = static_cast<T>(values[i]);
}

// `count` elements from `begin` on, in the whole tensor's row-major order.
template <typename T, typename Values>
void Fill(const Stream& stream, int64_t begin, int64_t count,
          const Values& values_of, T* out) {
  while (count > 0) {
    const int64_t group = begin / kGroup;
    const int64_t skipped = begin % kGroup;
    const int64_t used = std::min(kGroup - skipped, count);
    if (used == kGroup) {
      FillGroup(stream, group, values_of, out);
    } else {
      T values[kGroup];
      FillGroup(stream, group, values_of, values);
      std::copy_n(values + skipped, used, out);
    }
    begin += used;
    count -= used;
    out += used;
  }
}

// Fills `value`, the slice of a tensor of `shape`.
template <typename T, typename Values>
void FillSlice(const Stream& stream, at::IntArrayRef shape,
               const distributed::TensorSlice& slice, const Values& values_of,
               const at::Tensor& value) {
  // Elements without a gap between them: the last dimensions that are whole,
  // and of the one before them what the slice has. On this thread alone: the
  // largest adapters take milliseconds, less than threads take to meet on busy
  // cores.
  size_t run_dim = shape.size() - 1;
  int64_t run_size = slice.sizes[run_dim];
  while (run_dim > 0 && slice.sizes[run_dim] == shape[run_dim]) {
    run_size *= slice.sizes[--run_dim];
  }
  T* out = value.data_ptr<T>();
  for (int64_t done = 0; done < value.numel(); done += run_size) {
    int64_t index = done;  // In the slice, then of each of its dimensions.
    int64_t first = 0;     // In the tensor.
    int64_t stride = 1;
    for (size_t dim = shape.size(); dim-- > 0;) {
      first += (slice.offsets[dim] + index % slice.sizes[dim]) * stride;
      index /= slice.sizes[dim];
      stride *= shape[dim];
    }
    Fill(stream, first, run_size, values_of, out + done);
  }
}

// Normal with this standard deviation over `divisor`.
template <typename T>
void FillGaussian(const Stream& stream, double divisor, at::IntArrayRef shape,
                  const distributed::TensorSlice& slice,
                  const at::Tensor& value) {
  // Narrower types round the float32 value, so that a bfloat16 adapter starts
  // as near to a float32 one as it can.
  using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;
  FillSlice<T>(stream, shape, slice, GaussianValues<Compute>{divisor}, value);
}

template <typename T>
void FillUniform(const Stream& stream, at::IntArrayRef shape,
                 const distributed::TensorSlice& slice,
                 const at::Tensor& value) {
  using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const int64_t fan_in = c10::multiply_integers(shape.slice(1));
  const double bound = 1 / std::sqrt(static_cast<double>(fan_in));
  FillSlice<T>(
      stream, shape, slice,
      UniformValues<Compute>{static_cast<Compute>(std::ldexp(bound, -24))},
      value);
}

void CheckSlice(absl::string_view name, at::IntArrayRef shape,
                const distributed::TensorSlice& slice) {
  TORCH_CHECK(!shape.empty() && slice.offsets.size() == shape.size() &&
                  slice.sizes.size() == shape.size(),
              std::string(name), ": the slice has not the tensor's ",
              shape.size(), " dimensions");
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    TORCH_CHECK(slice.offsets[dim] >= 0 && slice.sizes[dim] >= 0 &&
                    slice.offsets[dim] + slice.sizes[dim] <= shape[dim],
                std::string(name), ": the slice exceeds dimension ", dim,
                " of size ", shape[dim]);
  }
}

// The distributions that a parameter can start with.
enum class Start { kZero, kUniform, kGaussian };

Start StartOf(absl::string_view name, config::AdapterInitialization kind) {
  const auto is = [&](absl::string_view parameter) {
    return absl::EndsWith(name, parameter);
  };
  if (is(".lora_A")) {
    return kind == config::AdapterInitialization::kGaussian ? Start::kGaussian
                                                            : Start::kUniform;
  }
  if (is(".lora_embedding_B")) return Start::kGaussian;
  TORCH_CHECK(is(".lora_B") || is(".lora_embedding_A") || is(".lora_magnitude"),
              std::string(name), " is no parameter of a LoRA adapter");
  return Start::kZero;
}

}  // namespace

at::Tensor InitialLoraValue(const LoraInitialization& initialization,
                            absl::string_view name,
                            at::IntArrayRef global_shape, at::ScalarType dtype,
                            const distributed::TensorSlice& slice) {
  CheckSlice(name, global_shape, slice);
  const Start start = StartOf(name, initialization.kind);
  if (start == Start::kZero) return at::zeros(slice.sizes, dtype);

  at::Tensor value = at::empty(slice.sizes, dtype);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, dtype, "InitialLoraValue", [&] {
        // A question whether the name is known costs no hash of it.
        if (value.numel() == 0) return;
        const Stream stream = StreamOf(initialization, name);
        if (start == Start::kUniform) {
          FillUniform<scalar_t>(stream, global_shape, slice, value);
        } else {
          const bool is_lora_A = absl::EndsWith(name, ".lora_A");
          FillGaussian<scalar_t>(
              stream, is_lora_A ? static_cast<double>(global_shape[0]) : 1,
              global_shape, slice, value);
        }
      });
  return value;
}

distributed::MissingParameterInitializer MakeLoraParameterInitializer(
    LoraInitialization initialization,
    std::map<std::string, std::string> parameter_names) {
  return
      [initialization = std::move(initialization),
       parameter_names = std::move(parameter_names)](
          absl::string_view name, at::IntArrayRef global_shape,
          at::ScalarType dtype,
          const distributed::TensorSlice& slice) -> std::optional<at::Tensor> {
        const auto found = parameter_names.find(std::string(name));
        if (found == parameter_names.end()) return std::nullopt;
        return InitialLoraValue(initialization, found->second, global_shape,
                                dtype, slice);
      };
}

}  // namespace trainer_lora::lora

#include "lora/parameter_initializer.h"

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/Dispatch.h"
#include "ATen/Functions.h"
#include "ATen/core/PhiloxRNGEngine.h"
#include "absl/strings/match.h"
#include "config/internal/fnv1a.h"

namespace trainer_lora::lora {
namespace {

// The stream of random words that belongs to one parameter.
struct Stream {
  uint64_t seed;
  uint64_t name_hash;

  // A generator whose next word is that of element `index`.
  at::Philox4_32 At(int64_t index) const {
    at::Philox4_32 generator(seed, name_hash, static_cast<uint64_t>(index) / 4);
    for (int64_t skipped = 0; skipped < index % 4; ++skipped) generator();
    return generator;
  }
};

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
// begins at 1.4e-11. Coefficients from the highest power down.
double InverseNormal(double p) {
  const double q = p - 0.5;
  if (std::abs(q) <= 0.425) {
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

// Elements [begin, begin + count) of a tensor, each `value_of(k)`.
template <typename T, typename ValueOf>
void Fill(const Stream& stream, int64_t begin, int64_t count,
          const ValueOf& value_of, T* out) {
  at::Philox4_32 generator = stream.At(begin);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t k =
        2 * static_cast<int32_t>(generator() >> 8) + 1 - (1 << 24);
    out[i] = static_cast<T>(value_of(k));
  }
}

// The rows of `slice` of a lora_A of shape [rank, in_features].
template <typename T>
void FillSlice(const LoraInitialization& initialization, const Stream& stream,
               at::IntArrayRef shape, const distributed::TensorSlice& slice,
               T* out) {
  // Narrower types round the float32 value, so that a bfloat16 adapter starts
  // as near to a float32 one as it can.
  using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const int64_t in_features = shape[1];
  const double bound = 1 / std::sqrt(static_cast<double>(in_features));
  const Compute scale = static_cast<Compute>(std::ldexp(bound, -24));
  const double rank = static_cast<double>(shape[0]);
  for (int64_t row = 0; row < slice.sizes[0]; ++row) {
    const int64_t begin =
        (slice.offsets[0] + row) * in_features + slice.offsets[1];
    const int64_t count = slice.sizes[1];
    switch (initialization.kind) {
      case config::AdapterInitialization::kDefault:
        Fill(
            stream, begin, count,
            [scale](int32_t k) { return static_cast<Compute>(k) * scale; },
            out);
        break;
      case config::AdapterInitialization::kGaussian:
        Fill(
            stream, begin, count,
            [rank](int32_t k) {
              const double p = std::ldexp(k + (1 << 24), -25);
              return static_cast<Compute>(InverseNormal(p) / rank);
            },
            out);
        break;
    }
    out += count;
  }
}

void CheckSlice(absl::string_view name, at::IntArrayRef shape,
                const distributed::TensorSlice& slice) {
  TORCH_CHECK(
      shape.size() == 2 && slice.offsets.size() == 2 && slice.sizes.size() == 2,
      std::string(name), ": a LoRA factor has two dimensions");
  for (size_t dim = 0; dim < 2; ++dim) {
    TORCH_CHECK(slice.offsets[dim] >= 0 && slice.sizes[dim] >= 0 &&
                    slice.offsets[dim] + slice.sizes[dim] <= shape[dim],
                std::string(name), ": the slice exceeds dimension ", dim,
                " of size ", shape[dim]);
  }
}

}  // namespace

at::Tensor InitialLoraValue(const LoraInitialization& initialization,
                            absl::string_view name,
                            at::IntArrayRef global_shape, at::ScalarType dtype,
                            const distributed::TensorSlice& slice) {
  CheckSlice(name, global_shape, slice);
  if (absl::EndsWith(name, ".lora_B")) return at::zeros(slice.sizes, dtype);
  TORCH_CHECK(absl::EndsWith(name, ".lora_A"), std::string(name),
              " is no parameter of a LoRA adapter");

  std::string address = initialization.scope;
  address.push_back('\0');
  address.append(name.data(), name.size());
  const Stream stream{initialization.seed, config::Fnv1a64(address)};

  at::Tensor value = at::empty(slice.sizes, dtype);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, dtype, "InitialLoraValue", [&] {
        FillSlice(initialization, stream, global_shape, slice,
                  value.data_ptr<scalar_t>());
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

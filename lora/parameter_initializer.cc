#include "lora/parameter_initializer.h"

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/Dispatch.h"
#include "ATen/Functions.h"
#include "ATen/core/PhiloxRNGEngine.h"
#include "absl/strings/match.h"

namespace trainer_lora::lora {
namespace {

// std::hash and absl::Hash may differ between builds; this must not.
uint64_t Fnv1a64(absl::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return hash;
}

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

// Elements [begin, begin + count) of a tensor of uniform values.
template <typename T>
void FillUniform(const Stream& stream, double bound, int64_t begin,
                 int64_t count, T* out) {
  // Narrower types round the float32 value, so that a bfloat16 adapter starts
  // as near to a float32 one as it can.
  using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const Compute scale = static_cast<Compute>(std::ldexp(bound, -24));
  at::Philox4_32 generator = stream.At(begin);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t k =
        2 * static_cast<int32_t>(generator() >> 8) + 1 - (1 << 24);
    out[i] = static_cast<T>(static_cast<Compute>(k) * scale);
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
  const Stream stream{initialization.seed, Fnv1a64(address)};
  const int64_t in_features = global_shape[1];
  const double bound = 1 / std::sqrt(static_cast<double>(in_features));

  at::Tensor value = at::empty(slice.sizes, dtype);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, dtype, "InitialLoraValue", [&] {
        scalar_t* out = value.data_ptr<scalar_t>();
        for (int64_t row = 0; row < slice.sizes[0]; ++row) {
          const int64_t begin =
              (slice.offsets[0] + row) * in_features + slice.offsets[1];
          FillUniform(stream, bound, begin, slice.sizes[1], out);
          out += slice.sizes[1];
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

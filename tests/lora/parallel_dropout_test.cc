// Adapters with dropout, and several on one layer, over tensor parallel ranks
// against one process: ranks are processes, as each has a generator of its own.
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "config/launch_environment.h"
#include "distributed/device_mesh.h"
#include "distributed/gradient_sync.h"
#include "distributed/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/linear.h"
#include "lora/lora_adapter.h"
#include "lora/lora_gradient_sync.h"
#include "lora/parallel_linear.h"
#include "tests/testutil/process_ranks.h"
#include "tests/testutil/status_matchers.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora {
namespace {

using ::trainer_lora::distributed::DeviceMesh;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::IsRankProcess;
using ::trainer_lora::testutil::ProcessRanks;

constexpr int kRanks = 4;
constexpr int64_t kFeatures = 8;
constexpr int64_t kLoraRank = 2;
constexpr int64_t kTokens = 16;

TEST(ParallelDropoutTest, RanksDropWhatOneProcessDrops) {
  ProcessRanks ranks("dropout", kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_TRUE(ranks.EndedWell(rank));
  }
}

// The part of rank `rank` of a tensor that is split along `dim`, or all of it.
at::Tensor PartOf(const at::Tensor& tensor, std::optional<int64_t> dim,
                  int64_t rank) {
  return dim.has_value() ? tensor.chunk(kRanks, *dim)[rank] : tensor;
}

// Which dimensions the layer types split.
struct Split {
  std::optional<int64_t> weight, lora_A, lora_B, lora_magnitude, input, output;
};

constexpr Split kColumn = {0, std::nullopt, 0, 0, std::nullopt, -1};
constexpr Split kRow = {1, 1, std::nullopt, std::nullopt, -1, std::nullopt};

struct Variant {
  double dropout;
  bool use_dora;
  // Of the adapters "default" and "style".
  std::vector<double> weights;
};

// Random values under one seed, the same on every rank.
struct Values {
  explicit Values(int64_t seed) {
    at::manual_seed(seed);
    weight = at::randn({kFeatures, kFeatures}, at::kDouble);
    lora_A = at::randn({kLoraRank, kFeatures}, at::kDouble);
    lora_B = at::randn({kFeatures, kLoraRank}, at::kDouble);
    lora_magnitude = at::rand({kFeatures}, at::kDouble) + 1;
  }
  at::Tensor weight, lora_A, lora_B, lora_magnitude;
};

// Adapts `layer` with the parts that `rank` has.
void Adapt(LoraLayer& layer, const Variant& variant, const Split& split,
           int64_t rank) {
  layer.to(at::kDouble);
  const at::NoGradGuard no_grad;
  std::vector<ActiveAdapter> active;
  for (size_t i = 0; i < variant.weights.size(); ++i) {
    const Values values(static_cast<int64_t>(i));
    if (i == 0) {
      layer.state("weight").copy_(PartOf(values.weight, split.weight, rank));
      layer.state("weight").requires_grad_(false);
    }
    LoraAdapterOptions options;
    options.rank = kLoraRank;
    options.alpha = 3;
    options.dropout = variant.dropout;
    options.use_dora = variant.use_dora;
    LORA_ASSERT_OK_AND_ASSIGN(LoraAdapter adapter, layer.EmptyAdapter(options));
    adapter.lora_A.copy_(PartOf(values.lora_A, split.lora_A, rank));
    adapter.lora_B.copy_(PartOf(values.lora_B, split.lora_B, rank));
    if (variant.use_dora) {
      adapter.lora_magnitude.copy_(
          PartOf(values.lora_magnitude, split.lora_magnitude, rank));
    }
    active.push_back({i == 0 ? kDefaultAdapter : "style", variant.weights[i]});
    ASSERT_THAT(layer.AdoptAdapter(adapter, active.back().name), IsOk());
  }
  ASSERT_THAT(layer.SetActiveAdapters(active), IsOk());
}

void ExpectClose(const at::Tensor& actual, const at::Tensor& expected,
                 const std::string& what) {
  ASSERT_TRUE(actual.defined()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(at::allclose(actual, expected, /*rtol=*/1e-12, /*atol=*/1e-11))
      << what << "\n"
      << actual << "\nexpected\n"
      << expected;
}

template <typename Parallel>
void ExpectThatOfOneProcess(Parallel parallel, const Variant& variant,
                            const Split& split, const DeviceMesh& mesh) {
  const int64_t rank = mesh.rank();
  ReplicatedLinear whole(
      torch::nn::LinearOptions(kFeatures, kFeatures).bias(false));
  Adapt(*whole, variant, Split(), rank);
  Adapt(*parallel, variant, split, rank);

  at::manual_seed(100);
  const at::Tensor input =
      at::randn({kTokens, kFeatures}, at::kDouble).requires_grad_();
  const at::Tensor grad = at::randn({kTokens, kFeatures}, at::kDouble);
  at::manual_seed(7);
  const at::Tensor expected = whole(input);
  expected.backward(grad);

  const at::Tensor own_input =
      PartOf(input.detach(), split.input, rank).clone().requires_grad_();
  at::manual_seed(7);
  const at::Tensor output = parallel(own_input);
  output.backward(PartOf(grad, split.output, rank));

  ExpectClose(output, PartOf(expected, split.output, rank), "output");
  ExpectClose(own_input.grad(), PartOf(input.grad(), split.input, rank),
              "input");
  torch::nn::Module model;
  model.register_module("layer", parallel.ptr());
  ASSERT_THAT(SyncReplicatedLoraGradients(model), IsOk());
  for (const ActiveAdapter& active : whole->active_adapters()) {
    const LoraAdapter of_whole = whole->adapter(active.name);
    const LoraAdapter of_parts = parallel->adapter(active.name);
    ExpectClose(of_parts.lora_A.grad(),
                PartOf(of_whole.lora_A.grad(), split.lora_A, rank),
                active.name + " lora_A");
    ExpectClose(of_parts.lora_B.grad(),
                PartOf(of_whole.lora_B.grad(), split.lora_B, rank),
                active.name + " lora_B");
    if (!variant.use_dora) continue;
    ExpectClose(
        of_parts.lora_magnitude.grad(),
        PartOf(of_whole.lora_magnitude.grad(), split.lora_magnitude, rank),
        active.name + " lora_magnitude");
  }
}

TEST(ParallelDropoutTest, DISABLED_Rank) {
  if (!IsRankProcess()) GTEST_SKIP() << "runs in the other test's processes";
  alarm(60);  // A rank that hangs ends with a signal, which is a failure.

  LORA_ASSERT_OK_AND_ASSIGN(config::LaunchEnvironment environment,
                            config::ReadLaunchEnvironment());
  LORA_ASSERT_OK_AND_ASSIGN(auto group,
                            distributed::InitProcessGroup(environment));
  LORA_ASSERT_OK_AND_ASSIGN(
      std::shared_ptr<const DeviceMesh> mesh,
      DeviceMesh::Create(std::move(group), {{"tensor", kRanks}}));
  for (const Variant& variant : std::vector<Variant>{{0, false, {0.5, 2}},
                                                     {0.5, false, {1}},
                                                     {0.5, false, {0.5, 2}},
                                                     {0, true, {0.5, 2}},
                                                     {0.5, true, {1}}}) {
    SCOPED_TRACE(testing::Message() << variant.dropout << variant.use_dora
                                    << variant.weights.size());
    ExpectThatOfOneProcess(
        ColumnParallelLinear(
            ColumnParallelLinearOptions{kFeatures, kFeatures, /*bias=*/false},
            mesh, "tensor"),
        variant, kColumn, *mesh);
    ExpectThatOfOneProcess(
        RowParallelLinear(
            RowParallelLinearOptions{kFeatures, kFeatures, /*bias=*/false},
            mesh, "tensor"),
        variant, kRow, *mesh);
  }
}

}  // namespace
}  // namespace trainer_lora::lora

// Random parameters, meshes, placements and backward passes: GradientSync and
// ReduceGradients make what a plain loop over the parameters makes of the
// gradients of all ranks, in float64: a sum or mean over each mesh dimension,
// where a missing gradient is zeros.
#include <chrono>
#include <cstdint>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "distributed/device_mesh.h"
#include "distributed/gradient_sync.h"
#include "distributed/parameter_layout.h"
#include "distributed/placement.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/thread_ranks.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::_;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::RunRanks;
using ::trainer_lora::testutil::StatusIs;

using MeshPtr = std::shared_ptr<const DeviceMesh>;
using Parameters = std::vector<DistributedParameter>;
using Random = std::mt19937;
using Sizes = std::vector<int64_t>;
// One a rank.
using RankTensors = std::vector<at::Tensor>;

int Below(int limit, Random& random) {
  return static_cast<int>(random() % static_cast<unsigned>(limit));
}
bool OneIn(int n, Random& random) { return Below(n, random) == 0; }

// --- What happens, and what has to come out: no mesh, no process group -------

// How a gradient gets to its parameter.
enum class Arrival {
  kMissing,
  kBackward,    // Autograd accumulates in place.
  kReplaced,    // A new tensor holds the sum.
  kTransposed,  // The same, not contiguous.
};

// One parameter in one micro-batch; both have an entry a rank.
struct MicroBatch {
  std::vector<Arrival> arrivals;
  RankTensors gradients;  // in the parameter's dtype
};

// The backward passes before one sync, for one parameter.
struct Step {
  // On these ranks the gradient is set to none first.
  std::vector<bool> reset;
  std::vector<MicroBatch> micro_batches;
  // The gradients afterwards, in float64.
  RankTensors expected;
  // What they are when each rank has the absolute values.
  RankTensors magnitudes;
};

struct ParameterPlan {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = true;
  std::vector<Placement> placements;
  std::vector<Sizes> shapes;  // one a rank
  std::vector<Step> steps;

  bool takes_part() const {
    for (const Placement& placement : placements) {
      if (requires_grad &&
          placement.gradient_reduction() != GradientReduction::kNone) {
        return true;
      }
    }
    return false;
  }
};

struct Plan {
  Sizes mesh;
  GradientSyncOptions options;
  // Whether the values allow no other result than the expected one.
  bool exact = false;
  bool sums = false;
  // Each has an entry a step. Without ZeroGrad() before it, a step accumulates
  // on top of what the last one synchronized.
  std::vector<bool> zero_grad;
  std::vector<int> micro_batches;
  std::vector<ParameterPlan> parameters;
  // Indices that are listed a second time.
  std::vector<int> listed_again;
};

int64_t WorldSize(const Sizes& mesh) { return c10::multiply_integers(mesh); }

// Of a rank, row-major.
Sizes Coordinates(const Sizes& mesh, int64_t rank) {
  Sizes coordinates(mesh.size());
  for (int64_t dim = mesh.size(); dim-- > 0;) {
    coordinates[dim] = rank % mesh[dim];
    rank /= mesh[dim];
  }
  return coordinates;
}

Placement RandomPlacement(bool sums, int tensor_dims, Random& random) {
  switch (Below(tensor_dims > 0 ? 6 : 5, random)) {
    case 0:
      return Placement::Replicate(GradientReduction::kNone);
    case 1:
    case 2:
      return Placement::Replicate(sums ? GradientReduction::kSum
                                       : GradientReduction::kAverage);
    case 5:
      return Placement::Shard(Below(tensor_dims, random));
    default:
      return Placement::Replicate(GradientReduction::kAverage);
  }
}

// A rank's part of a tensor of shape `global`.
Sizes LocalShape(const Sizes& global, const std::vector<Placement>& placements,
                 const Sizes& mesh, int64_t rank) {
  Sizes local = global;
  const Sizes coordinates = Coordinates(mesh, rank);
  for (int64_t dim = 0; dim < mesh.size(); ++dim) {
    if (placements[dim].is_replicate()) continue;
    int64_t& size = local[placements[dim].shard_dim()];
    size = ChunkOf(size, mesh[dim], coordinates[dim]).size;
  }
  return local;
}

// Either integers that are so small that every sum and every mean over a power
// of two of them is exact in the dtype, or whatever the mantissa holds.
at::Tensor RandomGradient(const Sizes& shape, at::ScalarType dtype,
                          bool integers, Random& random) {
  const at::Tensor gradient = at::empty(shape, at::kDouble);
  double* const values = gradient.mutable_data_ptr<double>();
  const int largest = dtype == at::kBFloat16 ? 1 : 50;
  for (int64_t i = 0; i < gradient.numel(); ++i) {
    values[i] = integers ? Below(2 * largest + 1, random) - largest
                         : std::normal_distribution<double>()(random);
  }
  return gradient.to(dtype);
}

Arrival RandomArrival(bool backward_only, Random& random) {
  if (OneIn(4, random)) return Arrival::kMissing;
  if (backward_only) return Arrival::kBackward;
  static constexpr Arrival kArrivals[] = {
      Arrival::kBackward, Arrival::kBackward, Arrival::kReplaced,
      Arrival::kTransposed};
  return kArrivals[Below(4, random)];
}

// The contract: over one mesh dimension after the other, what the ranks that
// differ in that coordinate alone have is summed or averaged.
void Reduce(const std::vector<Placement>& placements, const Sizes& mesh,
            RankTensors& values) {
  for (int64_t dim = 0; dim < mesh.size(); ++dim) {
    const GradientReduction reduction = placements[dim].gradient_reduction();
    if (reduction == GradientReduction::kNone) continue;
    RankTensors reduced;
    for (int64_t rank = 0; rank < values.size(); ++rank) {
      at::Tensor sum = at::zeros_like(values[rank]);
      for (int64_t peer = 0; peer < values.size(); ++peer) {
        Sizes coordinates = Coordinates(mesh, peer);
        coordinates[dim] = Coordinates(mesh, rank)[dim];
        if (coordinates == Coordinates(mesh, rank)) sum += values[peer];
      }
      if (reduction == GradientReduction::kAverage) sum /= double(mesh[dim]);
      reduced.push_back(sum);
    }
    values = reduced;
  }
}

// Fills in what has to come out. Gradients accumulate in their dtype, one after
// the other, on each rank alone.
void Expect(const Plan& plan, ParameterPlan& parameter) {
  RankTensors sums;
  for (const Sizes& shape : parameter.shapes) {
    sums.push_back(at::zeros(shape, parameter.dtype));
  }
  for (int s = 0; s < parameter.steps.size(); ++s) {
    Step& step = parameter.steps[s];
    for (int64_t rank = 0; rank < sums.size(); ++rank) {
      if (plan.zero_grad[s] || step.reset[rank]) {
        sums[rank] = at::zeros_like(sums[rank]);
      }
      for (const MicroBatch& micro_batch : step.micro_batches) {
        if (micro_batch.arrivals[rank] == Arrival::kMissing) continue;
        sums[rank] = sums[rank] + micro_batch.gradients[rank];
      }
      step.expected.push_back(sums[rank].to(at::kDouble));
      step.magnitudes.push_back(step.expected[rank].abs());
    }
    if (parameter.takes_part()) {
      Reduce(parameter.placements, plan.mesh, step.expected);
      Reduce(parameter.placements, plan.mesh, step.magnitudes);
    }
    for (int64_t rank = 0; rank < sums.size(); ++rank) {
      sums[rank] = step.expected[rank].to(parameter.dtype);
    }
  }
}

// The largest relative error of one rounding.
double UnitRoundoff(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 0x1p-53;
    case at::kFloat:
      return 0x1p-24;
    default:
      return 0x1p-8;  // bfloat16
  }
}

// How much each element may be off. A sum of n terms, in any order, is rounded
// n - 1 times, each time by a share of at most the sum of the absolute values;
// each mean is rounded once more.
at::Tensor Tolerance(const Plan& plan, const ParameterPlan& parameter,
                     const Step& step, int64_t rank, bool in_float32) {
  if (plan.exact || !parameter.takes_part()) {
    return at::zeros_like(step.magnitudes[rank]);
  }
  const double roundings = 1.01 * (WorldSize(plan.mesh) + plan.mesh.size());
  if (in_float32 && parameter.dtype == at::kBFloat16) {
    return step.magnitudes[rank] * (roundings * UnitRoundoff(at::kFloat)) +
           step.expected[rank].abs() * (1.01 * UnitRoundoff(parameter.dtype));
  }
  return step.magnitudes[rank] * (roundings * UnitRoundoff(parameter.dtype));
}

ParameterPlan RandomParameter(const Plan& plan, int index, bool integers,
                              Random& random) {
  static const std::vector<Sizes> kShapes = {
      {}, {1}, {5}, {0}, {4, 3}, {3, 0}, {7, 2}, {2, 3, 5}, {33}, {1, 9}};
  static constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble,
                                               at::kBFloat16};
  const int64_t world_size = WorldSize(plan.mesh);
  ParameterPlan parameter;
  parameter.name = absl::StrCat("layer", index, ".lora_A");
  parameter.dtype = kDtypes[Below(3, random)];
  parameter.requires_grad = !OneIn(8, random);
  const Sizes& global = kShapes[Below(kShapes.size(), random)];
  const bool averaged = OneIn(2, random);
  for (int64_t dim = 0; dim < plan.mesh.size(); ++dim) {
    parameter.placements.push_back(
        averaged ? Placement::Replicate()
                 : RandomPlacement(plan.sums, global.size(), random));
  }
  for (int64_t rank = 0; rank < world_size; ++rank) {
    parameter.shapes.push_back(
        LocalShape(global, parameter.placements, plan.mesh, rank));
  }

  for (int s = 0; s < plan.zero_grad.size(); ++s) {
    Step step;
    for (int64_t rank = 0; rank < world_size; ++rank) {
      step.reset.push_back(OneIn(4, random));
    }
    for (int i = 0; i < plan.micro_batches[s]; ++i) {
      MicroBatch micro_batch;
      for (int64_t rank = 0; rank < world_size; ++rank) {
        micro_batch.arrivals.push_back(
            parameter.requires_grad
                ? RandomArrival(plan.options.overlap_backward, random)
                : Arrival::kMissing);
        micro_batch.gradients.push_back(RandomGradient(
            parameter.shapes[rank], parameter.dtype, integers, random));
      }
      step.micro_batches.push_back(micro_batch);
    }
    parameter.steps.push_back(step);
  }
  return parameter;
}

Plan RandomPlan(const Sizes& mesh, bool overlap, unsigned seed) {
  Random random(seed);
  const bool integers = !OneIn(3, random);
  Plan plan;
  plan.mesh = mesh;
  static constexpr int64_t kBucketBytes[] = {1, 128, 200, kDefaultBucketBytes};
  plan.options.bucket_bytes = kBucketBytes[Below(4, random)];
  plan.options.reduce_in_float32 = OneIn(3, random);
  plan.options.overlap_backward = overlap;
  plan.exact = integers;
  for (const int64_t size : mesh) {
    if ((size & (size - 1)) != 0) plan.exact = false;  // no power of two
  }
  plan.sums = OneIn(2, random);
  // Nothing may be accumulated on top of a sum; and what is on top of a rounded
  // mean has no expected value.
  plan.zero_grad = {true, plan.sums || !plan.exact, true};
  plan.micro_batches = {1 + Below(3, random), 1, 1 + Below(2, random)};
  const int count = Below(9, random);
  for (int i = 0; i < count; ++i) {
    plan.parameters.push_back(RandomParameter(plan, i, integers, random));
    if (OneIn(8, random)) plan.listed_again.push_back(i);
  }
  for (ParameterPlan& parameter : plan.parameters) Expect(plan, parameter);
  return plan;
}

// --- The same on a rank ------------------------------------------------------

Parameters MakeParameters(const Plan& plan, const MeshPtr& mesh) {
  Parameters parameters;
  for (const ParameterPlan& parameter : plan.parameters) {
    parameters.push_back(
        {parameter.name,
         at::zeros(parameter.shapes[mesh->rank()], parameter.dtype)
             .set_requires_grad(parameter.requires_grad),
         {mesh, parameter.placements}});
  }
  for (const int i : plan.listed_again) parameters.push_back(parameters[i]);
  return parameters;
}

at::Tensor Transposed(const at::Tensor& tensor) {
  if (tensor.dim() < 2) return tensor.clone();
  return tensor.transpose(0, -1)
      .clone(at::MemoryFormat::Contiguous)
      .transpose(0, -1);
}

// One micro-batch on one rank: one backward pass for all parameters.
void Backward(const Plan& plan, const Parameters& parameters, int step,
              int micro_batch, int64_t rank) {
  at::Tensor loss;
  for (int i = 0; i < plan.parameters.size(); ++i) {
    const MicroBatch& batch =
        plan.parameters[i].steps[step].micro_batches[micro_batch];
    const at::Tensor& gradient = batch.gradients[rank];
    const at::Tensor& parameter = parameters[i].parameter;
    at::Tensor& sum = parameter.mutable_grad();
    switch (batch.arrivals[rank]) {
      case Arrival::kMissing:
        break;
      case Arrival::kBackward: {
        const at::Tensor term = (parameter * gradient).sum().to(at::kDouble);
        loss = loss.defined() ? loss + term : term;
        break;
      }
      case Arrival::kReplaced:
        sum = sum.defined() ? sum + gradient : gradient.clone();
        break;
      case Arrival::kTransposed:
        sum = Transposed(sum.defined() ? sum + gradient : gradient);
        break;
    }
  }
  if (loss.defined()) loss.backward();
}

// Sets to none what the step starts without. Parameters that take no part have
// nobody else who does.
void ResetGradients(const Plan& plan, const Parameters& parameters, int step,
                    int64_t rank) {
  for (int i = 0; i < plan.parameters.size(); ++i) {
    const ParameterPlan& parameter = plan.parameters[i];
    if (parameter.steps[step].reset[rank] ||
        (plan.zero_grad[step] && !parameter.takes_part())) {
      parameters[i].parameter.mutable_grad().reset();
    }
  }
}

int64_t CountTakingPart(const Plan& plan) {
  int64_t count = 0;
  for (const ParameterPlan& parameter : plan.parameters) {
    count += parameter.takes_part();
  }
  return count;
}

void CheckGradients(const Plan& plan, const Parameters& parameters, int step,
                    int64_t rank, bool in_float32) {
  for (int i = 0; i < plan.parameters.size(); ++i) {
    const ParameterPlan& parameter = plan.parameters[i];
    SCOPED_TRACE(absl::StrCat(parameter.name, ", ",
                              parameters[i].layout.ToString(), ", step ",
                              step));
    const at::Tensor& gradient = parameters[i].parameter.grad();
    const at::Tensor& expected = parameter.steps[step].expected[rank];
    if (!gradient.defined()) {
      EXPECT_FALSE(parameter.takes_part());
      EXPECT_TRUE(at::equal(expected, at::zeros_like(expected)));
      continue;
    }
    EXPECT_EQ(gradient.scalar_type(), parameter.dtype);
    ASSERT_EQ(gradient.sizes(), expected.sizes());
    const at::Tensor is_near =
        (gradient.to(at::kDouble) - expected).abs() <=
        Tolerance(plan, parameter, parameter.steps[step], rank, in_float32);
    EXPECT_TRUE(is_near.all().item<bool>()) << gradient << "\nexpected:\n"
                                            << expected;
  }
}

void CheckReduceGradients(const Plan& plan, const MeshPtr& mesh) {
  SCOPED_TRACE("ReduceGradients");
  const int64_t rank = mesh->rank();
  const Parameters parameters = MakeParameters(plan, mesh);
  for (int step = 0; step < plan.zero_grad.size(); ++step) {
    for (const DistributedParameter& parameter : parameters) {
      if (plan.zero_grad[step]) parameter.parameter.mutable_grad().reset();
    }
    ResetGradients(plan, parameters, step, rank);
    for (int i = 0; i < plan.micro_batches[step]; ++i) {
      Backward(plan, parameters, step, i, rank);
    }
    std::vector<const void*> places;
    for (const DistributedParameter& parameter : parameters) {
      const at::Tensor& gradient = parameter.parameter.grad();
      places.push_back(gradient.defined() ? gradient.data_ptr() : nullptr);
    }

    const absl::StatusOr<int64_t> count = ReduceGradients(*mesh, parameters);
    ASSERT_THAT(count, IsOk());
    EXPECT_EQ(*count, CountTakingPart(plan));
    CheckGradients(plan, parameters, step, rank, /*in_float32=*/false);
    for (int i = 0; i < parameters.size(); ++i) {
      if (places[i] == nullptr) continue;
      EXPECT_EQ(parameters[i].parameter.grad().data_ptr(), places[i])
          << "an existing gradient is written into";
    }
  }
}

// Whether a second sync would add something up again.
bool SumsOverPeers(const Plan& plan) {
  for (const ParameterPlan& parameter : plan.parameters) {
    for (int64_t dim = 0; dim < plan.mesh.size(); ++dim) {
      if (parameter.requires_grad && plan.mesh[dim] > 1 &&
          parameter.placements[dim].gradient_reduction() ==
              GradientReduction::kSum) {
        return true;
      }
    }
  }
  return false;
}

// Appends the gradients after each step to `results`.
void CheckGradientSync(const Plan& plan, const MeshPtr& mesh,
                       const GradientSyncOptions& options,
                       std::vector<at::Tensor>& results) {
  SCOPED_TRACE(options.overlap_backward ? "GradientSync with overlap"
                                        : "GradientSync");
  const int64_t rank = mesh->rank();
  const Parameters parameters = MakeParameters(plan, mesh);
  LORA_ASSERT_OK_AND_ASSIGN(std::unique_ptr<GradientSync> sync,
                            GradientSync::Create(mesh, parameters, options));
  for (int step = 0; step < plan.zero_grad.size(); ++step) {
    if (plan.zero_grad[step]) sync->ZeroGrad();
    ResetGradients(plan, parameters, step, rank);
    const int last = plan.micro_batches[step] - 1;
    for (int i = 0; i < last; ++i) {
      const GradientSync::NoSyncScope no_sync(*sync);
      Backward(plan, parameters, step, i, rank);
    }
    Backward(plan, parameters, step, last, rank);

    const absl::StatusOr<int64_t> count = sync->Sync();
    ASSERT_THAT(count, IsOk());
    EXPECT_EQ(*count, CountTakingPart(plan));
    EXPECT_EQ(sync->statistics().parameters, *count);
    CheckGradients(plan, parameters, step, rank, options.reduce_in_float32);
    for (const DistributedParameter& parameter : parameters) {
      const at::Tensor& gradient = parameter.parameter.grad();
      results.push_back(gradient.defined() ? gradient.clone() : gradient);
    }
  }

  if (SumsOverPeers(plan)) {
    EXPECT_THAT(sync->Sync(),
                StatusIs(absl::StatusCode::kFailedPrecondition, _));
  } else if (plan.exact && !plan.sums) {
    const int last_step = int(plan.zero_grad.size()) - 1;
    ASSERT_THAT(sync->Sync(), IsOk());
    CheckGradients(plan, parameters, last_step, rank,
                   options.reduce_in_float32);
  }
}

void CheckGradientSync(const Plan& plan, const MeshPtr& mesh) {
  std::vector<at::Tensor> results;
  CheckGradientSync(plan, mesh, plan.options, results);
  if (!plan.options.overlap_backward || testing::Test::HasFailure()) return;

  GradientSyncOptions options = plan.options;
  options.overlap_backward = false;
  std::vector<at::Tensor> without_overlap;
  CheckGradientSync(plan, mesh, options, without_overlap);
  ASSERT_EQ(results.size(), without_overlap.size());
  for (int i = 0; i < results.size(); ++i) {
    ASSERT_EQ(results[i].defined(), without_overlap[i].defined());
    if (!results[i].defined()) continue;
    EXPECT_TRUE(at::equal(results[i], without_overlap[i]))
        << "overlap must not change the bits";
  }
}

struct Case {
  const char* name;
  Sizes mesh;
  bool overlap;
  int plans;
};

void PrintTo(const Case& test_case, std::ostream* out) {
  *out << test_case.name;
}

class GradientSyncPropertyTest : public testing::TestWithParam<Case> {};

TEST_P(GradientSyncPropertyTest, EqualsALoopOverParametersInFloat64) {
  const Case& test_case = GetParam();
  at::set_num_threads(1);
  std::vector<Plan> plans;
  for (int seed = 0; seed < test_case.plans; ++seed) {
    plans.push_back(RandomPlan(test_case.mesh, test_case.overlap, seed));
  }

  RunRanks(
      WorldSize(test_case.mesh),
      [&](int, auto group) {
        std::vector<MeshDim> dims;
        for (const int64_t size : test_case.mesh) {
          dims.push_back({absl::StrCat("d", dims.size()), size});
        }
        LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                                  DeviceMesh::Create(group, dims));
        for (int seed = 0; seed < plans.size(); ++seed) {
          SCOPED_TRACE(absl::StrCat("seed ", seed));
          // After a failure the ranks may be out of step.
          if (!testing::Test::HasFailure())
            CheckGradientSync(plans[seed], mesh);
          if (!testing::Test::HasFailure()) {
            CheckReduceGradients(plans[seed], mesh);
          }
        }
      },
      std::chrono::seconds(20));
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, GradientSyncPropertyTest,
    testing::Values(Case{"One", {1}, false, 20}, Case{"Two", {2}, false, 20},
                    Case{"Three", {3}, false, 16}, Case{"Four", {4}, false, 12},
                    Case{"TwoByTwo", {2, 2}, false, 16},
                    Case{"TwoByFour", {2, 4}, false, 6},
                    Case{"TwoByOneByTwo", {2, 1, 2}, false, 8},
                    // Some reductions are over two of the dimensions, for which
                    // there is no group.
                    Case{"TwoByTwoByTwo", {2, 2, 2}, false, 4},
                    Case{"OverlapTwo", {2}, true, 16},
                    Case{"OverlapThree", {3}, true, 12},
                    Case{"OverlapTwoByTwo", {2, 2}, true, 10},
                    Case{"OverlapTwoByTwoByTwo", {2, 2, 2}, true, 3}),
    [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

}  // namespace
}  // namespace trainer_lora::distributed

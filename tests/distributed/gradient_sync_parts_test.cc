// Gradients of tensors some of whose parts several tensor parallel ranks hold,
// such as the rows of k and v where there are fewer heads than ranks.
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/status/status.h"
#include "c10/util/intrusive_ptr.h"
#include "distributed/device_mesh.h"
#include "distributed/grad_norm.h"
#include "distributed/gradient_sync.h"
#include "distributed/parameter_layout.h"
#include "distributed/placement.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::RunRanks;
using ::trainer_lora::testutil::StatusIs;

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using MeshPtr = std::shared_ptr<const DeviceMesh>;
using Parameters = std::vector<DistributedParameter>;

constexpr int64_t kColumns = 3;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A tensor of q, k and v over a mesh {data, tensor}.
struct Case {
  std::string name;
  int64_t data;
  int64_t tensor;
  int64_t query_rows;
  int64_t key_rows;
  int64_t replicas;  // Of each chunk of k and v.

  int64_t rows() const { return query_rows + 2 * key_rows; }

  // The rows of the whole tensor that tensor parallel rank `rank` holds.
  at::Tensor RowsOf(int64_t rank) const {
    const Chunk query = ChunkOf(query_rows, tensor, rank);
    const int64_t key_size = key_rows / (tensor / replicas);
    const int64_t key_begin = rank / replicas * key_size;
    const auto range = [](int64_t begin, int64_t size) {
      return at::arange(begin, begin + size, at::kLong);
    };
    return at::cat({range(query.offset, query.size),
                    range(query_rows + key_begin, key_size),
                    range(query_rows + key_rows + key_begin, key_size)});
  }

  ParameterLayout Layout(const MeshPtr& mesh) const {
    return {mesh,
            {Placement::Replicate(), Placement::Shard(0)},
            {{query_rows}, {key_rows, replicas}, {key_rows, replicas}}};
  }
};

// What data rank `data` and tensor parallel rank `tensor` computes for its rows
// of tensor `index`; values of no pattern.
at::Tensor PartialGradient(const Case& test, int64_t data, int64_t tensor,
                           int64_t index) {
  const int64_t rows = test.RowsOf(tensor).numel();
  return at::sin(at::arange(rows * kColumns, at::kDouble) * 1.3 + 100 * data +
                 10 * tensor + index)
      .view({rows, kColumns});
}

// The gradient of the whole tensor in one process, whose loss is the mean over
// data of the sum over tensor parallel ranks.
at::Tensor WholeGradient(const Case& test, int64_t index) {
  const at::Tensor whole =
      at::zeros({test.rows(), kColumns}, at::kDouble).set_requires_grad(true);
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (int64_t data = 0; data < test.data; ++data) {
    for (int64_t tensor = 0; tensor < test.tensor; ++tensor) {
      loss = loss + (whole.index_select(0, test.RowsOf(tensor)) *
                     PartialGradient(test, data, tensor, index))
                            .sum() /
                        test.data;
    }
  }
  loss.backward();
  return whole.grad();
}

// Two such tensors of zeros, and a lora_A, whose gradient is a sum too.
Parameters MakeParameters(const Case& test, const MeshPtr& mesh,
                          at::ScalarType dtype = at::kDouble) {
  const int64_t rows = test.RowsOf(mesh->coordinate(1)).numel();
  const auto parameter = [&](const std::string& name, int64_t rows,
                             const ParameterLayout& layout) {
    return DistributedParameter{
        name, at::zeros({rows, kColumns}, dtype).set_requires_grad(true),
        layout};
  };
  return {parameter("0.qkv.lora_B", rows, test.Layout(mesh)),
          parameter("0.qkv.lora_A", 2,
                    {mesh,
                     {Placement::Replicate(),
                      Placement::Replicate(GradientReduction::kSum)}}),
          parameter("1.qkv.lora_B", rows, test.Layout(mesh))};
}

void RunCase(const Case& test,
             const std::function<void(const MeshPtr& mesh)>& body) {
  RunRanks(static_cast<int>(test.data * test.tensor), [&](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        const MeshPtr mesh,
        DeviceMesh::Create(group,
                           {{"data", test.data}, {"tensor", test.tensor}}));
    body(mesh);
  });
}

// Accumulates the gradients of a backward pass, as the loss would.
void Backward(const Case& test, const DeviceMesh& mesh,
              const Parameters& parameters) {
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (const int64_t index : {0, 2}) {
    loss = loss +
           (parameters[index].parameter *
            PartialGradient(test, mesh.coordinate(0), mesh.coordinate(1), index)
                .to(parameters[index].parameter.scalar_type()))
               .sum()
               .to(at::kDouble);
  }
  loss = loss + (parameters[1].parameter * (mesh.rank() + 1)).sum();
  loss.backward();
}

void ExpectComplete(const Case& test, const DeviceMesh& mesh,
                    const Parameters& parameters) {
  const at::Tensor rows = test.RowsOf(mesh.coordinate(1));
  for (const int64_t index : {0, 2}) {
    const at::Tensor expected =
        WholeGradient(test, index).index_select(0, rows);
    EXPECT_TRUE(at::allclose(parameters[index].parameter.grad(), expected,
                             /*rtol=*/1e-12, /*atol=*/1e-12))
        << parameters[index].name << "\n"
        << parameters[index].parameter.grad() << "\nexpected\n"
        << expected;
  }
  const double sum = mesh.size() * (mesh.size() + 1) / 2;
  EXPECT_TRUE(
      at::equal(parameters[1].parameter.grad(),
                at::full({2, kColumns}, sum / mesh.size(0), at::kDouble)));
}

class GradientSyncPartsTest : public ::testing::TestWithParam<Case> {};

TEST_P(GradientSyncPartsTest, ReducesOnceToTheGradientOfOneProcess) {
  RunCase(GetParam(), [](const MeshPtr& mesh) {
    const Parameters parameters = MakeParameters(GetParam(), mesh);
    Backward(GetParam(), *mesh, parameters);
    LORA_ASSERT_OK_AND_ASSIGN(const int64_t count,
                              ReduceGradients(*mesh, parameters));
    EXPECT_EQ(count, 3);
    ExpectComplete(GetParam(), *mesh, parameters);
  });
}

TEST_P(GradientSyncPartsTest, EveryStepHasTheGradientOfOneProcess) {
  for (const bool overlap : {false, true}) {
    for (const int64_t bucket_bytes : {int64_t{1}, kDefaultBucketBytes}) {
      SCOPED_TRACE(bucket_bytes);
      RunCase(GetParam(), [&](const MeshPtr& mesh) {
        const Parameters parameters = MakeParameters(GetParam(), mesh);
        GradientSyncOptions options;
        options.bucket_bytes = bucket_bytes;
        options.overlap_backward = overlap;
        LORA_ASSERT_OK_AND_ASSIGN(
            const auto sync, GradientSync::Create(mesh, parameters, options));
        for (int step = 0; step < 3; ++step) {
          sync->ZeroGrad();
          Backward(GetParam(), *mesh, parameters);
          LORA_ASSERT_OK_AND_ASSIGN(const int64_t count, sync->Sync());
          EXPECT_EQ(count, 3);
          ExpectComplete(GetParam(), *mesh, parameters);
        }
        EXPECT_EQ(sync->statistics().copied_gradients, 0);
      });
    }
  }
}

TEST_P(GradientSyncPartsTest, ARankWithoutAGradientHasZeros) {
  RunCase(GetParam(), [](const MeshPtr& mesh) {
    const Case& test = GetParam();
    const Parameters parameters = MakeParameters(test, mesh);
    if (mesh->rank() == 0) {
      parameters[0].parameter.mutable_grad() = at::ones_like(
          parameters[0].parameter, at::TensorOptions().requires_grad(false));
    }
    ASSERT_THAT(ReduceGradients(*mesh, parameters), IsOk());
    // Each row that rank 0 holds, on the ranks that hold it.
    const at::Tensor whole =
        at::zeros({test.rows()}, at::kDouble)
            .index_fill(0, test.RowsOf(0), 1.0 / test.data);
    const at::Tensor expected =
        whole.index_select(0, test.RowsOf(mesh->coordinate(1)));
    EXPECT_TRUE(
        at::equal(parameters[0].parameter.grad().select(1, 0), expected));
  });
}

TEST_P(GradientSyncPartsTest, TheNormCountsEachRowOnce) {
  RunCase(GetParam(), [](const MeshPtr& mesh) {
    Parameters parameters = MakeParameters(GetParam(), mesh);
    parameters.erase(parameters.begin() + 1);
    double squares = 0;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor whole = WholeGradient(GetParam(), i);
      squares += whole.square().sum().item<double>();
      parameters[i].parameter.mutable_grad() =
          whole.index_select(0, GetParam().RowsOf(mesh->coordinate(1)));
    }
    LORA_ASSERT_OK_AND_ASSIGN(const double norm,
                              ClipGradNorm(*mesh, parameters, kInfinity));
    EXPECT_NEAR(norm, std::sqrt(squares), 1e-12 * norm);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Cases, GradientSyncPartsTest,
    ::testing::Values(Case{"TwoHeadsOfFourRanks", 1, 4, 8, 4, 2},
                      Case{"OneHeadOfFourRanks", 1, 4, 6, 3, 4},
                      Case{"OneHeadOfTwoRanksTwice", 2, 2, 5, 1, 2}),
    [](const auto& info) { return info.param.name; });

const Case kCase = {"", 2, 2, 4, 2, 2};

TEST(GradientSyncPartsTest, ReplicasHaveTheSameBitsInOneMoreCollective) {
  std::vector<at::Tensor> gradients(4);
  RunCase(kCase, [&](const MeshPtr& mesh) {
    const Parameters parameters = MakeParameters(kCase, mesh, at::kFloat);
    LORA_ASSERT_OK_AND_ASSIGN(const auto sync,
                              GradientSync::Create(mesh, parameters));
    Backward(kCase, *mesh, parameters);
    ASSERT_THAT(sync->Sync(), IsOk());
    gradients[mesh->rank()] = parameters[0].parameter.grad().clone();
    // The average, the sum and average of lora_A, and those of k and v of both
    // tensors in one buffer.
    EXPECT_EQ(sync->statistics().collectives, 3);
    EXPECT_THAT(sync->ToString(),
                AllOf(HasSubstr("3 buckets"), HasSubstr("0.qkv.lora_B[4:6]"),
                      HasSubstr("1.qkv.lora_B[6:8]")));
  });
  for (int rank = 1; rank < 4; ++rank) {
    EXPECT_TRUE(at::equal(gradients[rank].narrow(0, 2, 4),
                          gradients[0].narrow(0, 2, 4)));
  }
}

TEST(GradientSyncPartsTest, Bfloat16IsRoundedOnceOnRequest) {
  RunCase(kCase, [](const MeshPtr& mesh) {
    const Parameters parameters = MakeParameters(kCase, mesh, at::kBFloat16);
    GradientSyncOptions options;
    options.reduce_in_float32 = true;
    LORA_ASSERT_OK_AND_ASSIGN(const auto sync,
                              GradientSync::Create(mesh, parameters, options));
    const at::Tensor gradient = parameters[0].parameter.grad();
    // The average over data alone, 0.5 + 2^-9 on two of the ranks, would be
    // rounded to 0.5.
    gradient.fill_(mesh->rank() == 0 ? 1.0 : std::ldexp(1.0, -8));
    ASSERT_THAT(sync->Sync(), IsOk());
    const at::Tensor expected =
        at::tensor((1.0f + 3 * std::ldexp(1.0f, -8)) / 2).to(at::kBFloat16);
    EXPECT_EQ(gradient[2][0].item<float>(), expected.item<float>());
  });
}

TEST(GradientSyncPartsTest, RefusesToSumTwice) {
  RunCase(kCase, [](const MeshPtr& mesh) {
    Parameters parameters = MakeParameters(kCase, mesh);
    parameters.resize(1);
    LORA_ASSERT_OK_AND_ASSIGN(const auto sync,
                              GradientSync::Create(mesh, parameters));
    ASSERT_THAT(sync->Sync(), IsOk());
    EXPECT_THAT(sync->Sync(),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("0.qkv.lora_B is a sum over ranks")));
  });
}

// Whoever is wrong, every rank learns of it, and no gradient is touched.
TEST(GradientSyncPartsTest, NamesWhatDoesNotFitOnEveryRank) {
  RunCase(kCase, [](const MeshPtr& mesh) {
    const auto expect_error =
        [&](const std::string& text,
            const std::function<void(Parameters&)>& change) {
          Parameters parameters = MakeParameters(kCase, mesh);
          Backward(kCase, *mesh, parameters);
          const at::Tensor before = parameters[2].parameter.grad().clone();
          if (mesh->rank() == 1) change(parameters);
          EXPECT_THAT(
              ReduceGradients(*mesh, parameters),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(text)));
          EXPECT_TRUE(at::equal(parameters[2].parameter.grad(), before));
        };
    const auto parameter = [](at::IntArrayRef shape) {
      return at::zeros(shape, at::kDouble).set_requires_grad(true);
    };
    expect_error("0.qkv.lora_B of shape [5, 3] must have 6 rows",
                 [&](Parameters& parameters) {
                   parameters[0].parameter = parameter({5, 3});
                 });
    expect_error("only on rank 1: 0.qkv.lora_B (rows of [4])",
                 [&](Parameters& parameters) {
                   parameters[0].parameter = parameter({6, 4});
                 });
    expect_error("Shard(0) in parts 2, 2, 2", [&](Parameters& parameters) {
      parameters[0].layout.parts = {{2}, {2}, {2}};
    });
    expect_error("a part with 3 replicas", [&](Parameters& parameters) {
      parameters[0].layout.parts[1].replicas = 3;
    });
  });
}

}  // namespace
}  // namespace trainer_lora::distributed

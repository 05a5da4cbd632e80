#include "distributed/tensor_parallel.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "c10/util/intrusive_ptr.h"
#include "distributed/device_mesh.h"
#include "distributed/placement.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/error_of.h"
#include "tests/testutil/operator_log.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::ErrorOf;
using ::trainer_lora::testutil::OperatorLog;
using ::trainer_lora::testutil::RunRanks;

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using MeshPtr = std::shared_ptr<const DeviceMesh>;

// Calls `body` on every rank of a mesh {tensor} of 1, 2, 3 and 4 ranks, and of
// the mesh {data: 2, tensor: 2}. `replica` counts the ranks' other coordinates.
void ForEachMesh(const std::function<void(const MeshPtr& mesh, int64_t dim,
                                          int64_t replica)>& body) {
  for (int world_size = 1; world_size <= 4; ++world_size) {
    SCOPED_TRACE(world_size);
    RunRanks(world_size, [&](int, GroupPtr group) {
      LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                                DeviceMesh::Create(group, "tensor"));
      body(mesh, 0, 0);
    });
  }
  SCOPED_TRACE("2x2");
  RunRanks(4, [&](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        const MeshPtr mesh,
        DeviceMesh::Create(group, {{"data", 2}, {"tensor", 2}}));
    body(mesh, 1, rank / 2);
  });
}

// Values of no pattern, the same in every call of the same arguments.
at::Tensor Example(at::IntArrayRef shape, int64_t seed,
                   at::ScalarType dtype = at::kDouble) {
  const int64_t numel = c10::multiply_integers(shape);
  return at::sin(at::arange(numel, at::kDouble) * 1.7 + 10 * seed + 1)
      .view(shape)
      .to(dtype);
}

at::Tensor ChunkOfRank(const at::Tensor& whole, int64_t num_ranks,
                       int64_t rank) {
  const Chunk chunk = ChunkOf(whole.size(-1), num_ranks, rank);
  return whole.narrow(-1, chunk.offset, chunk.size);
}

at::Tensor Leaf(const at::Tensor& value) {
  return value.detach().clone().set_requires_grad(true);
}

TEST(TensorParallelTest, ForwardIsWhatTheTableSays) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    SCOPED_TRACE(c10::toString(dtype));
    ForEachMesh([&](const MeshPtr& mesh, int64_t dim, int64_t replica) {
      const int64_t size = mesh->size(dim);
      const int64_t rank = mesh->coordinate(dim);
      // Fewer columns than ranks, uneven and even ones.
      for (const int64_t columns : {1, 3, 5, 8}) {
        SCOPED_TRACE(columns);
        const at::Tensor whole = Example({2, 3, columns}, replica, dtype);
        const at::Tensor chunk = ChunkOfRank(whole, size, rank);
        EXPECT_TRUE(at::equal(CopyToTensorParallel(whole, mesh, dim), whole));
        EXPECT_TRUE(
            at::equal(ScatterToTensorParallel(whole, mesh, dim), chunk));
        EXPECT_TRUE(at::equal(
            GatherFromTensorParallel(chunk, columns, mesh, dim), whole));

        // Whole numbers, which every dtype and order sums exactly.
        const at::Tensor part = at::full({3, columns}, rank + 1, dtype);
        EXPECT_TRUE(
            at::equal(ReduceFromTensorParallel(part, mesh, dim),
                      at::full({3, columns}, size * (size + 1) / 2, dtype)));
        EXPECT_TRUE(at::equal(part, at::full({3, columns}, rank + 1, dtype)))
            << "the input must stay as it is";
      }
    });
  }
}

TEST(TensorParallelTest, TakesStridedInputs) {
  RunRanks(2, [](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    const at::Tensor whole = Example({4, 6}, 0);
    EXPECT_TRUE(at::equal(
        GatherFromTensorParallel(ChunkOfRank(whole.t(), 2, rank), 4, mesh, 0),
        whole.t()));
    EXPECT_TRUE(
        at::equal(ReduceFromTensorParallel(whole.t(), mesh, 0), whole.t() * 2));
    EXPECT_TRUE(
        at::equal(ReduceFromTensorParallel(at::ones({1}).expand({5}), mesh, 0),
                  at::full({5}, 2.0)));
  });
}

struct Gradients {
  at::Tensor loss;
  at::Tensor input;         // d loss / d input
  at::Tensor weight;        // d loss / d weight
  at::Tensor twice_input;   // d |d loss / d input|^2 / d input
  at::Tensor twice_weight;  // d |d loss / d input|^2 / d weight
};

Gradients Differentiate(const at::Tensor& loss, const at::Tensor& input,
                        const at::Tensor& weight) {
  const auto first =
      torch::autograd::grad({loss}, {input, weight}, /*grad_outputs=*/{},
                            /*retain_graph=*/true, /*create_graph=*/true);
  const at::Tensor squares = first[0].square().sum();
  const auto second = torch::autograd::grad({squares}, {input, weight});
  return {loss.detach(), first[0].detach(), first[1].detach(), second[0],
          second[1]};
}

void ExpectClose(const at::Tensor& actual, const at::Tensor& expected,
                 const char* what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(at::allclose(actual, expected, /*rtol=*/1e-12, /*atol=*/1e-12))
      << what << "\n"
      << actual << "\nexpected\n"
      << expected;
}

TEST(TensorParallelTest, ColumnAndRowParallelGradientsAreThoseOfOneProcess) {
  for (const int64_t hidden : {1, 5, 8}) {
    SCOPED_TRACE(hidden);
    ForEachMesh([&](const MeshPtr& mesh, int64_t dim, int64_t replica) {
      const int64_t size = mesh->size(dim);
      const int64_t rank = mesh->coordinate(dim);
      const at::Tensor first = Example({hidden, 3}, 7);
      const at::Tensor second = Example({2, hidden}, 8);
      const at::Tensor target = Example({4, 2}, 9);
      const auto loss_of = [&](const at::Tensor& output) {
        return (output * output * target).sum();
      };

      const at::Tensor input = Leaf(Example({4, 3}, replica));
      const at::Tensor whole_first = Leaf(first);
      const Gradients expected = Differentiate(
          loss_of(at::linear(at::tanh(at::linear(input, whole_first)), second)),
          input, whole_first);

      const at::Tensor own_input = Leaf(Example({4, 3}, replica));
      const at::Tensor own_first = Leaf(ChunkOfRank(first.t(), size, rank).t());
      const at::Tensor own_second = ChunkOfRank(second, size, rank);
      const at::Tensor output = ReduceFromTensorParallel(
          at::linear(
              at::tanh(at::linear(CopyToTensorParallel(own_input, mesh, dim),
                                  own_first)),
              own_second),
          mesh, dim);
      const Gradients actual =
          Differentiate(loss_of(output), own_input, own_first);
      ExpectClose(actual.loss, expected.loss, "loss");
      ExpectClose(actual.input, expected.input, "input");
      ExpectClose(actual.weight,
                  ChunkOfRank(expected.weight.t(), size, rank).t(), "weight");
      ExpectClose(actual.twice_input, expected.twice_input, "twice, input");
      ExpectClose(actual.twice_weight,
                  ChunkOfRank(expected.twice_weight.t(), size, rank).t(),
                  "twice, weight");
    });
  }
}

TEST(TensorParallelTest, ScatterAndGatherGradientsAreThoseOfOneProcess) {
  for (const int64_t columns : {1, 5, 8}) {
    SCOPED_TRACE(columns);
    ForEachMesh([&](const MeshPtr& mesh, int64_t dim, int64_t replica) {
      const int64_t size = mesh->size(dim);
      const int64_t rank = mesh->coordinate(dim);
      const at::Tensor scale = Example({columns}, 7);
      const at::Tensor target = Example({4, columns}, 8);
      const auto loss_of = [&](const at::Tensor& output) {
        return (output * output * target).sum();
      };

      const at::Tensor input = Leaf(Example({4, columns}, replica));
      const at::Tensor whole_scale = Leaf(scale);
      const Gradients expected = Differentiate(
          loss_of(at::sin(input * whole_scale)), input, whole_scale);

      const at::Tensor own_input = Leaf(Example({4, columns}, replica));
      const at::Tensor own_scale = Leaf(ChunkOfRank(scale, size, rank));
      const at::Tensor own_output =
          at::sin(ScatterToTensorParallel(own_input, mesh, dim) * own_scale);
      const Gradients actual = Differentiate(
          loss_of(GatherFromTensorParallel(own_output, columns, mesh, dim)),
          own_input, own_scale);
      ExpectClose(actual.loss, expected.loss, "loss");
      ExpectClose(actual.input, expected.input, "input");
      ExpectClose(actual.weight, ChunkOfRank(expected.weight, size, rank),
                  "scale");
      ExpectClose(actual.twice_input, expected.twice_input, "twice, input");
      ExpectClose(actual.twice_weight,
                  ChunkOfRank(expected.twice_weight, size, rank),
                  "twice, scale");
    });
  }
}

TEST(TensorParallelTest, BackwardMakesACollectiveOnlyForAGradient) {
  RunRanks(2, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    const OperatorLog log;
    const at::Tensor weight = Leaf(at::ones({3}));
    const at::Tensor input = at::ones({2, 3});
    (CopyToTensorParallel(input, mesh, 0) * weight).sum().backward();
    EXPECT_EQ(log.CountCollectives(), 0);
    (CopyToTensorParallel(Leaf(input), mesh, 0) * weight).sum().backward();
    EXPECT_EQ(log.CountCollectives(), 1);

    ReduceFromTensorParallel(input * weight, mesh, 0).sum().backward();
    EXPECT_EQ(log.CountCollectives(), 2) << "that of forward";

    const at::Tensor half = at::ones({2});
    (ScatterToTensorParallel(input, mesh, 0).sum() * Leaf(half))
        .sum()
        .backward();
    EXPECT_EQ(log.CountCollectives(), 2);
    ScatterToTensorParallel(Leaf(input), mesh, 0).sum().backward();
    EXPECT_EQ(log.CountCollectives(), 3);

    GatherFromTensorParallel(Leaf(half), 4, mesh, 0).sum().backward();
    EXPECT_EQ(log.CountCollectives(), 4) << "that of forward";
  });
}

TEST(TensorParallelTest, ADimensionOfOneRankDoesNothing) {
  RunRanks(2, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        const MeshPtr mesh,
        DeviceMesh::Create(group, {{"data", 2}, {"tensor", 1}}));
    const OperatorLog log;
    const at::Tensor input = Leaf(at::ones({2, 3}));
    EXPECT_TRUE(CopyToTensorParallel(input, mesh, 1).is_same(input));
    EXPECT_TRUE(ReduceFromTensorParallel(input, mesh, 1).is_same(input));
    EXPECT_TRUE(ScatterToTensorParallel(input, mesh, 1).is_same(input));
    EXPECT_TRUE(GatherFromTensorParallel(input, 3, mesh, 1).is_same(input));
    EXPECT_EQ(log.CountCollectives(), 0);
  });
}

TEST(TensorParallelTest, TheGraphKeepsTheMesh) {
  RunRanks(2, [](int, GroupPtr group) {
    const at::Tensor input = Leaf(at::ones({3}));
    at::Tensor output;
    {
      LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                                DeviceMesh::Create(std::move(group)));
      output = CopyToTensorParallel(input, mesh, 0);
    }
    output.sum().backward();
    EXPECT_TRUE(at::equal(input.grad(), at::full({3}, 2.0)));
  });
}

TEST(TensorParallelTest, RefusesToGatherWhatIsNoChunk) {
  RunRanks(2, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                              DeviceMesh::Create(group, "tensor"));
    EXPECT_THAT(
        ErrorOf([&] { GatherFromTensorParallel(at::ones({3}), 9, mesh, 0); }),
        AllOf(HasSubstr("DeviceMesh(tensor=2), rank "),
              HasSubstr("this rank's chunk of 9")));
    EXPECT_THAT(
        ErrorOf([&] { GatherFromTensorParallel(at::ones({}), 2, mesh, 0); }),
        HasSubstr("can't gather []"));
  });
}

TEST(TensorParallelTest, ReportsAPeerThatLeft) {
  RunRanks(2, [](int rank, GroupPtr group) {
    if (rank == 1) return;
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                              DeviceMesh::Create(group, "tensor"));
    EXPECT_THAT(
        ErrorOf([&] {
          ReduceFromTensorParallel(at::ones({2, 3}), mesh, 0);
        }),
        AllOf(HasSubstr("DeviceMesh(tensor=2), rank 0: all-reduce over tensor"),
              HasSubstr("shape [2, 3] failed")));
  });
}

}  // namespace
}  // namespace trainer_lora::distributed

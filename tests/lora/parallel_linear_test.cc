// Every layer over 2 and 4 tensor parallel ranks, with and without data
// parallelism, against plain tensor operations on whole tensors in one process.
#include "lora/parallel_linear.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "c10/util/intrusive_ptr.h"
#include "distributed/device_mesh.h"
#include "distributed/gradient_sync.h"
#include "distributed/meta_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/linear.h"
#include "lora/lora_adapter.h"
#include "lora/lora_gradient_sync.h"
#include "tests/testutil/error_of.h"
#include "tests/testutil/operator_log.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/nn/module.h"
#include "torch/nn/options/linear.h"
#include "torch/nn/pimpl.h"

namespace trainer_lora::lora {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::trainer_lora::distributed::DeviceMesh;
using ::trainer_lora::testutil::ErrorOf;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::OperatorLog;
using ::trainer_lora::testutil::RunRanks;

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using MeshPtr = std::shared_ptr<const DeviceMesh>;

constexpr int64_t kLoraRank = 2;
constexpr double kAlpha = 3;
constexpr double kScale = kAlpha / kLoraRank;

// Values of no pattern, the same in every call of the same arguments.
at::Tensor Example(at::IntArrayRef shape, int64_t seed) {
  const int64_t numel = c10::multiply_integers(shape);
  return at::sin(at::arange(numel, at::kDouble) * 1.7 + 10 * seed + 1)
      .view(shape);
}

at::Tensor Leaf(const at::Tensor& value) {
  return value.detach().clone().set_requires_grad(true);
}

// The indices that rank `rank` of `size` has of `count`, as torch.chunk cuts.
at::Tensor ChunkIndices(int64_t count, int64_t size, int64_t rank) {
  const int64_t full = (count + size - 1) / size;
  const int64_t begin = std::min(count, full * rank);
  return at::arange(begin, std::min(count, begin + full), at::kLong);
}

// A layer of any of the types, in a model as its child `layer`.
struct BuiltLayer {
  template <typename Holder>
  explicit BuiltLayer(Holder holder)
      : layer(holder.ptr()), forward([holder](const at::Tensor& input) mutable {
          return holder(input);
        }) {
    model->register_module("layer", layer);
  }

  std::shared_ptr<torch::nn::Module> model =
      std::make_shared<torch::nn::Module>();
  std::shared_ptr<LoraLayer> layer;
  std::function<at::Tensor(const at::Tensor&)> forward;
};

struct Case {
  std::string name;
  int64_t in_features;
  int64_t out_features;
  bool bias;
  std::function<BuiltLayer(const MeshPtr& mesh)> build;
  // What the tensor parallel rank `rank` of `size` has of the input and output
  // features of the weight.
  std::function<at::Tensor(int64_t size, int64_t rank)> input_indices;
  std::function<at::Tensor(int64_t size, int64_t rank)> output_indices;
  // Whether it gets its part of the input, and gives its part of the output;
  // else all of them.
  bool splits_input;
  bool splits_output;
};

std::function<at::Tensor(int64_t, int64_t)> All(int64_t count) {
  return [count](int64_t, int64_t) { return at::arange(count, at::kLong); };
}

std::function<at::Tensor(int64_t, int64_t)> Chunks(int64_t count) {
  return [count](int64_t size, int64_t rank) {
    return ChunkIndices(count, size, rank);
  };
}

Case Column(std::string name, const ColumnParallelLinearOptions& options) {
  return {std::move(name),
          options.in_features,
          options.out_features,
          options.bias,
          [options](const MeshPtr& mesh) {
            return BuiltLayer(ColumnParallelLinear(options, mesh, "tensor"));
          },
          All(options.in_features),
          Chunks(options.out_features),
          /*splits_input=*/false,
          /*splits_output=*/!options.gather_output};
}

Case Merged(std::string name,
            const MergedColumnParallelLinearOptions& options) {
  int64_t out_features = 0;
  for (const int64_t size : options.out_features) out_features += size;
  return {
      std::move(name),
      options.in_features,
      out_features,
      options.bias,
      [options](const MeshPtr& mesh) {
        return BuiltLayer(MergedColumnParallelLinear(options, mesh, "tensor"));
      },
      All(options.in_features),
      [options](int64_t size, int64_t rank) {
        std::vector<at::Tensor> indices;
        int64_t begin = 0;
        for (const int64_t part : options.out_features) {
          indices.push_back(ChunkIndices(part, size, rank) + begin);
          begin += part;
        }
        return at::cat(indices);
      },
      /*splits_input=*/false,
      /*splits_output=*/true};
}

Case QKV(std::string name, const QKVParallelLinearOptions& options) {
  const int64_t out_features =
      (options.num_heads + 2 * options.num_kv_heads) * options.head_size;
  return {std::move(name),
          options.hidden_size,
          out_features,
          options.bias,
          [options](const MeshPtr& mesh) {
            return BuiltLayer(QKVParallelLinear(options, mesh, "tensor"));
          },
          All(options.hidden_size),
          [options](int64_t size, int64_t rank) {
            const auto heads = [&](int64_t first, int64_t count) {
              return at::arange(first * options.head_size,
                                (first + count) * options.head_size, at::kLong);
            };
            const int64_t num_heads = options.num_heads / size;
            const int64_t num_kv =
                std::max<int64_t>(options.num_kv_heads / size, 1);
            const int64_t first_kv = rank * options.num_kv_heads / size;
            return at::cat(
                {heads(rank * num_heads, num_heads),
                 heads(options.num_heads + first_kv, num_kv),
                 heads(options.num_heads + options.num_kv_heads + first_kv,
                       num_kv)});
          },
          /*splits_input=*/false,
          /*splits_output=*/true};
}

Case Row(std::string name, const RowParallelLinearOptions& options) {
  return {std::move(name),
          options.in_features,
          options.out_features,
          options.bias,
          [options](const MeshPtr& mesh) {
            return BuiltLayer(RowParallelLinear(options, mesh, "tensor"));
          },
          Chunks(options.in_features),
          All(options.out_features),
          /*splits_input=*/options.input_is_parallel,
          /*splits_output=*/false};
}

// How a layer is adapted.
struct Variant {
  bool use_dora = false;
  double weight = 1;  // Of the active adapter.
};

// The tensors of a whole layer, by the names of LoraLayer::LayoutOf().
struct WholeLayer {
  explicit WholeLayer(const Case& test, const Variant& variant = {})
      : weight(Leaf(Example({test.out_features, test.in_features}, 1))),
        bias(test.bias ? Leaf(Example({test.out_features}, 2)) : at::Tensor()),
        lora_A(Leaf(Example({kLoraRank, test.in_features}, 3))),
        lora_B(Leaf(Example({test.out_features, kLoraRank}, 4))),
        lora_magnitude(Leaf(Example({test.out_features}, 5) + 2)),
        variant(variant) {}

  at::Tensor operator()(const at::Tensor& input) const {
    const at::Tensor base = at::matmul(input, weight.t());
    at::Tensor adapted_weight = weight + kScale * at::matmul(lora_B, lora_A);
    if (variant.use_dora) {
      const at::Tensor norms = adapted_weight.detach().square().sum(1).sqrt();
      adapted_weight = adapted_weight * (lora_magnitude / norms).unsqueeze(1);
    }
    const at::Tensor adapted = at::matmul(input, adapted_weight.t());
    const at::Tensor output = base + variant.weight * (adapted - base);
    return bias.defined() ? output + bias : output;
  }

  at::Tensor weight;
  at::Tensor bias;
  at::Tensor lora_A;
  at::Tensor lora_B;
  at::Tensor lora_magnitude;
  Variant variant;
};

// Gives `layer` the values that rank `rank` of `size` has of `whole`.
void SetValues(const Case& test, const WholeLayer& whole, int64_t size,
               int64_t rank, LoraLayer& layer, bool adopt = true) {
  const at::NoGradGuard no_grad;
  const at::Tensor inputs = test.input_indices(size, rank);
  const at::Tensor outputs = test.output_indices(size, rank);
  layer.to(at::kDouble);
  layer.state("weight").copy_(
      whole.weight.index_select(0, outputs).index_select(1, inputs));
  if (test.bias) {
    layer.state("bias").copy_(whole.bias.index_select(0, outputs));
  }
  if (!adopt) return;
  LoraAdapterOptions options;
  options.rank = kLoraRank;
  options.alpha = kAlpha;
  options.use_dora = whole.variant.use_dora;
  auto adapter = layer.EmptyAdapter(options);
  ASSERT_THAT(adapter, IsOk());
  adapter->lora_A.copy_(whole.lora_A.index_select(1, inputs));
  adapter->lora_B.copy_(whole.lora_B.index_select(0, outputs));
  if (options.use_dora) {
    adapter->lora_magnitude.copy_(
        whole.lora_magnitude.index_select(0, outputs));
  }
  const at::AutoGradMode grad(true);
  ASSERT_THAT(layer.AdoptAdapter(*adapter), IsOk());
  ASSERT_THAT(
      layer.SetActiveAdapters({{kDefaultAdapter, whole.variant.weight}}),
      IsOk());
}

void ExpectClose(const at::Tensor& actual, const at::Tensor& expected,
                 const std::string& what) {
  ASSERT_TRUE(actual.defined()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  if (expected.numel() == 0) return;
  // An element may be the small difference of large ones.
  const double tolerance =
      1e-12 * std::max(1.0, expected.abs().max().item<double>());
  EXPECT_TRUE(at::allclose(actual, expected, /*rtol=*/0, tolerance))
      << what << "\n"
      << actual << "\nexpected\n"
      << expected;
}

// Calls `body` on the ranks of meshes with 1, 2 and 4 tensor parallel ranks,
// alone and with two data parallel ones.
void ForEachMesh(const std::function<void(const MeshPtr& mesh, int64_t data,
                                          int64_t rank)>& body) {
  for (const auto& [data, tensor] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {1, 2}, {1, 4}, {2, 2}}) {
    SCOPED_TRACE(data);
    SCOPED_TRACE(tensor);
    RunRanks(static_cast<int>(data * tensor), [&, data = data, tensor = tensor](
                                                  int, GroupPtr group) {
      LORA_ASSERT_OK_AND_ASSIGN(
          const MeshPtr mesh,
          DeviceMesh::Create(group, {{"data", data}, {"tensor", tensor}}));
      body(mesh, mesh->coordinate(0), mesh->coordinate(1));
    });
  }
}

at::Tensor InputOf(const Case& test, int64_t data) {
  return Example({3, 2, test.in_features}, 20 + data);
}

// The loss of a rank's output: of the part that it has, or of the whole, which
// every rank then computes alike.
at::Tensor LossOf(const Case& test, const at::Tensor& output, int64_t data,
                  int64_t rank) {
  const int64_t seed = 40 + 10 * data + (test.splits_output ? rank : 0);
  return (output * output * Example(output.sizes(), seed)).sum();
}

// Compares outputs and all gradients, after their synchronization.
void ExpectThoseOfOneProcess(const Case& test, const Variant& variant) {
  ForEachMesh([&](const MeshPtr& mesh, int64_t data, int64_t rank) {
    const int64_t size = mesh->size(1);
    // One process has every rank's loss, averaged over data.
    const WholeLayer whole(test, variant);
    at::Tensor expected_output;
    at::Tensor expected_input_gradient;
    for (int64_t d = 0; d < mesh->size(0); ++d) {
      const at::Tensor input = Leaf(InputOf(test, d));
      const at::Tensor output = whole(input);
      at::Tensor loss;
      if (test.splits_output) {
        loss = at::zeros({}, at::kDouble);
        for (int64_t r = 0; r < size; ++r) {
          loss = loss +
                 LossOf(test,
                        output.index_select(-1, test.output_indices(size, r)),
                        d, r);
        }
      } else {
        loss = LossOf(test, output, d, 0);
      }
      (loss / mesh->size(0)).backward();
      if (d != data) continue;
      expected_output = output.detach();
      expected_input_gradient = input.grad() * mesh->size(0);
    }
    const at::Tensor inputs = test.input_indices(size, rank);
    const at::Tensor outputs = test.output_indices(size, rank);
    if (test.splits_output) {
      expected_output = expected_output.index_select(-1, outputs);
    }

    const BuiltLayer built = test.build(mesh);
    SetValues(test, whole, size, rank, *built.layer);
    at::Tensor input = InputOf(test, data);
    if (test.splits_input) {
      input = input.index_select(-1, inputs);
      expected_input_gradient =
          expected_input_gradient.index_select(-1, inputs);
    }
    input = Leaf(input);
    const at::Tensor output = built.forward(input);
    ExpectClose(output.detach(), expected_output, "output");
    LossOf(test, output, data, rank).backward();
    ExpectClose(input.grad(), expected_input_gradient, "input gradient");

    LORA_ASSERT_OK_AND_ASSIGN(const int64_t synchronized,
                              SyncReplicatedLoraGradients(*built.model));
    EXPECT_EQ(synchronized, variant.use_dora ? 3 : 2);
    ExpectClose(built.layer->lora_A().grad(),
                whole.lora_A.grad().index_select(1, inputs), "lora_A");
    ExpectClose(built.layer->lora_B().grad(),
                whole.lora_B.grad().index_select(0, outputs), "lora_B");
    if (variant.use_dora) {
      ExpectClose(built.layer->adapter().lora_magnitude.grad(),
                  whole.lora_magnitude.grad().index_select(0, outputs),
                  "lora_magnitude");
    }

    // Weight and bias, for those who train them too.
    std::vector<distributed::DistributedParameter> base = {
        {"weight", built.layer->state("weight"),
         built.layer->LayoutOf("weight", 0)->layout}};
    if (test.bias) {
      base.push_back({"bias", built.layer->state("bias"),
                      built.layer->LayoutOf("bias", 0)->layout});
    }
    ASSERT_THAT(distributed::ReduceGradients(*mesh, base), IsOk());
    ExpectClose(
        base[0].parameter.grad(),
        whole.weight.grad().index_select(0, outputs).index_select(1, inputs),
        "weight");
    if (test.bias) {
      ExpectClose(base[1].parameter.grad(),
                  whole.bias.grad().index_select(0, outputs), "bias");
    }
  });
}

class ParallelLayerTest : public ::testing::TestWithParam<Case> {};

TEST_P(ParallelLayerTest, OutputsAndGradientsAreThoseOfOneProcess) {
  ExpectThoseOfOneProcess(GetParam(), {});
}

TEST_P(ParallelLayerTest, SoAreThoseOfDora) {
  for (const double weight : {1.0, 0.5}) {
    SCOPED_TRACE(weight);
    ExpectThoseOfOneProcess(GetParam(), {/*use_dora=*/true, weight});
  }
}

TEST_P(ParallelLayerTest, AdaptersMakeNoCollectiveInForwardAndBackward) {
  const Case& test = GetParam();
  RunRanks(2, [&](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                              DeviceMesh::Create(group, "tensor"));
    const WholeLayer whole(test);
    const auto count_collectives = [&](bool adopt) {
      const BuiltLayer built = test.build(mesh);
      SetValues(test, whole, 2, rank, *built.layer, adopt);
      at::Tensor input = InputOf(test, 0);
      if (test.splits_input) {
        input = input.index_select(-1, test.input_indices(2, rank));
      }
      input = Leaf(input);
      const OperatorLog log;
      built.forward(input).sum().backward();
      return log.CountCollectives();
    };
    const int64_t without = count_collectives(/*adopt=*/false);
    EXPECT_EQ(count_collectives(/*adopt=*/true), without);
    // A layer that takes or gives all features makes one more.
    EXPECT_EQ(without, test.splits_input || test.splits_output ? 1 : 2);
  });
}

// Each rank draws alone, as a process does: the generator is the process's.
std::mutex generator_mutex;

TEST_P(ParallelLayerTest, StartsWithTheRowsOrColumnsOfOneProcess) {
  const Case& test = GetParam();
  RunRanks(4, [&](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                              DeviceMesh::Create(group, "tensor"));
    const std::lock_guard<std::mutex> lock(generator_mutex);
    at::manual_seed(5);
    ReplicatedLinear whole(
        torch::nn::LinearOptions(test.in_features, test.out_features)
            .bias(test.bias));
    const at::Tensor drawn_next = at::rand({3});
    at::manual_seed(5);
    const BuiltLayer built = test.build(mesh);
    EXPECT_TRUE(at::equal(at::rand({3}), drawn_next));

    const at::Tensor inputs = test.input_indices(4, rank);
    const at::Tensor outputs = test.output_indices(4, rank);
    EXPECT_TRUE(at::equal(
        built.layer->state("weight"),
        whole->weight().index_select(0, outputs).index_select(1, inputs)));
    EXPECT_EQ(built.layer->state("bias").defined(), test.bias);
    if (test.bias) {
      EXPECT_TRUE(at::equal(built.layer->state("bias"),
                            whole->bias().index_select(0, outputs)));
    }
    EXPECT_EQ(built.layer->in_features(), inputs.numel());
    EXPECT_EQ(built.layer->out_features(), outputs.numel());

    at::manual_seed(5);
    const distributed::MetaDeviceGuard meta_device;
    const BuiltLayer meta = test.build(mesh);
    EXPECT_TRUE(meta.layer->state("weight").is_meta());
    EXPECT_EQ(meta.layer->state("weight").sizes(),
              built.layer->state("weight").sizes());
  });
}

TEST_P(ParallelLayerTest, ClonesComputeAlikeAndShareNothing) {
  const Case& test = GetParam();
  RunRanks(2, [&](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                              DeviceMesh::Create(group, "tensor"));
    const BuiltLayer built = test.build(mesh);
    SetValues(test, WholeLayer(test), 2, rank, *built.layer);
    const auto clone =
        std::dynamic_pointer_cast<LoraLayer>(built.layer->clone());
    ASSERT_NE(clone, nullptr);
    for (const char* name : {"weight", "lora_B"}) {
      ASSERT_TRUE(clone->LayoutOf(name, 2).has_value());
      EXPECT_EQ(clone->LayoutOf(name, 2)->layout.ToString(),
                built.layer->LayoutOf(name, 2)->layout.ToString());
    }
    EXPECT_TRUE(at::equal(clone->lora_B(), built.layer->lora_B()));
    EXPECT_FALSE(clone->lora_B().is_alias_of(built.layer->lora_B()));
    EXPECT_TRUE(
        at::equal(clone->state("weight"), built.layer->state("weight")));
    EXPECT_FALSE(
        clone->state("weight").is_alias_of(built.layer->state("weight")));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Layers, ParallelLayerTest,
    ::testing::Values(Column("Column", {5, 8}),
                      // Over four ranks the last chunk is empty.
                      Column("ColumnUneven", {3, 5, /*bias=*/false}),
                      Column("ColumnGathered",
                             {4, 7, /*bias=*/true, /*gather_output=*/true}),
                      Merged("Merged", {5, {8, 4}}),
                      Merged("MergedUneven", {3, {5, 3, 1}, /*bias=*/false}),
                      QKV("QKV", {5, 3, 4, 4}),
                      QKV("QKVGrouped", {5, 3, 8, 4, /*bias=*/false}),
                      QKV("QKVTwoKvHeads", {6, 2, 4, 2}),
                      QKV("QKVOneKvHead", {3, 3, 4, 1}), Row("Row", {8, 5}),
                      Row("RowUneven", {5, 3, /*bias=*/false}),
                      Row("RowOfWholeInput",
                          {7, 4, /*bias=*/true, /*input_is_parallel=*/false})),
    [](const auto& info) { return info.param.name; });

// --- Layers together ---------------------------------------------------------

// A transformer block whose k and v have fewer heads than there are ranks.
constexpr int64_t kHidden = 6;
constexpr int64_t kHeadSize = 3;
constexpr int64_t kHeads = 4;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kInner = 9;

using Layer = std::function<at::Tensor(const at::Tensor&)>;

// [tokens, kHidden] -> the same. The sizes are those of the parts of the output
// of `qkv` and `gate_up`.
at::Tensor RunBlock(const at::Tensor& input, const Layer& qkv, const Layer& out,
                    const Layer& gate_up, const Layer& down,
                    const std::vector<int64_t>& qkv_sizes,
                    const std::vector<int64_t>& gate_up_sizes) {
  const std::vector<at::Tensor> projections =
      at::split_with_sizes(qkv(input), qkv_sizes, 1);
  const auto by_head = [](const at::Tensor& projection) {
    return projection.unflatten(1, {-1, kHeadSize}).transpose(0, 1);
  };
  const int64_t group = qkv_sizes[0] / qkv_sizes[1];
  const at::Tensor q = by_head(projections[0]);
  const at::Tensor k = by_head(projections[1]).repeat_interleave(group, 0);
  const at::Tensor v = by_head(projections[2]).repeat_interleave(group, 0);
  const at::Tensor attention =
      at::matmul(at::softmax(at::matmul(q, k.transpose(1, 2)), -1), v);
  const at::Tensor hidden = input + out(attention.transpose(0, 1).flatten(1));
  const std::vector<at::Tensor> halves =
      at::split_with_sizes(gate_up(hidden), gate_up_sizes, 1);
  return hidden + down(at::silu(halves[0]) * halves[1]);
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const MeshPtr& mesh)
      : qkv(QKVParallelLinearOptions{kHidden, kHeadSize, kHeads, kKvHeads},
            mesh, "tensor"),
        out(RowParallelLinearOptions{kHeads * kHeadSize, kHidden}, mesh,
            "tensor"),
        gate_up(MergedColumnParallelLinearOptions{kHidden, {kInner, kInner}},
                mesh, "tensor"),
        down(RowParallelLinearOptions{kInner, kHidden}, mesh, "tensor") {
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("gate_up", gate_up);
    register_module("down", down);
  }

  at::Tensor forward(const at::Tensor& input) {
    return RunBlock(input, qkv, out, gate_up, down, qkv->output_sizes(),
                    gate_up->output_sizes());
  }

  std::vector<LoraLayer*> layers() {
    return {qkv.get(), out.get(), gate_up.get(), down.get()};
  }

  QKVParallelLinear qkv;
  RowParallelLinear out;
  MergedColumnParallelLinear gate_up;
  RowParallelLinear down;
};
TORCH_MODULE(Block);

// The same in one process, of plain operations on whole tensors.
struct WholeBlock {
  at::Tensor operator()(const at::Tensor& input) const {
    return RunBlock(
        input, qkv, out, gate_up, down,
        {kHeads * kHeadSize, kKvHeads * kHeadSize, kKvHeads * kHeadSize},
        {kInner, kInner});
  }

  std::vector<const WholeLayer*> layers() const {
    return {&qkv, &out, &gate_up, &down};
  }

  WholeLayer qkv{QKV("", {kHidden, kHeadSize, kHeads, kKvHeads})};
  WholeLayer out{Row("", {kHeads * kHeadSize, kHidden})};
  WholeLayer gate_up{Merged("", {kHidden, {kInner, kInner}})};
  WholeLayer down{Row("", {kInner, kHidden})};
};

// What this rank has of the whole tensor `name` of `layer`.
at::Tensor PartOf(const at::Tensor& whole, const LoraLayer& layer,
                  const std::string& name) {
  const auto layout = *layer.LayoutOf(name, kLoraRank);
  std::vector<at::Tensor> parts;
  for (const auto& slice : layout.SlicesOf(layout.layout.mesh->rank())) {
    at::Tensor part = whole;
    for (int64_t dim = 0; dim < whole.dim(); ++dim) {
      part = part.narrow(dim, slice.offsets[dim], slice.sizes[dim]);
    }
    parts.push_back(part);
  }
  return at::cat(parts);
}

void SetValues(const WholeBlock& whole, BlockImpl& block) {
  block.to(at::kDouble);
  for (size_t i = 0; i < block.layers().size(); ++i) {
    LoraLayer& layer = *block.layers()[i];
    const WholeLayer& values = *whole.layers()[i];
    LoraAdapterOptions options;
    options.rank = kLoraRank;
    options.alpha = kAlpha;
    auto adapter = layer.EmptyAdapter(options);
    ASSERT_THAT(adapter, IsOk());
    {
      const at::NoGradGuard no_grad;
      layer.state("weight").copy_(PartOf(values.weight, layer, "weight"));
      layer.state("bias").copy_(PartOf(values.bias, layer, "bias"));
      adapter->lora_A.copy_(PartOf(values.lora_A, layer, "lora_A"));
      adapter->lora_B.copy_(PartOf(values.lora_B, layer, "lora_B"));
    }
    ASSERT_THAT(layer.AdoptAdapter(*adapter), IsOk());
  }
}

TEST(ParallelBlockTest, GradientsAreThoseOfOneProcessWithoutAGatherInBetween) {
  ForEachMesh([](const MeshPtr& mesh, int64_t data, int64_t) {
    const auto input_of = [](int64_t data) {
      return Leaf(Example({5, kHidden}, 60 + data));
    };
    const auto loss_of = [](const at::Tensor& output, int64_t data) {
      return (output * output * Example(output.sizes(), 70 + data)).sum();
    };
    const WholeBlock whole;
    at::Tensor expected_output;
    at::Tensor expected_input_gradient;
    for (int64_t d = 0; d < mesh->size(0); ++d) {
      const at::Tensor input = input_of(d);
      const at::Tensor output = whole(input);
      (loss_of(output, d) / mesh->size(0)).backward();
      if (d != data) continue;
      expected_output = output.detach();
      expected_input_gradient = input.grad() * mesh->size(0);
    }

    Block block(mesh);
    SetValues(whole, *block);
    const at::Tensor input = input_of(data);
    const OperatorLog log;
    const at::Tensor output = block(input);
    EXPECT_EQ(log.CountCollectives(), mesh->size(1) == 1 ? 0 : 2);
    loss_of(output, data).backward();
    EXPECT_EQ(log.CountCollectives(), mesh->size(1) == 1 ? 0 : 4);
    ExpectClose(output.detach(), expected_output, "output");
    ExpectClose(input.grad(), expected_input_gradient, "input gradient");

    LORA_ASSERT_OK_AND_ASSIGN(
        const auto sync,
        distributed::GradientSync::Create(mesh, LoraParameters(*block)));
    ASSERT_THAT(sync->Sync(), IsOk());
    for (size_t i = 0; i < block->layers().size(); ++i) {
      const LoraLayer& layer = *block->layers()[i];
      const WholeLayer& values = *whole.layers()[i];
      ExpectClose(layer.lora_A().grad(),
                  PartOf(values.lora_A.grad(), layer, "lora_A"), "lora_A");
      ExpectClose(layer.lora_B().grad(),
                  PartOf(values.lora_B.grad(), layer, "lora_B"), "lora_B");
    }
  });
}

// --- What went wrong elsewhere -----------------------------------------------

TEST(ParallelLinearTest, TheDeltaIsAddedInEveryColumnParallelLayer) {
  RunRanks(2, [](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                              DeviceMesh::Create(group, "tensor"));
    for (const Case& test : {Column("column", {4, 6}), Merged("", {4, {4, 2}}),
                             QKV("", {4, 1, 2, 2})}) {
      const BuiltLayer built = test.build(mesh);
      WholeLayer whole(test);
      SetValues(test, whole, 2, rank, *built.layer);
      const at::Tensor input = InputOf(test, 0);
      const at::Tensor delta =
          built.forward(input) - at::linear(input, built.layer->state("weight"),
                                            built.layer->state("bias"));
      EXPECT_GT(delta.abs().max().item<double>(), 0.1);
    }
  });
}

TEST(ParallelLinearTest, ARowParallelLoraAIsLocalAndNotSlicedAgain) {
  RunRanks(2, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                              DeviceMesh::Create(group, "tensor"));
    const BuiltLayer built(
        RowParallelLinear(RowParallelLinearOptions{8, 3}, mesh, "tensor"));
    LoraAdapterOptions options;
    options.rank = kLoraRank;
    options.alpha = kAlpha;
    auto adapter = built.layer->EmptyAdapter(options);
    ASSERT_THAT(adapter, IsOk());
    EXPECT_THAT(adapter->lora_A.sizes(), ElementsAre(kLoraRank, 4));
    EXPECT_THAT(adapter->lora_B.sizes(), ElementsAre(3, kLoraRank));
    adapter->lora_A.fill_(1);
    adapter->lora_B.fill_(1);
    ASSERT_THAT(built.layer->AdoptAdapter(*adapter), IsOk());
    built.layer->state("weight").detach().zero_();
    built.layer->state("bias").detach().zero_();
    // Every one of the 8 input features counts once.
    EXPECT_TRUE(
        at::equal(built.forward(at::ones({1, 4})).detach(),
                  at::full({1, 3}, 8 * kLoraRank * kScale, at::kFloat)));
  });
}

TEST(ParallelLinearTest, TheLoraBOfMergedLayersIsAMatrix) {
  RunRanks(2, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                              DeviceMesh::Create(group, "tensor"));
    MergedColumnParallelLinear merged(
        MergedColumnParallelLinearOptions{4, {6, 2}}, mesh, "tensor");
    QKVParallelLinear qkv(QKVParallelLinearOptions{4, 3, 4, 1}, mesh, "tensor");
    EXPECT_THAT(merged->adapter_shapes(kLoraRank).lora_B,
                ElementsAre(4, kLoraRank));
    EXPECT_THAT(qkv->adapter_shapes(kLoraRank).lora_B,
                ElementsAre(12, kLoraRank));
    EXPECT_THAT(merged->output_sizes(), ElementsAre(3, 1));
    EXPECT_THAT(qkv->output_sizes(), ElementsAre(6, 3, 3));
  });
}

// --- Errors ------------------------------------------------------------------

TEST(ParallelLinearTest, RefusesWhatCannotBeSplit) {
  RunRanks(4, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                              DeviceMesh::Create(group, "tensor"));
    EXPECT_THAT(ErrorOf([] {
                  ColumnParallelLinear(ColumnParallelLinearOptions{2, 4},
                                       nullptr, "tensor");
                }),
                HasSubstr("ColumnParallelLinear: the mesh is null"));
    EXPECT_THAT(ErrorOf([&] {
                  RowParallelLinear(RowParallelLinearOptions{2, 4}, mesh, "tp");
                }),
                HasSubstr("RowParallelLinear: DeviceMesh(tensor=4) has no "
                          "dimension \"tp\""));
    EXPECT_THAT(ErrorOf([&] {
                  MergedColumnParallelLinear(
                      MergedColumnParallelLinearOptions{2, {}}, mesh, "tensor");
                }),
                HasSubstr("it needs at least one output"));
    const auto qkv_error = [&](int64_t heads, int64_t kv_heads) {
      return ErrorOf([&] {
        QKVParallelLinear(QKVParallelLinearOptions{2, 1, heads, kv_heads}, mesh,
                          "tensor");
      });
    };
    EXPECT_EQ(qkv_error(8, 8), "");
    EXPECT_EQ(qkv_error(4, 2), "");
    EXPECT_THAT(qkv_error(6, 2),
                HasSubstr("6 heads of q can't be split evenly over 4"));
    EXPECT_THAT(qkv_error(12, 6),
                HasSubstr("6 heads of k and v can neither be split"));
    EXPECT_THAT(qkv_error(12, 3),
                HasSubstr("3 heads of k and v can neither be split"));
    EXPECT_THAT(qkv_error(4, 0), HasSubstr("there must be heads"));
  });
}

TEST(ParallelLinearTest, ARowParallelLayerSaysWhichInputItWants) {
  RunRanks(2, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                              DeviceMesh::Create(group, "tensor"));
    RowParallelLinear layer(RowParallelLinearOptions{8, 3}, mesh, "tensor");
    EXPECT_THAT(ErrorOf([&] {
                  layer(at::ones({2, 8}));
                }),
                HasSubstr("wants 4 of 8 input features on this rank, got 8: "
                          "pass its chunk, or set input_is_parallel"));
  });
}

TEST(ParallelLinearTest, PrintsItsPart) {
  RunRanks(2, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                              DeviceMesh::Create(group, "tensor"));
    std::ostringstream text;
    text << *ColumnParallelLinear(ColumnParallelLinearOptions{2, 6}, mesh,
                                  "tensor")
         << "\n"
         << *RowParallelLinear(RowParallelLinearOptions{8, 3, false}, mesh,
                               "tensor");
    EXPECT_THAT(text.str(), HasSubstr("ColumnParallelLinear(in_features=2, "
                                      "out_features=3 of 6, bias=true)"));
    EXPECT_THAT(text.str(), HasSubstr("RowParallelLinear(in_features=4 of 8, "
                                      "out_features=3, bias=false)"));
  });
}

}  // namespace
}  // namespace trainer_lora::lora

// A run that is saved and resumed goes on with the bits of one that never
// stopped: adapters, the optimizer's state, dropout.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Context.h"
#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "c10/util/intrusive_ptr.h"
#include "config/lora_config.h"
#include "distributed/device_mesh.h"
#include "distributed/grad_norm.h"
#include "distributed/gradient_sync.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/adapter_file.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "lora/lora_gradient_sync.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/temporary_folder.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/nn/module.h"
#include "torch/optim/adamw.h"
#include "torch/serialize.h"

namespace trainer_lora {
namespace {

using ::trainer_lora::testutil::IsOk;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int64_t kSteps = 3;

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    register_module("to_q", to_q);
    register_module("to_out", to_out);
  }
  at::Tensor forward(const at::Tensor& x) { return to_out(to_q(x).relu()); }
  lora::ReplicatedLinear to_q{6, 8};
  lora::ReplicatedLinear to_out{8, 4};
};
TORCH_MODULE(Model);

at::Generator Generator() { return at::detail::getDefaultCPUGenerator(); }

// One process of a run, with everything that a step changes.
class Trainer {
 public:
  explicit Trainer(const GroupPtr& group) {
    // The base weights, as a checkpoint would give them to every trainer.
    at::manual_seed(1);
    model_ = Model();
    config::LoraConfig config;
    config.enable = true;
    config.rank = 2;
    config.dropout = 0.5;
    config.use_dora = true;
    EXPECT_THAT(lora::EnableLoraTraining(*model_, config), IsOk());
    parameters_ = lora::LoraParameters(*model_);
    mesh_ = distributed::DeviceMesh::Create(group).value();
    sync_ = distributed::GradientSync::Create(mesh_, parameters_).value();
    std::vector<at::Tensor> tensors;
    for (const auto& item : parameters_) tensors.push_back(item.parameter);
    optimizer_ = std::make_unique<torch::optim::AdamW>(
        tensors, torch::optim::AdamWOptions(1e-2));
  }

  void Train(int64_t begin, int64_t end) {
    model_->train();
    for (int64_t step = begin; step < end; ++step) {
      sync_->ZeroGrad();
      const at::Tensor batch =
          at::sin(at::arange(5 * 6, at::kFloat) + step).view({5, 6});
      (model_(batch) - 1).square().mean().backward();
      ASSERT_THAT(sync_->Sync(), IsOk());
      ASSERT_THAT(distributed::ClipGradNorm(*mesh_, parameters_, 1.0), IsOk());
      optimizer_->step();
    }
  }

  void Save(const testutil::TemporaryFolder& folder) {
    ASSERT_THAT(lora::SaveAdapter(*model_, folder.Path("adapter")), IsOk());
    torch::serialize::OutputArchive archive;
    optimizer_->save(archive);
    archive.write("generator", Generator().get_state(), /*is_buffer=*/true);
    archive.save_to(folder.Path("trainer.pt"));
  }

  void Resume(const testutil::TemporaryFolder& folder) {
    ASSERT_THAT(lora::LoadAdapter(*model_, folder.Path("adapter")), IsOk());
    torch::serialize::InputArchive archive;
    archive.load_from(folder.Path("trainer.pt"));
    optimizer_->load(archive);
    at::Tensor generator;
    archive.read("generator", generator, /*is_buffer=*/true);
    Generator().set_state(generator);
  }

  // What a step reads and writes.
  std::vector<at::Tensor> State() const {
    std::vector<at::Tensor> state;
    for (const auto& item : parameters_) {
      state.push_back(item.parameter.detach().clone());
      const auto& moments = static_cast<torch::optim::AdamWParamState&>(
          *optimizer_->state().at(item.parameter.unsafeGetTensorImpl()));
      state.push_back(moments.exp_avg().clone());
      state.push_back(moments.exp_avg_sq().clone());
      state.push_back(at::full({}, moments.step()));
    }
    state.push_back(Generator().get_state());
    return state;
  }

 private:
  Model model_ = nullptr;
  std::shared_ptr<const distributed::DeviceMesh> mesh_;
  std::vector<distributed::DistributedParameter> parameters_;
  std::unique_ptr<distributed::GradientSync> sync_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
};

TEST(ResumeTest, GoesOnWithTheBitsOfARunThatNeverStopped) {
  testutil::TemporaryFolder folder;
  testutil::RunRanks(1, [&](int, GroupPtr group) {
    std::vector<at::Tensor> expected;
    {
      Trainer trainer(group);
      trainer.Train(0, 2 * kSteps);
      expected = trainer.State();
    }
    {
      Trainer trainer(group);
      trainer.Train(0, kSteps);
      trainer.Save(folder);
    }
    Trainer trainer(group);
    at::manual_seed(99);
    trainer.Resume(folder);
    trainer.Train(kSteps, 2 * kSteps);
    const std::vector<at::Tensor> resumed = trainer.State();
    ASSERT_EQ(resumed.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::equal(resumed[i], expected[i])) << i;
    }
  });
}

}  // namespace
}  // namespace trainer_lora

// What people do with a libtorch model works on an adapted one too: containers,
// sharing, copies, conversions, archives.
#include <algorithm>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "config/lora_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/adapter_file.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/temporary_folder.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/container/any.h"
#include "torch/nn/modules/container/moduledict.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/normalization.h"
#include "torch/serialize.h"
#include "torch/types.h"

namespace trainer_lora::lora {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::TemporaryFolder;

constexpr int64_t kWidth = 6;

config::LoraConfig Config() {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 2;
  config.alpha = 4;
  config.target_modules = {"all-linear"};
  return config;
}

// So that the adapters count: lora_B starts at zero.
void RandomizeAdapters(const torch::nn::Module& model) {
  for (const NamedLoraLayer& item : LoraLayers(model)) {
    item.layer->lora_B().detach().uniform_(-1, 1);
  }
}

std::vector<std::string> LayerNames(const torch::nn::Module& model) {
  std::vector<std::string> names;
  for (const NamedLoraLayer& item : LoraLayers(model)) {
    names.push_back(item.name);
  }
  return names;
}

// layer(x) as the formula has it, from the layer's registered tensors.
at::Tensor Reference(const LoraLayer& layer, const at::Tensor& x) {
  const auto parameters = layer.named_parameters();
  const at::Tensor base = at::linear(x, parameters["base_layer.weight"],
                                     parameters["base_layer.bias"]);
  return base + layer.adapter().options.alpha /
                    static_cast<double>(layer.adapter().options.rank) *
                    at::matmul(at::matmul(x, parameters["lora_A"].t()),
                               parameters["lora_B"].t());
}

// A model in which two adapted layers follow each other, however they are held.
struct Case {
  std::string name;
  std::shared_ptr<torch::nn::Module> model;
  std::vector<std::string> layer_names;
  std::function<at::Tensor(const at::Tensor&)> forward;
};

ReplicatedLinear Linear() { return ReplicatedLinear(kWidth, kWidth); }

struct MembersImpl : torch::nn::Module {
  MembersImpl() {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  ReplicatedLinear first = Linear();
  ReplicatedLinear second = Linear();
};
TORCH_MODULE(Members);

Case MembersCase() {
  Members model;
  return {"members",
          model.ptr(),
          {"first", "second"},
          [model](const at::Tensor& x) mutable { return model(x); }};
}

Case SequentialCase() {
  torch::nn::Sequential model(Linear(), Linear());
  return {"Sequential",
          model.ptr(),
          {"0", "1"},
          [model](const at::Tensor& x) mutable { return model->forward(x); }};
}

Case ModuleListCase() {
  torch::nn::ModuleList model;
  model->push_back(Linear());
  model->push_back(Linear());
  return {"ModuleList", model.ptr(), {"0", "1"}, [model](at::Tensor x) mutable {
            for (const auto& child : *model) {
              x = child->as<ReplicatedLinear>()->forward(x);
            }
            return x;
          }};
}

Case ModuleDictCase() {
  torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>> layers;
  layers.insert("a", Linear().ptr());
  layers.insert("b", Linear().ptr());
  torch::nn::ModuleDict model(layers);
  return {"ModuleDict",
          model.ptr(),
          {"a", "b"},
          [model](const at::Tensor& x) mutable {
            return (*model)["b"]->as<ReplicatedLinear>()->forward(
                (*model)["a"]->as<ReplicatedLinear>()->forward(x));
          }};
}

Case AnyModuleCase() {
  auto model = std::make_shared<torch::nn::Module>("Model");
  auto first = std::make_shared<torch::nn::AnyModule>(Linear());
  auto second = std::make_shared<torch::nn::AnyModule>(Linear());
  model->register_module("first", first->ptr());
  model->register_module("second", second->ptr());
  return {"AnyModule",
          model,
          {"first", "second"},
          [first, second](const at::Tensor& x) {
            return second->forward(first->forward(x));
          }};
}

std::vector<Case> AllCases() {
  return {MembersCase(), SequentialCase(), ModuleListCase(), ModuleDictCase(),
          AnyModuleCase()};
}

TEST(AdaptedModelTest, EveryWayToHoldALayerSeesItsAdapter) {
  for (const Case& test : AllCases()) {
    SCOPED_TRACE(test.name);
    const at::Tensor x = at::randn({3, kWidth});
    const at::Tensor base_output = test.forward(x);
    ASSERT_THAT(EnableLoraTraining(*test.model, Config()), IsOk());
    EXPECT_THAT(LayerNames(*test.model), ElementsAreArray(test.layer_names));
    EXPECT_TRUE(at::equal(test.forward(x), base_output));

    RandomizeAdapters(*test.model);
    const auto layers = LoraLayers(*test.model);
    const at::Tensor expected =
        Reference(*layers[1].layer, Reference(*layers[0].layer, x));
    EXPECT_TRUE(at::allclose(test.forward(x), expected, 1e-5, 1e-5));
    EXPECT_FALSE(at::allclose(expected, base_output, 1e-2, 1e-2));
  }
}

TEST(AdaptedModelTest, TrainAndEvalReachEveryPart) {
  for (const Case& test : AllCases()) {
    SCOPED_TRACE(test.name);
    ASSERT_THAT(EnableLoraTraining(*test.model, Config()), IsOk());
    for (const bool training : {false, true}) {
      test.model->train(training);
      for (const auto& module : test.model->modules()) {
        EXPECT_EQ(module->is_training(), training) << module->name();
      }
    }
  }
}

TEST(AdaptedModelTest, ConvertingTheDtypeBeforeAndAfterGivesTheSame) {
  for (const Case& test : AllCases()) {
    SCOPED_TRACE(test.name);
    ASSERT_THAT(EnableLoraTraining(*test.model, Config()), IsOk());
    RandomizeAdapters(*test.model);
    const at::Tensor x = at::randn({3, kWidth});
    const at::Tensor before = test.forward(x);
    test.model->to(at::kDouble);
    for (const at::Tensor& parameter : test.model->parameters()) {
      EXPECT_EQ(parameter.scalar_type(), at::kDouble);
    }
    EXPECT_TRUE(at::allclose(test.forward(x.to(at::kDouble)),
                             before.to(at::kDouble), 1e-5, 1e-5));
    // What trains is what it was, and takes gradients of its own type.
    EXPECT_EQ(TrainableParameters(*test.model).size(), 4);
    test.forward(x.to(at::kDouble)).sum().backward();
    for (const auto& [name, parameter] : TrainableParameters(*test.model)) {
      EXPECT_EQ(parameter.grad().scalar_type(), at::kDouble) << name;
    }
  }
  Case converted_before = MembersCase();
  converted_before.model->to(at::kBFloat16);
  ASSERT_THAT(EnableLoraTraining(*converted_before.model, Config()), IsOk());
  for (const auto& item : TrainableParameters(*converted_before.model)) {
    EXPECT_EQ(item.parameter.scalar_type(), at::kBFloat16);
  }
}

// Where there is no second device, the CPU stands for it: the calls are those
// of a trainer, and what is checked holds for both.
TEST(AdaptedModelTest, AdaptersAreWhereTheirBaseIs) {
  const at::Device device =
      at::hasCUDA() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  for (const bool moves_before : {true, false}) {
    for (const Case& test : AllCases()) {
      SCOPED_TRACE(test.name);
      if (moves_before) test.model->to(device);
      ASSERT_THAT(EnableLoraTraining(*test.model, Config()), IsOk());
      if (!moves_before) test.model->to(device);
      for (const at::Tensor& parameter : test.model->parameters()) {
        EXPECT_EQ(parameter.device(), device);
      }
      EXPECT_EQ(test.forward(at::randn({3, kWidth}).to(device)).device(),
                device);
    }
  }
}

TEST(AdaptedModelTest, AnArchiveRestoresAnAdaptedModelBitwise) {
  const std::vector<Case> saved_cases = AllCases();
  const std::vector<Case> loaded_cases = AllCases();
  for (size_t i = 0; i < saved_cases.size(); ++i) {
    const Case& saved = saved_cases[i];
    const Case& loaded = loaded_cases[i];
    SCOPED_TRACE(saved.name);
    ASSERT_THAT(EnableLoraTraining(*saved.model, Config()), IsOk());
    RandomizeAdapters(*saved.model);
    std::stringstream stream;
    torch::serialize::OutputArchive output;
    saved.model->save(output);
    output.save_to(stream);

    ASSERT_THAT(EnableLoraTraining(*loaded.model, Config()), IsOk());
    torch::serialize::InputArchive input;
    input.load_from(stream);
    loaded.model->load(input);
    const at::Tensor x = at::randn({3, kWidth});
    EXPECT_TRUE(at::equal(loaded.forward(x), saved.forward(x)));
    EXPECT_EQ(TrainableParameters(*loaded.model).size(), 4);
  }
}

TEST(AdaptedModelTest, PrintsItsLayersWithTheirAdapters) {
  const Case test = SequentialCase();
  ASSERT_THAT(EnableLoraTraining(*test.model, Config()), IsOk());
  std::ostringstream stream;
  stream << *test.model;
  EXPECT_THAT(stream.str(),
              AllOf(HasSubstr("(0): trainer_lora::lora::ReplicatedLinear("
                              "in_features=6, out_features=6, bias=true, "
                              "lora_rank=2, lora_alpha=4)"),
                    HasSubstr("(1): ")));
}

// Two parents hold one layer, and a third place holds it once more.
struct SharingImpl : torch::nn::Cloneable<SharingImpl> {
  SharingImpl() { reset(); }
  void reset() override {
    shared = Linear();
    encoder = register_module("encoder", torch::nn::Sequential(shared));
    decoder = register_module("decoder",
                              torch::nn::Sequential(torch::nn::ReLU(), shared));
    register_module("head", shared);
  }
  ReplicatedLinear shared{nullptr};
  torch::nn::Sequential encoder{nullptr};
  torch::nn::Sequential decoder{nullptr};
};

TEST(AdaptedModelTest, ALayerOfTwoParentsHasOneAdapter) {
  SharingImpl model;
  LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                            EnableLoraTraining(model, Config()));
  EXPECT_THAT(training.layer_names, ElementsAre("encoder.0"));
  EXPECT_EQ(TrainableParameters(model).size(), 2);
  for (const char* name : {"encoder.0", "decoder.1", "head"}) {
    EXPECT_EQ(std::string(training.checkpoint_key_aliases.Resolve(
                  std::string(name) + ".weight")),
              std::string(name) + ".base_layer.weight");
  }
  RandomizeAdapters(model);
  const at::Tensor x = at::randn({3, kWidth});
  const at::Tensor expected =
      Reference(*model.shared, Reference(*model.shared, x).relu());
  EXPECT_TRUE(at::allclose(model.decoder->forward(model.encoder->forward(x)),
                           expected, 1e-5, 1e-5));
}

// A block as models have them: Cloneable, typed members, a norm.
struct BlockImpl : torch::nn::Cloneable<BlockImpl> {
  BlockImpl() { reset(); }
  void reset() override {
    to_q = register_module("to_q", Linear());
    norm = register_module(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    tail = register_module("tail", torch::nn::Sequential(Linear()));
  }
  at::Tensor forward(const at::Tensor& x) {
    return tail->forward(norm(to_q(x)));
  }
  ReplicatedLinear to_q{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Sequential tail{nullptr};
};

TEST(AdaptedModelTest, ACloneComputesTheSameAndSharesNothing) {
  auto model = std::make_shared<BlockImpl>();
  ASSERT_THAT(EnableLoraTraining(*model, Config()), IsOk());
  RandomizeAdapters(*model);
  const auto copy = std::dynamic_pointer_cast<BlockImpl>(model->clone());
  const at::Tensor x = at::randn({3, kWidth});
  const at::Tensor output = model->forward(x);
  EXPECT_TRUE(at::equal(copy->forward(x), output));
  EXPECT_EQ(copy->named_parameters().keys(), model->named_parameters().keys());
  for (const auto& item : LoraLayers(*copy)) {
    EXPECT_TRUE(item.layer->is_adapted()) << item.name;
    item.layer->lora_B().detach().zero_();
  }
  EXPECT_FALSE(at::equal(copy->forward(x), output));
  EXPECT_TRUE(at::equal(model->forward(x), output));
  // Finalizing the copy selects what trains, whatever clone() left.
  EXPECT_THAT(FinalizeLoraTraining(*copy), IsOk());
  EXPECT_EQ(TrainableParameters(*copy).size(), 4);
}

TEST(AdaptedModelTest, ACloneOfABaseModelCanBeEnabledApart) {
  auto model = std::make_shared<BlockImpl>();
  const auto copy = std::dynamic_pointer_cast<BlockImpl>(model->clone());
  ASSERT_THAT(EnableLoraTraining(*copy, Config()), IsOk());
  EXPECT_FALSE(model->to_q->is_adapted());
  EXPECT_TRUE(copy->to_q->is_adapted());
}

// Two roles that start from one seed, enabled and finalized in any order, train
// exactly their own adapters.
TEST(AdaptedModelTest, RolesDoNotDisturbEachOther) {
  auto student = std::make_shared<BlockImpl>();
  auto critic = std::make_shared<BlockImpl>();
  LoraTrainingOptions options;
  options.prepare_for_fsdp = true;
  options.initialization_scope = "student";
  ASSERT_THAT(EnableLoraTraining(*student, Config(), options), IsOk());
  options.initialization_scope = "critic";
  ASSERT_THAT(EnableLoraTraining(*critic, Config(), options), IsOk());
  for (const auto& model : {critic, student, critic}) {
    LORA_ASSERT_OK_AND_ASSIGN(const int64_t layers,
                              FinalizeLoraTraining(*model));
    EXPECT_EQ(layers, 2);
    EXPECT_EQ(TrainableParameters(*model).size(), 2 * layers);
  }
  EXPECT_FALSE(at::equal(student->to_q->lora_A(), critic->to_q->lora_A()));
}

std::vector<at::Tensor> AdapterValues(const torch::nn::Module& model) {
  std::vector<at::Tensor> values;
  for (const NamedLoraLayer& item : LoraLayers(model)) {
    values.push_back(item.layer->lora_A().detach().clone());
    values.push_back(item.layer->lora_B().detach().clone());
  }
  return values;
}

bool AreEqual(const std::vector<at::Tensor>& a,
              const std::vector<at::Tensor>& b) {
  return std::equal(
      a.begin(), a.end(), b.begin(), b.end(),
      [](const at::Tensor& x, const at::Tensor& y) { return at::equal(x, y); });
}

// The student's adapter resumes in the model of one role, and in no other,
// before or after these are finalized.
TEST(AdaptedModelTest, AResumedRoleDoesNotDisturbTheOther) {
  TemporaryFolder folder;
  BlockImpl trained;
  ASSERT_THAT(EnableLoraTraining(trained, Config()), IsOk());
  RandomizeAdapters(trained);
  ASSERT_THAT(SaveAdapter(trained, folder.Path("student")), IsOk());
  const std::vector<at::Tensor> saved = AdapterValues(trained);

  enum Step { kLoadStudent, kFinalizeStudent, kFinalizeCritic };
  std::vector<Step> order = {kLoadStudent, kFinalizeStudent, kFinalizeCritic};
  do {
    SCOPED_TRACE(::testing::PrintToString(order));
    BlockImpl student;
    BlockImpl critic;
    LoraTrainingOptions options;
    options.prepare_for_fsdp = true;
    ASSERT_THAT(EnableLoraTraining(student, Config(), options), IsOk());
    options.initialization_scope = "critic";
    ASSERT_THAT(EnableLoraTraining(critic, Config(), options), IsOk());
    const std::vector<at::Tensor> fresh = AdapterValues(critic);
    const at::Tensor base = student.to_q->weight().clone();
    for (const Step step : order) {
      if (step == kLoadStudent) {
        ASSERT_THAT(LoadAdapter(student, folder.Path("student")), IsOk());
      } else {
        ASSERT_THAT(
            FinalizeLoraTraining(step == kFinalizeStudent ? student : critic),
            IsOk());
      }
    }
    EXPECT_TRUE(AreEqual(AdapterValues(student), saved));
    EXPECT_TRUE(AreEqual(AdapterValues(critic), fresh));

    // A step of the student changes its adapters alone.
    const at::Tensor x = at::randn({3, kWidth});
    student.forward(x).square().sum().backward();
    std::vector<std::string> names;
    for (const auto& [name, parameter] : TrainableParameters(student)) {
      names.push_back(name);
      EXPECT_TRUE(parameter.grad().any().item<bool>()) << name;
      parameter.detach().sub_(parameter.grad());
    }
    EXPECT_THAT(names, ElementsAre("to_q.lora_A", "to_q.lora_B",
                                   "tail.0.lora_A", "tail.0.lora_B"));
    EXPECT_FALSE(AreEqual(AdapterValues(student), saved));
    EXPECT_TRUE(AreEqual(AdapterValues(critic), fresh));
    EXPECT_TRUE(at::equal(student.to_q->weight(), base));
    for (const auto& [name, parameter] : TrainableParameters(critic)) {
      EXPECT_FALSE(parameter.grad().defined()) << name;
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(AdaptedModelTest, AForwardOnMetaIsAnErrorThatNamesTheLayer) {
  auto model = std::make_shared<BlockImpl>();
  ASSERT_THAT(EnableLoraTraining(*model, Config()), IsOk());
  try {
    model->to_q->lora_B().unsafeGetTensorImpl()->shallow_copy_from(
        at::empty({kWidth, 2}, at::kMeta).getIntrusivePtr());
    model->forward(at::randn({3, kWidth}));
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                AllOf(HasSubstr("to_q"), HasSubstr("meta device")));
  }
}

}  // namespace
}  // namespace trainer_lora::lora

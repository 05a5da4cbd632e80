#include "distributed/checkpoint/load_plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "distributed/checkpoint/safetensors_checkpoint.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/state_dict_mapping.h"
#include "distributed/tensor_slice.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::StatusIs;

constexpr auto kUnfit = absl::StatusCode::kFailedPrecondition;

// The headers of a checkpoint, without files.
class Headers {
 public:
  Headers& Add(std::string name, TensorDtype dtype, std::vector<int64_t> shape,
               size_t file = 0) {
    infos_->push_back({std::move(name), dtype, std::move(shape), 0, 0});
    tensors_.push_back({file, &infos_->back()});
    return *this;
  }
  Headers& Add(std::string name, std::vector<int64_t> shape) {
    return Add(std::move(name), TensorDtype::kF32, std::move(shape));
  }
  const std::vector<CheckpointTensor>& tensors() const { return tensors_; }

 private:
  // A deque, so that they stay where they are; shared by copies.
  std::shared_ptr<std::deque<TensorInfo>> infos_ =
      std::make_shared<std::deque<TensorInfo>>();
  std::vector<CheckpointTensor> tensors_;
};

TargetTensor Whole(std::string name, std::vector<int64_t> shape,
                   TensorDtype dtype = TensorDtype::kF32) {
  return {{std::move(name)}, dtype, shape, {TensorSlice::Whole(shape)}};
}

TargetTensor Part(std::string name, std::vector<int64_t> shape,
                  std::vector<TensorSlice> slices) {
  return {{std::move(name)},
          TensorDtype::kF32,
          std::move(shape),
          std::move(slices)};
}

StateDictMapping Mapping(std::vector<MappingRule> rules) {
  absl::StatusOr<StateDictMapping> mapping =
      StateDictMapping::Create(std::move(rules));
  EXPECT_THAT(mapping, IsOk());
  return *mapping;
}

// Three projections that are one in the model.
StateDictMapping FusedMapping() {
  return Mapping({{R"((.*)to_q\.(.*))", R"(\1to_qkv.\2)", 0, 3},
                  {R"((.*)to_k\.(.*))", R"(\1to_qkv.\2)", 1, 3},
                  {R"((.*)to_v\.(.*))", R"(\1to_qkv.\2)", 2, 3}});
}

TEST(LoadPlanTest, ReadsAWholeTensorAtOnce) {
  const Headers headers = Headers().Add("w", {3, 4});
  LORA_ASSERT_OK_AND_ASSIGN(
      const LoadPlan plan,
      MakeLoadPlan({Whole("w", {3, 4})}, headers.tensors(), {}));
  ASSERT_THAT(plan.copies, SizeIs(1));
  EXPECT_EQ(plan.copies[0].num_runs, 1);
  EXPECT_EQ(plan.copies[0].run_elements, 12);
  EXPECT_EQ(plan.bytes_read, 48);
  EXPECT_THAT(plan.value_sources, ElementsAre(ValueSource::kCheckpoint));
}

TEST(LoadPlanTest, ReadsRowsAtOnce) {
  const Headers headers = Headers().Add("w", {3, 4});
  LORA_ASSERT_OK_AND_ASSIGN(
      const LoadPlan plan, MakeLoadPlan({Part("w", {3, 4}, {{{1, 0}, {2, 4}}})},
                                        headers.tensors(), {}));
  ASSERT_THAT(plan.copies, SizeIs(1));
  EXPECT_EQ(plan.copies[0].SourceBegin(0), 4);
  EXPECT_EQ(plan.copies[0].run_elements, 8);
  EXPECT_EQ(plan.bytes_read, 32);
}

TEST(LoadPlanTest, ReadsNothingForAnEmptyPart) {
  const Headers headers = Headers().Add("w", {3, 4}).Add("empty", {0, 4});
  LORA_ASSERT_OK_AND_ASSIGN(const LoadPlan plan,
                            MakeLoadPlan({Part("w", {3, 4}, {{{3, 0}, {0, 4}}}),
                                          Whole("empty", {0, 4})},
                                         headers.tensors(), {}));
  EXPECT_THAT(plan.copies, IsEmpty());
  EXPECT_EQ(plan.bytes_read, 0);
}

TEST(LoadPlanTest, SpansSmallGapsAndSkipsLargeOnes) {
  // Half of each row: gaps of 4 kB, and of 400 kB.
  const Headers headers =
      Headers().Add("narrow", {10'000, 2'000}).Add("wide", {10, 200'000});
  LORA_ASSERT_OK_AND_ASSIGN(
      const LoadPlan plan,
      MakeLoadPlan(
          {Part("narrow", {10'000, 2'000}, {{{0, 1'000}, {10'000, 1'000}}}),
           Part("wide", {10, 200'000}, {{{0, 100'000}, {10, 100'000}}})},
          headers.tensors(), {}));
  ASSERT_THAT(plan.copies, SizeIs(2));
  const PlannedCopy& narrow = plan.copies[0];
  EXPECT_GT(narrow.runs_per_read, 1);
  // Never more than a reader's buffer.
  for (int64_t run = 0; run < narrow.num_runs; run = narrow.ReadEnd(run)) {
    const int64_t last = narrow.ReadEnd(run) - 1;
    EXPECT_LE((narrow.SourceBegin(last) + narrow.run_elements -
               narrow.SourceBegin(run)) *
                  4,
              kMaxSpannedBytes);
  }
  EXPECT_EQ(plan.copies[1].runs_per_read, 1);
  EXPECT_EQ(plan.copies[1].bytes_read, 10 * 100'000 * 4);
}

TEST(LoadPlanTest, ConcatenatesPartsInTheirOrder) {
  const Headers headers = Headers()
                              .Add("a.to_k.weight", {2, 3})
                              .Add("a.to_q.weight", {4, 3})
                              .Add("a.to_v.weight", {2, 3});
  LoadPlanOptions options;
  options.mapping = FusedMapping();
  LORA_ASSERT_OK_AND_ASSIGN(const LoadPlan plan,
                            MakeLoadPlan({Whole("a.to_qkv.weight", {8, 3})},
                                         headers.tensors(), options));
  ASSERT_THAT(plan.copies, SizeIs(3));
  EXPECT_EQ(plan.copies[0].LocalBegin(0), 12);  // k after the 4 rows of q
  EXPECT_EQ(plan.copies[1].LocalBegin(0), 0);
  EXPECT_EQ(plan.copies[2].LocalBegin(0), 18);
  const std::vector<KeyPart>& origin = plan.origins.at("a.to_qkv.weight");
  ASSERT_THAT(origin, SizeIs(3));
  EXPECT_EQ(origin[0].key, "a.to_q.weight");
  EXPECT_EQ(origin[0].rows, 4);
  EXPECT_EQ(origin[2].key, "a.to_v.weight");
}

TEST(LoadPlanTest, MapsFirstAndAliasesThen) {
  const Headers headers = Headers().Add("attn.to_out.0.weight", {2, 2});
  LoadPlanOptions options;
  options.mapping = Mapping({{R"((.*)\.to_out\.0\.(.*))", R"(\1.to_out.\2)"}});
  ASSERT_THAT(options.aliases.Add("attn.to_out.weight",
                                  "attn.to_out.base_layer.weight"),
              IsOk());
  LORA_ASSERT_OK_AND_ASSIGN(
      const LoadPlan plan,
      MakeLoadPlan({Whole("attn.to_out.base_layer.weight", {2, 2})},
                   headers.tensors(), options));
  EXPECT_EQ(plan.origins.at("attn.to_out.base_layer.weight")[0].key,
            "attn.to_out.0.weight");
}

TEST(LoadPlanTest, SaysWhatIsMadeAnew) {
  LoadPlanOptions options;
  options.is_initializable = [](absl::string_view name) {
    return name == "a.lora_A";
  };
  options.zero_patterns = {R"(.*gate_compress.*)", R"(a\.lora_A)"};
  LORA_ASSERT_OK_AND_ASSIGN(
      const LoadPlan plan,
      MakeLoadPlan({Whole("a.lora_A", {2}), Whole("a.gate_compress.w", {2})},
                   {}, options));
  EXPECT_THAT(plan.value_sources,
              ElementsAre(ValueSource::kInitializer, ValueSource::kZero));
}

TEST(LoadPlanTest, LeavesKeysOut) {
  const Headers headers = Headers()
                              .Add("w", {2})
                              .Add("pooler.w", {2})
                              .Add("a._extra_state", {2})
                              .Add("b", {2});
  LoadPlanOptions options;
  options.ignored_patterns = {R"(pooler\..*)"};
  options.strict = false;
  LORA_ASSERT_OK_AND_ASSIGN(
      const LoadPlan plan,
      MakeLoadPlan({Whole("w", {2})}, headers.tensors(), options));
  EXPECT_THAT(plan.ignored, ElementsAre("pooler.w", "a._extra_state"));
  EXPECT_THAT(plan.unexpected, ElementsAre("b"));
}

TEST(LoadPlanTest, ListsAllProblemsAtOnce) {
  const Headers headers = Headers()
                              .Add("extra", {2})
                              .Add("shape", {2, 3})
                              .Add("type", TensorDtype::kI64, {2})
                              .Add("x.to_q.w", {2, 3})
                              .Add("x.to_v.w", {2, 3})
                              .Add("y.to_q.w", {2, 3})
                              .Add("y.to_k.w", {2, 3})
                              .Add("y.to_v.w", {2, 4});
  LoadPlanOptions options;
  options.mapping = FusedMapping();
  const absl::Status status =
      MakeLoadPlan(
          {Whole("missing", {2}), Whole("shape", {3, 2}), Whole("type", {2}),
           Whole("x.to_qkv.w", {6, 3}), Whole("y.to_qkv.w", {6, 3})},
          headers.tensors(), options)
          .status();
  EXPECT_THAT(
      status,
      StatusIs(kUnfit,
               AllOf(HasSubstr("no place for (see ignored_patterns): extra;"),
                     HasSubstr("not known to the initializer: missing;"),
                     HasSubstr("missing a part: x.to_qkv.w (part 1 of 3"),
                     HasSubstr("shape is F32 [2, 3] in the checkpoint and F32 "
                               "[3, 2] in the model"),
                     HasSubstr("type is I64 [2] in the checkpoint and F32 [2]"),
                     HasSubstr("y.to_qkv.w is F32 [2, 3] + F32 [2, 3] + F32 "
                               "[2, 4] in the checkpoint"))));
}

TEST(LoadPlanTest, RefusesTwoKeysForOneTensor) {
  const Headers headers =
      Headers().Add("a.to_out.0.w", {2}).Add("a.to_out.w", {2});
  LoadPlanOptions options;
  options.mapping = Mapping({{R"((.*)\.to_out\.0\.(.*))", R"(\1.to_out.\2)"}});
  const std::string twice = "(by the keys a.to_out.0.w and a.to_out.w)";
  EXPECT_THAT(
      MakeLoadPlan({Whole("a.to_out.w", {2})}, headers.tensors(), options),
      StatusIs(kUnfit, HasSubstr("given twice: a.to_out.w " + twice)));
  // Also where an alias leads on from there.
  ASSERT_THAT(options.aliases.Add("a.to_out.w", "a.to_out.base_layer.w"),
              IsOk());
  EXPECT_THAT(MakeLoadPlan({Whole("a.to_out.base_layer.w", {2})},
                           headers.tensors(), options),
              StatusIs(kUnfit, HasSubstr("a.to_out.base_layer.w " + twice)));
}

TEST(LoadPlanTest, RefusesAPartBesideAWhole) {
  const Headers headers = Headers().Add("a.to_q.w", {2}).Add("a.to_qkv.w", {6});
  LoadPlanOptions options;
  options.mapping = FusedMapping();
  EXPECT_THAT(
      MakeLoadPlan({Whole("a.to_qkv.w", {6})}, headers.tensors(), options),
      StatusIs(kUnfit, HasSubstr("given twice: a.to_qkv.w")));
}

// A layer that the checkpoint has under two names.
TEST(LoadPlanTest, ReadsTheFirstOfTwoAliases) {
  const Headers headers = Headers().Add("first", {2}).Add("second", {2});
  LoadPlanOptions options;
  ASSERT_THAT(options.aliases.Add("first", "shared"), IsOk());
  ASSERT_THAT(options.aliases.Add("second", "shared"), IsOk());
  LORA_ASSERT_OK_AND_ASSIGN(
      const LoadPlan plan,
      MakeLoadPlan({Whole("shared", {2})}, headers.tensors(), options));
  ASSERT_THAT(plan.copies, SizeIs(1));
  EXPECT_EQ(plan.copies[0].source, 0);
}

// Also where a wrapper has put its prefix before them.
TEST(LoadPlanTest, ReadsTheFirstOfTwoAliasesUnderAPrefix) {
  LoadPlanOptions options;
  ASSERT_THAT(options.aliases.Add("x.w", "x.base_layer.w"), IsOk());
  ASSERT_THAT(options.aliases.Add("y.w", "x.base_layer.w"), IsOk());
  const auto plan = [&](const std::string& first, const std::string& second) {
    const Headers headers = Headers().Add(first, {2}).Add(second, {2});
    return MakeLoadPlan({Whole("x.base_layer.w", {2})}, headers.tensors(),
                        options);
  };
  for (const std::string& prefix :
       std::vector<std::string>{"", "module.", "model._orig_mod."}) {
    LORA_ASSERT_OK_AND_ASSIGN(const LoadPlan found,
                              plan(prefix + "x.w", prefix + "y.w"));
    ASSERT_THAT(found.copies, SizeIs(1)) << prefix;
    EXPECT_EQ(found.copies[0].source, 0) << prefix;
  }
  // One alias twice is no shared layer.
  EXPECT_THAT(plan("module.x.w", "x.w"),
              StatusIs(kUnfit, HasSubstr("by the keys module.x.w and x.w")));
  EXPECT_THAT(plan("x.base_layer.w", "module.x.w"),
              StatusIs(kUnfit, HasSubstr("given twice: x.base_layer.w")));
}

TEST(LoadPlanTest, ReadsTheFirstOfTwoNames) {
  const Headers headers = Headers().Add("a", {2}).Add("b", {2});
  TargetTensor target = Whole("b", {2});
  target.names.push_back("a");
  LORA_ASSERT_OK_AND_ASSIGN(const LoadPlan plan,
                            MakeLoadPlan({target}, headers.tensors(), {}));
  ASSERT_THAT(plan.copies, SizeIs(1));
  EXPECT_EQ(plan.copies[0].source, 0);
  EXPECT_EQ(plan.origins.at("b")[0].key, "a");
}

TEST(LoadPlanTest, ConvertsFloatingPointTypesAlone) {
  const auto plan = [](TensorDtype from, TensorDtype to) {
    const Headers headers = Headers().Add("w", from, {8});
    return MakeLoadPlan({Whole("w", {8}, to)}, headers.tensors(), {}).status();
  };
  for (const TensorDtype from :
       {TensorDtype::kF8E4M3, TensorDtype::kF8E5M2, TensorDtype::kF16,
        TensorDtype::kBF16, TensorDtype::kF32, TensorDtype::kF64}) {
    EXPECT_THAT(plan(from, TensorDtype::kBF16), IsOk());
    EXPECT_THAT(plan(from, TensorDtype::kI64),
                StatusIs(kUnfit, HasSubstr("w")));
  }
  EXPECT_THAT(plan(TensorDtype::kI64, TensorDtype::kI64), IsOk());
  EXPECT_THAT(plan(TensorDtype::kI32, TensorDtype::kI64), Not(IsOk()));
  EXPECT_THAT(plan(TensorDtype::kF8E8M0, TensorDtype::kF32), Not(IsOk()));
  EXPECT_THAT(plan(TensorDtype::kF4, TensorDtype::kF32), Not(IsOk()));
}

// A key of a file can't write lines of its own into a log.
TEST(LoadPlanTest, PrintsKeysInOneLine) {
  const Headers headers = Headers().Add("a\n\x1b[2J", {2});
  LoadPlanOptions options;
  EXPECT_THAT(MakeLoadPlan({}, headers.tensors(), options),
              StatusIs(kUnfit, HasSubstr(R"(: a\x0a\x1b[2J)")));
  options.strict = false;
  LORA_ASSERT_OK_AND_ASSIGN(const LoadPlan plan,
                            MakeLoadPlan({}, headers.tensors(), options));
  EXPECT_THAT(plan.unexpected, ElementsAre("a\n\x1b[2J"));
  EXPECT_THAT(plan.ToString({}, headers.tensors()),
              HasSubstr(R"(no place: a\x0a\x1b[2J)"));
}

TEST(LoadPlanTest, RefusesBrokenPatterns) {
  LoadPlanOptions options;
  options.ignored_patterns = {"("};
  EXPECT_THAT(MakeLoadPlan({}, {}, options),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("the ignored pattern \"(\"")));
  options.ignored_patterns = {};
  options.zero_patterns = {"["};
  EXPECT_THAT(MakeLoadPlan({}, {}, options),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("the zero pattern \"[\"")));
}

TEST(LoadPlanTest, IsPrinted) {
  const Headers headers = Headers()
                              .Add("w", TensorDtype::kBF16, {4, 3}, 0)
                              .Add("pooler", TensorDtype::kF32, {2}, 1);
  const std::vector<TargetTensor> targets = {
      Part("w", {4, 3}, {{{2, 0}, {2, 3}}}), Whole("lora_A", {5})};
  LoadPlanOptions options;
  options.ignored_patterns = {"pooler"};
  options.is_initializable = [](absl::string_view) { return true; };
  LORA_ASSERT_OK_AND_ASSIGN(const LoadPlan plan,
                            MakeLoadPlan(targets, headers.tensors(), options));
  EXPECT_EQ(plan.ToString(targets, headers.tensors()),
            "load plan: 2 tensors from 2 in the checkpoint, 12 bytes to read\n"
            "  w F32 [4, 3], here [2:4, 0:3] <- w (BF16, file 0: 1 x 6 "
            "elements from 6 to 0, 12 bytes read)\n"
            "  lora_A F32 [5], here [0:5] <- the initializer\n"
            "  ignored: pooler\n");
}

// What a plan says, done with numbers: element i of source s is its own value.
// Compared with an index computation that knows nothing of runs.
void CheckRandomPlan(int seed) {
  std::mt19937 random(seed);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  // Parts that differ in dimension 0, and slices that do as well.
  const int64_t ndim = pick(1, 4);
  std::vector<int64_t> shape;
  for (int64_t dim = 0; dim < ndim; ++dim) shape.push_back(pick(1, 7));
  const int64_t num_parts = pick(1, 3);
  Headers headers;
  std::vector<MappingRule> rules;
  std::vector<int64_t> part_rows;
  shape[0] = 0;
  for (int64_t part = 0; part < num_parts; ++part) {
    std::vector<int64_t> part_shape = shape;
    part_shape[0] = pick(0, 6);
    part_rows.push_back(part_shape[0]);
    headers.Add(absl::StrCat("part", part), part_shape);
    rules.push_back({absl::StrCat("part", part), "whole", part, num_parts});
  }
  for (const int64_t rows : part_rows) shape[0] += rows;

  TargetTensor target{{"whole"}, TensorDtype::kF32, shape, {}};
  TensorSlice slice = TensorSlice::Whole(shape);
  for (int64_t dim = 1; dim < ndim; ++dim) {
    slice.offsets[dim] = pick(0, shape[dim] - 1);
    slice.sizes[dim] = pick(1, shape[dim] - slice.offsets[dim]);
  }
  int64_t row = 0;
  do {
    slice.offsets[0] = pick(row, shape[0]);
    slice.sizes[0] = pick(0, shape[0] - slice.offsets[0]);
    target.slices.push_back(slice);
    row = slice.offsets[0] + slice.sizes[0];
  } while (pick(0, 1) == 1);

  LoadPlanOptions options;
  options.mapping = Mapping(rules);
  LORA_ASSERT_OK_AND_ASSIGN(const LoadPlan plan,
                            MakeLoadPlan({target}, headers.tensors(), options));

  // The whole tensor counts up through all parts.
  std::vector<int64_t> first_value(num_parts, 0);
  int64_t row_elements = 1;
  for (int64_t dim = 1; dim < ndim; ++dim) row_elements *= shape[dim];
  for (int64_t part = 1; part < num_parts; ++part) {
    first_value[part] =
        first_value[part - 1] + part_rows[part - 1] * row_elements;
  }

  std::vector<int64_t> expected;
  for (const TensorSlice& wanted : target.slices) {
    for (int64_t i = 0; i < shape[0] * row_elements; ++i) {
      int64_t rest = i;
      bool inside = true;
      for (int64_t dim = ndim - 1; dim >= 0; --dim) {
        const int64_t index = rest % shape[dim];
        rest /= shape[dim];
        inside = inside && index >= wanted.offsets[dim] &&
                 index < wanted.offsets[dim] + wanted.sizes[dim];
      }
      if (inside) expected.push_back(i);
    }
  }

  std::vector<int64_t> local(expected.size(), -1);
  uint64_t bytes_read = 0;
  for (const PlannedCopy& copy : plan.copies) {
    for (int64_t begin = 0; begin < copy.num_runs;
         begin = copy.ReadEnd(begin)) {
      const int64_t end = copy.ReadEnd(begin);
      bytes_read += 4 * (copy.SourceBegin(end - 1) + copy.run_elements -
                         copy.SourceBegin(begin));
      for (int64_t run = begin; run < end; ++run) {
        for (int64_t i = 0; i < copy.run_elements; ++i) {
          local.at(copy.LocalBegin(run) + i) =
              first_value[copy.source] + copy.SourceBegin(run) + i;
        }
      }
    }
  }
  EXPECT_EQ(local, expected);
  EXPECT_EQ(plan.bytes_read, bytes_read);
  int64_t elements = 1;
  for (const int64_t size : LocalShape(target)) elements *= size;
  EXPECT_EQ(elements, expected.size());
}

TEST(LoadPlanTest, PutsEveryElementWhereItBelongs) {
  for (int seed = 0; seed < 2'000 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    CheckRandomPlan(seed);
  }
}

}  // namespace
}  // namespace trainer_lora::distributed

#include "distributed/device_mesh.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/arange.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"
#include "distributed/collectives.h"
#include "distributed/parameter_layout.h"
#include "distributed/placement.h"
#include "distributed/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"
#include "torch/csrc/distributed/c10d/Types.hpp"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::RunRanks;
using ::trainer_lora::testutil::StatusIs;

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using MeshPtr = std::shared_ptr<const DeviceMesh>;

// The ranks of `group` as the bits of a number, which its members add up. -1
// after an error.
int64_t Members(const MeshPtr& mesh, const GroupPtr& group) {
  absl::StatusOr<MeshPtr> line = DeviceMesh::Create(group);
  if (!line.ok()) return -1;
  const absl::StatusOr<double> sum =
      AllReduce(**line, std::ldexp(1.0, mesh->rank()), ReduceOp::kSum);
  EXPECT_TRUE(sum.ok()) << sum.status();
  return sum.ok() ? static_cast<int64_t>(*sum) : -1;
}

TEST(DeviceMeshTest, IsOneDimensionOverAGroup) {
  RunRanks(3, [](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(MeshPtr mesh, DeviceMesh::Create(group));
    EXPECT_EQ(mesh->ndim(), 1);
    EXPECT_THAT(mesh->dim_names(), ElementsAre("replicate"));
    EXPECT_EQ(mesh->size(), 3);
    EXPECT_EQ(mesh->size(0), 3);
    EXPECT_EQ(mesh->rank(), rank);
    EXPECT_EQ(mesh->coordinate(0), rank);
    EXPECT_EQ(mesh->group(), group);
    EXPECT_EQ(mesh->group(0), group);
    EXPECT_EQ(mesh->ToString(), "DeviceMesh(replicate=3)");
    EXPECT_EQ(mesh->RankString(),
              "DeviceMesh(replicate=3), rank " + std::to_string(rank));
  });
}

TEST(DeviceMeshTest, TakesTheNameOfItsDimension) {
  RunRanks(1, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(MeshPtr mesh, DeviceMesh::Create(group, "data"));
    EXPECT_EQ(mesh->ToString(), "DeviceMesh(data=1)");
  });
}

TEST(DeviceMeshTest, RefusesANullGroupAndANamelessDimension) {
  for (const absl::Status& status :
       {DeviceMesh::Create(nullptr).status(),
        DeviceMesh::Create(nullptr, {{"a", 1}, {"b", 1}}).status()}) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                                 HasSubstr("process group")));
  }
  RunRanks(1, [](int, GroupPtr group) {
    EXPECT_THAT(
        DeviceMesh::Create(group, ""),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("name")));
  });
}

// Row-major: the coordinates are the digits of the rank, the last one lowest.
TEST(DeviceMeshGridTest, GroupsAreTheRanksThatDifferInOneCoordinate) {
  const std::vector<std::vector<int64_t>> grids = {
      {2, 2}, {2, 4}, {1, 4}, {4, 1}, {8}, {1}, {1, 1}, {2, 1, 3}, {2, 2, 2}};
  for (const std::vector<int64_t>& sizes : grids) {
    std::vector<MeshDim> dims;
    int64_t world_size = 1;
    for (int dim = 0; dim < sizes.size(); ++dim) {
      dims.push_back({"d" + std::to_string(dim), sizes[dim]});
      world_size *= sizes[dim];
    }
    SCOPED_TRACE(::testing::PrintToString(sizes));
    RunRanks(world_size, [&](int rank, GroupPtr group) {
      SCOPED_TRACE(::testing::PrintToString(sizes));
      LORA_ASSERT_OK_AND_ASSIGN(MeshPtr mesh, DeviceMesh::Create(group, dims));
      ASSERT_EQ(mesh->ndim(), sizes.size());
      EXPECT_EQ(mesh->size(), world_size);
      EXPECT_EQ(mesh->rank(), rank);
      EXPECT_EQ(mesh->group(), group);

      int64_t stride = world_size;
      for (int64_t dim = 0; dim < sizes.size(); ++dim) {
        SCOPED_TRACE(dim);
        stride /= sizes[dim];
        const int64_t coordinate = rank / stride % sizes[dim];
        EXPECT_EQ(mesh->size(dim), sizes[dim]);
        EXPECT_EQ(mesh->coordinate(dim), coordinate);

        int64_t members = 0;
        for (int64_t other = 0; other < sizes[dim]; ++other) {
          members += int64_t{1} << (rank + (other - coordinate) * stride);
        }
        ASSERT_NE(mesh->group(dim), nullptr);
        EXPECT_EQ(mesh->group(dim)->getSize(), sizes[dim]);
        EXPECT_EQ(mesh->group(dim)->getRank(), coordinate);
        EXPECT_EQ(Members(mesh, mesh->group(dim)), members);
      }
    });
  }
}

TEST(DeviceMeshGridTest, NamesItsDimensionsAndThisRanksPlace) {
  RunRanks(6, [](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        MeshPtr mesh,
        DeviceMesh::Create(group, {{"replicate", 2}, {"shard", 3}}));
    EXPECT_EQ(mesh->ToString(), "DeviceMesh(replicate=2, shard=3)");
    if (rank == 5) {
      EXPECT_EQ(mesh->RankString(),
                "DeviceMesh(replicate=2, shard=3), rank 5 at (1, 2)");
    }
    LORA_ASSERT_OK_AND_ASSIGN(int64_t dim, mesh->DimByName("shard"));
    EXPECT_EQ(dim, 1);
    EXPECT_THAT(
        mesh->DimByName("tensor"),
        StatusIs(absl::StatusCode::kNotFound,
                 HasSubstr("DeviceMesh(replicate=2, shard=3) has no dimension "
                           "\"tensor\"")));
  });
}

TEST(DeviceMeshGridTest, FlattenedDimensionsHaveOneGroup) {
  RunRanks(8, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        MeshPtr mesh, DeviceMesh::Create(group, {{"a", 2}, {"b", 2}, {"c", 2}},
                                         /*flattened=*/{{"b", "a"}}));
    LORA_ASSERT_OK_AND_ASSIGN(GroupPtr a_and_b, mesh->GroupOver({0, 1}));
    EXPECT_EQ(a_and_b->getSize(), 4);
    EXPECT_EQ(a_and_b->getRank(),
              2 * mesh->coordinate(0) + mesh->coordinate(1));
    // The even ranks, or the odd ones where c is 1.
    EXPECT_EQ(Members(mesh, a_and_b), 0b01010101 << mesh->coordinate(2));

    LORA_ASSERT_OK_AND_ASSIGN(GroupPtr b_and_a, mesh->GroupOver({1, 0}));
    EXPECT_EQ(b_and_a, a_and_b);
    LORA_ASSERT_OK_AND_ASSIGN(GroupPtr all, mesh->GroupOver({0, 1, 2}));
    EXPECT_EQ(all, group);
    LORA_ASSERT_OK_AND_ASSIGN(GroupPtr c, mesh->GroupOver({2}));
    EXPECT_EQ(c, mesh->group(2));

    EXPECT_THAT(mesh->GroupOver({0, 2}),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("no group over {a, c}: list these among "
                                   "`flattened` in DeviceMesh::Create")));
    for (const std::vector<int64_t>& bad :
         std::vector<std::vector<int64_t>>{{}, {0, 0}, {-1}, {3}}) {
      EXPECT_THAT(mesh->GroupOver(bad),
                  StatusIs(absl::StatusCode::kInvalidArgument,
                           HasSubstr("distinct dimensions in [0, 3)")));
    }
  });
}

// A group costs connections and threads.
TEST(DeviceMeshGridTest, HasOneGroupForTheSameRanks) {
  RunRanks(4, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        MeshPtr mesh,
        DeviceMesh::Create(group, {{"a", 1}, {"b", 4}, {"c", 1}}));
    EXPECT_EQ(mesh->group(1), group);
    EXPECT_EQ(mesh->group(0), mesh->group(2));
    LORA_ASSERT_OK_AND_ASSIGN(GroupPtr a_and_b, mesh->GroupOver({0, 1}));
    EXPECT_EQ(a_and_b, group);
    LORA_ASSERT_OK_AND_ASSIGN(GroupPtr a_and_c, mesh->GroupOver({0, 2}));
    EXPECT_EQ(a_and_c, mesh->group(0));
  });
}

TEST(DeviceMeshGridTest, SeveralMeshesShareAGroup) {
  RunRanks(4, [](int rank, GroupPtr group) {
    const std::vector<MeshDim> dims = {{"a", 2}, {"b", 2}};
    LORA_ASSERT_OK_AND_ASSIGN(MeshPtr first, DeviceMesh::Create(group, dims));
    LORA_ASSERT_OK_AND_ASSIGN(MeshPtr second, DeviceMesh::Create(group, dims));
    EXPECT_NE(first->group(1), second->group(1));
    // A mesh of a part of the ranks, in the store of that part.
    LORA_ASSERT_OK_AND_ASSIGN(
        MeshPtr part,
        DeviceMesh::Create(first->group(1), {{"x", 2}, {"y", 1}}));
    EXPECT_EQ(part->rank(), rank % 2);
    EXPECT_EQ(Members(first, part->group(0)), 0b11 << rank / 2 * 2);
    EXPECT_EQ(Members(first, second->group(0)), 0b101 << rank % 2);
    EXPECT_EQ(Members(first, part->group(1)), 1 << rank);
  });
}

// The groups hold on to what they need of the one they are from.
TEST(DeviceMeshGridTest, OutlivesTheCallersHandles) {
  RunRanks(4, [](int rank, GroupPtr group) {
    absl::StatusOr<MeshPtr> mesh =
        DeviceMesh::Create(std::move(group), {{"a", 2}, {"b", 2}});
    ASSERT_TRUE(mesh.ok()) << mesh.status();
    const GroupPtr b = (*mesh)->group(1);
    LORA_ASSERT_OK_AND_ASSIGN(MeshPtr line, DeviceMesh::Create(b));
    ASSERT_TRUE(Barrier(**mesh).ok());
    mesh = absl::CancelledError();
    LORA_ASSERT_OK_AND_ASSIGN(double sum,
                              AllReduce(*line, rank, ReduceOp::kSum));
    EXPECT_EQ(sum, rank < 2 ? 1 : 5);
  });
}

struct BadGrid {
  std::string name;
  std::vector<MeshDim> dims;
  std::vector<std::vector<std::string>> flattened;
  std::string in_message;
};

class BadGridTest : public ::testing::TestWithParam<BadGrid> {};

TEST_P(BadGridTest, IsAnErrorAndTheGroupStillWorks) {
  RunRanks(4, [](int, GroupPtr group) {
    EXPECT_THAT(
        DeviceMesh::Create(group, GetParam().dims, GetParam().flattened),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 HasSubstr(GetParam().in_message)));
    LORA_ASSERT_OK_AND_ASSIGN(MeshPtr mesh,
                              DeviceMesh::Create(group, {{"a", 2}, {"b", 2}}));
    EXPECT_TRUE(Barrier(*mesh).ok());
  });
}

INSTANTIATE_TEST_SUITE_P(
    Grids, BadGridTest,
    ::testing::Values(
        BadGrid{"TooFewRanks",
                {{"a", 2}, {"b", 3}},
                {},
                "DeviceMesh(a=2, b=3): the sizes must multiply to the 4 ranks"},
        BadGrid{"TooManyRanks", {{"a", 3}}, {}, "multiply to the 4 ranks"},
        BadGrid{"NoDimension", {}, {}, "DeviceMesh(): the sizes must multiply"},
        BadGrid{"OverflowsToTheRanks",
                {{"a", int64_t{1} << 62}, {"b", 4}, {"c", 4}, {"d", 4}},
                {},
                "multiply to the 4 ranks"},
        BadGrid{"NoRank", {{"a", 4}, {"b", 0}}, {}, "size of b must be at"},
        BadGrid{"TwoNegativeSizes", {{"a", -2}, {"b", -2}}, {}, "size of a"},
        BadGrid{"NoName", {{"a", 4}, {"", 1}}, {}, "got \"\""},
        BadGrid{"NameOfTwoLines", {{"a\nb", 4}}, {}, "letters, digits"},
        BadGrid{"SameName", {{"a", 2}, {"a", 2}}, {}, "two dimensions a"},
        BadGrid{"FlattensAnUnknownName",
                {{"a", 2}, {"b", 2}},
                {{"a", "b"}, {"a", "c"}},
                "flattened {a, c}: DeviceMesh(a=2, b=2) has no dimension c"},
        BadGrid{"FlattensANameTwice",
                {{"a", 2}, {"b", 2}},
                {{"a", "a"}},
                "flattened {a, a}: DeviceMesh(a=2, b=2) can have it once: a"},
        BadGrid{"FlattensNothing", {{"a", 4}}, {{}}, "at least one dimension"}),
    [](const ::testing::TestParamInfo<BadGrid>& info) {
      return info.param.name;
    });

TEST(DeviceMeshGridTest, RanksThatDifferAllSayHow) {
  RunRanks(4, [](int rank, GroupPtr group) {
    std::vector<MeshDim> dims = {{"a", 2}, {"b", 2}};
    if (rank == 3) dims = {{"a", 4}, {"b", 1}};
    EXPECT_THAT(
        DeviceMesh::Create(group, dims),
        StatusIs(absl::StatusCode::kFailedPrecondition,
                 HasSubstr("only on ranks 0, 1, 2: DeviceMesh(a=2, b=2); only "
                           "on rank 3: DeviceMesh(a=4, b=1)")));
    if (rank == 3) dims = {{"a", 3}, {"b", 1}};
    EXPECT_THAT(DeviceMesh::Create(group, dims),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("only on rank 3: DeviceMesh(a=3, b=1), "
                                   "DeviceMesh(a=3, b=1): the sizes must "
                                   "multiply to the 4 ranks")));
  });
}

TEST(DeviceMeshGridTest, AGroupWithoutItsResourcesIsAnError) {
  RunRanks(2, [](int, GroupPtr group) {
    const std::vector<MeshDim> dims = {{"a", 2}, {"b", 1}};
    LORA_ASSERT_OK_AND_ASSIGN(MeshPtr mesh, DeviceMesh::Create(group, dims));
    group->release_resources();
    EXPECT_THAT(Barrier(*mesh),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("DeviceMesh(a=2, b=1), rank ")));
    EXPECT_THAT(DeviceMesh::Create(group, dims),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("a new DeviceMesh")));
    EXPECT_EQ(mesh->size(0), 2);
  });
}

// A backend of a trainer's own, on which all ranks always say the same.
class OwnBackend : public c10d::Backend {
 public:
  using Backend::Backend;
  const std::string getBackendName() const override { return "own"; }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions&) override {
    output.view({getSize(), -1}).copy_(input.expand({getSize(), -1}));
    return c10::make_intrusive<DoneWork>();
  }

 private:
  struct DoneWork : c10d::Work {
    bool wait(std::chrono::milliseconds) override { return true; }
  };
};

TEST(DeviceMeshGridTest, NamesABackendWithoutPartsAndAMissingStore) {
  const auto own_group = [](c10::intrusive_ptr<c10d::Store> store) {
    auto group = c10::make_intrusive<c10d::ProcessGroup>(store, 0, 4);
    group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                      c10::make_intrusive<OwnBackend>(0, 4));
    return group;
  };
  const GroupPtr group = own_group(c10::make_intrusive<c10d::HashStore>());
  EXPECT_THAT(DeviceMesh::Create(group, {{"a", 2}, {"b", 2}}),
              StatusIs(absl::StatusCode::kUnimplemented,
                       AllOf(HasSubstr("rank 0 at (0, 0): no group over {a} of "
                                       "the ranks 0, 2: "),
                             HasSubstr("uses own for cpu"))));
  EXPECT_THAT(DeviceMesh::Create(own_group(nullptr), {{"a", 2}, {"b", 2}}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("DeviceMesh(a=2, b=2), rank 0"),
                             HasSubstr("has no store"))));
  // It needs no part of the group.
  EXPECT_THAT(DeviceMesh::Create(group, std::vector<MeshDim>{{"a", 4}}),
              IsOk());
}

// As the device has it after a collective was aborted: the lengths that the
// ranks seem to have are not those of the texts.
class WrongNumbersBackend final : public OwnBackend {
 public:
  using OwnBackend::OwnBackend;
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options) override {
    const auto work = OwnBackend::_allgather_base(output, input, options);
    if (input.scalar_type() == at::kLong) {
      output.copy_(at::arange(output.numel()));
    }
    return work;
  }
};

TEST(DeviceMeshGridTest, ALengthThatIsWrongEndsInAnError) {
  const std::string long_name(size_t{1} << 25, 'a');
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(
      c10::make_intrusive<c10d::HashStore>(), 0, 4);
  group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::make_intrusive<WrongNumbersBackend>(0, 4));
  EXPECT_THAT(DeviceMesh::Create(group, std::vector<MeshDim>{{long_name, 4}}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("the ranks must make the same call")));
}

// A rank's way to the store of its job.
class RanksStore final : public c10d::PrefixStore {
 public:
  explicit RanksStore(c10::intrusive_ptr<c10d::Store> store)
      : PrefixStore("job", std::move(store)) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (fails) throw std::runtime_error("the way is blocked");
    PrefixStore::set(key, value);
  }
  // So that Gloo calls set().
  bool hasExtendedApi() const override { return false; }

  bool fails = false;
};

// Rank 3 can't come to its first group. Rank 1 gives up there, 0 and 2 in the
// second group. Nevertheless they meet when they try again.
TEST(DeviceMeshGridTest, RanksThatFailedAtDifferentGroupsMeetAgain) {
  testutil::AllowRanksOnThreads();
  const auto shared_store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<int> tried = 0;
  const auto run_rank = [&](int rank) {
    const auto store = c10::make_intrusive<RanksStore>(shared_store);
    ProcessGroupOptions options;
    options.timeout = std::chrono::seconds(4);
    options.bind_address = "127.0.0.1";
    LORA_ASSERT_OK_AND_ASSIGN(
        const GroupPtr group,
        CreateGlooProcessGroup(store, rank, /*size=*/4, options));
    const std::vector<MeshDim> dims = {{"a", 2}, {"b", 2}};
    store->fails = rank == 3;
    EXPECT_THAT(DeviceMesh::Create(group, dims), Not(IsOk()));
    store->fails = false;
    ++tried;
    for (int i = 0; i < 1000 && tried < 4; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    LORA_ASSERT_OK_AND_ASSIGN(MeshPtr mesh, DeviceMesh::Create(group, dims));
    EXPECT_EQ(Members(mesh, mesh->group(0)), 0b101 << rank % 2);
    EXPECT_EQ(Members(mesh, mesh->group(1)), 0b11 << rank / 2 * 2);
  };
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank) ranks.emplace_back(run_rank, rank);
  for (std::thread& rank : ranks) rank.join();
}

// Several times, as the others then write to connections that are closed, which
// only sometimes comes to the signal SIGPIPE.
TEST(DeviceMeshGridTest, APeerThatLeftIsAnError) {
  for (int repetition = 0; repetition < 50; ++repetition) {
    RunRanks(4, [](int rank, GroupPtr group) {
      const std::vector<MeshDim> dims = {{"a", 2}, {"b", 2}};
      if (rank == 3) return;
      EXPECT_THAT(DeviceMesh::Create(group, dims),
                  StatusIs(absl::StatusCode::kUnavailable,
                           AllOf(HasSubstr("a new DeviceMesh, rank "),
                                 HasSubstr("comparison of the dimensions"))));
    });
  }
}

TEST(ParameterLayoutTest, ReplicatesOverEveryDimensionOfTheMesh) {
  RunRanks(2, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(MeshPtr mesh,
                              DeviceMesh::Create(group, {{"a", 2}, {"b", 1}}));
    const ParameterLayout layout = ParameterLayout::Replicated(mesh);
    EXPECT_EQ(layout.mesh, mesh);
    ASSERT_EQ(layout.placements.size(), 2);
    EXPECT_TRUE(layout.placements[0].is_replicate());
    EXPECT_THAT(layout.ReducedDims(GradientReduction::kAverage),
                ElementsAre(0, 1));
    EXPECT_THAT(layout.ReducedDims(GradientReduction::kSum), IsEmpty());
  });
}

TEST(ParameterLayoutTest, ListsTheDimensionsOfEachReduction) {
  RunRanks(1, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        MeshPtr mesh,
        DeviceMesh::Create(group,
                           {{"a", 1}, {"b", 1}, {"c", 1}, {"d", 1}, {"e", 1}}));
    const ParameterLayout layout = {
        mesh,
        {Placement::Replicate(), Placement::Replicate(GradientReduction::kSum),
         Placement::Shard(1), Placement::Replicate(GradientReduction::kNone),
         Placement::Replicate()}};
    EXPECT_THAT(layout.ReducedDims(GradientReduction::kAverage),
                ElementsAre(0, 4));
    EXPECT_THAT(layout.ReducedDims(GradientReduction::kSum), ElementsAre(1));
    EXPECT_EQ(layout.ToString(),
              "a: Replicate(average), b: Replicate(sum), c: Shard(1), "
              "d: Replicate(none), e: Replicate(average)");
    EXPECT_EQ((ParameterLayout{
                   mesh, std::vector<Placement>(6, Placement::Replicate())})
                  .ToString(),
              "a: Replicate(average), b: Replicate(average), "
              "c: Replicate(average), d: Replicate(average), "
              "e: Replicate(average), ?: Replicate(average)");
  });
}

}  // namespace
}  // namespace trainer_lora::distributed

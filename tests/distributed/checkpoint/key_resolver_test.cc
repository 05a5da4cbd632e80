#include "distributed/checkpoint/key_resolver.h"

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "distributed/checkpoint/key_aliases.h"
#include "distributed/checkpoint/state_dict_mapping.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::Eq;
using ::testing::Field;
using ::testing::Matcher;
using ::testing::Optional;
using ::trainer_lora::testutil::IsOk;

Matcher<std::optional<MappedKey>> IsPart(int64_t part, int64_t num_parts,
                                         std::string name) {
  return Optional(AllOf(Field("name", &MappedKey::name, std::move(name)),
                        Field("part", &MappedKey::part, part),
                        Field("num_parts", &MappedKey::num_parts, num_parts)));
}

Matcher<std::optional<MappedKey>> IsWhole(std::string name) {
  return IsPart(0, 1, std::move(name));
}

Matcher<std::optional<MappedKey>> IsUnknown() { return Eq(std::nullopt); }

KeyAliases MakeAliases(
    const std::vector<std::pair<std::string, std::string>>& pairs) {
  KeyAliases aliases;
  for (const auto& [key, name] : pairs) {
    EXPECT_THAT(aliases.Add(key, name), IsOk());
  }
  return aliases;
}

KeyResolver ResolverOf(const std::vector<std::string>& model_names) {
  return KeyResolver(StateDictMapping(), KeyAliases(), model_names);
}

TEST(KeyResolverTest, FindsTheNamesOfTheModelOnly) {
  const KeyResolver resolver = ResolverOf({"a.weight", "a.bias", ".", "b..c"});
  for (const std::string name : {"a.weight", "a.bias", ".", "b..c"}) {
    EXPECT_THAT(resolver.Resolve(name), IsWhole(name));
  }
  for (const std::string key : {"", "a", "a.weight.", ".a.weight", "b.c"}) {
    EXPECT_THAT(resolver.Resolve(key), IsUnknown()) << key;
    EXPECT_EQ(resolver.NameFor(key), key);
  }
}

TEST(KeyResolverTest, MapsThenFollowsAnAliasOnce) {
  LORA_ASSERT_OK_AND_ASSIGN(
      StateDictMapping mapping,
      StateDictMapping::Create({{"hf_(.*)", R"(\1)"},
                                {"k", "a", 1, 2},
                                {"b", "from_alias_to_rule"}}));
  const KeyResolver resolver(std::move(mapping),
                             MakeAliases({{"a", "b"}, {"b", "c"}}),
                             {"a", "b", "c", "hf_x"});
  EXPECT_THAT(resolver.Resolve("hf_a"), IsWhole("b"));
  EXPECT_THAT(resolver.Resolve("a"), IsWhole("b"));
  EXPECT_THAT(resolver.Resolve("hf_b"), IsWhole("c"));
  EXPECT_THAT(resolver.Resolve("k"), IsPart(1, 2, "b"));
  EXPECT_THAT(resolver.Resolve("c"), IsWhole("c"));
  // The mapping says that it is something else, even if the model has it.
  EXPECT_THAT(resolver.Resolve("hf_x"), IsUnknown());
  EXPECT_EQ(resolver.NameFor("hf_x"), "x");
  EXPECT_EQ(resolver.NameFor("_orig_mod.hf_a"), "b");
}

TEST(KeyResolverTest, SeesThroughWrappersAtAnyPlace) {
  const KeyResolver resolver = ResolverOf({"blocks.0.to_q.weight", "scale"});
  struct Case {
    std::string key;
    std::string name;
  };
  const Case cases[] = {
      {"_orig_mod.blocks.0.to_q.weight", "blocks.0.to_q.weight"},
      {"blocks._checkpoint_wrapped_module.0.to_q.weight",
       "blocks.0.to_q.weight"},
      {"blocks.0._fsdp_wrapped_module.to_q.weight", "blocks.0.to_q.weight"},
      {"blocks.0.to_q.weight._orig_mod", "blocks.0.to_q.weight"},
      {"_fsdp_wrapped_module._orig_mod.blocks.0._checkpoint_wrapped_module._"
       "fsdp_wrapped_module._fsdp_wrapped_module.to_q._orig_mod.weight",
       "blocks.0.to_q.weight"},
      {"module.blocks.0.to_q.weight", "blocks.0.to_q.weight"},
      {"base_model.model.blocks.0.to_q.weight", "blocks.0.to_q.weight"},
      {"transformer.blocks.0.to_q.weight", "blocks.0.to_q.weight"},
      {"diffusion_model.blocks.0.to_q.weight", "blocks.0.to_q.weight"},
      {"model.blocks.0.to_q.weight", "blocks.0.to_q.weight"},
      {"model.diffusion_model.blocks.0.to_q.weight", "blocks.0.to_q.weight"},
      {"base_model.model.model.blocks.0.to_q.weight", "blocks.0.to_q.weight"},
      {"module.module.scale", "scale"},
      {"_orig_mod.module._fsdp_wrapped_module.transformer._orig_mod.scale",
       "scale"},
      {"base_model._orig_mod.model.scale", "scale"},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(resolver.Resolve(c.key), IsWhole(c.name)) << c.key;
  }
}

TEST(KeyResolverTest, DoesNotTakeAPartOfASegmentForAWrapper) {
  const KeyResolver resolver = ResolverOf({"a.weight"});
  for (const std::string key :
       {"_orig_mod_a.weight", "_orig_moda.weight", "a._orig_mod2.weight",
        "a.x_orig_mod.weight", "a._orig_mod..weight", "my_module.a.weight",
        "modulea.weight", "base_model.a.weight", "a.module.weight", "module",
        "model.", "_orig_mod", "x.module.a.weight"}) {
    EXPECT_THAT(resolver.Resolve(key), IsUnknown()) << key;
  }
}

TEST(KeyResolverTest, KeepsAGenuinePrefix) {
  const KeyResolver resolver =
      ResolverOf({"module.a", "a", "model.model.b", "transformer.c"});
  EXPECT_THAT(resolver.Resolve("module.a"), IsWhole("module.a"));
  EXPECT_THAT(resolver.Resolve("_orig_mod.module.a"), IsWhole("module.a"));
  EXPECT_THAT(resolver.Resolve("module.module.a"), IsWhole("module.a"));
  EXPECT_THAT(resolver.Resolve("model.a"), IsWhole("a"));
  EXPECT_THAT(resolver.Resolve("base_model.model.model.model.b"),
              IsWhole("model.model.b"));
  EXPECT_THAT(resolver.Resolve("model.module.transformer.c"),
              IsWhole("transformer.c"));
  EXPECT_THAT(resolver.Resolve("model.b"), IsUnknown());
  EXPECT_THAT(resolver.Resolve("c"), IsUnknown());
}

TEST(KeyResolverTest, TriesMappingAndAliasesAtEachPrefix) {
  LORA_ASSERT_OK_AND_ASSIGN(
      StateDictMapping mapping,
      StateDictMapping::Create(
          {{R"(transformer\.h\.(\d+)\.(.*))", R"(blocks.\1.\2)"},
           {R"(q\.(.*))", R"(qkv.\1)", 0, 3}}));
  const KeyResolver resolver(std::move(mapping),
                             MakeAliases({{"blocks.0.w", "blocks.0.base.w"}}),
                             {"blocks.0.base.w", "qkv.w"});
  EXPECT_THAT(resolver.Resolve("transformer.h.0.w"),
              IsWhole("blocks.0.base.w"));
  EXPECT_THAT(resolver.Resolve("module.transformer.h.0.w"),
              IsWhole("blocks.0.base.w"));
  EXPECT_THAT(resolver.Resolve("model.blocks.0.w"), IsWhole("blocks.0.base.w"));
  EXPECT_THAT(resolver.Resolve("diffusion_model.model.q.w"),
              IsPart(0, 3, "qkv.w"));
  EXPECT_THAT(resolver.Resolve("module.transformer.h.1.w"), IsUnknown());
  // The first candidate's name is the one to report.
  EXPECT_EQ(resolver.NameFor("transformer.h._orig_mod.1.w"), "blocks.1.w");
  EXPECT_EQ(resolver.NameFor("module.transformer.h.1.w"),
            "module.transformer.h.1.w");
}

TEST(KeyResolverTest, AnswersWithTheNamesOfAWrappedModel) {
  LORA_ASSERT_OK_AND_ASSIGN(
      StateDictMapping mapping,
      StateDictMapping::Create(
          {{"clean", "a.w"}, {"spelled", "_orig_mod.a.w"}}));
  const std::string wrapped = "_orig_mod.a._checkpoint_wrapped_module.w";
  const KeyResolver resolver(
      std::move(mapping),
      MakeAliases({{"_orig_mod.b.w", "_orig_mod.b.base.w"}}),
      {wrapped, "_orig_mod.b.base.w"});
  for (const std::string key :
       {"_orig_mod.a._checkpoint_wrapped_module.w", "a.w", "module.a.w",
        "a._fsdp_wrapped_module.w", "clean", "spelled"}) {
    EXPECT_THAT(resolver.Resolve(key), IsWhole(wrapped)) << key;
  }
  for (const std::string key :
       {"b.w", "_orig_mod.b.w", "b._fsdp_wrapped_module.w", "model.b.base.w"}) {
    EXPECT_THAT(resolver.Resolve(key), IsWhole("_orig_mod.b.base.w")) << key;
  }
}

TEST(KeyResolverTest, PrefersTheNameWithoutWrappersOfTwoThatAreEqual) {
  const std::vector<std::vector<std::string>> orders = {
      {"x.w", "x._orig_mod.w"}, {"x._orig_mod.w", "x.w"}};
  for (const std::vector<std::string>& names : orders) {
    const KeyResolver resolver = ResolverOf(names);
    for (const std::string& name : names) {
      EXPECT_THAT(resolver.Resolve(name), IsWhole(name));
    }
    EXPECT_THAT(resolver.Resolve("_fsdp_wrapped_module.x.w"), IsWhole("x.w"));
    EXPECT_THAT(resolver.Resolve("module.x.w"), IsWhole("x.w"));
  }
}

TEST(KeyResolverTest, GuessesNoneOfTwoWrappedNamesThatAreEqual) {
  const std::vector<std::string> names = {"x._orig_mod.w",
                                          "x._fsdp_wrapped_module.w", "y"};
  const KeyResolver resolver = ResolverOf(names);
  for (const std::string& name : names) {
    EXPECT_THAT(resolver.Resolve(name), IsWhole(name));
  }
  EXPECT_THAT(resolver.Resolve("x.w"), IsUnknown());
  EXPECT_THAT(resolver.Resolve("_orig_mod.x.w"), IsUnknown());
}

TEST(KeyResolverTest, FollowsAnAliasToANameThatNeedsItsWrappers) {
  const KeyResolver resolver(
      StateDictMapping(),
      MakeAliases(
          {{"x.w", "x.base.w"}, {"x._orig_mod.w", "x._orig_mod.base.w"}}),
      {"x.base.w", "x._orig_mod.base.w"});
  EXPECT_THAT(resolver.Resolve("x.w"), IsWhole("x.base.w"));
  EXPECT_THAT(resolver.Resolve("x._orig_mod.w"), IsWhole("x._orig_mod.base.w"));
  EXPECT_THAT(resolver.Resolve("_orig_mod.x.w"), IsWhole("x.base.w"));
}

TEST(KeyResolverTest, GuessesNoneOfTwoAliasesThatAreEqual) {
  const KeyResolver resolver(
      StateDictMapping(),
      MakeAliases({{"x._orig_mod.w", "a"}, {"_orig_mod.x.w", "b"}}),
      {"a", "b"});
  EXPECT_THAT(resolver.Resolve("x.w"), IsUnknown());
  EXPECT_EQ(resolver.NameFor("x.w"), "x.w");
}

TEST(KeyResolverTest, FollowsTheAliasThatAKeySpellsOfSeveralThatAreEqual) {
  const KeyResolver resolver(StateDictMapping(),
                             MakeAliases({{"x._orig_mod.w", "a"},
                                          {"_orig_mod.x.w", "b"},
                                          {"y.w", "c"},
                                          {"y._orig_mod.w", "d"}}),
                             {"a", "b", "c", "d"});
  EXPECT_THAT(resolver.Resolve("x._orig_mod.w"), IsWhole("a"));
  EXPECT_THAT(resolver.Resolve("_orig_mod.x.w"), IsWhole("b"));
  EXPECT_THAT(resolver.Resolve("x._fsdp_wrapped_module.w"), IsUnknown());
  EXPECT_THAT(resolver.Resolve("y.w"), IsWhole("c"));
  EXPECT_THAT(resolver.Resolve("y._orig_mod.w"), IsWhole("d"));
  EXPECT_THAT(resolver.Resolve("_orig_mod.y.w"), IsWhole("c"));
}

TEST(KeyResolverTest, TakesOffEightPrefixesAtMost) {
  const KeyResolver resolver = ResolverOf({"w"});
  std::string key = "w";
  for (int prefixes = 1; prefixes <= 9; ++prefixes) {
    key = absl::StrCat(prefixes % 2 == 0 ? "model." : "base_model.model.", key);
    EXPECT_THAT(resolver.Resolve(key),
                prefixes <= 8 ? IsWhole("w") : IsUnknown());
  }
}

TEST(KeyResolverTest, FindsEachNameUnderRandomWrappers) {
  const std::vector<std::string> wrappers = {
      "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"};
  const std::vector<std::string> prefixes = {
      "module", "base_model.model", "transformer", "diffusion_model", "model"};
  std::vector<std::string> names;
  for (int i = 0; i < 100; ++i) {
    names.push_back(absl::StrCat("blocks.", i, ".attn.to_q.weight"));
  }
  const KeyResolver resolver = ResolverOf(names);
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    const std::string& name = names[i % names.size()];
    std::string key = name;
    for (int count = random() % 4; count > 0; --count) {
      key = absl::StrCat(prefixes[random() % prefixes.size()], ".", key);
    }
    std::vector<std::string> segments = absl::StrSplit(key, '.');
    for (int count = random() % 6; count > 0; --count) {
      segments.insert(segments.begin() + random() % (segments.size() + 1),
                      wrappers[random() % wrappers.size()]);
    }
    key = absl::StrJoin(segments, ".");
    ASSERT_THAT(resolver.Resolve(key), IsWhole(name)) << key;
  }
}

}  // namespace
}  // namespace trainer_lora::distributed

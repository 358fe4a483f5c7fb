// A misspelt key changes nothing and refuses nothing: it must at least be heard of.
#include "engine/unread_keys.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "engine/read_spec.h"

namespace weir {
namespace {

using Names = std::vector<std::string>;

Names unread_of(const std::string& text) {
  Names unread;
  const auto spec = read_spec(text, "C", &unread);
  EXPECT_TRUE(spec.ok()) << spec.status();
  return unread;
}

TEST(UnreadKeys, NamesMisspeltOnes) {
  EXPECT_EQ(unread_of(R"({"model_type": "gated_deltanet", "hidden_size": 64, "num_haeds": 2,
                          "norm_epz": 1e-5})"),
            (Names{"norm_epz", "num_haeds"}));
}

TEST(UnreadKeys, NamesThoseOfObjectsWithin) {
  EXPECT_EQ(unread_of(R"({"model_type": "delta_net", "hidden_size": 64,
                          "attn": {"layers": [1], "num_heads": 2, "windowsize": 8}})"),
            (Names{"attn.windowsize"}));
  EXPECT_EQ(unread_of(R"({"model_type": "delta_net", "hidden_size": 64,
                          "attn": [{"layers": [1], "num_heads": 2},
                                   {"layers": [2], "num_heads": 2, "rope_thetta": 8}]})"),
            (Names{"attn[1].rope_thetta"}));
}

TEST(UnreadKeys, PassesWhatOtherProgramsRead) {
  EXPECT_EQ(unread_of(R"({"model_type": "gla", "hidden_size": 64, "_name_or_path": "x",
                          "architectures": ["GLAForCausalLM"], "id2label": {"0": "LABEL_0"},
                          "transformers_version": "4.50.0", "use_cache": true})"),
            Names());
}

// A warning that every good file brings is read by nobody.
TEST(UnreadKeys, NoneInTheCheckpoints) {
  const std::filesystem::path vectors = WEIR_SOURCE_DIR "/tests/vectors";
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(vectors)) {
    if (!std::filesystem::exists(entry.path() / "config.json")) continue;
    Names unread;
    const auto spec = read_spec_folder(entry.path().string(), &unread);
    EXPECT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(unread, Names()) << entry.path();
    ++files;
  }
  EXPECT_GT(files, 40);
}

}  // namespace
}  // namespace weir

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/tokenizer.h"
#include "tests/unit/tokenizer_cases.h"

namespace weir {
namespace {

// sentencepiece's own programs, on files in a folder. They read lines, so no text here has two.
class Tools {
 public:
  static bool installed() {
    return std::system("command -v spm_encode spm_decode spm_train >/dev/null") == 0;
  }
  explicit Tools(std::string model) : model_(std::move(model)) {}

  std::string ids(const std::string& lines) const {
    return run("spm_encode --output_format=id", lines);
  }
  std::string text(const std::string& lines_of_ids) const {
    return run("spm_decode --input_format=id", lines_of_ids);
  }

 private:
  std::string run(const std::string& tool, const std::string& input) const {
    const test::TemporaryFolder folder;
    folder.write("in", input);
    const std::string in = folder.path() + "/in", out = folder.path() + "/out";
    const std::string command = tool + " --model=" + model_ + " <" + in + " >" + out;
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
    return read(out);
  }

  std::string model_;
};

std::string line_of(const std::vector<Token>& ids) {
  std::string line;
  for (const Token id : ids) {
    if (!line.empty()) line += ' ';
    line += std::to_string(id);
  }
  return line += '\n';
}

// Texts, and ids drawn at random, all but byte pieces: their bytes alone are no valid text.
void expect_equal(const std::string& folder, const Tools& tools) {
  const Tokenizer tokenizer = open(folder);
  std::string lines, ids, decoded;
  for (const std::string& text : texts()) {
    if (text.find_first_of("\r\n") != text.npos) continue;
    const std::vector<Token> encoded = tokenizer.encode(text);
    lines += text + "\n";
    ids += line_of(encoded);
    decoded += tokenizer.decode(encoded) + "\n";
  }
  EXPECT_EQ(ids, tools.ids(lines));
  EXPECT_EQ(decoded, tools.text(ids));

  std::mt19937 random(1);
  ids.clear();
  decoded.clear();
  for (int line = 0; line < 300; ++line) {
    std::vector<Token> drawn;
    for (size_t count = 1 + random() % 6; drawn.size() < count;) {
      const Token id = Token(random() % (random() % 2 == 0 ? 6 : uint32_t(tokenizer.size())));
      if (tokenizer.piece(id).find("<0x") != 0 && tokenizer.piece(id) != "\n") drawn.push_back(id);
    }
    ids += line_of(drawn);
    decoded += tokenizer.decode(drawn) + "\n";
  }
  EXPECT_EQ(decoded, tools.text(ids));
}

TEST(Tokenizer, EqualsSentencepiecesOwnTools) {
  if (!Tools::installed()) GTEST_SKIP() << "spm_encode, spm_decode or spm_train not installed";
  for (const std::string& folder : {kFolder, kDemo}) {
    SCOPED_TRACE(folder);
    expect_equal(folder, Tools(folder + "/tokenizer.model"));
  }
}

// Prefix spaces, suffix spaces, normalisation, no byte pieces, runs of spaces kept or not: what the
// test checkpoints do not have.
TEST(Tokenizer, EqualsSentencepiecesOwnToolsOnModelsOfEveryKind) {
  if (!Tools::installed()) GTEST_SKIP() << "spm_encode, spm_decode or spm_train not installed";
  for (const char* options :
       {"--model_type=unigram --byte_fallback=true",
        "--model_type=bpe --user_defined_symbols=\u2581,uds,\u2581\u2581x",
        "--model_type=bpe --remove_extra_whitespaces=false --user_defined_symbols=\u2581,uds",
        "--model_type=unigram --add_dummy_prefix=false --unk_surface=:unk: --vocab_size=256",
        "--model_type=bpe --treat_whitespace_as_suffix=true --control_symbols=ctl,cud",
        "--model_type=char --normalization_rule_name=nfkc_cf", "--model_type=word",
        "--model_type=bpe --add_dummy_prefix=false --remove_extra_whitespaces=false "
        "--normalization_rule_name=identity --allow_whitespace_only_pieces=true"}) {
    SCOPED_TRACE(options);
    const test::TemporaryFolder folder;
    std::string command = "spm_train --input=" WEIR_SOURCE_DIR "/README.md --vocab_size=420 ";
    command += "--hard_vocab_limit=false --model_prefix=" + folder.path() + "/tokenizer ";
    command += options;
    command += " >/dev/null 2>&1";
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
    expect_equal(folder.path(), Tools(folder.path() + "/tokenizer.model"));
  }
}

}  // namespace
}  // namespace weir

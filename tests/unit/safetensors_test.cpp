#include "engine/safetensors.h"

#include <gtest/gtest.h>

#include <sys/stat.h>

#include "engine/fingerprint.h"
#include "tests/unit/checkpoint_writer.h"

namespace weir {
namespace {

using test::safetensors_image;
using test::TemporaryFolder;
using test::TestTensor;
using test::TestTensors;
using test::write_file;

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string error_of(const std::string& image) {
  const std::string path = "F";
  const auto result = parse_safetensors(bytes_of(image), path);
  return result.ok() ? "accepted" : std::string(result.status().message());
}

std::string open_error(const std::string& folder) {
  const auto result = Safetensors::open_folder(folder);
  return result.ok() ? "accepted" : std::string(result.status().message());
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

const TestTensors kThree = {{"a", {TensorType::F32, {2, 2}, {1, 2, 3, 4}}},
                            {"b", {TensorType::BF16, {3}, {1, -2, 0.5f}}},
                            {"c", {TensorType::U8, {}, {7}}}};

TEST(ParseSafetensors, ReadsTypesShapesAndData) {
  const std::string image = test::safetensors_bytes(kThree), path = "F";
  const auto tensors = parse_safetensors(bytes_of(image), path);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_EQ(tensors->size(), 3u);
  const TensorView& a = tensors->at("a");
  EXPECT_EQ(a.type, TensorType::F32);
  EXPECT_EQ(a.shape, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(a.data.size(), 16u);
  float last = 0;
  std::memcpy(&last, a.data.data() + 12, 4);
  EXPECT_EQ(last, 4);
  EXPECT_EQ(tensors->at("b").elements(), 3);
  EXPECT_EQ(tensors->at("c").elements(), 1);  // a scalar
  EXPECT_EQ(*a.file, "F");
}

TEST(ParseSafetensors, AcceptsAnEmptyTensorAndDataAlignedToItsElementsOnly) {
  std::string header = R"({"e":{"dtype":"F32","shape":[0,4],"data_offsets":[0,0]},)"
                       R"("x":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}})";
  if (header.size() % 2) header += ' ';
  std::string image;
  test::append_bytes(image, uint64_t(header.size()));
  EXPECT_EQ(error_of(image + header + "ab"), "accepted");
}

TEST(ParseSafetensors, RefusesFilesThatAreTooShort) {
  EXPECT_EQ(error_of(""), "F: expected at least 8 bytes, found 0");
  EXPECT_EQ(error_of("1234567"), "F: expected at least 8 bytes, found 7");
  const std::string image = test::safetensors_bytes(kThree);
  for (size_t size = 0; size < image.size(); ++size) {
    EXPECT_NE(error_of(image.substr(0, size)), "accepted") << size;
  }
  EXPECT_NE(error_of(image + "x"), "accepted");
}

TEST(ParseSafetensors, RefusesAHeaderLengthBeyondTheFileOrTheLimit) {
  std::string image;
  test::append_bytes(image, UINT64_MAX);
  EXPECT_TRUE(has(error_of(image + "{}"), "found a header of 18446744073709551615"));
  image.clear();
  test::append_bytes(image, uint64_t(3));
  EXPECT_TRUE(has(error_of(image + "{}"), "inside a file of 10, found a header of 3"));
}

struct Refusal {
  const char* header;
  size_t data_bytes;
  const char* message;
};

TEST(ParseSafetensors, RefusesHeadersByWhatIsWrong) {
  const Refusal cases[] = {
      {"[]", 0, "expected the header to be an object, found a list"},
      {"7", 0, "expected the header to be an object, found the number 7"},
      {"{", 0, "the header is not JSON at its byte"},
      {"{}{}", 0, "the header is not JSON at its byte"},
      {"{}", 1, "expected 0 bytes of tensors, found 1"},
      {R"({"x":3})", 0, "tensor x: expected an object, found the number 3"},
      {R"({"x":{}})", 0, "tensor x: dtype is missing"},
      {R"({"x":{"dtype":"F32"}})", 0, "tensor x: shape is missing"},
      {R"({"x":{"dtype":"F32","shape":[]}})", 0, "tensor x: data_offsets is missing"},
      {R"({"x":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}})", 1, "found F8_E4M3"},
      {R"({"x":{"dtype":5}})", 0, "tensor x: dtype: expected a string, found the number 5"},
      {R"({"x":{"shape":"a"}})", 0, "tensor x: shape: expected a list, found a string"},
      {R"({"x":{"shape":[-1]}})", 0,
       "shape: expected whole numbers from 0 on, found the number -1"},
      {R"({"x":{"shape":[1.5]}})", 0, "found the number 1.5"},
      {R"({"x":{"shape":[[1]]}})", 0, "found a list"},
      {R"({"x":{"shape":[null]}})", 0, "found null"},
      {R"({"x":{"shape":[1,1,1,1,1,1,1,1,1]}})", 0, "expected at most 8 numbers in shape"},
      {R"({"x":{"kind":1}})", 0, "expected dtype, shape and data_offsets, found kind"},
      {R"({"x":{"dtype":"F32","dtype":"F16"}})", 0, "tensor x: dtype is there twice"},
      {R"({"x":{"shape":[],"shape":[]}})", 0, "tensor x: shape is there twice"},
      {R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2, "tensor x: is there twice"},
      {R"({"__metadata__":3})", 0, "__metadata__: expected an object, found the number 3"},
      {R"({"__metadata__":{"a":1}})", 0, "__metadata__: expected text only, found the number 1"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "__metadata__ is there twice"},
      {R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 1,
       "data_offsets: expected 2 numbers, found 1"},
      {R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1, "found [1, 0]"},
      {R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 1,
       "expected 0 <= begin <= end <= 1, found [0, 2]"},
      {R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4,
       "tensor x: expected 8 bytes for F32 [2], found 4"},
      {R"({"x":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0]}})", 0,
       "tensor x: shape [4294967296, 4294967296, 4] is too large"},
      {R"({"x":{"dtype":"U8","shape":[9223372036854775807,2],"data_offsets":[0,0]}})", 0,
       "is too large"},
      {R"({"x":{"dtype":"U8","shape":[18446744073709551615,0],"data_offsets":[0,0]}})", 0,
       "is too large"},
      {R"({"x":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,0]}})", 0,
       "expected whole numbers"},
      {R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
       R"("y":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})", 3,
       "tensor y: overlaps another: expected its data at 2, found 1"},
      {R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
       R"("y":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}})", 4,
       "tensor y: leaves a hole before it: expected its data at 2, found 3"},
      {R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2, "tensor x: leaves a hole"},
      {R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 2,
       "expected 1 bytes of tensors, found 2"},
      {R"({"u":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("x":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})", 5,
       "tensor x: expected its data at a multiple of 4 bytes in the file"},
  };
  for (const Refusal& c : cases) {
    const std::string error = error_of(safetensors_image(c.header, std::string(c.data_bytes, 0)));
    EXPECT_TRUE(has(error, c.message)) << c.header << "\n  " << error;
    EXPECT_EQ(error.substr(0, 3), "F: ");
  }
}

TEST(ParseSafetensors, DepthBombsCostNothing) {
  EXPECT_NE(error_of(safetensors_image(std::string(10'000'000, '['), "")), "accepted");
  std::string objects;
  for (int i = 0; i < 1'000'000; ++i) objects += R"({"a":)";
  EXPECT_NE(error_of(safetensors_image(objects, "")), "accepted");
}

TEST(ParseSafetensors, NoByteOfAHeaderCanBreakIt) {
  const std::string image = test::safetensors_bytes(kThree);
  for (size_t at = 0; at < image.size(); ++at) {
    for (const int change : {1, 0x20, 0x80, 0xff}) {
      std::string changed = image;
      changed[at] = char(changed[at] ^ change);
      error_of(changed);  // the sanitizers judge
    }
  }
}

TEST(ParseSafetensors, CorpusOfTheFuzzerIsHarmless) {
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(
           WEIR_SOURCE_DIR "/tests/fuzz/corpus/safetensors")) {
    error_of(test::read_file(entry.path().string()));
    ++files;
  }
  EXPECT_GT(files, 5u);
}

TEST(SafetensorsFolder, OneFileAndShardsGiveTheSameTensors) {
  TemporaryFolder one, many;
  write_file(one.file("model.safetensors"), test::safetensors_bytes(kThree));
  test::write_shards(many.path(), kThree, 2);
  auto single = Safetensors::open_folder(one.path());
  auto sharded = Safetensors::open_folder(many.path());
  ASSERT_TRUE(single.ok()) << single.status();
  ASSERT_TRUE(sharded.ok()) << sharded.status();
  for (const auto& [name, view] : single->tensors()) {
    const TensorView* other = sharded->find(name);
    ASSERT_TRUE(other);
    EXPECT_EQ(other->shape, view.shape);
    EXPECT_TRUE(std::equal(view.data.begin(), view.data.end(), other->data.begin()));
  }
  EXPECT_EQ(single->find("d"), nullptr);
  EXPECT_EQ(single->path(), one.file("model.safetensors"));
  EXPECT_EQ(sharded->path(), many.file("model.safetensors.index.json"));
  EXPECT_EQ(fingerprint("{}", *single), fingerprint("{}", *sharded));

  // A moved object keeps its mapping and its names.
  const TensorView* before = single->find("a");
  Safetensors moved = *std::move(single);
  EXPECT_EQ(moved.find("a"), before);
  EXPECT_EQ(*before->file, one.file("model.safetensors"));
}

TEST(SafetensorsFolder, SaysWhatCannotBeOpened) {
  TemporaryFolder folder;
  EXPECT_EQ(open_error(folder.path()),
            folder.path() +
                ": expected model.safetensors or model.safetensors.index.json, found neither");
  EXPECT_TRUE(has(open_error(folder.path() + "/no"), "found neither"));
  mkdir(folder.file("model.safetensors").c_str(), 0700);
  EXPECT_TRUE(has(open_error(folder.path()), "model.safetensors: expected a regular file"));
  const auto missing = Safetensors::open_file(folder.file("x"));
  EXPECT_EQ(missing.status().message(),
            folder.file("x") + ": cannot open: No such file or directory");
}

TEST(SafetensorsFolder, NamesTheEmptyFile) {
  TemporaryFolder folder;
  write_file(folder.file("model.safetensors"), "");
  EXPECT_EQ(open_error(folder.path()),
            folder.file("model.safetensors") + ": expected at least 8 bytes, found 0");
}

// Writes an index that maps names to shards, and opens the folder.
std::string index_error(const TemporaryFolder& folder, const nlohmann::json& map) {
  write_file(folder.file("model.safetensors.index.json"),
             nlohmann::json{{"weight_map", map}}.dump());
  return open_error(folder.path());
}

TEST(SafetensorsFolder, RefusesAnIndexThatLies) {
  TemporaryFolder folder;
  const TestTensors a = {{"a", {TensorType::U8, {1}, {1}}}};
  TestTensors ab = a;
  ab["b"] = {TensorType::U8, {1}, {2}};
  write_file(folder.file("one"), test::safetensors_bytes(a));
  write_file(folder.file("two"), test::safetensors_bytes(ab));

  EXPECT_EQ(index_error(folder, {{"a", "one"}}), "accepted");
  EXPECT_TRUE(has(index_error(folder, {{"a", "three"}}),
                  folder.file("three") + ": cannot open: No such file or directory; " +
                      folder.file("model.safetensors.index.json") + " names it"));
  EXPECT_TRUE(has(index_error(folder, {{"a", "one"}, {"c", "one"}}),
                  "tensor c: expected in one, which does not have it"));
  EXPECT_TRUE(has(index_error(folder, {{"a", "one"}, {"b", "two"}}),
                  "tensor a is in two files, also in " + folder.file("one")));
  EXPECT_TRUE(has(index_error(folder, {{"b", "two"}}), "which does not name it; found here"));
  for (const char* name : {"../one", "/etc/passwd", "..", ".", "", "sub/one", "a\\b"}) {
    EXPECT_TRUE(has(index_error(folder, {{"a", name}}), "tensor a: expected a file of this folder"))
        << name;
  }
  EXPECT_TRUE(has(index_error(folder, {{"a", 3}}), "tensor a: expected a file name, found 3"));
  EXPECT_TRUE(has(index_error(folder, nullptr), "weight_map: expected an object"));
  EXPECT_TRUE(has(index_error(folder, nlohmann::json::object()), "weight_map names no tensor"));
  for (const char* text : {"", "[]", "{", R"({"weight_map":{"a":"one","a":"two"}})"}) {
    write_file(folder.file("model.safetensors.index.json"), text);
    EXPECT_NE(open_error(folder.path()), "accepted") << text;
  }
}

TEST(Fingerprint, ChangesWithConfigNameShapeAndEveryByte) {
  std::set<std::string> seen;
  const auto add = [&](const std::string& config, const TestTensors& tensors) {
    TemporaryFolder folder;
    write_file(folder.file("model.safetensors"), test::safetensors_bytes(tensors));
    write_file(folder.file("config.json"), config);
    const auto files = Safetensors::open_folder(folder.path());
    ASSERT_TRUE(files.ok());
    const std::string digits = fingerprint(config, *files);
    EXPECT_EQ(digits.size(), 32u);
    EXPECT_EQ(digits.find_first_not_of("0123456789abcdef"), std::string::npos);
    EXPECT_EQ(*fingerprint_folder(folder.path(), *files), digits);
    EXPECT_TRUE(seen.insert(digits).second);
  };
  TestTensors tensors = kThree;
  add("{}", tensors);
  add("{ }", tensors);
  tensors["a"].values[3] = 5;
  add("{}", tensors);
  tensors["a"].shape = {4};
  add("{}", tensors);
  tensors["a2"] = tensors["a"];
  add("{}", tensors);
  tensors.erase("a");
  add("{}", tensors);
}

}  // namespace
}  // namespace weir

#include "clients/convert/pickle.h"

#include <gtest/gtest.h>

#include "clients/convert/torch_archive.h"
#include "clients/convert/zip_archive.h"
#include "tests/unit/torch_writer.h"

namespace weir {
namespace {

using namespace std::string_literals;
using namespace test::pickled;
using test::TestTensor;
using test::TorchWriter;
using test::zip_bytes;

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// The value of a pickle that must be readable, with what it borrows.
class ReadPickle {
 public:
  explicit ReadPickle(std::string bytes) : bytes_(std::move(bytes)) {
    auto pickle = read_pickle(bytes_of(bytes_), "P");
    EXPECT_TRUE(pickle.ok()) << pickle.status();
    if (pickle.ok()) pickle_ = *std::move(pickle);
  }
  const Value* root() const { return pickle_.root; }

 private:
  std::string bytes_;
  Pickle pickle_;
};

std::string error_of(const std::string& bytes) {
  const auto pickle = read_pickle(bytes_of(bytes), "P");
  return pickle.ok() ? "accepted" : std::string(pickle.status().message());
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Pickle, ReadsScalarsAndContainers) {
  const ReadPickle pickle(file(dict({{"none", none()},
                                     {"yes", boolean(true)},
                                     {"small", "K\x07"},
                                     {"negative", integer(-3)},
                                     {"wide", integer(int64_t(1) << 40)},
                                     {"long", "\x8a\x02\x00\xff"s},
                                     {"zero", "\x8a\x00"s},
                                     {"real", real(0.25)},
                                     {"list", list({integer(1), text("a")})},
                                     {"size", torch_size({2, 3})}})));
  const Value* root = pickle.root();
  EXPECT_NE(as<None>(find(root, "none")), nullptr);
  EXPECT_EQ(*as<bool>(find(root, "yes")), true);
  EXPECT_EQ(*as<int64_t>(find(root, "small")), 7);
  EXPECT_EQ(*as<int64_t>(find(root, "negative")), -3);
  EXPECT_EQ(*as<int64_t>(find(root, "wide")), int64_t(1) << 40);
  EXPECT_EQ(*as<int64_t>(find(root, "long")), -256);  // two's complement, low byte first
  EXPECT_EQ(*as<int64_t>(find(root, "zero")), 0);
  EXPECT_EQ(*as<double>(find(root, "real")), 0.25);
  ASSERT_EQ(items_of(find(root, "list")).size(), 2u);
  EXPECT_EQ(as<Text>(items_of(find(root, "list"))[1])->bytes, "a");
  std::vector<int64_t> shape;
  ASSERT_TRUE(as_shape(find(root, "size"), shape));
  EXPECT_EQ(shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(find(root, "absent"), nullptr);
}

TEST(Pickle, ReadsANamespaceWithOpaqueMembers) {
  const std::string arguments = object(
      "argparse", "Namespace",
      dict({{"num_layers", integer(3)},
            {"params_dtype", global("torch", "bfloat16")},
            {"attention_backend", call("megatron.core.transformer.enums", "AttnBackend",
                                       {integer(5)})}}));
  const ReadPickle pickle(file(dict({{"args", arguments}})));
  const Value* found = find(pickle.root(), "args");
  EXPECT_EQ(describe(found), "an object of argparse.Namespace");
  EXPECT_EQ(*as<int64_t>(find(found, "num_layers")), 3);
  TensorType type{};
  ASSERT_TRUE(as_dtype(find(found, "params_dtype"), type));
  EXPECT_EQ(type, TensorType::BF16);
  EXPECT_EQ(describe(find(found, "attention_backend")),
            "an object of megatron.core.transformer.enums.AttnBackend");
}

// Protocol 4, as pickle.dump writes .metadata: frames, MEMOIZE, STACK_GLOBAL, short texts.
TEST(Pickle, ReadsProtocolFour) {
  const std::string frame =
      "\x8c\x05torch\x94\x8c\x04Size\x94\x93\x94K\x02K\x03\x86\x94\x85\x94R\x94."s;
  std::string bytes("\x80\x04\x95", 3);
  test::append_bytes(bytes, uint64_t(frame.size()));
  const ReadPickle pickle(bytes + frame);
  std::vector<int64_t> shape;
  ASSERT_TRUE(as_shape(pickle.root(), shape));
  EXPECT_EQ(shape, (std::vector<int64_t>{2, 3}));
}

TEST(Pickle, MemoSharesValuesAndMakesCycles) {
  // l = []; l.append(l); l.append(x); l.append(x)
  const std::string cycle = "]q\x00(h\x00"s + text("x") + "q\x01h\x01" "e"s;
  const ReadPickle pickle(file(cycle));
  const auto items = items_of(pickle.root());
  ASSERT_EQ(items.size(), 3u);
  EXPECT_EQ(items[0], pickle.root());
  EXPECT_EQ(items[1], items[2]);
  EXPECT_EQ(describe(pickle.root()), "a list");
}

// What a malicious checkpoint would call. It must be named, and nothing may happen.
TEST(Pickle, RefusesAClassThatNoCheckpointNeeds) {
  const std::string error =
      error_of(file(call("os", "system", {text("touch /tmp/weir-was-executed")})));
  EXPECT_EQ(error, "P: pickle, byte 2: the class os.system is not one that a checkpoint may name; "
                   "nothing was executed");
  for (const char* module : {"posix", "builtins", "__builtin__", "subprocess", "numpy.testing"}) {
    EXPECT_TRUE(has(error_of(file(call(module, "eval", {text("1")}))),
                    std::string("the class ") + module + ".eval")) << module;
  }
  EXPECT_TRUE(has(error_of(file(text("torch") + text("load") + "\x93")), "torch.load"));
}

TEST(Pickle, RefusesOpcodesThatTorchDoesNotWrite) {
  // INST and OBJ make instances by another way; INT is protocol 0.
  EXPECT_TRUE(has(error_of(file("(ios\nsystem\n")), "the opcode 0x69 is not one"));
  EXPECT_TRUE(has(error_of(file("(o")), "the opcode 0x6f is not one"));
  EXPECT_TRUE(has(error_of(file("I1\n")), "the opcode 0x49 is not one"));
  EXPECT_TRUE(has(error_of("\x80\x06N."), "expected protocol 2 to 5, found 6"));
}

TEST(Pickle, RefusesEveryCut) {
  const std::string whole = file(dict({{"a", list({integer(1), real(2), text("three")})},
                                       {"b", torch_size({4, 5})}}));
  ASSERT_EQ(error_of(whole), "accepted");
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(error_of(whole.substr(0, size)), "accepted") << size;
  }
  EXPECT_TRUE(has(error_of(whole + "N"), "expected to end here"));
}

TEST(Pickle, RefusesAStackThatDoesNotFit) {
  EXPECT_TRUE(has(error_of(file("")), "the stack is empty"));
  EXPECT_TRUE(has(error_of(file("N(0")), "the stack is empty"));  // not below the mark
  EXPECT_TRUE(has(error_of(file("Nt")), "there is no mark"));
  EXPECT_TRUE(has(error_of(file("NN")), "left over"));
  EXPECT_TRUE(has(error_of(file("N(")), "the stack is empty"));
  EXPECT_TRUE(has(error_of(file("h\x05"s)), "the memo has no such value"));
  EXPECT_TRUE(has(error_of(file("N(NNu")), "a dict's items are given to None"));
  EXPECT_TRUE(has(error_of(file("}(Nu")), "a dict's key without a value"));
  EXPECT_TRUE(has(error_of(file("NNa")), "a list's items are given to None"));
  EXPECT_TRUE(has(error_of(file("N}b")), "a state is given to None"));
  EXPECT_TRUE(has(error_of(file("N)R")), "expected a class to make a value of, found None"));
  EXPECT_TRUE(has(error_of(file(global("torch", "bfloat16") + ")R")), "the class torch.bfloat16"));
}

TEST(Pickle, RefusesDeepNestingAndLengthsBeyondTheEnd) {
  EXPECT_TRUE(has(error_of(file(std::string(5000, '('))), "nested deeper than 1024 levels"));
  EXPECT_TRUE(has(error_of(file("\x8d\xff\xff\xff\xff\xff\xff\xff\xff"s)),
                  "cut short"));
  EXPECT_TRUE(has(error_of(file("\x8b\xff\xff\xff\xff"s)), "cut short"));
}

TEST(Pickle, RefusesDtypesAndTensorsItCannotHold) {
  const std::string complex = test::pickled_storage("ComplexFloatStorage", "0", 1);
  EXPECT_TRUE(has(error_of(file(complex)), "the class torch.ComplexFloatStorage"));
  const std::string storage = test::pickled_storage("FloatStorage", "0", 4);
  EXPECT_EQ(error_of(file(test::pickled_tensor(storage, 0, {2, 2}, {2, 1}))), "accepted");
  EXPECT_TRUE(has(error_of(file(test::pickled_tensor(none(), 0, {2}, {1}))),
                  "a tensor: expected a storage, found None"));
  EXPECT_TRUE(has(error_of(file(test::pickled_tensor(storage, -1, {2}, {1}))), "an offset"));
  EXPECT_TRUE(has(error_of(file(test::pickled_tensor(storage, 0, {2}, {1, 1}))), "a size and a"));
  EXPECT_TRUE(has(error_of(file(test::pickled_tensor(storage, 0, {-2}, {1}))), "a size and a"));
}

// --- zip archives ---

std::string zip_error(const std::string& bytes) {
  const auto entries = read_zip(bytes_of(bytes), "Z");
  return entries.ok() ? "accepted" : std::string(entries.status().message());
}

void replace_number(std::string& bytes, size_t at, auto value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

TEST(Zip, ReadsStoredEntriesPlainAndZip64) {
  for (const bool zip64 : {false, true}) {
    const std::string bytes = zip_bytes({{"a/x", "hello"}, {"a/empty", ""}}, zip64);
    const auto entries = read_zip(bytes_of(bytes), "Z");
    ASSERT_TRUE(entries.ok()) << entries.status();
    ASSERT_EQ(entries->size(), 2u);
    const ZipEntry& entry = entries->at("a/x");
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(entry.data.data()), 5), "hello");
    EXPECT_EQ(size_t(reinterpret_cast<const char*>(entry.data.data()) - bytes.data()) % 64, 0u);
    EXPECT_TRUE(check_crc("a/x", entry, "Z").ok());
    EXPECT_TRUE(entries->at("a/empty").data.empty());
  }
}

TEST(Zip, RefusesEveryCut) {
  for (const bool zip64 : {false, true}) {
    const std::string whole = zip_bytes({{"a/x", "hello"}, {"a/y", "there"}}, zip64);
    for (size_t size = 0; size < whole.size(); ++size) {
      EXPECT_NE(zip_error(whole.substr(0, size)), "accepted") << size;
    }
  }
  EXPECT_TRUE(has(zip_error(std::string(100, 'x')), "not a zip archive, or cut short"));
}

TEST(Zip, RefusesWrongChecksumsSizesAndPlaces) {
  const std::string whole = zip_bytes({{"a/x", "hello"}});
  const size_t head = whole.find("PK\x01\x02");

  std::string damaged = whole;
  damaged[whole.find("hello")] = 'j';
  const auto entries = read_zip(bytes_of(damaged), "Z");
  ASSERT_TRUE(entries.ok());
  const std::string crc(check_crc("a/x", entries->at("a/x"), "Z").message());
  EXPECT_TRUE(has(crc, "entry a/x: expected CRC-32 3610a686, found ")) << crc;

  damaged = whole;
  replace_number(damaged, head + 24, uint32_t(6));
  EXPECT_TRUE(has(zip_error(damaged), "entry a/x: expected 6 stored bytes, found 5"));

  damaged = whole;
  replace_number(damaged, head + 20, uint32_t(5000));
  replace_number(damaged, head + 24, uint32_t(5000));
  EXPECT_TRUE(has(zip_error(damaged), "entry a/x: expected within the file's"));

  damaged = whole;
  replace_number(damaged, head + 42, uint32_t(1 << 30));
  EXPECT_TRUE(has(zip_error(damaged), "entry a/x: expected its local header at 1073741824"));

  damaged = whole;
  replace_number(damaged, head + 10, uint16_t(8));
  EXPECT_TRUE(has(zip_error(damaged), "expected to be stored, method 0; found method 8"));

  damaged = whole;
  replace_number(damaged, head + 8, uint16_t(1));
  EXPECT_TRUE(has(zip_error(damaged), "entry a/x: encrypted"));

  damaged = whole;
  damaged[head + 46] = 'b';
  EXPECT_TRUE(has(zip_error(damaged), "entry b/x: its local header has another name"));

  EXPECT_TRUE(has(zip_error(zip_bytes({{"a/x", "1"}, {"a/x", "2"}})), "entry a/x: is there twice"));
}

TEST(Zip, RefusesAZip64FieldThatIsMissing) {
  std::string bytes = zip_bytes({{"a/x", "hello"}}, true);
  replace_number(bytes, bytes.find("PK\x01\x02") + 46 + 3, uint16_t(2));  // another field's number
  EXPECT_TRUE(has(zip_error(bytes), "entry a/x: its zip64 field is missing or cut short"));
}

// --- torch archives ---

std::string tensor_error(const std::string& bytes) {
  auto archive = TorchArchive::open(bytes_of(bytes), "T");
  if (!archive.ok()) return std::string(archive.status().message());
  const auto* reference = as<TensorReference>(archive->root());
  if (reference == nullptr) return "no tensor";
  const auto tensor = archive->tensor(*reference, "w");
  return tensor.ok() ? "accepted" : std::string(tensor.status().message());
}

TEST(TorchArchive, ReadsATensor) {
  TorchWriter writer;
  const std::string root = writer.tensor({TensorType::BF16, {2, 3}, {1, 2, 3, 4, 5, 6}});
  const std::string bytes = writer.bytes(root);
  auto archive = TorchArchive::open(bytes_of(bytes), "T");
  ASSERT_TRUE(archive.ok()) << archive.status();
  const auto tensor = archive->tensor(*as<TensorReference>(archive->root()), "w");
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_EQ(tensor->type, TensorType::BF16);
  EXPECT_EQ(tensor->shape, (std::vector<int64_t>{2, 3}));
  ASSERT_EQ(tensor->data.size(), 12u);
  uint16_t second = 0;
  std::memcpy(&second, tensor->data.data() + 2, 2);
  EXPECT_EQ(second, 0x4000);  // 2.0
}

std::string one_storage(const std::string& root, const std::string& data,
                        const std::string& order = "little") {
  return zip_bytes({{"a/data.pkl", file(root)}, {"a/byteorder", order}, {"a/data/0", data}});
}

TEST(TorchArchive, RefusesStoragesThatDoNotHoldTheTensor) {
  const std::string six = test::pickled_storage("FloatStorage", "0", 6);
  const std::string data(24, '\0');
  using Shape = std::vector<int64_t>;
  const auto tensor = [&](int64_t offset, const Shape& shape, const Shape& strides) {
    return tensor_error(one_storage(test::pickled_tensor(six, offset, shape, strides), data));
  };
  EXPECT_EQ(tensor(0, {2, 3}, {3, 1}), "accepted");
  EXPECT_EQ(tensor(3, {1, 3}, {77, 1}), "accepted");  // the stride of one row means nothing
  EXPECT_EQ(tensor(6, {0}, {1}), "accepted");
  EXPECT_TRUE(has(tensor(1, {2, 3}, {3, 1}),
                  "tensor w: expected a storage of at least 6 elements after 1, found 6 in all"));
  EXPECT_TRUE(has(tensor(7, {0}, {1}), "found 6 in all"));
  EXPECT_TRUE(has(tensor(0, {3, 2}, {1, 3}),
                  "expected row-major order, found shape [3, 2] with strides [1, 3]"));
  const int64_t huge = int64_t(1) << 40;
  EXPECT_TRUE(has(tensor(0, {huge, huge}, {huge, 1}), "is too large"));

  const std::string whole = test::pickled_tensor(six, 0, {2, 3}, {3, 1});
  EXPECT_TRUE(has(tensor_error(one_storage(whole, data.substr(4))),
                  "its storage: expected 6 elements of 4 bytes, found 20 bytes"));
  EXPECT_TRUE(has(tensor_error(one_storage(whole, data, "big")), "expected little, found big"));
  const std::string other = test::pickled_storage("FloatStorage", "9", 6);
  EXPECT_TRUE(has(tensor_error(one_storage(test::pickled_tensor(other, 0, {6}, {1}), data)),
                  "tensor w: its storage a/data/9 is missing"));
  std::string damaged = one_storage(whole, std::string(24, 'q'));
  damaged[damaged.find("qqqq")] = 'p';
  EXPECT_TRUE(has(tensor_error(damaged), "entry a/data/0: expected CRC-32"));
}

// tests/vectors/torch-1.13.pt was written by torch.save of that version, under Python 3.11: not by
// us, so that reader and writer cannot agree on a mistake.
TEST(TorchArchive, ReadsWhatTorchWrote) {
  const std::string bytes = test::read_file(WEIR_SOURCE_DIR "/tests/vectors/torch-1.13.pt");
  auto archive = TorchArchive::open(bytes_of(bytes), "T");
  ASSERT_TRUE(archive.ok()) << archive.status();
  const Value* arguments = find(archive->root(), "args");
  EXPECT_EQ(describe(arguments), "an object of argparse.Namespace");
  EXPECT_EQ(*as<int64_t>(find(arguments, "num_layers")), 3);
  EXPECT_EQ(*as<double>(find(arguments, "lr")), 3e-4);
  EXPECT_EQ(describe(find(arguments, "big")), "an integer beyond 64 bits");
  EXPECT_EQ(describe(find(arguments, "params_dtype")), "the class torch.bfloat16");
  EXPECT_EQ(items_of(find(arguments, "linear_attention_freq")).size(), 3u);
  const Value* model = find(archive->root(), "model");
  EXPECT_NE(as<None>(find(model, "w._extra_state")), nullptr);
  const auto tensor = [&](const char* name) {
    const auto* reference = as<TensorReference>(find(model, name));
    EXPECT_NE(reference, nullptr) << name;
    return archive->tensor(*reference, name);
  };
  const auto matrix = tensor("w");  // 0 to 5
  ASSERT_TRUE(matrix.ok()) << matrix.status();
  EXPECT_EQ(matrix->type, TensorType::BF16);
  EXPECT_EQ(matrix->shape, (std::vector<int64_t>{2, 3}));
  uint16_t last = 0;
  std::memcpy(&last, matrix->data.data() + 10, 2);
  EXPECT_EQ(last, 0x40a0);
  const auto view = tensor("v");  // elements 2 to 4 of a storage of 8
  ASSERT_TRUE(view.ok()) << view.status();
  float first = 0;
  std::memcpy(&first, view->data.data(), 4);
  EXPECT_EQ(first, 2);
  EXPECT_EQ(view->data.size(), 12u);
  EXPECT_TRUE(tensor("s")->shape.empty());
  EXPECT_TRUE(tensor("x").ok());  // an nn.Parameter
  EXPECT_TRUE(has(std::string(tensor("t").status().message()),
                  "expected row-major order, found shape [3, 2] with strides [1, 3]"));
}

TEST(TorchArchive, RefusesAPickleThatWasChanged) {
  std::string bytes = TorchWriter().bytes(text("hello"));
  EXPECT_EQ(tensor_error(bytes), "no tensor");
  bytes[bytes.find("hello")] = 'j';  // still a pickle, of another text
  EXPECT_TRUE(has(tensor_error(bytes), "data.pkl: expected CRC-32 ")) << tensor_error(bytes);
}

TEST(TorchArchive, RefusesWhatIsNotAnArchiveOfOnePickle) {
  EXPECT_TRUE(has(tensor_error(zip_bytes({{"a/data", "x"}})), "data.pkl: is missing"));
  EXPECT_TRUE(has(tensor_error(zip_bytes({{"a/data.pkl", "x"}, {"b/data.pkl", "x"}})),
                  "data.pkl: is there twice"));
  const std::string old = "\x80\x02\x8a\nl\xfc\x9c\x46\xf9 j\xa8P\x19."s;
  EXPECT_TRUE(has(tensor_error(old), "the format that torch.save wrote before 1.6"));
}

}  // namespace
}  // namespace weir

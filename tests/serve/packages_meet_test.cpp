// sentencepiece carries a protobuf of its own. In a process that uses the other one for real, both
// must work, whichever is used first. Linked plainly, loading a tokenizer aborts here.
#include <dlfcn.h>
#include <elf.h>
#include <google/protobuf/descriptor.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <gtest/gtest.h>
#include <link.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "engine/tokenizer.h"
#include "weir/v1/generation.grpc.pb.h"

namespace weir {
namespace {

const std::string kVectors = WEIR_SOURCE_DIR "/tests/vectors";

void use_protobuf() {
  v1::GenerateRequest request;
  request.set_prompt("In the beginning");
  request.mutable_stop()->add_strings("own fox");
  v1::GenerateRequest read;
  ASSERT_TRUE(read.ParseFromString(request.SerializeAsString()));
  EXPECT_EQ(read.stop().strings(0), "own fox");
  EXPECT_NE(google::protobuf::DescriptorPool::generated_pool()->FindMessageTypeByName(
                "weir.v1.GenerateRequest"),
            nullptr);
  EXPECT_NE(read.Utf8DebugString().find("own fox"), std::string::npos);
  EXPECT_FALSE(read.ParseFromString("\xFF\xFF\xFF"));
}

void use_grpc() {
  grpc::EnableDefaultHealthCheckService(true);
  v1::Generation::CallbackService service;  // answers every call with UNIMPLEMENTED
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  const auto channel = grpc::CreateChannel("127.0.0.1:" + std::to_string(port),
                                           grpc::InsecureChannelCredentials());
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  v1::TokenizeResponse response;
  const grpc::Status status =
      v1::Generation::NewStub(channel)->Tokenize(&context, v1::TokenizeRequest(), &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << status.error_message();
  server->Shutdown();
}

void use_tokenizers() {
  const std::string text = "In the beginning God created the heaven, 世界 and 😀.";
  int models = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kVectors)) {
    if (!std::filesystem::exists(entry.path() / "tokenizer.model")) continue;
    const absl::StatusOr<Tokenizer> tokenizer = Tokenizer::open_folder(entry.path().string());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
    EXPECT_EQ(tokenizer->encode_pieces(text).back().end, int64_t(text.size()));
    ++models;
  }
  EXPECT_GT(models, 0);
}

TEST(PackagesMeet, ProtobufThenTokenizersThenBoth) {
  use_protobuf();
  use_grpc();
  use_tokenizers();
  use_protobuf();
  use_grpc();
  use_tokenizers();
}

// A process of its own, in which sentencepiece comes first.
TEST(PackagesMeetDeathTest, TokenizersFirst) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        use_tokenizers();
        use_protobuf();
        use_grpc();
        use_tokenizers();
        _exit(HasFailure() ? 1 : 0);
      },
      testing::ExitedWithCode(0), "");
}

struct Library {
  std::string path;
  ElfW(Addr) base = 0;
  const ElfW(Dyn)* dynamic = nullptr;
};

std::vector<Library> loaded_sentencepieces() {
  std::vector<Library> found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        if (std::string(info->dlpi_name).find("libsentencepiece") == std::string::npos) return 0;
        Library library{.path = info->dlpi_name, .base = info->dlpi_addr};
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
          library.dynamic =
              reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
        }
        static_cast<std::vector<Library>*>(out)->push_back(library);
        return 0;
      },
      &found);
  return found;
}

// The reason why it works, not the luck that it did: one copy, ours, that binds to itself, and
// none of its names among the program's.
TEST(PackagesMeet, SentencepieceIsThePrivateCopyAndStaysOutOfSight) {
  use_tokenizers();
  const std::vector<Library> libraries = loaded_sentencepieces();
  ASSERT_EQ(libraries.size(), 1u);
  EXPECT_EQ(std::filesystem::canonical(libraries[0].path),
            std::filesystem::canonical(WEIR_BINARY_DIR
                                       "/lib/weir-private/libsentencepiece.so.0"));
  bool symbolic = false;
  for (const ElfW(Dyn)* entry = libraries[0].dynamic; entry->d_tag != DT_NULL; ++entry) {
    if (entry->d_tag == DT_SYMBOLIC) symbolic = true;
    if (entry->d_tag == DT_FLAGS && (entry->d_un.d_val & DF_SYMBOLIC) != 0) symbolic = true;
  }
  EXPECT_TRUE(symbolic);
  EXPECT_EQ(dlsym(RTLD_DEFAULT, "_ZN13sentencepiece22SentencePieceProcessorC1Ev"), nullptr);

  // A function and a "unique" variable that both protobufs have: each library its own.
  for (const char* name : {"_ZN6google8protobuf8internal13VerifyVersionEiiPKc",
                           "_ZZN6google8protobuf8internal12ShutdownData3getEvE4data"}) {
    void* own = dlopen(libraries[0].path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    ASSERT_NE(own, nullptr);
    const void* in_sentencepiece = dlsym(own, name);
    if (in_sentencepiece != nullptr) {
      EXPECT_NE(in_sentencepiece, dlsym(RTLD_DEFAULT, name)) << name;
    }
    dlclose(own);
  }
}

}  // namespace
}  // namespace weir

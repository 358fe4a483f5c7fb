// What weir-convert refuses: checkpoints that are damaged, or not of a model that is served.
#include <gtest/gtest.h>

#include "tests/unit/megatron_models.h"

namespace weir {
namespace {

namespace fs = std::filesystem;
namespace pickled = test::pickled;
using test::error_of;
using test::Folders;
using test::has;
using test::json;
using test::MegatronWriter;
using test::model;
using test::route;
using test::with;

TEST(Convert, RefusesTensorsThatTheModelDoesNotHave) {
  MegatronWriter missing(model("gdn"));
  missing.tensors().erase("decoder.layers.1.mlp.linear_fc2.weight");
  EXPECT_TRUE(has(error_of(missing), "tensor decoder.layers.1.mlp.linear_fc2.weight: "
                                     "expected shape [32, 48], found nothing"));
  MegatronWriter more(model("gdn"));
  more.tensors()["decoder.layers.1.mlp.linear_fc3.weight"] = {TensorType::F32, {2}, {1, 2}};
  EXPECT_TRUE(has(error_of(more), "tensor decoder.layers.1.mlp.linear_fc3.weight: the model has "
                                  "no place for it, of shape [2]"));
  MegatronWriter narrow(model("gdn"));
  narrow.tensors()["decoder.layers.0.self_attention.out_proj.weight"].shape = {16, 64};
  EXPECT_TRUE(has(error_of(narrow), "tensor decoder.layers.0.self_attention.out_proj.weight: "
                                    "expected shape [32, 32], found [16, 64]"));
  MegatronWriter whole(model("gdn"));
  whole.tensors()["decoder.layers.0.self_attention.A_log"].type = TensorType::I32;
  EXPECT_TRUE(has(error_of(whole), "A_log: expected BF16, F16 or F32, found I32"));
  EXPECT_TRUE(has(error_of(MegatronWriter(model("gdn")), {{"decoder.x", pickled::none()}}),
                  "model: decoder.x: expected a tensor, found None"));
  MegatronWriter gate(model("gdn"));  // rows of another count than with and without the gate
  gate.tensors()["decoder.layers.2.self_attention.linear_qkv.weight"].shape = {48, 64};
  EXPECT_TRUE(has(error_of(gate), "linear_qkv.weight: expected shape [64, 32], found [48, 64]"));
}

TEST(Convert, ForgetsAGammaThatHiddenRoutingLeftOver) {
  MegatronWriter writer(with(model("gdn"), route("value")));
  const std::string name = "decoder.layers.0.self_attention.cler_gamma";
  writer.tensors()[name] = {TensorType::F32, {}, {0.5f}};
  EXPECT_EQ(error_of(writer), "accepted");
  MegatronWriter plain(model("gdn"));
  plain.tensors()[name] = {TensorType::F32, {}, {0.5f}};
  EXPECT_TRUE(has(error_of(plain), "cler_gamma: the model has no place for it"));
}

TEST(Convert, RefusesArgumentsByName) {
  const auto error = [](const json& config, const std::string& name, const std::string& value) {
    MegatronWriter writer(config);
    writer.arguments()[name] = value;
    return error_of(writer);
  };
  const json gdn = model("gdn");
  EXPECT_TRUE(has(error(gdn, "add_bias_linear", pickled::boolean(true)),
                  "model_optim_rng.pt: args.add_bias_linear: expected it to be off, found True"));
  EXPECT_TRUE(has(error(gdn, "normalization", pickled::text("LayerNorm")),
                  "args.normalization: expected one of RMSNorm, found the text \"LayerNorm\""));
  EXPECT_TRUE(has(error(gdn, "swiglu", pickled::boolean(false)), "args.swiglu: expected True"));
  EXPECT_TRUE(has(error(gdn, "rotary_percent", pickled::real(0.5)),
                  "args.rotary_percent: expected 1"));
  EXPECT_TRUE(has(error(gdn, "num_layers", pickled::none()), "args.num_layers: expected a number"));
  EXPECT_TRUE(has(error(gdn, "num_query_groups", pickled::integer(3)), "a divisor of 4 heads"));
  EXPECT_TRUE(has(error(gdn, "experimental_attention_variant", pickled::text("mamba9")),
                  "args.experimental_attention_variant: expected one of delta_net, "));
  EXPECT_TRUE(has(error(gdn, "linear_attention_freq", pickled::integer(2)),
                  "tensor decoder.layers.1.self_attention.linear_qkv.weight: expected a softmax "
                  "layer by linear_attention_freq, found nothing"));
  EXPECT_TRUE(has(error(gdn, "linear_attention_freq", pickled::list({pickled::integer(1)})),
                  "a number, or a list of 4 of 0 and 1, found a list of 1"));
  EXPECT_TRUE(has(error(gdn, "cler_teleport", pickled::boolean(true)),
                  "args.cler_teleport: not known, and set to True; --ignore_argument lets it"));
  EXPECT_EQ(error(gdn, "cler_teleport", pickled::boolean(false)), "accepted");
  EXPECT_TRUE(has(error(gdn, "tensor_model_parallel_size", pickled::integer(2)),
                  "args.tensor_model_parallel_size: expected 1, found 2"));
  EXPECT_TRUE(has(error(model("kda"), "cler_enabled", pickled::boolean(true)),
                  "args.cler_enabled: only delta_net and gated_delta_net route, found the text "
                  "\"kda\""));
  EXPECT_TRUE(has(error(with(model("delta"), route("value")), "experimental_attention_variant",
                        pickled::text("delta_net_pytorch")),
                  "routes values, which the *_pytorch classes do not give"));
  EXPECT_TRUE(has(error(with(gdn, route("value")), "cler_hidden_route_both",
                        pickled::boolean(true)), "found several"));
}

// In the words of the reader that the server has.
TEST(Convert, RefusesACombinationThatTheServerRefuses) {
  MegatronWriter writer(with(with(model("gdn"), route("self", 4)),
                             {{"attention_residuals", {{"eps", 1e-6}}}}));
  EXPECT_TRUE(has(error_of(writer), "served/config.json: route.signal: expected another one"));
}

TEST(Convert, LetsAnArgumentPassWhenTold) {
  MegatronWriter writer(model("gdn"));
  writer.arguments()["cler_teleport"] = pickled::boolean(true);
  const Folders folders;
  writer.write_legacy(folders.from);
  const ConvertOptions options{.checkpoint = folders.from,
                               .out = folders.to,
                               .ignored_arguments = {"cler_teleport"}};
  EXPECT_EQ(error_of(options), "accepted");
}

TEST(Convert, RefusesFoldersThatAreNoCheckpoint) {
  const Folders folders;
  EXPECT_TRUE(has(error_of(folders), "checkpoint: no such folder"));
  fs::create_directories(folders.from);
  EXPECT_TRUE(has(error_of(folders), "expected a Megatron checkpoint: .metadata (torch_dist) or "
                                     "mp_rank_00 (torch), found neither"));
  MegatronWriter(model("gdn")).write_legacy(folders.from);
  fs::create_directories(folders.from + "/iter_0000010/mp_rank_01");
  EXPECT_TRUE(has(error_of(folders), "expected one rank, found mp_rank_00, mp_rank_01"));
  test::write_file(folders.from + "/latest_checkpointed_iteration.txt", "../../etc");
  EXPECT_TRUE(has(error_of(folders), "expected an iteration or \"release\", found \"../../etc\""));
  test::write_file(folders.from + "/latest_checkpointed_iteration.txt", "11");
  EXPECT_TRUE(has(error_of(folders), "iter_0000011: no such folder"));
}

TEST(Convert, RefusesADamagedFileAndLeavesNothing) {
  const Folders folders;
  MegatronWriter(model("gdn")).write_legacy(folders.from);
  const std::string path = folders.from + "/iter_0000010/mp_rank_00/model_optim_rng.pt";
  std::string bytes = test::read_file(path);
  bytes[bytes.size() / 2] ^= 1;  // within some tensor
  test::write_file(path, bytes);
  EXPECT_TRUE(has(error_of(folders), "expected CRC-32 ")) << error_of(folders);
  EXPECT_EQ(std::distance(fs::directory_iterator(folders.all.path()), {}), 1);
}

TEST(Convert, AFailureAfterTheLastByteLeavesNothingEither) {
  const Folders folders;
  MegatronWriter(model("gdn")).write_legacy(folders.from);
  test::write_file(folders.to, "");  // a folder cannot take the name of a file
  EXPECT_TRUE(has(error_of(folders), "served: cannot rename the finished folder to it"));
  EXPECT_EQ(std::distance(fs::directory_iterator(folders.all.path()), {}), 2);
}

// --- distributed checkpoints that are damaged ---

class Distributed : public testing::Test {
 protected:
  Distributed() { MegatronWriter(model("gdn")).write_distributed(folders_.from, false); }
  std::string file(const char* name) const { return folders_.from + "/iter_0000010/" + name; }
  std::string error_after(const char* name, const std::string& what, const std::string& by) {
    std::string bytes = test::read_file(file(name));
    const size_t at = bytes.find(what);
    EXPECT_NE(at, std::string::npos) << what;
    test::write_file(file(name), bytes.replace(at, what.size(), by));
    return error_of(folders_);
  }
  Folders folders_;
};

TEST_F(Distributed, RefusesAnotherBackend) {
  EXPECT_TRUE(has(error_after("metadata.json", "torch_dist", "zarr"),
                  "sharded_backend: expected torch_dist, found the string \"zarr\""));
}

TEST_F(Distributed, RefusesAFileOutsideTheFolder) {
  EXPECT_TRUE(has(error_after(".metadata", "__0_0.distcp", "../secret.pt"),
                  "expected a file of this folder, found the text \"../secret.pt\""));
}

TEST_F(Distributed, RefusesAFileThatIsMissingOrCut) {
  const std::string bytes = test::read_file(file("__1_0.distcp"));
  test::write_file(file("__1_0.distcp"), bytes.substr(0, bytes.size() - 100));
  EXPECT_TRUE(has(error_of(folders_), "expected within the file's ")) << error_of(folders_);
  fs::remove(file("__1_0.distcp"));
  EXPECT_TRUE(has(error_of(folders_), "__1_0.distcp: cannot open"));
}

TEST_F(Distributed, RefusesAShardOfAnotherType) {
  EXPECT_TRUE(has(error_after(".metadata", "ctorch\nfloat32\n", "ctorch\nfloat16\n"),
                  "expected shards of F16, found F32"));
  EXPECT_TRUE(has(error_after(".metadata", "ctorch\nfloat16\n", "ctorch\nfloat8_e4m3fn\n"),
                  "the class torch.float8_e4m3fn is not one"));
}

TEST_F(Distributed, RefusesAShardThatIsNotThere) {
  // The first shard's place is renamed in storage_data: the last text of that name there is.
  std::string bytes = test::read_file(file(".metadata"));
  const std::string name = "decoder.final_layernorm.weight";
  bytes[bytes.rfind(name)] = 'x';
  test::write_file(file(".metadata"), bytes);
  EXPECT_TRUE(has(error_of(folders_), "tensor decoder.final_layernorm.weight: storage_data has no "
                                      "place for its shard at ")) << error_of(folders_);
}

}  // namespace
}  // namespace weir

#include "server/grpc_server.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace weir {
namespace {

constexpr const char* kService = "weir.v1.Generation";

absl::Status read_file(const char* flag, const std::string& path, std::string& text) {
  std::ifstream file(path);
  std::ostringstream content;
  content << file.rdbuf();
  if (!file || content.str().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, ": expected a readable PEM file, found ", path));
  }
  text = content.str();
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> credentials(const Options& options) {
  if (options.tls_cert.empty()) return grpc::InsecureServerCredentials();
  grpc::SslServerCredentialsOptions ssl;
  grpc::SslServerCredentialsOptions::PemKeyCertPair pair;
  absl::Status status = read_file("tls_cert", options.tls_cert, pair.cert_chain);
  if (status.ok()) status = read_file("tls_key", options.tls_key, pair.private_key);
  if (status.ok() && !options.tls_client_ca.empty()) {
    status = read_file("tls_client_ca", options.tls_client_ca, ssl.pem_root_certs);
    ssl.client_certificate_request =
        GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY;
  }
  if (!status.ok()) return status;
  ssl.pem_key_cert_pairs.push_back(std::move(pair));
  return grpc::SslServerCredentials(ssl);
}

void set_channel_limits(const Options& options, grpc::ServerBuilder& builder) {
  builder.SetMaxReceiveMessageSize(options.max_receive_mib << 20);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_concurrent_streams);
  // Two servers on one port would silently share it.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Clients may ping idle channels every 10 s; what comes faster than this earns a strike.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);
  if (options.max_connection_age_seconds > 0) {
    const int64_t milliseconds = int64_t(options.max_connection_age_seconds) * 1000;
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS,
                               int(std::min<int64_t>(milliseconds, INT32_MAX)));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::start(const Options& options,
                                                              grpc::Service& service) {
  auto trusted = credentials(options);
  if (!trusted.ok()) return trusted.status();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  set_channel_limits(options, builder);
  const std::string where = address(options.host, options.port);
  int port = 0;
  builder.AddListeningPort(where, *trusted, &port);
  builder.RegisterService(&service);
  // A port that is taken is our one line to say, not three of gRPC's.
  gpr_set_log_function([](gpr_log_func_args*) {});
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  gpr_set_log_function(nullptr);
  if (server == nullptr || port == 0) {
    return absl::UnavailableError(
        absl::StrCat("--host, --port: expected an address to listen on, found ", where,
                     ", which is taken or not ours (with TLS: or the key is another's)"));
  }
  return std::unique_ptr<GrpcServer>(new GrpcServer(std::move(server), port));
}

GrpcServer::GrpcServer(std::unique_ptr<grpc::Server> server, int32_t port)
    : server_(std::move(server)), port_(port) {
  set_ready(false);
}

void GrpcServer::set_ready(bool ready) {
  server_->GetHealthCheckService()->SetServingStatus(kService, ready);
}

std::shared_ptr<grpc::Channel> GrpcServer::in_process_channel() {
  return server_->InProcessChannel({});
}

void GrpcServer::shut_down(std::chrono::milliseconds grace) {
  server_->Shutdown(std::chrono::system_clock::now() + grace);
  server_->Wait();
}

}  // namespace weir

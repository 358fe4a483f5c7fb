#include "clients/health.h"

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace weir {

namespace {

using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

std::chrono::system_clock::time_point in(double seconds) {
  return std::chrono::system_clock::now() +
         std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

std::string bytes_of(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string out;
  if (!buffer.Dump(&slices).ok()) return out;
  for (const grpc::Slice& slice : slices) {
    out.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return out;
}

}  // namespace

std::string health_request(const std::string& service) {
  std::string out(1, '\x0a');  // field 1, a string
  uint8_t length[10];
  const uint8_t* end = CodedOutputStream::WriteVarint64ToArray(service.size(), length);
  out.append(reinterpret_cast<const char*>(length), static_cast<size_t>(end - length));
  return out + service;
}

Health parse_health(const std::string& response) {
  if (response.empty()) return Health::Unknown;  // proto3 leaves zero out
  CodedInputStream stream(reinterpret_cast<const uint8_t*>(response.data()),
                          static_cast<int>(response.size()));
  uint32_t tag = 0, status = 0;
  if (!stream.ReadVarint32(&tag) || tag != 0x08 || !stream.ReadVarint32(&status) || status > 3) {
    return Health::Unknown;
  }
  return static_cast<Health>(status);
}

Health check_health(const std::shared_ptr<grpc::Channel>& channel, const std::string& service,
                    double timeout_s) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(in(timeout_s));
  context.set_wait_for_ready(true);
  const grpc::Slice slice(health_request(service));
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<grpc::Status> status;
  stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request, &response,
                 [&](grpc::Status result) {
                   const std::lock_guard<std::mutex> lock(mutex);
                   status = std::move(result);
                   changed.notify_one();
                 });
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return status.has_value(); });
  if (status->error_code() == grpc::StatusCode::NOT_FOUND) return Health::ServiceUnknown;
  if (!status->ok()) return Health::Unreachable;
  return parse_health(bytes_of(response));
}

bool wait_until_serving(const std::shared_ptr<grpc::Channel>& channel, const std::string& service,
                        double timeout_s) {
  const auto end = in(timeout_s);
  while (true) {
    const std::chrono::duration<double> left = end - std::chrono::system_clock::now();
    if (left.count() <= 0) return false;
    if (check_health(channel, service, left.count()) == Health::Serving) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // between two questions
  }
}

}  // namespace weir

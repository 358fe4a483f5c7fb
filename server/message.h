#pragma once
#include <string>

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

namespace weir {

// gRPC hands a message that does not parse to nobody and answers UNIMPLEMENTED. The service takes
// bytes and parses them itself, so that such a request gets a clear error and is counted.

// Empty when the bytes are a `message`; otherwise what is wrong, with the field where it is known:
// a string that is not UTF-8.
struct ParseProblem {
  bool failed = false;
  std::string field, problem;
};
ParseProblem parse(const grpc::ByteBuffer& bytes, google::protobuf::Message& message);

// The bytes of a message, in one slice.
grpc::ByteBuffer serialize(const google::protobuf::MessageLite& message);

}  // namespace weir

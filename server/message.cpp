#include "server/message.h"

#include <cstdint>
#include <utility>
#include <vector>

#include <google/protobuf/descriptor.h>
#include <google/protobuf/unknown_field_set.h>
#include <grpcpp/support/slice.h>

#include "engine/text_stream.h"

namespace weir {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::UnknownField;
using google::protobuf::UnknownFieldSet;

// The path of the first string field that is not UTF-8; empty when there is none. As deep as our
// messages are, whatever the bytes claim.
std::string find_bad_text(const UnknownFieldSet& fields, const Descriptor& type) {
  for (int i = 0; i < fields.field_count(); ++i) {
    const UnknownField& found = fields.field(i);
    if (found.type() != UnknownField::TYPE_LENGTH_DELIMITED) continue;
    const FieldDescriptor* known = type.FindFieldByNumber(found.number());
    if (known == nullptr) continue;
    if (known->type() == FieldDescriptor::TYPE_STRING && !is_utf8(found.length_delimited())) {
      return known->name();
    }
    if (known->type() != FieldDescriptor::TYPE_MESSAGE) continue;
    UnknownFieldSet inner;
    if (!inner.ParseFromString(found.length_delimited())) continue;
    const std::string path = find_bad_text(inner, *known->message_type());
    if (!path.empty()) return known->name() + "." + path;
  }
  return "";
}

}  // namespace

ParseProblem parse(const grpc::ByteBuffer& bytes, google::protobuf::Message& message) {
  grpc::Slice slice;
  if (!bytes.TrySingleSlice(&slice).ok() && !bytes.DumpToSingleSlice(&slice).ok()) {
    return {.failed = true, .field = "request", .problem = "the message could not be read"};
  }
  // Receive limits are below 2 GiB.
  const int size = int(slice.size());
  if (message.ParseFromArray(slice.begin(), size)) return {};
  UnknownFieldSet fields;
  if (fields.ParseFromArray(slice.begin(), size)) {
    const std::string field = find_bad_text(fields, *message.GetDescriptor());
    if (!field.empty()) {
      return {.failed = true, .field = field, .problem = "expected UTF-8, found other bytes"};
    }
  }
  return {.failed = true,
          .field = "request",
          .problem = "expected a " + message.GetDescriptor()->full_name() +
                     ", found bytes that do not parse"};
}

grpc::ByteBuffer serialize(const google::protobuf::MessageLite& message) {
  grpc::Slice slice(message.ByteSizeLong());
  message.SerializeWithCachedSizesToArray(const_cast<uint8_t*>(slice.begin()));
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace weir

#include "engine/sentencepiece/plugin.h"

#include <sentencepiece_processor.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "engine/sentencepiece/model_check.h"

namespace weir::sentencepiece_plugin {

struct Model {
  ::sentencepiece::SentencePieceProcessor processor;
};

namespace {

// Null when memory has run out; an empty array still has an address.
void* copy_of(const void* data, size_t size) {
  void* copy = std::malloc(size == 0 ? 1 : size);
  if (copy != nullptr && size != 0) std::memcpy(copy, data, size);
  return copy;
}

Bytes bytes_of(std::string_view text) {
  char* data = static_cast<char*>(copy_of(text.data(), text.size()));
  return {data, data == nullptr ? 0 : text.size()};
}

bool fail(std::string_view message, Bytes* error) {
  *error = bytes_of(message);
  return false;
}

// Runs `body`, which returns a message, empty when all went well.
template <typename Body>
bool guarded(Bytes* error, Body body) {
  try {
    const std::string message = body();
    return message.empty() || fail(message, error);
  } catch (const std::exception& exception) {
    return fail(exception.what(), error);
  } catch (...) {
    return fail("sentencepiece threw something that is no std::exception", error);
  }
}

Model* open(const char* bytes, size_t size, Bytes* error) {
  std::unique_ptr<Model> model;
  const bool good = guarded(error, [&]() -> std::string {
    const std::string flaw = model_flaw({bytes, size});
    if (!flaw.empty()) return flaw;
    model = std::make_unique<Model>();
    const auto status = model->processor.LoadFromSerializedProto({bytes, size});
    return status.ok() ? "" : status.ToString();
  });
  return good ? model.release() : nullptr;
}

void close(Model* model) { delete model; }

int32_t size(const Model* model) { return model->processor.GetPieceSize(); }
int32_t bos(const Model* model) { return model->processor.bos_id(); }
int32_t eos(const Model* model) { return model->processor.eos_id(); }

Kind kind(const Model* model, int32_t id) {
  const auto& processor = model->processor;
  if (processor.IsUnknown(id)) return Kind::Unknown;
  if (processor.IsControl(id)) return Kind::Control;
  if (processor.IsByte(id)) return Kind::Byte;
  return processor.IsUnused(id) ? Kind::Unused : Kind::Normal;
}

Borrowed piece(const Model* model, int32_t id) {
  const std::string& text = model->processor.IdToPiece(id);
  return {text.data(), text.size()};
}

bool encode(const Model* model, const char* text, size_t text_size, Spans* spans, Bytes* error) {
  return guarded(error, [&]() -> std::string {
    ::sentencepiece::ImmutableSentencePieceText encoded;
    const auto status =
        model->processor.Encode(std::string_view(text, text_size), encoded.mutable_proto());
    if (!status.ok()) return status.ToString();
    std::vector<Span> found;
    found.reserve(encoded.pieces_size());
    for (size_t i = 0; i < encoded.pieces_size(); ++i) {
      const auto each = encoded.pieces(int(i));
      found.push_back({.id = int32_t(each.id()), .begin = each.begin(), .end = each.end()});
    }
    spans->data = static_cast<Span*>(copy_of(found.data(), found.size() * sizeof(Span)));
    if (spans->data == nullptr) throw std::bad_alloc();
    spans->size = found.size();
    return "";
  });
}

bool decode(const Model* model, const int32_t* ids, size_t count, Bytes* text, Bytes* error) {
  return guarded(error, [&]() -> std::string {
    std::string decoded;
    const auto status = model->processor.Decode(std::vector<int>(ids, ids + count), &decoded);
    if (!status.ok()) return status.ToString();
    *text = bytes_of(decoded);
    if (text->data == nullptr) throw std::bad_alloc();
    return "";
  });
}

void release(void* data) { std::free(data); }

constexpr Api kApi{.open = open,
                   .close = close,
                   .size = size,
                   .bos = bos,
                   .eos = eos,
                   .kind = kind,
                   .piece = piece,
                   .encode = encode,
                   .decode = decode,
                   .release = release};

}  // namespace
}  // namespace weir::sentencepiece_plugin

extern "C" __attribute__((visibility("default"))) const weir::sentencepiece_plugin::Api*
weir_sentencepiece_api_1() {
  return &weir::sentencepiece_plugin::kApi;
}

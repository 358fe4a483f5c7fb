#pragma once
#include <cstddef>
#include <cstdint>

// What libweir-sentencepiece.so offers: sentencepiece behind plain C types and one exported symbol,
// so that the program shares neither headers nor symbols with sentencepiece and its protobuf.
// Nothing throws. Everything but open() and close() may be called from any thread.
namespace weir::sentencepiece_plugin {

struct Model;

// User-defined pieces are Normal: sentencepiece does not tell them apart once a model is loaded.
enum class Kind : int32_t { Normal, Unknown, Control, Byte, Unused };

struct Span {
  int32_t id = 0;
  uint32_t begin = 0, end = 0;  // bytes of the text given
};

// An array that the plugin allocated; free it with release(data).
struct Bytes {
  char* data = nullptr;
  size_t size = 0;
};
struct Spans {
  Span* data = nullptr;
  size_t size = 0;
};
struct Borrowed {  // lives as long as the model
  const char* data = nullptr;
  size_t size = 0;
};

// Functions that return false have left a message in `error`, to be released.
struct Api {
  Model* (*open)(const char* bytes, size_t size, Bytes* error) = nullptr;  // null: see `error`
  void (*close)(Model* model) = nullptr;

  int32_t (*size)(const Model* model) = nullptr;  // ids are 0 .. size - 1
  int32_t (*bos)(const Model* model) = nullptr;   // -1: none
  int32_t (*eos)(const Model* model) = nullptr;   // -1: none
  Kind (*kind)(const Model* model, int32_t id) = nullptr;
  Borrowed (*piece)(const Model* model, int32_t id) = nullptr;

  bool (*encode)(const Model* model, const char* text, size_t size, Spans* spans,
                 Bytes* error) = nullptr;
  bool (*decode)(const Model* model, const int32_t* ids, size_t count, Bytes* text,
                 Bytes* error) = nullptr;
  void (*release)(void* data) = nullptr;
};

// The exported symbol, of type `const Api* ()`.
inline constexpr const char* kSymbol = "weir_sentencepiece_api_1";

}  // namespace weir::sentencepiece_plugin

#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/json.h"

namespace weir {

// Reads the typed keys of a JSON object, and remembers the first thing that was wrong (path, key,
// expected, found) instead of returning it each time. Keys nobody asks for are ignored, but which
// were asked for can be kept.
class ConfigReader {
 public:
  // All are borrowed. `prefix` stands before each key in a message, and in `asked`: "attn.".
  ConfigReader(const nlohmann::json& object, const std::string& path, std::string prefix,
               absl::Status& status, std::set<std::string>* asked = nullptr)
      : object_(object),
        path_(path),
        prefix_(std::move(prefix)),
        status_(status),
        asked_(asked) {}

  // Of an object within this one.
  ConfigReader inside(const nlohmann::json& object, const std::string& name) const {
    return {object, path_, prefix_ + name + ".", status_, asked_};
  }

  const std::string& path() const { return path_; }
  absl::Status& status() { return status_; }

  // Null when the key is absent.
  const nlohmann::json* find(const char* key) const {
    if (asked_) asked_->insert(prefix_ + key);
    const auto at = object_.find(key);
    return at == object_.end() ? nullptr : &*at;
  }
  bool is_set(const char* key) const {  // there, and not null
    const nlohmann::json* value = find(key);
    return value && !value->is_null();
  }

  int32_t integer(const char* key, int32_t fallback, int32_t min, int32_t max) {
    const nlohmann::json* value = find(key);
    if (!value) return fallback;
    const std::optional<int32_t> read = as_integer(*value, min, max);
    if (!read) refuse(key, absl::StrCat("a whole number from ", min, " to ", max), *value);
    return read.value_or(fallback);
  }
  // For keys where null means the same as absence.
  int32_t integer_or_null(const char* key, int32_t fallback, int32_t min, int32_t max) {
    return is_set(key) ? integer(key, fallback, min, max) : fallback;
  }
  double number(const char* key, double fallback, double min, double max) {
    const nlohmann::json* value = find(key);
    if (!value) return fallback;
    const double read = value->is_number() ? value->get<double>() : std::nan("");
    if (read >= min && read <= max) return read;  // never of a NaN
    refuse(key, absl::StrCat("a number from ", min, " to ", max), *value);
    return fallback;
  }
  bool boolean(const char* key, bool fallback) {
    const nlohmann::json* value = find(key);
    if (!value) return fallback;
    if (value->is_boolean()) return value->get<bool>();
    refuse(key, "true or false", *value);
    return fallback;
  }
  template <class T>
  T choice(const char* key, T fallback, const std::vector<std::pair<const char*, T>>& choices) {
    const nlohmann::json* value = find(key);
    if (!value) return fallback;
    std::string expected;
    for (const auto& [name, meaning] : choices) {
      if (value->is_string() && value->get_ref<const std::string&>() == name) return meaning;
      absl::StrAppend(&expected, expected.empty() ? "" : ", ", name);
    }
    refuse(key, "one of " + expected, *value);
    return fallback;
  }

  static std::optional<int32_t> as_integer(const nlohmann::json& value, int32_t min, int32_t max) {
    if (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t(INT32_MAX)) return {};
    if (!value.is_number_integer()) return {};
    const int64_t read = value.get<int64_t>();
    if (read < min || read > max) return {};
    return int32_t(read);
  }

  // Refuses the first key that is not one of these.
  template <class Names>
  void refuse_others(const Names& known) {
    if (asked_) {
      for (const char* name : known) asked_->insert(prefix_ + name);
    }
    for (const auto& [key, value] : object_.items()) {
      const auto same = [&key = key](const char* name) { return key == name; };
      if (std::any_of(known.begin(), known.end(), same)) continue;
      refuse(key, "no such key", value);
    }
  }
  void refuse(const std::string& key, const std::string& expected, const nlohmann::json& found) {
    refuse_text(key, absl::StrCat("expected ", expected, ", found ", describe(found)));
  }
  void refuse_text(const std::string& key, const std::string& message) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(absl::StrCat(path_, ": ", prefix_, key, ": ", message));
  }

 private:
  const nlohmann::json& object_;
  const std::string& path_;
  std::string prefix_;
  absl::Status& status_;
  std::set<std::string>* asked_;
};

}  // namespace weir

#pragma once
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "clients/convert/pickle.h"

namespace weir {

// Reads typed members of a Namespace, and remembers the first thing that was wrong (file, name,
// expected, found) instead of returning it each time. None is the same as absence.
class ArgumentReader {
 public:
  // Both are borrowed.
  ArgumentReader(const Value* arguments, const std::string& path)
      : arguments_(arguments), path_(path) {}

  const absl::Status& status() const { return status_; }

  const Value* find(const std::string& name) const {
    const Value* value = weir::find(arguments_, name);
    return as<None>(value) ? nullptr : value;
  }

  int64_t integer(const std::string& name, int64_t fallback, int64_t min, int64_t max) {
    const Value* value = find(name);
    if (value == nullptr) return fallback;
    const int64_t* number = as<int64_t>(value);
    if (number != nullptr && *number >= min && *number <= max) return *number;
    refuse(name, absl::StrCat("a whole number from ", min, " to ", max), describe(value));
    return fallback;
  }
  // One that there is no sensible default for.
  int64_t size(const std::string& name, int64_t max) {
    if (find(name) == nullptr) refuse(name, "a number", "nothing");
    return integer(name, 1, 1, max);
  }
  double number(const std::string& name, double fallback, double min, double max) {
    const Value* value = find(name);
    if (value == nullptr) return fallback;
    double number = std::nan("");  // which lies in no range
    if (const double* real = as<double>(value)) number = *real;
    if (const int64_t* whole = as<int64_t>(value)) number = double(*whole);
    if (number >= min && number <= max) return number;
    refuse(name, absl::StrCat("a number from ", min, " to ", max), describe(value));
    return fallback;
  }
  bool boolean(const std::string& name, bool fallback) {
    const Value* value = find(name);
    if (value == nullptr) return fallback;
    if (const bool* truth = as<bool>(value)) return *truth;
    refuse(name, "True or False", describe(value));
    return fallback;
  }
  // One of `choices`, the first when absent.
  std::string choice(const std::string& name, const std::vector<std::string>& choices) {
    const Value* value = find(name);
    if (value == nullptr) return choices[0];
    std::string expected;
    for (const std::string& choice : choices) {
      if (as<Text>(value) && as<Text>(value)->bytes == choice) return choice;
      absl::StrAppend(&expected, expected.empty() ? "" : ", ", choice);
    }
    refuse(name, "one of " + expected, describe(value));
    return choices[0];
  }

  void refuse(const std::string& name, const std::string& expected, const std::string& found) {
    refuse_text(name, absl::StrCat("expected ", expected, ", found ", found));
  }
  void refuse_text(const std::string& name, const std::string& why) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(absl::StrCat(path_, ": args.", name, ": ", why));
  }

 private:
  const Value* arguments_;
  const std::string& path_;
  absl::Status status_;
};

}  // namespace weir

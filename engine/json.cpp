#include "engine/json.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace weir {
namespace {

using nlohmann::json;

constexpr size_t kDepthMax = 32;
constexpr size_t kDescriptionMax = 60;

// Walks a document before a tree is built of it, and stops at the first thing to refuse.
class JsonCheck final : public nlohmann::json_sax<json> {
 public:
  const std::string& error() const { return error_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return enter(); }
  bool start_array(size_t) override { return enter(); }
  bool end_object() override { return leave(); }
  bool end_array() override { return leave(); }

  bool key(string_t& name) override {
    if (keys_.back().insert(name).second) return true;
    error_ = absl::StrCat("the key \"", name, "\" is there twice");
    return false;
  }
  bool parse_error(size_t position, const std::string&, const json::exception&) override {
    error_ = absl::StrCat("not JSON at byte ", position);
    return false;
  }

 private:
  bool enter() {
    keys_.emplace_back();
    if (keys_.size() <= kDepthMax) return true;
    error_ = absl::StrCat("nested deeper than ", kDepthMax, " levels");
    return false;
  }
  bool leave() {
    keys_.pop_back();
    return true;
  }

  std::vector<std::set<std::string>> keys_;  // of the objects around the current place
  std::string error_;
};

// Python's bare words in quotes, so that a standard parser reads the rest.
std::string quote_bare_words(std::string_view text) {
  static constexpr std::string_view kWords[] = {"-Infinity", "Infinity", "NaN"};
  std::string out;
  out.reserve(text.size());
  bool in_string = false;
  for (size_t i = 0; i < text.size();) {
    if (!in_string) {
      std::string_view found;
      for (const std::string_view word : kWords) {
        if (text.substr(i, word.size()) == word) found = word;
        if (!found.empty()) break;
      }
      if (!found.empty()) {
        out.append("\"").append(found).append("\"");
        i += found.size();
        continue;
      }
    }
    if (text[i] == '"') in_string = !in_string;
    if (in_string && text[i] == '\\' && i + 1 < text.size()) out.push_back(text[i++]);
    out.push_back(text[i++]);
  }
  return out;
}

std::string system_message(const std::string& path, const char* verb) {
  return absl::StrCat(path, ": cannot ", verb, ": ", std::generic_category().message(errno));
}

absl::StatusOr<std::string> read_open_file(int file, const std::string& path, size_t bytes_max) {
  struct stat info;
  if (fstat(file, &info) != 0) return absl::UnavailableError(system_message(path, "stat"));
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(path + ": expected a regular file");
  }
  if (size_t(info.st_size) > bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": expected at most ", bytes_max,
                                                   " bytes, found ", info.st_size));
  }
  std::string text(size_t(info.st_size), '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = read(file, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return absl::UnavailableError(system_message(path, "read"));
    if (count == 0) break;
    done += size_t(count);
  }
  text.resize(done);
  return text;
}

}  // namespace

absl::StatusOr<std::string> read_text_file(const std::string& path, size_t bytes_max) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) {
    const bool missing = errno == ENOENT;
    const std::string message = system_message(path, "open");
    return missing ? absl::NotFoundError(message) : absl::UnavailableError(message);
  }
  absl::StatusOr<std::string> text = read_open_file(file, path, bytes_max);
  close(file);
  return text;
}

absl::StatusOr<json> parse_json(std::string_view text, const std::string& path) {
  const std::string quoted = quote_bare_words(text);
  JsonCheck check;
  if (!json::sax_parse(quoted, &check)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", check.error()));
  }
  return json::parse(quoted, nullptr, false);
}

std::string describe(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list";
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > kDescriptionMax) text = text.substr(0, kDescriptionMax) + "...";
  return value.is_string() ? "the string " + text : text;
}

}  // namespace weir

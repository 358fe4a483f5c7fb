#include "server/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>

namespace weir {
namespace {

using prometheus::MetricFamily;
using prometheus::MetricType;

void add(std::vector<MetricFamily>& families, const char* name, const char* help, MetricType type,
         double value) {
  MetricFamily family;
  family.name = name;
  family.help = help;
  family.type = type;
  family.metric.resize(1);
  (type == MetricType::Counter ? family.metric[0].counter.value
                               : family.metric[0].gauge.value) = value;
  families.push_back(std::move(family));
}

// Seconds since the epoch at which the machine started.
double boot_seconds() {
  std::ifstream file("/proc/stat");
  for (std::string key; file >> key;) {
    double value = 0;
    if (key == "btime" && file >> value) return value;
    std::getline(file, key);
  }
  return 0;
}

void add_stat(std::vector<MetricFamily>& families) {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  // The second field is a name in parentheses that may hold anything.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return;
  std::istringstream rest(line.substr(name_end + 1));
  std::vector<std::string> fields;  // fields[0] is the third of proc(5)
  for (std::string field; rest >> field;) fields.push_back(field);
  if (fields.size() < 22) return;
  const auto number = [&fields](size_t field) { return std::stod(fields[field - 3]); };
  const auto ticks = double(sysconf(_SC_CLK_TCK));
  add(families, "process_cpu_seconds_total", "Processor time, user and system.",
      MetricType::Counter, (number(14) + number(15)) / ticks);
  add(families, "process_start_time_seconds", "Start, seconds since the epoch.",
      MetricType::Gauge, boot_seconds() + number(22) / ticks);
  add(families, "process_threads", "Threads.", MetricType::Gauge, number(20));
  add(families, "process_virtual_memory_bytes", "Virtual memory.", MetricType::Gauge, number(23));
  add(families, "process_resident_memory_bytes", "Resident memory.", MetricType::Gauge,
      number(24) * double(sysconf(_SC_PAGESIZE)));
}

}  // namespace

std::vector<MetricFamily> ProcessMetrics::Collect() const {
  std::vector<MetricFamily> families;
  add_stat(families);
  std::error_code error;
  double open = 0;
  for (std::filesystem::directory_iterator at("/proc/self/fd", error), end; !error && at != end;
       at.increment(error)) {
    ++open;
  }
  add(families, "process_open_fds", "Open file descriptors.", MetricType::Gauge, open);
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    add(families, "process_max_fds", "Most file descriptors.", MetricType::Gauge,
        double(limit.rlim_cur));
  }
  return families;
}

}  // namespace weir

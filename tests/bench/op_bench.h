#pragma once
#include "kernels/op.h"
#include "tests/bench/bench_util.h"

namespace weir {

// Memory for ops to work on, and their times, printed and kept.
class OpBench {
 public:
  explicit OpBench(const BenchOptions& options)
      : options_(options), backend_(bench_backend(options)), cpu_(options.device == "cpu") {
    const DeviceInfo info = backend_->info();
    copy_ = copy_rate(*backend_, size_t(cpu_ ? 256 : 2048) << 20);
    results_["device"] = info.name;
    results_["copy_gb_per_s"] = copy_ / 1e9;
    std::printf("%s: copy %.0f GB/s (read + written)\n", info.name.c_str(), copy_ / 1e9);
    std::printf("%-44s %6s %10s %10s %9s %7s\n", "op", "B", "us", "MB", "GB/s", "% copy");
    pool_ = repeated(random_floats(size_t(1) << 24, 1.0f), pool_floats());
    weights_ = repeated(random_bf16(size_t(1) << 24), weight_count());
  }

  bool cpu() const { return cpu_; }
  bool defers(const Op& op) const { return backend_->defers_writes({op}); }
  bool wanted(const std::string& name) const {
    return options_.only.empty() || name.find(options_.only) != std::string::npos;
  }
  int64_t pool_floats() const { return int64_t(cpu_ ? 16 : 1152) << 20; }
  int64_t weight_count() const { return int64_t(cpu_ ? 64 : 1024) << 20; }
  // The slots' parts of one layer of many, `floats` each, end to end as StatePool lays them out.
  SlotState layer(int64_t number, int64_t slots, int64_t floats) const {
    return {pool_ + number * slots * floats, floats};
  }
  const uint16_t* weights() const { return weights_; }
  template <typename T>
  T* put(const std::vector<T>& values) {
    T* data = static_cast<T*>(backend_->allocate(values.size() * sizeof(T)));
    backend_->upload(data, values.data(), values.size() * sizeof(T));
    backend_->finish();
    return data;
  }
  // `values` again and again, `count` numbers in all: a multiple of their number.
  template <typename T>
  T* repeated(const std::vector<T>& values, int64_t count) {
    const T* once = put(values);
    T* data = static_cast<T*>(backend_->allocate(size_t(count) * sizeof(T)));
    for (int64_t at = 0; at < count; at += int64_t(values.size())) {
      backend_->copy(data + at, once, values.size() * sizeof(T));
    }
    backend_->finish();
    return data;
  }
  Acts acts(int64_t tokens, int64_t dim, float scale = 1) {
    return {put(random_floats(size_t(tokens * dim), scale)), dim};
  }
  Rows rows(int32_t count, int32_t first) {
    std::vector<int32_t> slot, firsts(size_t(count), first), begin{0};
    for (int32_t i = 0; i < count; ++i) {
      slot.push_back(i);
      begin.push_back(i + 1);
    }
    return {.count = count, .tokens = count, .slot = put(slot), .first = put(firsts),
            .begin = put(begin), .written = put(std::vector<int32_t>(size_t(count), 0))};
  }

  bool split_vectors() const { return options_.vectors == "split"; }

  void time(const std::string& name, int32_t batch, const Program& program) {
    time(name, batch, program, cost(program.front()));
  }
  // The same of an op whose floor the op alone does not say.
  void time(const std::string& name, int32_t batch, const Program& program, const Cost& floor) {
    const double seconds = median_seconds(3, cpu_ ? 5 : 21, [&] {
      backend_->run(program);
      backend_->finish();
    }) / double(program.size());
    const double rate = double(floor.bytes) / seconds;
    std::printf("%-44s %6d %10.2f %10.2f %9.0f %6.1f%%\n", name.c_str(), batch, seconds * 1e6,
                double(floor.bytes) / 1e6, rate / 1e9, 100 * rate / copy_);
    std::fflush(stdout);
    results_["ops"].push_back({{"op", name}, {"batch", batch}, {"us", seconds * 1e6},
                               {"bytes", floor.bytes}, {"flops", floor.flops},
                               {"gb_per_s", rate / 1e9}, {"of_copy", rate / copy_}});
  }
  void save() const { write_json(options_, results_); }

 private:
  BenchOptions options_;
  std::unique_ptr<Backend> backend_;
  bool cpu_;
  double copy_ = 0;
  nlohmann::json results_;
  float* pool_ = nullptr;
  uint16_t* weights_ = nullptr;
};

}  // namespace weir

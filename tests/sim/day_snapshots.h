#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "kernels/check.h"
#include "tests/sim/random_request.h"

namespace weir {

// The snapshots of a simulated day as a reader would keep account of them: which are kept, who
// still has to start from them, and how many slots are left.
struct DaySnapshots {
  int32_t free = 0;
  std::map<SnapshotId, std::vector<Token>> kept;  // and not dropped
  std::map<SnapshotId, int32_t> readers;          // sequences that have not started from it yet
  SnapshotId last = kNoSnapshot;

  // What a sequence holds.
  struct OfClient {
    std::vector<int32_t> keeps;           // positions, the next one last
    SnapshotId reads_from = kNoSnapshot;  // until it has started

    int32_t next() const { return keeps.empty() ? INT32_MAX : keeps.back(); }
  };

  // Gives a request positions to keep, and a snapshot to start from; which answer they earn.
  Admission ask(Chance& chance, const Limits& limits, Request& request) const {
    if (!chance.percent(40)) return Admission::Accepted;
    const int32_t begin = start_from_one(chance, limits, request);
    const auto prompt = int32_t(request.prompt.size());
    for (int32_t at = begin + 1; at <= prompt; ++at) {
      if (chance.percent(100 / prompt + 1)) request.snapshots.push_back(at);
    }
    const auto asked = int32_t(request.snapshots.size());
    if (asked == 0 && request.start_from == kNoSnapshot) return Admission::Accepted;
    if (limits.pages > 0) return Admission::SnapshotOfPages;
    if (chance.percent(10)) return spoil(chance, limits, request);
    return asked <= free ? Admission::Accepted : Admission::NoSnapshotFree;
  }

  // The request is accepted; how many of its tokens have been read.
  int32_t take(const Request& request, OfClient& client) {
    client.keeps.assign(request.snapshots.rbegin(), request.snapshots.rend());
    free -= int32_t(client.keeps.size());
    client.reads_from = request.start_from;
    if (request.start_from == kNoSnapshot) return 0;
    ++readers[request.start_from];
    return int32_t(kept.at(request.start_from).size());
  }

  void stop_reading(OfClient& client) {
    const SnapshotId id = std::exchange(client.reads_from, kNoSnapshot);
    if (id == kNoSnapshot || --readers.at(id) > 0) return;
    readers.erase(id);
    if (!kept.contains(id)) ++free;
  }
  // The sequence is gone.
  void release(OfClient& client) {
    free += int32_t(std::exchange(client.keeps, {}).size());
    stop_reading(client);
  }

  void keep(SnapshotId id, const std::vector<Token>& prompt, int32_t position) {
    WEIR_CHECK(id > last);
    last = id;
    kept[id].assign(prompt.begin(), prompt.begin() + position);
  }
  // Whether somebody still has to start from it.
  bool drop(SnapshotId id) {
    kept.erase(id);
    if (readers.contains(id)) return true;
    ++free;
    return false;
  }

 private:
  int32_t start_from_one(Chance& chance, const Limits& limits, Request& request) const {
    if (kept.empty() || !chance.percent(60)) return 0;
    const auto& [id, read] = *std::next(kept.begin(), chance.pick(0, int32_t(kept.size()) - 1));
    const auto begin = int32_t(read.size());
    if (begin >= limits.prompt_tokens) return 0;
    if (int32_t(request.prompt.size()) <= begin) request.prompt.resize(size_t(begin) + 1);
    std::ranges::copy(read, request.prompt.begin());
    request.prompt_logprobs = false;
    request.start_from = id;
    return begin;
  }

  static Admission spoil(Chance& chance, const Limits& limits, Request& request) {
    const bool starts = request.start_from != kNoSnapshot &&
                        int32_t(request.snapshots.size()) <= limits.snapshots;
    if (starts && chance.percent(50)) {
      request.start_from += 1'000'000;
      return Admission::UnknownSnapshot;
    }
    if (starts && chance.percent(50)) {
      Token& first = request.prompt.front();
      first = first == 0 ? 1 : 0;
      return Admission::BadSnapshot;
    }
    request.snapshots.push_back(chance.percent(50) ? 0 : limits.prompt_tokens + 1);
    return Admission::BadSnapshot;
  }
};

}  // namespace weir

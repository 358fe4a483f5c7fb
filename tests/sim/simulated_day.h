#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "tests/sim/day_client.h"
#include "tests/sim/hash_model.h"
#include "tests/sim/random_request.h"

namespace weir {

// A server's day under random limits, arrivals, cancels and deadlines, from one seed. Beside the
// scheduler runs its policy as a reader would write it down, on lists of clients: what it hands
// out must be exactly that, and what each client gets must be HashModel::alone(), whether steps are
// handed out one by one or before the last one's answers are known. A check that fails aborts.
class SimulatedDay {
 public:
  SimulatedDay(uint64_t seed, DayCounts& counts)
      : counts_(counts), chance_(seed), limits_(random_limits()), scheduler_(limits_),
        model_(limits_, Scheduler::kStepsOut), free_slots_(limits_.slots),
        free_pages_(limits_.pages), snapshots_{.free = limits_.snapshots} {}

  void run() {
    constexpr SequenceId kArrivals = 60;
    constexpr int kStepsMax = 100'000;
    for (int step = 0; next_id_ < kArrivals || !open_.empty() || !leaving_.empty(); ++step) {
      WEIR_CHECK(step < kStepsMax);  // everything ends
      if (next_id_ < kArrivals) arrive();
      maybe_cancel();
      if (chance_.percent(20)) drop(chance_.pick(0, 9));
      now_ += chance_.pick(0, 3);
      if (!out_.empty()) ++counts_.ahead;
      hand_out();
      if (maybe_cancel()) ++counts_.cancelled_mid_step;
      if (next_id_ < kArrivals && chance_.percent(10)) arrive();
      const size_t most_out = chance_.percent(ahead_percent_) ? Scheduler::kStepsOut - 1 : 0;
      while (out_.size() > most_out) commit();
    }
    WEIR_CHECK(scheduler_.idle());
    while (!snapshots_.kept.empty()) drop(0);
    WEIR_CHECK(snapshots_.free == limits_.snapshots && snapshots_.readers.empty());
    check_free_snapshots();
    WEIR_CHECK(free_slots_ == limits_.slots && free_pages_ == limits_.pages);
  }

 private:
  using Client = DayClient;
  using Step = std::vector<Moved>;

  void hand_out() {
    const StepBatch& batch = scheduler_.next(now_);
    expire();
    admit();
    check_rows(batch);
    scheduler_.check_invariants();
    if (!batch.empty()) model_.begin(batch);
    out_.emplace_back();
    for (const Row& row : batch.rows) out_.back().push_back({row.id, row.count, 0});
    check_copies(batch);
  }

  void commit() {
    const Step step = std::move(out_.front());
    out_.pop_front();
    keeping_.clear();
    for (const auto& [id, count, kept] : step) {
      if (kept > 0) keeping_[id] = kept;
      Client& client = open_.contains(id) ? open_.at(id) : leaving_.at(id);
      client.answered += count;
      --client.rows_out;
      if (leaving_.contains(id)) ++counts_.rows_in_vain;
    }
    emissions_.clear();
    scheduler_.commit(step.empty() ? std::span<const Drawn>() : model_.finish(), emissions_);
    ++counts_.steps;
    check_emissions();
    for (auto item = leaving_.begin(); item != leaving_.end();) {
      Client& left = item->second;
      if (left.rows_out > 0) {
        ++item;
        continue;
      }
      snapshots_.release(left.snapshots);
      ++free_slots_;
      free_pages_ += left.pages;
      item = leaving_.erase(item);
    }
    scheduler_.check_invariants();
    check_occupancy();
    check_free_snapshots();
  }

  Limits random_limits() {
    Limits limits;
    limits.slots = chance_.pick(1, 8);
    limits.snapshots = chance_.percent(60) ? chance_.pick(1, 6) : 0;
    limits.page_tokens = chance_.pick(1, 16);
    limits.pages = chance_.percent(limits.snapshots > 0 ? 10 : 60) ? chance_.pick(1, 60) : 0;
    limits.step_tokens = limits.slots + (chance_.percent(30) ? 0 : chance_.pick(0, 40));
    limits.padding = chance_.percent(50) ? chance_.pick(1, 12) : 0;
    limits.chunk_tokens = chance_.pick(1, limits.step_tokens);
    limits.queued = chance_.pick(0, 10);
    limits.prompt_tokens = chance_.pick(1, 60);
    limits.new_tokens = chance_.pick(1, 40);
    limits.vocab = chance_.pick(2, 60);
    arrival_percent_ = chance_.pick(2, 100);
    cancel_percent_ = chance_.percent(50) ? chance_.pick(1, 8) : 0;
    deadline_percent_ = chance_.percent(50) ? chance_.pick(1, 40) : 0;
    ahead_percent_ = chance_.percent(50) ? 100 * chance_.pick(0, 1) : chance_.pick(1, 99);
    return limits;
  }

  int32_t pages_needed(const Request& request) const {
    if (limits_.pages == 0) return 0;
    const auto read = int32_t(request.prompt.size()) + request.new_tokens - 1;
    return (read + limits_.page_tokens - 1) / limits_.page_tokens;
  }

  // Makes one thing wrong, and says which answer it earns.
  Admission spoil(Request& request) {
    switch (chance_.pick(0, 6)) {
      case 0: request.prompt.clear(); return Admission::EmptyPrompt;
      case 1:
        request.prompt.resize(size_t(limits_.prompt_tokens) + 1);
        return Admission::PromptTooLong;
      case 2: request.prompt.back() = limits_.vocab; return Admission::BadToken;
      case 3: request.stop.push_back(-1); return Admission::BadToken;
      case 4: request.new_tokens = limits_.new_tokens + 1; return Admission::BadLength;
      case 5: request.min_tokens = request.new_tokens + 1; return Admission::BadLength;
      default: request.sampling.top_p = 0; return Admission::BadSampling;
    }
  }

  void arrive() {
    while (chance_.percent(arrival_percent_)) {
      Request request = random_request(chance_, limits_);
      if (chance_.percent(deadline_percent_)) request.deadline = now_ + chance_.pick(0, 80);
      Admission expected = snapshots_.ask(chance_, limits_, request);
      const bool full = int64_t(open_.size()) >= limits_.slots + limits_.queued;
      if (expected == Admission::Accepted && full) expected = Admission::QueueFull;
      if (pages_needed(request) > limits_.pages) expected = Admission::TooManyPages;
      else if (chance_.percent(5)) expected = spoil(request);
      const SequenceId id = next_id_++;
      WEIR_CHECK(scheduler_.submit(id, request) == expected);
      ++counts_.admissions[size_t(expected)];
      if (expected == Admission::Accepted) {
        const auto before = std::ranges::find_if(waiting_, [&](SequenceId other) {
          return open_.at(other).request.priority < request.priority;
        });
        waiting_.insert(before, id);
        Client& client = open_[id];
        client.expected = HashModel::alone(request, limits_);
        client.pages = pages_needed(request);
        client.read = client.answered = snapshots_.take(request, client.snapshots);
        counts_.started_from += client.read > 0;
        client.request = std::move(request);
      }
      if (chance_.percent(50)) return;
    }
  }

  bool maybe_cancel() {
    if (open_.empty() || !chance_.percent(cancel_percent_)) return false;
    const auto victim = std::next(open_.begin(), chance_.pick(0, int32_t(open_.size()) - 1));
    scheduler_.cancel(victim->first);
    scheduler_.cancel(victim->first + 1'000'000);  // one that has ended, or never was
    if (victim->second.cut) return false;
    victim->second.cut = Finish::Cancelled;
    return true;
  }

  void expire() {
    for (auto& [id, client] : open_) {
      if (!client.cut && client.request.deadline <= now_) client.cut = Finish::Deadline;
    }
  }

  // In order of priority and arrival, each with all it can need, and nobody overtakes.
  void admit() {
    for (auto place = waiting_.begin(); place != waiting_.end() && free_slots_ > 0;) {
      Client& client = open_.at(*place);
      if (client.cut) {
        ++place;
        continue;
      }
      if (client.pages > free_pages_) {
        ++counts_.waited_for_pages;
        break;
      }
      --free_slots_;
      free_pages_ -= client.pages;
      client.started_at = now_;
      running_.push_back(*place);
      place = waiting_.erase(place);
    }
    check_occupancy();
  }

  void check_occupancy() const {
    WEIR_CHECK(scheduler_.waiting() == int32_t(waiting_.size()));
    WEIR_CHECK(scheduler_.running() == int32_t(running_.size() + leaving_.size()));
    WEIR_CHECK(scheduler_.free_slots() == free_slots_);
    WEIR_CHECK(scheduler_.free_pages() == free_pages_);
  }

  // Who moves, and by how much: all that decode, then prompts in order of admission.
  void check_rows(const StepBatch& batch) {
    WEIR_CHECK(int64_t(batch.tokens.size()) <= limits_.step_tokens);
    WEIR_CHECK(int64_t(batch.outputs.size()) <= limits_.step_tokens);
    size_t row = 0;
    int32_t room = limits_.step_tokens;
    for (const bool decodes : {true, false}) {
      const bool alone = running_.size() + leaving_.size() == 1;
      if (!decodes && !alone && room > 2 * limits_.padding) room -= limits_.padding;
      for (const SequenceId id : running_) {
        Client& client = open_.at(id);
        if (!client.moves() || (client.unread() == 1) != decodes) continue;
        int32_t count = std::min({client.unread(), limits_.chunk_tokens, room});
        count = std::min(count, client.snapshots.next() - client.read);
        if (count == 0) continue;
        room -= count;
        WEIR_CHECK(row < batch.rows.size());
        check_row(batch.rows[row++], id, client, count);
      }
    }
    WEIR_CHECK(row == batch.rows.size());
    for (const Row& moved : batch.rows) {
      open_.at(moved.id).read += moved.count;
      ++open_.at(moved.id).rows_out;
    }
  }

  // Each sequence's first row starts from its snapshot, and rows that end at a position are kept.
  void check_copies(const StepBatch& batch) {
    size_t starts = 0, keeps = 0;
    for (size_t i = 0; i < batch.rows.size(); ++i) {
      const Row& row = batch.rows[i];
      Client& client = open_.at(row.id);
      if (client.snapshots.reads_from != kNoSnapshot) {
        WEIR_CHECK(starts < batch.starts.size());
        const SlotCopy& start = batch.starts[starts++];
        WEIR_CHECK(start.id == row.id && start.to == row.slot && start.position == row.first);
        snapshots_.stop_reading(client.snapshots);
      }
      if (client.snapshots.next() != client.read) continue;
      WEIR_CHECK(keeps < batch.keeps.size());
      const SlotCopy& keep = batch.keeps[keeps++];
      WEIR_CHECK(keep.id == row.id && keep.from == row.slot && keep.position == client.read);
      out_.back()[i].kept = client.read;
      client.snapshots.keeps.pop_back();
    }
    WEIR_CHECK(starts == batch.starts.size() && keeps == batch.keeps.size());
    check_free_snapshots();
  }

  void check_row(const Row& row, SequenceId id, Client& client, int32_t count) {
    WEIR_CHECK(row.id == id && row.first == client.read && row.count == count);
    if (!client.slot) {
      client.slot = row.slot;
      client.page_list.assign(row.pages.begin(), row.pages.end());
      WEIR_CHECK(int32_t(row.pages.size()) == client.pages);
      for (const SequenceId other : running_) {
        if (other != id) check_apart(client, open_.at(other));
      }
      for (const auto& [other, left] : leaving_) check_apart(client, left);
    }
    WEIR_CHECK(row.slot == *client.slot && std::ranges::equal(row.pages, client.page_list));
  }

  static void check_apart(const Client& client, const Client& other) {
    WEIR_CHECK(other.slot != client.slot);
    for (const int32_t page : other.page_list) {
      WEIR_CHECK(std::ranges::find(client.page_list, page) == client.page_list.end());
    }
  }

  void check_emissions() {
    std::set<SequenceId> told;
    for (const Emission& emission : emissions_) {
      WEIR_CHECK(told.insert(emission.id).second);
      WEIR_CHECK(open_.contains(emission.id));  // nothing after the last emission
      check_emission(emission, open_.at(emission.id));
      if (emission.finish) close(emission.id);
    }
    counts_.kept_in_vain += int64_t(keeping_.size());
    snapshots_.free += int32_t(keeping_.size());  // those that nobody was told of
    for (const auto& [id, position] : keeping_) WEIR_CHECK(!open_.contains(id));
    for (const auto& [id, client] : open_) {
      WEIR_CHECK(!client.cut);  // an end waits for no one
      // What the steps have read, they have answered.
      WEIR_CHECK(int32_t(client.tokens) == std::max(0, client.answered - client.prompt() + 1));
      const int32_t scored = std::min(client.answered, client.prompt() - 1);
      WEIR_CHECK(int32_t(client.scores) == (client.request.prompt_logprobs ? scored : 0));
    }
  }

  void check_emission(const Emission& emission, Client& client) {
    const HashModel::Answer& expected = client.expected;
    WEIR_CHECK(emission.token || !emission.prompt.empty() || emission.snapshot || emission.finish);
    check_snapshot(emission, client);
    WEIR_CHECK(emission.started == (client.started_at != kNever));
    WEIR_CHECK(emission.started_at == client.started_at);
    for (const Emission::PromptScore& score : emission.prompt) {
      WEIR_CHECK(client.tokens == 0 && client.scores < expected.prompt.size());
      const Emission::PromptScore& wanted = expected.prompt[client.scores++];
      WEIR_CHECK(score.position == wanted.position && score.logprob == wanted.logprob);
      WEIR_CHECK(equal(score.top, wanted.top));
      ++counts_.prompt_scores;
    }
    if (emission.token) {
      WEIR_CHECK(client.tokens < expected.tokens.size());
      const Drawn& wanted = expected.tokens[client.tokens++];
      WEIR_CHECK(*emission.token == wanted.token);
      const bool scored = client.request.logprobs || client.request.top_logprobs > 0;
      WEIR_CHECK(emission.logprob == (scored ? std::optional(wanted.logprob) : std::nullopt));
      WEIR_CHECK(equal(emission.top, wanted.top));
      ++counts_.tokens;
    } else {
      WEIR_CHECK(!emission.logprob && emission.top.empty());
    }
    const bool complete = client.tokens == expected.tokens.size();
    if (client.cut) {
      WEIR_CHECK(emission.finish == client.cut && !emission.token && emission.prompt.empty());
    } else if (emission.finish) {
      WEIR_CHECK(*emission.finish == expected.finish && complete);
      WEIR_CHECK(client.scores == expected.prompt.size());
    } else {
      WEIR_CHECK(!complete || expected.finish == Finish::Error);
    }
  }

  void check_free_snapshots() const {
    WEIR_CHECK(scheduler_.snapshots().ledger().free == snapshots_.free);
  }

  // The i-th or so of those that are kept.
  void drop(int32_t i) {
    if (snapshots_.kept.empty()) return;
    const auto place = i % int32_t(snapshots_.kept.size());
    const SnapshotId id = std::next(snapshots_.kept.begin(), place)->first;
    scheduler_.drop(id);
    scheduler_.drop(id);  // once more means nothing
    counts_.dropped_before_start += snapshots_.drop(id);
  }

  void check_snapshot(const Emission& emission, const Client& client) {
    const auto kept = keeping_.find(emission.id);
    const bool valid = !client.cut && emission.finish != Finish::Error;
    WEIR_CHECK(emission.snapshot.has_value() == (kept != keeping_.end() && valid));
    if (!emission.snapshot) return;
    WEIR_CHECK(emission.snapshot->position == kept->second);
    snapshots_.keep(emission.snapshot->id, client.request.prompt, kept->second);
    keeping_.erase(kept);
    ++counts_.kept;
  }

  static bool equal(const std::vector<TokenScore>& a, const std::vector<TokenScore>& b) {
    return std::ranges::equal(a, b, [](const TokenScore& x, const TokenScore& y) {
      return x.token == y.token && x.logprob == y.logprob;
    });
  }

  void close(SequenceId id) {
    Client& client = open_.at(id);
    ++counts_.finishes[size_t(client.cut.value_or(client.expected.finish))];
    if (std::erase(running_, id) == 1) {
      leaving_[id] = std::move(client);  // until its rows that are out are committed
    } else {
      WEIR_CHECK(std::erase(waiting_, id) == 1);
      snapshots_.release(client.snapshots);
      ++counts_.ended_in_queue;
    }
    open_.erase(id);
  }

  DayCounts& counts_;
  Chance chance_;
  int32_t arrival_percent_ = 0, cancel_percent_ = 0, deadline_percent_ = 0, ahead_percent_ = 0;
  const Limits limits_;
  Scheduler scheduler_;
  HashModel model_;
  Nanoseconds now_ = 1000;
  SequenceId next_id_ = 1;
  std::map<SequenceId, Client> open_, leaving_;
  std::deque<Step> out_;
  std::vector<SequenceId> waiting_, running_;  // the policy's own lists
  int32_t free_slots_ = 0, free_pages_ = 0;
  DaySnapshots snapshots_;
  std::map<SequenceId, int32_t> keeping_;      // copies of the step being committed
  std::vector<Emission> emissions_;
};

}  // namespace weir

#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "tests/sim/hash_model.h"
#include "tests/sim/random_request.h"

namespace weir {

// What days contained, so that a run can show that it was not empty.
struct DayCounts {
  int64_t steps = 0, tokens = 0, prompt_scores = 0;
  int64_t finishes[5] = {};    // by Finish
  int64_t admissions[8] = {};  // by Admission
  int64_t ended_in_queue = 0, cancelled_mid_step = 0, waited_for_pages = 0;
  int64_t ahead = 0;           // steps handed out before the one before was committed
  int64_t rows_in_vain = 0;    // rows of sequences that turned out to have ended
};

// A server's day under random limits, arrivals, cancels and deadlines, from one seed. Beside the
// scheduler runs its policy as a reader would write it down, on lists of clients: what it hands
// out must be exactly that, and what each client gets must be HashModel::alone(), whether steps are
// handed out one by one or before the last one's answers are known. A check that fails aborts.
class SimulatedDay {
 public:
  SimulatedDay(uint64_t seed, DayCounts& counts)
      : counts_(counts), chance_(seed), limits_(random_limits()), scheduler_(limits_),
        model_(limits_, Scheduler::kStepsOut), free_slots_(limits_.slots),
        free_pages_(limits_.pages) {}

  void run() {
    constexpr SequenceId kArrivals = 60;
    constexpr int kStepsMax = 100'000;
    for (int step = 0; next_id_ < kArrivals || !open_.empty() || !leaving_.empty(); ++step) {
      WEIR_CHECK(step < kStepsMax);  // everything ends
      if (next_id_ < kArrivals) arrive();
      maybe_cancel();
      now_ += chance_.pick(0, 3);
      if (!out_.empty()) ++counts_.ahead;
      hand_out();
      if (maybe_cancel()) ++counts_.cancelled_mid_step;
      if (next_id_ < kArrivals && chance_.percent(10)) arrive();
      const size_t most_out = chance_.percent(ahead_percent_) ? Scheduler::kStepsOut - 1 : 0;
      while (out_.size() > most_out) commit();
    }
    WEIR_CHECK(scheduler_.idle());
    WEIR_CHECK(free_slots_ == limits_.slots && free_pages_ == limits_.pages);
  }

 private:
  // What the scheduler has handed out and the model computed: rows, by their tokens.
  using Step = std::vector<std::pair<SequenceId, int32_t>>;
  struct Client {
    Request request;
    HashModel::Answer expected;
    int32_t pages = 0;                     // that it needs
    Nanoseconds started_at = kNever;
    std::optional<Finish> cut;             // cancelled or late, whichever came first
    int32_t read = 0;                      // tokens that the model has read
    int32_t answered = 0;                  // of them, in steps that are committed
    int32_t rows_out = 0;                  // in steps that are not
    std::optional<Slot> slot;
    std::vector<int32_t> page_list;
    size_t scores = 0, tokens = 0;         // got so far

    int32_t prompt() const { return int32_t(request.prompt.size()); }
    int32_t asked() const { return std::max(0, read - prompt() + 1); }  // draws
    int32_t unread() const { return prompt() + asked() - read; }
    bool moves() const { return !cut && asked() < request.new_tokens; }
  };

  void hand_out() {
    const StepBatch& batch = scheduler_.next(now_);
    expire();
    admit();
    check_rows(batch);
    scheduler_.check_invariants();
    if (!batch.empty()) model_.begin(batch);
    out_.emplace_back();
    for (const Row& row : batch.rows) out_.back().push_back({row.id, row.count});
  }

  void commit() {
    const Step step = std::move(out_.front());
    out_.pop_front();
    for (const auto& [id, count] : step) {
      Client& client = open_.contains(id) ? open_.at(id) : leaving_.at(id);
      client.answered += count;
      --client.rows_out;
      if (leaving_.contains(id)) ++counts_.rows_in_vain;
    }
    emissions_.clear();
    scheduler_.commit(step.empty() ? std::span<const Drawn>() : model_.finish(), emissions_);
    ++counts_.steps;
    check_emissions();
    std::erase_if(leaving_, [this](const auto& item) {
      if (item.second.rows_out > 0) return false;
      ++free_slots_;
      free_pages_ += item.second.pages;
      return true;
    });
    scheduler_.check_invariants();
    check_occupancy();
  }

  Limits random_limits() {
    Limits limits;
    limits.slots = chance_.pick(1, 8);
    limits.page_tokens = chance_.pick(1, 16);
    limits.pages = chance_.percent(50) ? chance_.pick(1, 60) : 0;
    limits.step_tokens = limits.slots + (chance_.percent(30) ? 0 : chance_.pick(0, 40));
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
      Admission expected = Admission::Accepted;
      if (int64_t(open_.size()) >= limits_.slots + limits_.queued) expected = Admission::QueueFull;
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
      for (const SequenceId id : running_) {
        Client& client = open_.at(id);
        if (!client.moves() || (client.unread() == 1) != decodes) continue;
        const int32_t count = std::min({client.unread(), limits_.chunk_tokens, room});
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
    WEIR_CHECK(emission.token || !emission.prompt.empty() || emission.finish);
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
  std::vector<Emission> emissions_;
};

}  // namespace weir

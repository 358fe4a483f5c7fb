#include "server/capacity.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace weir {
namespace {

// When slots are chosen, each is thought of with the pages of this many tokens.
constexpr int64_t kTokensOfATypicalSequence = 2048;
// Of the free memory, what is never planned for: the process has other needs.

std::string mib(size_t bytes) {
  return absl::StrFormat("%.1f MiB", double(bytes) / (1024.0 * 1024.0));
}

int64_t pages_of(int64_t tokens, int32_t page_tokens) {
  return (tokens + page_tokens - 1) / page_tokens;
}

// One planning: keeps the numbers that its steps share.
class Planner {
 public:
  Planner(const ModelSpec& spec, const CapacityAsked& asked, const CapacityGiven& given)
      : asked_(asked), given_(given) {
    plan_.size = state_size(spec);
    if (given.defers_writes) waiting_ = waiting_bytes(spec);
    plan_.size.recurrent += waiting_;
    plan_.page_bytes = plan_.size.kv_per_token * size_t(asked.kv_page_tokens);
    plan_.limits = {.page_tokens = asked.kv_page_tokens,
                    .chunk_tokens = asked.chunk_tokens,
                    .queued = asked.queue,
                    .prompt_tokens = asked.prompt_tokens,
                    .new_tokens = asked.new_tokens,
                    .vocab = spec.vocab};
  }

  absl::StatusOr<Capacity> plan() {
    if (absl::Status status = find_memory(); !status.ok()) return status;
    if (absl::Status status = choose_budget(); !status.ok()) return status;
    if (absl::Status status = choose_slots(); !status.ok()) return status;
    if (absl::Status status = report_step(); !status.ok()) return status;
    if (absl::Status status = choose_pages(); !status.ok()) return status;
    if (absl::Status status = fit_lengths(); !status.ok()) return status;
    describe();
    return std::move(plan_);
  }

 private:
  // Limits with this many slots.
  Limits limits_for(int32_t slots) const {
    Limits limits = plan_.limits;
    limits.slots = slots;
    limits.step_tokens = std::max(asked_.step_tokens, slots);
    limits.padding = limits.step_tokens <= kPaddedMost ? given_.step_padding : 0;
    limits.chunk_tokens = std::min(asked_.chunk_tokens, limits.step_tokens);
    limits.pages = plan_.page_bytes > 0 ? 1 : 0;
    return limits;
  }

  absl::Status clamp(const std::string& line) {
    if (asked_.strict) return absl::ResourceExhaustedError(line);
    plan_.lines.push_back(absl::StrCat("clamped: ", line));
    return absl::OkStatus();
  }

  absl::Status find_memory() {
    const double usable = double(given_.free_bytes) * (1 - given_.left_alone);
    const size_t workspace = given_.workspace_bytes(limits_for(1));
    if (usable <= double(given_.weights_bytes + workspace)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("memory: the weights need ", mib(given_.weights_bytes), " and a step ",
                       mib(workspace), ", free are ", mib(given_.free_bytes)));
    }
    usable_ = size_t(usable) - given_.weights_bytes;
    return absl::OkStatus();
  }

  absl::Status choose_budget() {
    plan_.state_budget = size_t(double(usable_) * given_.for_states);
    if (asked_.state_bytes == 0) return absl::OkStatus();
    plan_.state_budget = std::min(asked_.state_bytes, usable_);
    if (plan_.state_budget == asked_.state_bytes) return absl::OkStatus();
    return clamp(absl::StrCat("asked for ", mib(asked_.state_bytes),
                              " of state memory, possible ", mib(usable_)));
  }

  size_t slot_cost() const {
    const int64_t longest = int64_t(asked_.prompt_tokens) + asked_.new_tokens;
    const int64_t tokens = std::min(longest, kTokensOfATypicalSequence);
    // Asked for by number, slots only need to exist: a page for each.
    const int64_t pages = asked_.slots > 0 ? 1 : pages_of(tokens, asked_.kv_page_tokens);
    return plan_.size.slot() + size_t(pages) * plan_.page_bytes;
  }

  bool fits(int32_t slots) const {
    const size_t each = std::max<size_t>(slot_cost(), 1);
    if (size_t(slots) > plan_.state_budget / each) return false;  // the product might wrap around
    return size_t(slots) * each + given_.workspace_bytes(limits_for(slots)) <= usable_;
  }

  absl::Status choose_slots() {
    const int32_t wanted = asked_.slots > 0 ? asked_.slots : kSlotsByDefault;
    int32_t possible = 0;
    for (int32_t low = 1, high = wanted; low <= high;) {
      const int32_t middle = low + (high - low) / 2;
      if (fits(middle)) {
        possible = middle;
        low = middle + 1;
      } else {
        high = middle - 1;
      }
    }
    if (possible == 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("memory: one sequence needs ", slot_cost(), " bytes of state, there are ",
                       mib(plan_.state_budget), " for states"));
    }
    if (possible < asked_.slots) {
      const absl::Status status = clamp(absl::StrCat(
          "asked for ", asked_.slots, " slots, possible ", possible, " in ",
          mib(plan_.state_budget), " at ", slot_cost(), " bytes each"));
      if (!status.ok()) return status;
    }
    plan_.limits = limits_for(possible);
    plan_.workspace_bytes = given_.workspace_bytes(plan_.limits);
    return absl::OkStatus();
  }

  // What limits_for made of the step that was asked for.
  absl::Status report_step() {
    const Limits& limits = plan_.limits;
    if (limits.step_tokens > asked_.step_tokens) {
      const absl::Status status =
          clamp(absl::StrCat("asked for ", asked_.step_tokens, " tokens a step, needed ",
                             limits.step_tokens, ", one for each slot"));
      if (!status.ok()) return status;
    }
    if (limits.chunk_tokens == asked_.chunk_tokens) return absl::OkStatus();
    return clamp(absl::StrCat("asked for prompt chunks of ", asked_.chunk_tokens,
                              " tokens, possible ", limits.chunk_tokens, ", a whole step"));
  }

  absl::Status choose_pages() {
    Limits& limits = plan_.limits;
    limits.pages = 0;
    if (plan_.page_bytes == 0) return absl::OkStatus();
    const size_t slots_bytes = size_t(limits.slots) * plan_.size.slot();
    const size_t room = std::min(plan_.state_budget, usable_ - plan_.workspace_bytes) - slots_bytes;
    const int64_t longest = int64_t(limits.prompt_tokens) + limits.new_tokens;
    const int64_t useful = limits.slots * pages_of(longest, limits.page_tokens);
    const auto possible =
        int64_t(std::min<size_t>(room / plan_.page_bytes, size_t(INT32_MAX / 2)));
    const int64_t wanted = asked_.kv_pages > 0 ? asked_.kv_pages : std::min(useful, possible);
    limits.pages = int32_t(std::min(wanted, possible));
    if (limits.pages == wanted) return absl::OkStatus();
    return clamp(absl::StrCat("asked for ", wanted, " KV pages, possible ", possible, " in ",
                              mib(room), " at ", plan_.page_bytes, " bytes each"));
  }

  // A sequence may hold all the KV pages, and no more.
  absl::Status fit_lengths() {
    Limits& limits = plan_.limits;
    if (plan_.page_bytes == 0) return absl::OkStatus();
    const int64_t held = int64_t(limits.pages) * limits.page_tokens;
    const auto longest = int32_t(std::min<int64_t>(held, INT32_MAX));
    if (limits.prompt_tokens <= longest && limits.new_tokens <= longest) return absl::OkStatus();
    limits.prompt_tokens = std::min(limits.prompt_tokens, longest);
    limits.new_tokens = std::min(limits.new_tokens, longest);
    return clamp(absl::StrCat("asked for prompts of ", asked_.prompt_tokens, " and answers of ",
                              asked_.new_tokens, " tokens, possible ", longest,
                              " together, what the KV pages hold"));
  }

  void describe() {
    const Limits& limits = plan_.limits;
    const StateSize& size = plan_.size;
    auto& lines = plan_.lines;
    lines.push_back(absl::StrCat(
        "bytes per sequence: recurrent ", size.recurrent,
        waiting_ > 0 ? absl::StrCat(" (", waiting_, " for deferred writes)") : "", ", conv ",
        size.conv, ", window ", size.ring, ", kv per token ", size.kv_per_token));
    lines.push_back(absl::StrCat(
        "slots: ", limits.slots, " of ", size.slot(), " bytes = ",
        mib(size_t(limits.slots) * size.slot()), " of ", mib(plan_.state_budget),
        " for states; limited by ", limiting()));
    if (plan_.page_bytes > 0) {
      lines.push_back(absl::StrCat("kv pages: ", limits.pages, " of ", limits.page_tokens,
                                   " tokens, ", plan_.page_bytes, " bytes each = ",
                                   mib(size_t(limits.pages) * plan_.page_bytes)));
    }
    lines.push_back(absl::StrCat("memory: free ", mib(given_.free_bytes), ", weights ",
                                 mib(given_.weights_bytes), ", workspace ",
                                 mib(plan_.workspace_bytes)));
    lines.push_back(absl::StrCat("step: ", limits.step_tokens, " tokens, prompt chunks of ",
                                 limits.chunk_tokens, "; queue ", limits.queued,
                                 "; prompt at most ", limits.prompt_tokens, ", answer at most ",
                                 limits.new_tokens));
  }

  std::string limiting() const {
    if (asked_.slots > 0 && plan_.limits.slots == asked_.slots) return "--slots";
    if (asked_.slots == 0 && plan_.limits.slots == kSlotsByDefault) return "the default of 64";
    return asked_.state_bytes > 0 ? "--state_memory_mib" : "free memory";
  }

  const CapacityAsked& asked_;
  const CapacityGiven& given_;
  Capacity plan_;
  size_t usable_ = 0;   // free memory less the reserve and the weights
  size_t waiting_ = 0;  // bytes of a slot's states that are for updates of them that wait
};

}  // namespace

absl::StatusOr<Capacity> plan_capacity(const ModelSpec& spec, const CapacityAsked& asked,
                                       const CapacityGiven& given) {
  return Planner(spec, asked, given).plan();
}

}  // namespace weir

"""Bugs to put into the scheduler, each a name and (file, what stands there, what to write)."""

SCHEDULER, EDITS = "engine/scheduler.cpp", "engine/logit_edits.cpp"
SNAPSHOTS = "engine/snapshots.cpp"

BUGS = {
    "slot given back twice": (
        SCHEDULER,
        "  free_slots_.push_back(sequence.slot);\n",
        "  free_slots_.push_back(sequence.slot);\n  free_slots_.push_back(sequence.slot);\n"),
    "slot of a cancelled sequence lost": (
        SCHEDULER,
        "if (sequence.slot < 0) return;",
        "if (sequence.slot < 0 || sequence.finish == Finish::Cancelled) return;"),
    "pages of a late sequence leaked": (
        SCHEDULER,
        "  free_pages_.insert(free_pages_.end(), sequence.pages.begin(), sequence.pages.end());\n",
        "  if (sequence.finish != Finish::Deadline)\n"
        "    free_pages_.insert(free_pages_.end(), sequence.pages.begin(), sequence.pages.end());\n"),
    "two sequences given the same page": (
        SCHEDULER,
        "free_pages_.erase(first, free_pages_.end());",
        "if (first != free_pages_.end()) std::rotate(free_pages_.begin(), "
        "free_pages_.begin() + 1, free_pages_.end());"),
    "row names one page too few": (
        SCHEDULER,
        ".pages = sequence.pages};",
        ".pages = std::span(sequence.pages).first("
        "sequence.pages.size() - (sequence.pages.size() > 3))};"),
    "cancelled slot freed before its step is done": (
        SCHEDULER,
        "  found->second->finish = Finish::Cancelled;\n",
        "  found->second->finish = Finish::Cancelled;\n"
        "  if (out_ > 0 && found->second->slot >= 0) {\n"
        "    free_slots_.push_back(found->second->slot);\n"
        "    found->second->slot = -1;\n"
        "  }\n"),
    "draws before the prompt is read": (
        SCHEDULER,
        "if (count == sequence.unread()) add_draw",
        "if (count + 1 >= sequence.unread()) add_draw"),
    "chunk skips a token": (
        SCHEDULER,
        "  sequence.read = end;\n",
        "  sequence.read = end + (count == limits_.chunk_tokens && count > 8 &&\n"
        "                         sequence.unread() > count + 1);\n"),
    "chunk read twice": (
        SCHEDULER,
        "  sequence.read = end;\n",
        "  if (count != 13 || sequence.unread() == 13) sequence.read = end;\n"),
    "draws handed to neighbours": (
        SCHEDULER,
        "take(sequence, asked, drawn[output], emission);",
        "take(sequence, asked, drawn[drawn.size() - 1 - output], emission);"),
    "tokens of another row": (
        SCHEDULER,
        "batch.tokens.insert(batch.tokens.end(), tokens + row.first, tokens + known);",
        "batch.tokens.insert(batch.tokens.begin(), tokens + row.first, tokens + known);"),
    "stop token ignored": (
        SCHEDULER,
        "if (sequence.stops_at(answer.token)) {",
        "if (sequence.stops_at(answer.token) && sequence.drawn() > 1) {"),
    "only the first stop token known": (
        SCHEDULER,
        "return std::ranges::find(request.stop, token) != request.stop.end();",
        "return !request.stop.empty() && request.stop.front() == token;"),
    "stop told as length": (
        SCHEDULER,
        "sequence.finish = Finish::Stop;",
        "sequence.finish = Finish::Length;"),
    "one token too many": (
        SCHEDULER,
        "sequence.drawn() >= request.new_tokens",
        "sequence.drawn() > request.new_tokens"),
    "prompts take what padding was left": (
        SCHEDULER,
        " most -= limits_.padding;",
        " most -= 0;"),
    "prompts starve for padding's sake": (
        SCHEDULER,
        " && free > 2 * limits_.padding) most",
        ") most"),
    "padding left free beside a prompt alone": (
        SCHEDULER,
        "running_.size() > 1 && free",
        "free"),
    "step budget exceeded": (
        SCHEDULER,
        "std::min({sequence->unread(), limits_.chunk_tokens, room})",
        "std::min({sequence->unread(), limits_.chunk_tokens, room + (room > 0)})"),
    "chunk limit ignored": (
        SCHEDULER,
        "std::min({sequence->unread(), limits_.chunk_tokens, room})",
        "std::min({sequence->unread(), room})"),
    "lone decode row starved by prompts": (
        SCHEDULER,
        "if (sequence->moves() && sequence->unread() == 1) add_row(*sequence, 1, batch);",
        "if (sequence->moves() && sequence->unread() == 1 &&\n"
        "        (running_.size() < 3 || sequence != running_.back())) add_row(*sequence, 1, batch);"),
    "last prompt token does not decode": (
        SCHEDULER,
        "sequence->unread() > 1 && count > 0",
        "sequence->unread() > 2 && count > 0"),
    "first in the queue lost when another is cancelled": (
        SCHEDULER,
        "  found->second->finish = Finish::Cancelled;\n",
        "  found->second->finish = Finish::Cancelled;\n"
        "  if (out_ == 0 && waiting_.size() > 1) waiting_.pop_front();\n"),
    "cancelled request stays in the queue": (
        SCHEDULER,
        "  std::erase_if(waiting_, leaves);\n",
        "  if (running_.empty()) std::erase_if(waiting_, leaves);\n"),
    "cancelled request at the head blocks the queue": (
        SCHEDULER,
        "      ++place;\n      continue;\n",
        "      return;\n"),
    "cancelled request admitted": (
        SCHEDULER,
        "    if (sequence.finish) {\n      ++place;",
        "    if (sequence.finish == Finish::Deadline) {\n      ++place;"),
    "token after the cancel": (
        SCHEDULER,
        "if (!sequence.finish) take(sequence, asked, drawn[output], emission);",
        "if (!sequence.told) take(sequence, asked, drawn[output], emission);"),
    "cancel of a running sequence forgotten": (
        SCHEDULER,
        "found->second->finish) return;",
        "found->second->finish || (out_ > 0 && found->second->drawn() > 0)) return;"),
    "deadline not seen in the queue": (
        SCHEDULER,
        "  std::ranges::for_each(waiting_, end_late);\n",
        ""),
    "deadline not seen while running": (
        SCHEDULER,
        "  std::ranges::for_each(running_, end_late);\n",
        ""),
    "deadline one tick late": (
        SCHEDULER,
        "sequence->request.deadline <= now",
        "sequence->request.deadline < now"),
    "deadline told after a cancel": (
        SCHEDULER,
        "if (!sequence->finish && sequence->request.deadline <= now) {",
        "if (sequence->request.deadline <= now) {"),
    "last emission twice": (
        SCHEDULER,
        "if (!sequence->told) {",
        "if (!sequence->told || sequence->finish == Finish::Error) {"),
    "end of a sequence not told": (
        SCHEDULER,
        "if (!sequence->told) {",
        "if (!sequence->told && sequence->slot >= 0) {"),
    "broken row ends nobody": (
        SCHEDULER,
        "    sequence.finish = Finish::Error;\n",
        ""),
    "broken row ends every row after it": (
        SCHEDULER,
        "    sequence.finish = Finish::Error;\n",
        "    for (Sequence* other : running_)\n"
        "      if (!other->finish) other->finish = Finish::Error;\n"),
    "queue longer than its limit": (
        SCHEDULER,
        ">= live_max) return Admission::QueueFull;",
        "> live_max) return Admission::QueueFull;"),
    "later arrival first": (
        SCHEDULER,
        "return other->request.priority < priority;",
        "return other->request.priority <= priority;"),
    "priority upside down": (
        SCHEDULER,
        "return other->request.priority < priority;",
        "return other->request.priority > priority;"),
    "small request overtakes one that waits for pages": (
        SCHEDULER,
        "if (sequence.pages_needed > int64_t(free_pages_.size())) return;",
        "if (sequence.pages_needed > int64_t(free_pages_.size())) {\n"
        "      ++place;\n      continue;\n    }"),
    "position of a draw off by one": (
        SCHEDULER,
        ".position = sequence.known() + sequence.pending,",
        ".position = sequence.known() + sequence.pending - 1,"),
    "seed of the first sequence for all": (
        SCHEDULER,
        ".sampling = request.sampling,",
        ".sampling = running_.front()->request.sampling,"),
    "edits of an earlier step": (
        EDITS,
        "out.assign(edits_.begin(), edits_.end());",
        "out.insert(out.end(), edits_.begin(), edits_.end());"),
    "stop tokens allowed one draw early": (
        SCHEDULER,
        "sequence.asked() < request.min_tokens",
        "sequence.asked() + 1 < request.min_tokens"),
    "stop tokens forbidden for ever": (
        SCHEDULER,
        "sequence.asked() < request.min_tokens",
        "request.min_tokens > 0"),
    "prompt tokens not penalised": (
        EDITS,
        "if (repetition) edits_ = seen_tokens(prompt);",
        ""),
    "generated tokens counted once": (
        EDITS,
        "++edit.generated;",
        "edit.generated = 1;"),
    "presence penalty alone forgotten": (
        EDITS,
        " || sampling.presence_penalty != 0;",
        ";"),
    "bias lost on a token of the prompt": (
        EDITS,
        "edit_of(token, edits_).bias = bias;",
        "if (!edit_of(token, edits_).seen) edit_of(token, edits_).bias = bias;"),
    "prompt score off by one": (
        SCHEDULER,
        ".target = sequence.tokens[size_t(position)],",
        ".target = sequence.tokens[size_t(position) - 1],"),
    "prompt scores end with the chunk": (
        SCHEDULER,
        "std::min(row.first + row.count + 1, sequence.prompt_tokens)",
        "std::min(row.first + row.count, sequence.prompt_tokens)"),
    "alternatives not asked for": (
        SCHEDULER,
        ".position = sequence.known() + sequence.pending,\n                .top = request.top_logprobs,",
        ".position = sequence.known() + sequence.pending,\n                .top = 0,"),
    "slot freed with a row still out": (
        SCHEDULER,
        "    if (sequence->rows_out > 0) return false;\n    release(*sequence);\n",
        "    if (sequence->slot >= 0) release(*sequence);\n    sequence->slot = -1;\n"
        "    if (sequence->rows_out > 0) return false;\n"),
    "sequence forgotten with a row still out": (
        SCHEDULER,
        "    if (sequence->rows_out > 0) return false;\n",
        "    if (sequence->rows_out > 1) return false;\n"),
    "row in vain told": (
        SCHEDULER,
        "    if (sequence.told) continue;  // the row was in vain\n",
        ""),
    "row given beyond the known length": (
        SCHEDULER,
        "return !finish && asked() < request.new_tokens;",
        "return !finish && drawn() < request.new_tokens;"),
    "stop tokens forbidden one draw late when ahead": (
        SCHEDULER,
        "sequence.asked() < request.min_tokens",
        "sequence.drawn() < request.min_tokens"),
    "token of a neighbour's draw": (
        SCHEDULER,
        "drawn_for(sequence.last_draw)",
        "drawn_for(sequence.last_draw - (sequence.last_draw > 2))"),
    "position of a draw ahead off by one": (
        SCHEDULER,
        ".position = sequence.known() + sequence.pending,",
        ".position = sequence.known(),"),
    "token that the edits do not know not counted": (
        SCHEDULER,
        ".counts_last = sequence.pending > 0 && sequence.edits.penalise()};",
        ".counts_last = false};"),
    "token that the edits know counted twice": (
        SCHEDULER,
        ".counts_last = sequence.pending > 0 && sequence.edits.penalise()};",
        ".counts_last = sequence.drawn() > 0 && sequence.edits.penalise()};"),
    "steps committed in the wrong order": (
        SCHEDULER,
        "const StepBatch& batch = batches_[oldest_];",
        "const StepBatch& batch = batches_[(oldest_ + out_ - 1) % kStepsOut];"),
    "those told their end fill the queue": (
        SCHEDULER,
        "if (int64_t(sequences_.size()) - told_ >= live_max)",
        "if (int64_t(sequences_.size()) >= live_max)"),
    "chunk crosses a position to be kept": (
        SCHEDULER,
        "    count = std::min(count, sequence->before_snapshot());\n",
        ""),
    "state of an ended sequence kept": (
        SCHEDULER,
        "!ended && sequence.finish != Finish::Error, emission);",
        "sequence.finish != Finish::Error, emission);"),
    "broken state kept": (
        SCHEDULER,
        "!ended && sequence.finish != Finish::Error, emission);",
        "!ended, emission);"),
    "promised slots of an ended sequence lost": (
        SCHEDULER,
        "  for (const Slot promised : sequence.promised) snapshots_.give_back(promised);\n",
        ""),
    "sequence told to start from a state starts from nothing": (
        SCHEDULER,
        "  if (sequence.starts_from) {\n    batch.starts.push_back(",
        "  if (sequence.starts_from) {\n    StepBatch nowhere;\n    nowhere.starts.push_back("),
    "reader that never started counted for ever": (
        SCHEDULER,
        "  if (sequence.starts_from) snapshots_.end_reading(*sequence.starts_from);\n",
        ""),
    "tokens of a snapshot read again": (
        SCHEDULER,
        "    sequence->read = int32_t(snapshots_.ledger().kept.at(request.start_from).size());\n",
        ""),
    "frozen slot freed under its readers": (
        SNAPSHOTS,
        "if (frozen.owned || frozen.readers > 0) return;",
        "if (frozen.owned) return;"),
    "dropped snapshot stays": (
        SNAPSHOTS,
        "  frozen_.at(slot).owned = false;\n",
        ""),
    "snapshot of other tokens accepted": (
        SNAPSHOTS,
        "std::equal(read.begin(), read.end(), request.prompt.begin());",
        "true;"),
    "more promised than there are": (
        SNAPSHOTS,
        "int64_t(request.snapshots.size()) > free ?",
        "int64_t(request.snapshots.size()) > free + 1 ?"),
}

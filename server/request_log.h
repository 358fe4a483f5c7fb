#pragma once
#include "server/answer.h"

namespace weir {

// One JSON line on stderr about a finished call. Of the texts, nothing.
void log_request(const Answer& answer, Nanoseconds now);

}  // namespace weir

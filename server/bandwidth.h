#pragma once
#include "kernels/backend.h"

namespace weir {

// Bytes a second at which `threads` threads together read the host's memory; takes some tens of
// milliseconds. What the floor of a step's time is reckoned with.
double measure_read_bandwidth(int threads);
// The same for a GPU: of a copy inside its memory, counting bytes read and written. Takes 256 MiB
// of it for good.
double measure_copy_bandwidth(Backend& backend);

}  // namespace weir

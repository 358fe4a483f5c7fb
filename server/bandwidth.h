#pragma once

namespace weir {

// Bytes a second at which `threads` threads together read the host's memory; takes some tens of
// milliseconds. What the floor of a step's time is reckoned with.
double measure_read_bandwidth(int threads);

}  // namespace weir

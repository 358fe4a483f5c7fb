#pragma once
#include "engine/request.h"

namespace weir {

// Where a sequence's emissions go. Called on the engine thread; must not block. After the emission
// that carries `finish` the engine never touches the sink again.
class TokenSink {
 public:
  virtual ~TokenSink() = default;
  virtual void emit(const Emission& emission) = 0;
};

}  // namespace weir

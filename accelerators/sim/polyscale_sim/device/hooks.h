#pragma once

#include <c10/core/Storage.h>

namespace sim {

// Gives a storage memory of another size; what fits is kept. The storage object stays, as its tensors expect.
void resize_storage(const c10::Storage& storage, size_t bytes);
void install_hooks();

}  // namespace sim

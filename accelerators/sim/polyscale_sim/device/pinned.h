// Pinned host memory: host memory that is known to be pinned, and counted.
#pragma once

#include <cstdint>

namespace c10 {
struct Allocator;
}

namespace sim {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);  // anywhere inside a block
int64_t pinned_bytes();
void install_pinned_allocator();

}  // namespace sim

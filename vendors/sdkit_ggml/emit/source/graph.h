// What the graph_*.cpp files are written with: tensors at planned addresses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "ggml-cpp.h"

// Sizes of a tensor, and its strides in bytes; innermost first, as ggml has them.
using Sizes = std::array<int64_t, 4>;
using Strides = std::array<size_t, 4>;

// What is wrong with the files, the device or the command line; main() prints it.
struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Returns new memory of the device.
ggml_backend_buffer_ptr new_buffer(ggml_backend_dev_t device, size_t size, ggml_backend_buffer_usage usage);

// A graph whose results all lie in one buffer, the arena. Where, was planned when the model was
// compiled: a result that is read no more makes room for later ones.
class Graph {
  public:
    Graph(ggml_backend_dev_t device, size_t arena_bytes, size_t tensor_count);

    // Used by the calls of ggml in build_graph().
    ggml_context * ctx;

    // Places the result of a call at an offset of the arena, and makes it the graph's next step.
    ggml_tensor * put(size_t offset, ggml_tensor * result);

    // The same of a result that is read through views too: no backend may fuse it away.
    ggml_tensor * put_shared(size_t offset, ggml_tensor * result);

    // Makes the graph's next step of a call that writes into one of its operands.
    void write(ggml_tensor * result);

    // A tensor at an offset of the arena; without strides, a contiguous one.
    ggml_tensor * at(size_t offset, ggml_type type, const Sizes & ne);
    ggml_tensor * at(size_t offset, ggml_type type, const Sizes & ne, const Strides & nb);

    // A tensor at an offset from where `base` begins; without strides, a contiguous one.
    ggml_tensor * view(const ggml_tensor * base, size_t offset, const Sizes & ne);
    ggml_tensor * view(const ggml_tensor * base, size_t offset, const Sizes & ne, const Strides & nb);
    ggml_tensor * view(const ggml_tensor * base, size_t offset, ggml_type type, const Sizes & ne, const Strides & nb);

    // What of the graph the device does not support.
    std::vector<std::string> refused(ggml_backend_dev_t device) const;

    ggml_cgraph * steps() const { return steps_; }

  private:
    // `nb`: nullptr for a contiguous tensor.
    ggml_tensor * placed(ggml_backend_buffer_t buffer, char * address, ggml_type type, const Sizes & ne, const Strides * nb);

    ggml_context_ptr context_;
    ggml_backend_buffer_ptr arena_;
    ggml_cgraph * steps_;
};

// The weights: a GGUF file, read into memory of the device.
#pragma once

#include <string>

#include "graph.h"

class WeightsFile {
  public:
    // Refuses a file whose "sdkit.layout" is another than `layout`: it belongs to another program.
    WeightsFile(const std::string & path, const std::string & layout, ggml_backend_dev_t device);

    ggml_tensor * tensor(const char * name) const;

  private:
    ggml_context_ptr context_;
    ggml_backend_buffer_ptr buffer_;
};

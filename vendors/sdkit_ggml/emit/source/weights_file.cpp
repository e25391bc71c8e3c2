#include "weights_file.h"

#include <algorithm>
#include <fstream>

static const char * const layout_key = "sdkit.layout";
static const size_t block_bytes = 64 << 20;

WeightsFile::WeightsFile(const std::string & path, const std::string & layout, ggml_backend_dev_t device) {
    ggml_context * tensors = nullptr;
    gguf_context_ptr file(gguf_init_from_file(path.c_str(), {true, &tensors}));
    context_.reset(tensors);
    if (!file) {
        throw Failure(path + " is not there, or no GGUF file");
    }
    const int64_t key = gguf_find_key(file.get(), layout_key);
    if (key < 0 || gguf_get_kv_type(file.get(), key) != GGUF_TYPE_STRING ||
        layout != gguf_get_val_str(file.get(), key)) {
        throw Failure(path + " holds the weights of another program");
    }
    const int64_t count = gguf_get_n_tensors(file.get());
    size_t size = 0;
    for (int64_t i = 0; i < count; i++) {
        size = std::max(size, gguf_get_tensor_offset(file.get(), i) + gguf_get_tensor_size(file.get(), i));
    }
    const size_t alignment = gguf_get_alignment(file.get());
    size = (size + alignment - 1) / alignment * alignment;
    buffer_ = new_buffer(device, size, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    char * base = static_cast<char *>(ggml_backend_buffer_get_base(buffer_.get()));
    std::ifstream stream(path, std::ios::binary);
    std::vector<char> block;
    for (int64_t i = 0; i < count; i++) {
        const size_t offset = gguf_get_tensor_offset(file.get(), i);
        const size_t bytes = gguf_get_tensor_size(file.get(), i);
        ggml_tensor * tensor = ggml_get_tensor(tensors, gguf_get_tensor_name(file.get(), i));
        ggml_backend_tensor_alloc(buffer_.get(), tensor, base + offset);
        stream.seekg(static_cast<std::streamoff>(gguf_get_data_offset(file.get()) + offset));
        for (size_t at = 0; at < bytes; at += block_bytes) {
            block.resize(std::min(block_bytes, bytes - at));
            if (!stream.read(block.data(), static_cast<std::streamsize>(block.size()))) {
                throw Failure(path + " was cut short");
            }
            ggml_backend_tensor_set(tensor, block.data(), at, block.size());
        }
    }
}

ggml_tensor * WeightsFile::tensor(const char * name) const {
    ggml_tensor * found = ggml_get_tensor(context_.get(), name);
    if (!found) {
        throw Failure(std::string("the weights have no tensor ") + name);
    }
    return found;
}

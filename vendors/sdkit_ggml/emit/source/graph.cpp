#include "graph.h"

#include <set>

// Products by overlapping rows read a few elements past the end of the last one.
static const size_t guard_bytes = 4096;

ggml_backend_buffer_ptr new_buffer(ggml_backend_dev_t device, size_t size, ggml_backend_buffer_usage usage) {
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    ggml_backend_buffer_t buffer = nullptr;
    if (size <= ggml_backend_buft_get_max_size(type)) {
        buffer = ggml_backend_buft_alloc_buffer(type, size);
    }
    if (!buffer) {
        throw Failure(std::string(ggml_backend_dev_name(device)) + " gives no " + std::to_string(size) + " bytes");
    }
    ggml_backend_buffer_set_usage(buffer, usage);
    return ggml_backend_buffer_ptr(buffer);
}

Graph::Graph(ggml_backend_dev_t device, size_t arena_bytes, size_t tensor_count) {
    const size_t node_count = 2 * tensor_count + 64;
    const size_t size = 2 * node_count * ggml_tensor_overhead() + ggml_graph_overhead_custom(node_count, false);
    context_.reset(ggml_init({size + (1 << 20), nullptr, true}));
    ctx = context_.get();
    if (!ctx) {
        throw Failure("there is no memory for a graph of " + std::to_string(tensor_count) + " tensors");
    }
    arena_ = new_buffer(device, arena_bytes + guard_bytes, GGML_BACKEND_BUFFER_USAGE_COMPUTE);
    steps_ = ggml_new_graph_custom(ctx, node_count, false);
}

ggml_tensor * Graph::put(size_t offset, ggml_tensor * result) {
    if (result->op == GGML_OP_MUL_MAT) {
        ggml_mul_mat_set_prec(result, GGML_PREC_F32);
    }
    if (result->op == GGML_OP_FLASH_ATTN_EXT) {
        ggml_flash_attn_ext_set_prec(result, GGML_PREC_F32);
    }
    char * base = static_cast<char *>(ggml_backend_buffer_get_base(arena_.get()));
    ggml_backend_tensor_alloc(arena_.get(), result, base + offset);
    ggml_build_forward_expand(steps_, result);
    return result;
}

ggml_tensor * Graph::put_shared(size_t offset, ggml_tensor * result) {
    ggml_set_output(result);
    return put(offset, result);
}

void Graph::write(ggml_tensor * result) {
    ggml_backend_view_init(result);
    ggml_build_forward_expand(steps_, result);
}

ggml_tensor * Graph::at(size_t offset, ggml_type type, const Sizes & ne) {
    char * base = static_cast<char *>(ggml_backend_buffer_get_base(arena_.get()));
    return placed(arena_.get(), base + offset, type, ne, nullptr);
}

ggml_tensor * Graph::at(size_t offset, ggml_type type, const Sizes & ne, const Strides & nb) {
    char * base = static_cast<char *>(ggml_backend_buffer_get_base(arena_.get()));
    return placed(arena_.get(), base + offset, type, ne, &nb);
}

ggml_tensor * Graph::view(const ggml_tensor * base, size_t offset, const Sizes & ne) {
    return placed(base->buffer, static_cast<char *>(base->data) + offset, base->type, ne, nullptr);
}

ggml_tensor * Graph::view(const ggml_tensor * base, size_t offset, const Sizes & ne, const Strides & nb) {
    return view(base, offset, base->type, ne, nb);
}

ggml_tensor * Graph::view(const ggml_tensor * base, size_t offset, ggml_type type, const Sizes & ne, const Strides & nb) {
    return placed(base->buffer, static_cast<char *>(base->data) + offset, type, ne, &nb);
}

// No ggml_view_4d(): it refuses rows that overlap, by which convolutions are computed here.
ggml_tensor * Graph::placed(ggml_backend_buffer_t buffer, char * address, ggml_type type, const Sizes & ne, const Strides * nb) {
    ggml_tensor * tensor = ggml_new_tensor_4d(ctx, type, ne[0], ne[1], ne[2], ne[3]);
    for (size_t axis = 0; nb && axis < nb->size(); axis++) {
        tensor->nb[axis] = (*nb)[axis];
    }
    ggml_backend_tensor_alloc(buffer, tensor, address);
    return tensor;
}

std::vector<std::string> Graph::refused(ggml_backend_dev_t device) const {
    std::set<std::string> names;
    for (int i = 0; i < ggml_graph_n_nodes(steps_); i++) {
        ggml_tensor * step = ggml_graph_node(steps_, i);
        if (!ggml_backend_dev_supports_op(device, step)) {
            names.insert(ggml_op_desc(step));
        }
    }
    return {names.begin(), names.end()};
}

// Arrays of the host: what files hold, and what goes into tensors and comes out of them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "graph.h"

enum class Dtype { float16, float32, float64, boolean, int8, uint8, int16, uint16, int32, uint32, int64 };

// Values of the integers that the host computes, flat; also of truth values.
using Integers = std::vector<int64_t>;

// An input or output of the component.
struct TensorSpec {
    const char * name;   // as the ONNX model has it
    const char * file;   // its file is called so, and ends in .npy or .bin
    Dtype dtype;
    std::vector<int64_t> shape;
};

struct Array {
    Dtype dtype;
    std::vector<int64_t> shape;
    std::vector<char> bytes;
};

// File name of a TensorSpec -> its array.
using Arrays = std::map<std::string, Array>;

// Reads DIR/<file>.npy, or DIR/<file>.bin, which holds nothing but the numbers.
Array read_array(const std::string & folder, const TensorSpec & spec);

// Writes DIR/<file>.npy.
void write_array(const std::string & folder, const TensorSpec & spec, const Array & array);

Array zeros(const TensorSpec & spec);

Integers integers(const Array & array);
Array array_of(const TensorSpec & spec, const Integers & values);
Array array_of(const TensorSpec & spec, const std::vector<float> & values);

// Fill a tensor; none (nullptr) where a variant of the graph has no use for the input. Indices count from the end where they are negative; `limit` of them there are.
void set_floats(ggml_tensor * tensor, const Array & array);
void set_floats(ggml_tensor * tensor, const Integers & values);
void set_indices(ggml_tensor * tensor, const Integers & values, int64_t limit, const char * name);

std::vector<float> get_floats(const ggml_tensor * tensor);

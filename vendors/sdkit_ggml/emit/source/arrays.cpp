#include "arrays.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <numeric>

namespace {

struct DtypeFacts {
    const char * npy;  // as the header of a .npy file has it
    size_t size;
};

const std::map<Dtype, DtypeFacts> facts = {
    {Dtype::float16, {"<f2", 2}}, {Dtype::float32, {"<f4", 4}}, {Dtype::float64, {"<f8", 8}},
    {Dtype::boolean, {"|b1", 1}}, {Dtype::int8, {"|i1", 1}},    {Dtype::uint8, {"|u1", 1}},
    {Dtype::int16, {"<i2", 2}},   {Dtype::uint16, {"<u2", 2}},  {Dtype::int32, {"<i4", 4}},
    {Dtype::uint32, {"<u4", 4}},  {Dtype::int64, {"<i8", 8}},
};

size_t count_of(const std::vector<int64_t> & shape) {
    return static_cast<size_t>(std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<int64_t>()));
}

// As Python writes a tuple: "()", "(2,)", "(2, 77)".
std::string words_of(const std::vector<int64_t> & shape) {
    std::string words = "(";
    for (size_t i = 0; i < shape.size(); i++) {
        words += (i ? ", " : "") + std::to_string(shape[i]);
    }
    return words + (shape.size() == 1 ? ",)" : ")");
}

std::string header_of(Dtype dtype, const std::vector<int64_t> & shape) {
    return "{'descr': '" + std::string(facts.at(dtype).npy) + "', 'fortran_order': False, 'shape': " +
           words_of(shape) + ", }";
}

template <typename From, typename To> std::vector<To> converted(const Array & array) {
    const size_t count = array.bytes.size() / sizeof(From);
    std::vector<From> from(count);
    std::memcpy(from.data(), array.bytes.data(), count * sizeof(From));
    std::vector<To> to(count);
    for (size_t i = 0; i < count; i++) {
        to[i] = static_cast<To>(from[i]);
    }
    return to;
}

template <typename To, typename From> void store(Array & array, const std::vector<From> & values) {
    std::vector<To> to(values.size());
    for (size_t i = 0; i < values.size(); i++) {
        to[i] = static_cast<To>(values[i]);
    }
    std::memcpy(array.bytes.data(), to.data(), to.size() * sizeof(To));
}

std::vector<float> floats(const Array & array) {
    switch (array.dtype) {
        case Dtype::float16: {
            const std::vector<ggml_fp16_t> half = converted<ggml_fp16_t, ggml_fp16_t>(array);
            std::vector<float> values(half.size());
            ggml_fp16_to_fp32_row(half.data(), values.data(), static_cast<int64_t>(half.size()));
            return values;
        }
        case Dtype::float32: return converted<float, float>(array);
        case Dtype::float64: return converted<double, float>(array);
        default: {
            const Integers whole = integers(array);
            return std::vector<float>(whole.begin(), whole.end());
        }
    }
}

void require_count(const ggml_tensor * tensor, size_t count) {
    if (static_cast<size_t>(ggml_nelements(tensor)) != count) {
        throw Failure("a tensor of " + std::to_string(ggml_nelements(tensor)) + " elements is given " +
                      std::to_string(count));
    }
}

}  // namespace

Array read_array(const std::string & folder, const TensorSpec & spec) {
    const std::string npy_path = folder + "/" + spec.file + ".npy";
    const std::string bin_path = folder + "/" + spec.file + ".bin";
    const bool is_npy = std::ifstream(npy_path).good();
    const std::string path = is_npy ? npy_path : bin_path;
    std::ifstream stream(path, std::ios::binary);
    if (!stream) {
        throw Failure("there is neither " + npy_path + " nor " + bin_path + " for the input \"" + spec.name + "\"");
    }
    const std::string content((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    size_t start = 0;
    if (is_npy) {
        const bool is_short = content.size() >= 10 && content[6] == 1;
        start = is_short ? 10 : 12;
        if (content.size() < start || content.compare(0, 6, "\x93NUMPY") != 0) {
            throw Failure(path + " is no .npy file");
        }
        size_t length = 0;
        for (size_t i = start; i > 8; i--) {
            length = length * 256 + static_cast<unsigned char>(content[i - 1]);
        }
        const std::string header = header_of(spec.dtype, spec.shape);
        if (content.compare(start, header.size(), header) != 0) {
            throw Failure(path + " is " + content.substr(start, length) + "; the input is " + header);
        }
        start += length;
    }
    Array array = zeros(spec);
    if (content.size() < start || content.size() - start != array.bytes.size()) {
        throw Failure(path + " holds " + std::to_string(content.size() - std::min(start, content.size())) +
                      " bytes of numbers; the input " + header_of(spec.dtype, spec.shape) + " has " +
                      std::to_string(array.bytes.size()));
    }
    std::memcpy(array.bytes.data(), content.data() + start, array.bytes.size());
    return array;
}

void write_array(const std::string & folder, const TensorSpec & spec, const Array & array) {
    const std::string path = folder + "/" + spec.file + ".npy";
    std::string header = header_of(array.dtype, array.shape);
    while ((10 + header.size() + 1) % 64) {
        header += ' ';
    }
    header += '\n';
    std::string head("\x93NUMPY\x01\x00", 8);
    head += static_cast<char>(header.size() % 256);
    head += static_cast<char>(header.size() / 256);
    std::ofstream stream(path, std::ios::binary);
    stream << head << header;
    stream.write(array.bytes.data(), static_cast<std::streamsize>(array.bytes.size()));
    stream.close();
    if (!stream) {
        throw Failure(path + " cannot be written");
    }
}

Array zeros(const TensorSpec & spec) {
    return {spec.dtype, spec.shape, std::vector<char>(count_of(spec.shape) * facts.at(spec.dtype).size)};
}

Integers integers(const Array & array) {
    switch (array.dtype) {
        case Dtype::boolean:
        case Dtype::uint8: return converted<uint8_t, int64_t>(array);
        case Dtype::int8: return converted<int8_t, int64_t>(array);
        case Dtype::int16: return converted<int16_t, int64_t>(array);
        case Dtype::uint16: return converted<uint16_t, int64_t>(array);
        case Dtype::int32: return converted<int32_t, int64_t>(array);
        case Dtype::uint32: return converted<uint32_t, int64_t>(array);
        case Dtype::int64: return converted<int64_t, int64_t>(array);
        default: throw Failure("an array of floats is read as integers");
    }
}

Array array_of(const TensorSpec & spec, const Integers & values) {
    Array array = zeros(spec);
    if (values.size() != count_of(spec.shape)) {
        throw Failure(std::string("the output \"") + spec.name + "\" has another size");
    }
    switch (spec.dtype) {
        case Dtype::boolean:
        case Dtype::uint8: store<uint8_t>(array, values); break;
        case Dtype::int8: store<int8_t>(array, values); break;
        case Dtype::int16: store<int16_t>(array, values); break;
        case Dtype::uint16: store<uint16_t>(array, values); break;
        case Dtype::int32: store<int32_t>(array, values); break;
        case Dtype::uint32: store<uint32_t>(array, values); break;
        case Dtype::int64: store<int64_t>(array, values); break;
        default: return array_of(spec, std::vector<float>(values.begin(), values.end()));
    }
    return array;
}

Array array_of(const TensorSpec & spec, const std::vector<float> & values) {
    Array array = zeros(spec);
    if (values.size() != count_of(spec.shape)) {
        throw Failure(std::string("the output \"") + spec.name + "\" has another size");
    }
    switch (spec.dtype) {
        case Dtype::float16: {
            std::vector<ggml_fp16_t> half(values.size());
            ggml_fp32_to_fp16_row(values.data(), half.data(), static_cast<int64_t>(half.size()));
            store<ggml_fp16_t>(array, half);
            break;
        }
        case Dtype::float32: store<float>(array, values); break;
        case Dtype::float64: store<double>(array, values); break;
        default: return array_of(spec, Integers(values.begin(), values.end()));
    }
    return array;
}

void set_floats(ggml_tensor * tensor, const Array & array) {
    if (!tensor) {
        return;
    }
    const std::vector<float> values = floats(array);
    require_count(tensor, values.size());
    ggml_backend_tensor_set(tensor, values.data(), 0, values.size() * sizeof(float));
}

void set_floats(ggml_tensor * tensor, const Integers & values) {
    if (!tensor) {
        return;
    }
    const std::vector<float> floats(values.begin(), values.end());
    require_count(tensor, floats.size());
    ggml_backend_tensor_set(tensor, floats.data(), 0, floats.size() * sizeof(float));
}

void set_indices(ggml_tensor * tensor, const Integers & values, int64_t limit, const char * name) {
    std::vector<int32_t> indices;
    for (int64_t value : values) {
        const int64_t index = limit && value < 0 ? value + limit : value;
        if (limit && (index < 0 || index >= limit)) {
            throw Failure(std::string("\"") + name + "\" holds the index " + std::to_string(value) + "; there are " +
                          std::to_string(limit) + " rows");
        }
        indices.push_back(static_cast<int32_t>(index));
    }
    if (!tensor) {
        return;
    }
    require_count(tensor, indices.size());
    ggml_backend_tensor_set(tensor, indices.data(), 0, indices.size() * sizeof(int32_t));
}

std::vector<float> get_floats(const ggml_tensor * tensor) {
    std::vector<float> values(static_cast<size_t>(ggml_nelements(tensor)));
    ggml_backend_tensor_get(tensor, values.data(), 0, values.size() * sizeof(float));
    return values;
}
